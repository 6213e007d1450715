"""Embedding look-ups: φ(x) = one-hot(token), scale 1."""

from dataclasses import replace

import torch
from torch import Tensor

from adiv_monitor.features.features import OneHotFeatures
from adiv_monitor.features.rows import Rows, compute_dtype
from adiv_monitor.features.uses import FunctionCall, Refused, Use, uses
from adiv_monitor.features.whole import Whole


@uses("embedding")
def embedding(
    call: FunctionCall,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Use:
    """Z = W[token]: one row per token; the padding token is not trained."""
    if call.trains:
        refuse_rescaled(scale_grad_by_freq, sparse)
    return look_up(input, weight, padding_idx)


def refuse_rescaled(scale_grad_by_freq: bool, sparse: bool) -> None:
    """Refuse options by which the gradient is not GᵀΦ, or sparse, so that it has no norm."""
    if scale_grad_by_freq:
        raise Refused("scale_grad_by_freq=True rescales the gradient row by row: set it to False")
    if sparse:
        raise Refused("sparse=True gives sparse gradients: set it to False to measure this layer")


def look_up(token: Tensor, table: Tensor, padding: int | None = None) -> Use:
    """Return the use of a table by look-ups; a negative padding token counts from the end."""
    vocabulary = len(table)

    def trained(tokens: Tensor) -> Tensor:
        is_trained = torch.ones_like(tokens) if padding is None else tokens != padding % vocabulary
        return is_trained.to(compute_dtype(table))

    def features(rows: Rows) -> OneHotFeatures:
        tokens = token.reshape(-1)
        tokens = tokens.clone() if rows.chosen is None else tokens[rows.flat]
        return OneHotFeatures(tokens.long(), trained(tokens), vocabulary)

    def whole() -> Whole:
        tokens = token.reshape(-1)
        are_trained = trained(tokens)
        counts = are_trained.new_zeros(vocabulary).index_add_(0, tokens, are_trained)
        return Whole(are_trained, 0.0, counts, None if padding is None else are_trained)

    return Use("embedding", table, None, features, whole=whole)


@uses("__getitem__")
def indexed(call: FunctionCall, input: Tensor, index: object) -> Use | None:
    """Z = W[index] or W[:, index] with integer indices, as for a table of position biases."""
    of_dims = index if isinstance(index, tuple) else (index,)
    numbers = [d for d, of_dim in enumerate(of_dims) if isinstance(of_dim, Tensor)]
    rest = [of_dim for of_dim in of_dims if not isinstance(of_dim, Tensor)]
    if len(numbers) != 1 or any(of_dim != slice(None) for of_dim in rest):
        return None
    index = of_dims[numbers[0]]
    is_view = call.result._base is not None  # the index is a single number
    if is_view or not isinstance(index, Tensor) or index.dtype not in (torch.int64, torch.int32):
        return None
    return selected(call, input, numbers[0], index)


@uses("index_select")
def selected(call: FunctionCall, input: Tensor, dim: int, index: Tensor) -> Use | None:
    """Z = W[index] along a dimension: one row of W per index."""
    if not call.is_weight(input):
        return None
    dim %= input.dim()

    def table(weight: Tensor) -> Tensor:
        return weight.movedim(dim, 0).reshape(weight.shape[dim], -1)

    def layout(tensor: Tensor) -> Tensor:
        places = range(dim, dim + index.dim())
        tensor = tensor.movedim(tuple(places), tuple(range(index.dim())))
        return tensor.flatten(index.dim()) if tensor.dim() > index.dim() else tensor[..., None]

    found = look_up(index % input.shape[dim], table(input))
    return replace(found, weight=input, layout=layout, shaped=table)
