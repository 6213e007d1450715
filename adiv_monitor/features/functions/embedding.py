"""Embedding look-ups: φ(x) = one-hot(token), scale 1; and of several rows at once, bags."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

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
    if call.trains:
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

    def features(rows: Rows) -> OneHotFeatures:
        tokens = token.reshape(-1)
        tokens = tokens.clone() if rows.chosen is None else tokens[rows.flat]
        return OneHotFeatures(tokens.long(), trained(tokens, table, padding), len(table))

    def whole() -> Whole:
        tokens = token.reshape(-1)
        are_trained = trained(tokens, table, padding)
        counts = are_trained.new_zeros(len(table)).index_add_(0, tokens, are_trained)
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


@dataclass(frozen=True)
class BagFeatures(Features):
    """Features that add up several rows of the weight: φ(bag) = Σ share · one-hot(token).

    Attributes:
        token: (tokens,) int64, indices of the weight's rows.
        bag: (tokens,) int64, index of each token's bag; ascending.
        share: (tokens,), factor of each token; 0 for padding.
        bags: number of bags.
        rows: (rows,) int64, the sampled bags.
        vocabulary: number of rows of the weight.
    """

    token: Int[Tensor, " tokens"]
    bag: Int[Tensor, " tokens"]
    share: Float[Tensor, " tokens"]
    bags: int
    rows: Int[Tensor, " rows"]
    vocabulary: int

    def scale(self) -> Float[Tensor, "rows 1"]:
        """Return Σ (Σ share)² over the distinct tokens of every sampled bag."""
        merged = self.squared()
        return self._sums(merged.share, merged.bag)[self.rows][:, None]

    def squared(self) -> "BagFeatures":
        """Return features with (Σ share)² of each distinct token of a bag in place of shares."""
        keys, order = torch.sort(self.bag * self.vocabulary + self.token)
        run = torch.zeros_like(keys)
        run[1:] = (keys[1:] != keys[:-1]).cumsum(0)
        # Entries after the last run are left over: they have share 0, in the last bag.
        return replace(
            self,
            token=torch.zeros_like(keys).scatter_(0, run, self.token[order]),
            bag=torch.full_like(keys, self.bags - 1).scatter_(0, run, self.bag[order]),
            share=torch.zeros_like(self.share).index_add_(0, run, self.share[order]).square(),
        )

    def by_weight(self, weight: Tensor) -> Float[Tensor, "rows n_total"]:
        """Return the weighted sum of the weight's rows for every sampled bag."""
        first = torch.searchsorted(self.bag, torch.arange(self.bags, device=self.bag.device))
        sums = functional.embedding_bag(
            self.token, weight.to(self.share), first, mode="sum", per_sample_weights=self.share
        )
        return sums[self.rows]

    def mean_products(self, active: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        """Return φ_r·Σ_k a_k φ_k of every row."""
        products = self.share * self.weight_sum(active)[self.token]
        return self._sums(products, self.bag)[self.rows]

    def weight_sum(self, active: Float[Tensor, " rows"]) -> Float[Tensor, " vocabulary"]:
        """Return Σ_k a_k φ_k."""
        return self.sum(active.new_zeros(self.bags).index_add_(0, self.rows, active))

    def weight_norms(self) -> Float[Tensor, " rows"]:
        """Return ‖φ_r‖ of every row."""
        return self.scale()[:, 0].sqrt()

    def pick(self, rows: Tensor) -> "BagFeatures":
        """Return the features of some of the rows."""
        return replace(self, rows=self.rows[rows])

    def joined(self, others: Sequence[Any]) -> "BagFeatures":
        """Return the features of these rows and those of other calls of the same layer."""
        every: list[BagFeatures] = [self, *others]
        starts = [sum(features.bags for features in every[:i]) for i in range(len(every))]
        pairs = list(zip(every, starts, strict=True))
        return replace(
            self,
            token=torch.cat([features.token for features in every]),
            bag=torch.cat([features.bag + start for features, start in pairs]),
            share=torch.cat([features.share for features in every]),
            bags=sum(features.bags for features in every),
            rows=torch.cat([features.rows + start for features, start in pairs]),
        )

    def sum(self, weights: Float[Tensor, " bags"]) -> Float[Tensor, " vocabulary"]:
        """Return Σ_k a_k φ_k over all bags."""
        shares = self.share * weights[self.bag]
        return shares.new_zeros(self.vocabulary).index_add_(0, self.token, shares)

    def _sums(self, x: Tensor, bag: Tensor) -> Float[Tensor, " bags"]:
        return x.new_zeros(self.bags).index_add_(0, bag, x)


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
    if call.trains:
        refuse_rescaled(scale_grad_by_freq, sparse)
    if mode == "max":
        raise Refused("mode='max' takes every feature from a row of its own: use 'sum' or 'mean'")
    device = input.device

    def bags(rows: Tensor | None) -> BagFeatures:
        """Return some bags, None for all; bags of any length are all read, to know where one is."""
        tokens, weights = input, per_sample_weights
        if offsets is not None:
            count = len(offsets) - include_last_offset
            first = offsets[:count]
        else:
            if rows is not None:
                tokens, weights = tokens[rows], None if weights is None else weights[rows]
            count, length = tokens.shape
            first = torch.arange(count, device=device) * length
        tokens = tokens.reshape(-1)
        bag = torch.searchsorted(first, torch.arange(len(tokens), device=device), right=True) - 1
        share = trained(tokens, weight, padding_idx)
        if mode == "mean":
            sizes = share.new_zeros(count).index_add_(0, bag, share)
            share = share / sizes.clamp(min=1)[bag]
        if weights is not None:
            share = share * weights.reshape(-1)
        every = torch.arange(count, device=device)
        found = BagFeatures(tokens.long(), bag, share, count, every, len(weight))
        return found if rows is None or offsets is None else found.pick(rows)

    def features(rows: Rows) -> BagFeatures:
        return bags(None if rows.chosen is None else rows.flat)

    def whole() -> Whole:
        every = bags(None)
        return Whole(every.scale()[:, 0], 0.0, every.sum(every.share.new_ones(every.bags)))

    return Use("embedding", weight, None, features, whole=whole)
