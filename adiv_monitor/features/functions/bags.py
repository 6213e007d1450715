"""Look-ups of several rows at once: φ(bag) = Σ share · one-hot(token)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from adiv_monitor.features.features import Features
from adiv_monitor.features.functions.embedding import refuse_rescaled
from adiv_monitor.features.rows import Rows, compute_dtype
from adiv_monitor.features.uses import FunctionCall, Refused, Use, uses
from adiv_monitor.features.whole import Whole


@dataclass(frozen=True)
class BagFeatures(Features):
    """Features that add up several rows of the weight.

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

    def joined(self, others: Sequence[Features]) -> "BagFeatures":
        """Return the features of these rows and those of other calls of the same layer."""
        every = [self, *(other for other in others if isinstance(other, BagFeatures))]
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
    vocabulary, dtype = len(weight), compute_dtype(weight)

    def bags_of(tokens: Tensor, first: Tensor, count: int, weights: Tensor | None) -> BagFeatures:
        places = torch.arange(len(tokens), device=tokens.device)
        bag = torch.searchsorted(first, places, right=True) - 1
        share = torch.ones(len(tokens), dtype=dtype, device=tokens.device)
        if padding_idx is not None:
            share = (tokens != padding_idx % vocabulary).to(dtype)
        if mode == "mean":
            sizes = share.new_zeros(count).index_add_(0, bag, share)
            share = share / sizes.clamp(min=1)[bag]
        if weights is not None:
            share = share * weights
        every = torch.arange(count, device=tokens.device)
        return BagFeatures(tokens.long(), bag, share, count, every, vocabulary)

    def all_bags() -> BagFeatures:
        weights = None if per_sample_weights is None else per_sample_weights.reshape(-1)
        if offsets is None:
            return of_matrix(input, weights)
        count = len(offsets) - include_last_offset
        return bags_of(input, offsets[:count], count, weights)

    def of_matrix(tokens: Tensor, weights: Tensor | None) -> BagFeatures:
        count, length = tokens.shape
        first = torch.arange(count, device=tokens.device) * length
        return bags_of(tokens.reshape(-1), first, count, weights)

    def features(rows: Rows) -> BagFeatures:
        if rows.chosen is None:
            return all_bags()
        if offsets is not None:  # the bags' lengths are known only on the device
            return all_bags().pick(rows.flat)
        weights = None if per_sample_weights is None else per_sample_weights[rows.flat].reshape(-1)
        return of_matrix(input[rows.flat], weights)

    def whole() -> Whole:
        bags = all_bags()
        return Whole(bags.scale()[:, 0], 0.0, bags.sum(bags.share.new_ones(bags.bags)))

    return Use("embedding", weight, None, features, whole=whole)
