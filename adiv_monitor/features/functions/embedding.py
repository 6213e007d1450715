"""Embedding look-ups: φ(x) = one-hot(token), scale 1; and of several rows at once, bags."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from adiv_monitor.features.features import Features, OneHotFeatures
from adiv_monitor.features.rows import Rows, Whole, compute_dtype
from adiv_monitor.features.uses import FunctionCall, Refused, Use, uses


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
    refuse_rescaled(scale_grad_by_freq, sparse)
    return look_up(input, weight, padding_idx)


def refuse_rescaled(scale_grad_by_freq: bool, sparse: bool) -> None:
    """Refuse options by which the gradient is not GᵀΦ, or sparse, so that it has no norm."""
    if scale_grad_by_freq:
        raise Refused("scale_grad_by_freq=True rescales the gradient row by row: set it to False")
    if sparse:
        raise Refused("sparse=True gives sparse gradients: set it to False to measure this layer")


def trained(tokens: Tensor, table: Tensor, padding: int | None) -> Float[Tensor, " tokens"]:
    """Return 0 for the padding token, else 1; a negative padding token counts from the end."""
    dtype = compute_dtype(table)
    if padding is None:
        return torch.ones(len(tokens), dtype=dtype, device=tokens.device)
    return (tokens != padding % len(table)).to(dtype)


def look_up(token: Tensor, table: Tensor, padding: int | None = None) -> Use:
    """Return the use of a table by look-ups."""
    tokens = token.reshape(-1)

    def features(rows: Rows) -> OneHotFeatures:
        own = tokens.clone() if rows.chosen is None else tokens[rows.flat]
        return OneHotFeatures(own.long(), trained(own, table, padding), len(table))

    def whole(rows: Rows) -> Whole:
        are_trained = trained(tokens, table, padding)
        return Whole(are_trained, trained=None if padding is None else are_trained)

    def times(v: Tensor) -> Tensor:
        return v[tokens] * trained(tokens, table, padding)[:, None]

    return Use("embedding", table, None, features, whole=whole, times=times)


@uses("__getitem__")
def indexed(call: FunctionCall, input: Tensor, index: object) -> Use | None:
    """Z = W[index] with integer indices, as for a table of position biases."""
    if not isinstance(index, Tensor) or index.dtype not in (torch.int64, torch.int32):
        return None
    if call.result._base is not None or not call.is_weight(input):  # the index is a single number
        return None

    def table(weight: Tensor) -> Tensor:
        return weight.reshape(len(weight), -1)

    def layout(tensor: Tensor) -> Tensor:
        return tensor.flatten(index.dim()) if tensor.dim() > index.dim() else tensor[..., None]

    found = look_up(index % len(input), table(input))
    return replace(found, weight=input, layout=layout, shaped=table)


@dataclass(frozen=True)
class BagFeatures(Features):
    """Features that add up several rows of the weight: φ(bag) = Σ share · one-hot(token).

    Attributes:
        phi: (rows, vocabulary), sparse, with the share of every distinct token of a bag.
    """

    phi: Tensor

    def scale(self) -> Float[Tensor, "rows 1"]:
        """Return Σ (Σ share)² over the distinct tokens of every bag."""
        every = torch.ones(self.phi.shape[1], 1, dtype=self.phi.dtype, device=self.phi.device)
        return self.phi.coalesce().pow(2) @ every

    def by_weight(self, weight: Tensor) -> Float[Tensor, "rows n_total"]:
        """Return the weighted sum of the weight's rows for every bag."""
        return self.phi @ weight.to(self.phi)


@uses("embedding_bag")
def embedding_bag(
    call: FunctionCall,
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Use:
    """Z = Σ share · W[token] over the tokens of a bag except padding."""
    refuse_rescaled(scale_grad_by_freq, sparse)
    if mode == "max":
        raise Refused("mode='max' takes every feature from a row of its own: use 'sum' or 'mean'")

    def bags() -> BagFeatures:
        tokens = input.reshape(-1)
        places = torch.arange(len(tokens), device=tokens.device)
        if offsets is None:
            first = places[:: input.shape[1]].contiguous()
        else:
            first = offsets[: len(offsets) - include_last_offset]
        bag = torch.searchsorted(first, places, right=True) - 1
        share = trained(tokens, weight, padding_idx)
        if mode == "mean":
            sizes = share.new_zeros(len(first)).index_add_(0, bag, share)
            share = share / sizes.clamp(min=1)[bag]
        if per_sample_weights is not None:
            share = share * per_sample_weights.reshape(-1)
        entries, size = torch.stack([bag, tokens]), (len(first), len(weight))
        phi = torch.sparse_coo_tensor(entries, share, size, check_invariants=False)
        return BagFeatures(phi.coalesce())

    def features(rows: Rows) -> BagFeatures:
        return bags() if rows.chosen is None else bags().pick(rows.flat)

    def whole(rows: Rows) -> Whole:
        return Whole(bags().scale()[:, 0].sqrt())

    return Use("embedding", weight, None, features, whole=whole)
