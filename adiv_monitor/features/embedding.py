"""Look-ups: φ(x) = one-hot(token), scale 1."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from adiv_monitor.features.features import OneHotFeatures
from adiv_monitor.features.rows import Rows, exact_type
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
    if scale_grad_by_freq:
        raise Refused("scale_grad_by_freq=True rescales the gradient row by row: set it to False")
    if sparse:
        raise Refused("sparse=True gives sparse gradients: set it to False to measure this layer")
    return look_up(input, weight, padding_idx)


def look_up(token: Tensor, table: Tensor, padding: int | None = None) -> Use:
    """Rows of a table; torch counts a negative padding token from the end, as indices are."""
    vocabulary = len(table)

    def trained(tokens: Tensor) -> Tensor:
        is_trained = torch.ones_like(tokens) if padding is None else tokens != padding % vocabulary
        return is_trained.to(exact_type(table))

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
    """Z = W[index] with numbers of rows: a table of position biases, say."""
    if not isinstance(index, Tensor) or index.dtype not in (torch.int64, torch.int32):
        return None
    table = input.flatten(1) if input.dim() > 1 else input[:, None]
    found = look_up(index % len(input), table)
    layout = partial(_rows_of_table, dims=index.dim())
    return replace(found, weight=input, layout=layout, shaped=lambda w: w.reshape(len(w), -1))


@uses("index_select")
def selected(call: FunctionCall, input: Tensor, dim: int, index: Tensor) -> Use | None:
    """Z = W[index]."""
    return indexed(call, input, index) if dim in (0, -input.dim()) else None


def _rows_of_table(tensor: Tensor, dims: int) -> Tensor:
    return tensor.flatten(dims) if tensor.dim() > dims else tensor[..., None]
