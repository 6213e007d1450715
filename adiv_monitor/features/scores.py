"""One call of scaled dot-product attention in terms of its scores (spec, section 5).

    Y_ts = q_t·k_s                           the scores, per sample and head
    P    = softmax(Y·scale + mask)           O = P V
    g    = ∂L/∂Y = scale · P ⊙ (dP − rowsum(dP ⊙ P)),   dP = dO Vᵀ
    ΔY   = Δq kᵀ + q Δkᵀ                     the first-order effect of a change of the projections

Fused kernels never hold any of these matrices, so they are recomputed, some queries at a time.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from adiv_monitor.features.rows import to_compute_dtype
from adiv_monitor.features.uses import Refused

CHUNK = 2**22  # number of scores that are held in memory at once

Move = tuple[
    Float[Tensor, "samples heads queries width"], Float[Tensor, "samples heads keys width"]
]
"""Δq and Δk."""


@dataclass(frozen=True)
class Attention:
    """The arguments of one call.

    Attributes:
        query: q.
        key: k, repeated for every query's head (`of_heads`).
        value: v, repeated for every query's head.
        mask: added to the scores, or boolean with True for scores that participate; it broadcasts
            to (samples, heads, queries, keys).
        causal: query t sees only keys s ≤ t, both counted from the first.
        scale: multiplies the scores.
    """

    query: Float[Tensor, "samples heads queries width"]
    key: Float[Tensor, "samples heads keys width"]
    value: Float[Tensor, "samples heads keys value_width"]
    mask: Tensor | None
    causal: bool
    scale: float

    def logits(self, queries: slice = slice(None)) -> Float[Tensor, "samples heads some s"]:
        """Return Y·scale + mask of some queries, −inf for keys that they don't see."""
        logits = self.query[:, :, queries] @ self.key.mT * self.scale
        if self.mask is not None:
            mask = self.mask.expand(*self.mask.shape[:-2], self.query.shape[2], -1)[..., queries, :]
            logits = _masked(logits, mask) if mask.dtype == torch.bool else logits + mask
        if self.causal:
            t, s = (torch.arange(n, device=logits.device) for n in self.lengths)
            logits = _masked(logits, s <= t[queries, None])
        return logits

    def probabilities(self, queries: slice = slice(None)) -> Float[Tensor, "samples heads some s"]:
        """Return P of some queries; zeros for a query that sees no key, as in torch."""
        logits = self.logits(queries)
        sees_none = logits.amax(-1, keepdim=True) == -math.inf
        return torch.softmax(logits, -1).masked_fill(sees_none, 0.0)

    def score_gradient(
        self, output_gradient: Float[Tensor, "samples heads queries value_width"]
    ) -> Callable[[slice], Float[Tensor, "samples heads some keys"]]:
        """Return a function that computes G = ∂L/∂Y of a slice of the queries, from ∂L/∂O."""
        dO = to_compute_dtype(by_head(output_gradient))

        def of(queries: slice) -> Tensor:
            P = self.probabilities(queries)
            own = P * (dO[:, :, queries] @ self.value.mT)
            return self.scale * (own - P * own.sum(-1, keepdim=True))

        return of

    def change(self, move: Move, queries: slice = slice(None)) -> Tensor:
        """Return ΔY = Δq kᵀ + q Δkᵀ of some queries."""
        dq, dk = move
        left = torch.cat([dq[:, :, queries], self.query[:, :, queries]], -1)
        return left @ torch.cat([self.key, dk], -1).mT

    @property
    def parts(self) -> Iterator[slice]:
        """Slices of the queries with at most `CHUNK` scores each, if possible."""
        samples, heads = self.query.shape[:2]
        queries, keys = self.lengths
        step = max(1, CHUNK // max(1, samples * heads * keys))
        return (slice(start, start + step) for start in range(0, queries, step))

    @property
    def lengths(self) -> tuple[int, int]:
        """Numbers of queries and keys of one head."""
        return self.query.shape[2], self.key.shape[2]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Attention:
    """Return the arguments of `F.scaled_dot_product_attention`.

    Args:
        query: (…, heads, queries, width); dimensions before the heads are samples. A tensor of
            three dimensions has one head.
        key: (…, heads, keys, width), with fewer heads if `enable_gqa`.
        value: (…, heads, keys, value width), with the heads of `key`.
        attn_mask: see `Attention`.
        dropout_p: 0.
        is_causal: see `Attention`.
        scale: 1/√width if None.
        enable_gqa: ignored; keys with fewer heads are always repeated.

    Raises:
        Refused: some entries of P are zeroed at random.
    """
    if dropout_p > 0:
        raise Refused("it has dropout in evaluation mode, too")
    q = to_compute_dtype(by_head(query))
    count, heads = q.shape[:2]
    k, v = (to_compute_dtype(of_heads(by_head(x), heads)) for x in (key, value))
    return Attention(
        query=q,
        key=k.expand(count, -1, -1, -1),
        value=v.expand(count, -1, -1, -1),
        mask=None if attn_mask is None else _aligned(attn_mask, query),
        causal=is_causal,
        scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
    )


def by_head(tensor: Tensor) -> Float[Tensor, "samples heads length width"]:
    """Reshape to (samples, heads, length, width); missing dimensions get size 1."""
    if tensor.dim() == 2:
        return tensor[None, None]
    return tensor[:, None] if tensor.dim() == 3 else tensor.flatten(0, -4)


def of_heads(tensor: Float[Tensor, "n few keys width"], heads: int) -> Tensor:
    """Repeat keys or values for every query's head, where several share one (grouped queries)."""
    return tensor.repeat_interleave(heads // tensor.shape[1], 1)


def _aligned(mask: Tensor, query: Tensor) -> Float[Tensor, "samples_or_1 heads_or_1 length keys"]:
    """Reshape the mask so that its dimensions match those of `by_head(query)`."""
    mask = mask[(None,) * (query.dim() - mask.dim())]
    if mask.dim() > 4:
        mask = mask.expand(*query.shape[:-3], -1, -1, -1)
    return by_head(mask)


def _masked(logits: Tensor, seen: Tensor) -> Tensor:
    return logits.masked_fill(~seen, -math.inf)
