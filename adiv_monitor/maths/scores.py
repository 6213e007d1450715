"""One call of scaled dot-product attention in terms of its scores (spec, section 5).

    Y_ts = q_t·k_s                           the scores, per sample and head
    P    = softmax(Y·scale + mask)           O = P V
    g    = ∂L/∂Y = scale · P ⊙ (dP − rowsum(dP ⊙ P)),   dP = dO Vᵀ
    ΔY   = Δq kᵀ + q Δkᵀ                     the first-order effect of a change of the projections
    D_ts = ‖∂Y_ts/∂Θ‖²                       the attention scale

Fused kernels never hold any of these matrices, so they are recomputed, some queries at a time. Only
active scores count, g ≠ 0: masked scores are not. Where g is not known, all that a query sees do.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from adiv_monitor.features.rows import to_compute_dtype, wide
from adiv_monitor.features.uses import Refused

CHUNK = 2**22  # number of scores that are held in memory at once

# The record of an attention on the probe, (samples, heads, numbers), by part and its size: number
# of active scores; ‖g‖²; ⟨ΔY, g⟩ and ‖ΔY‖² of a plain gradient step and of the optimizer's, each as
# a descent direction; `Attention.spread`; estimates of Σ D_ts, one of each random move, and of
# Σ D_ts² (all are alike where they are exact). What is not known is NaN. The records of several
# calls or ranks are one, of all samples.
RECORD = {"count": 1, "G_G": 1, "e": 2, "d": 2, "spread": 7, "scale": 16, "square": 16}
ESTIMATES = RECORD["scale"]

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
        gradient: ∂L/∂O; None: not known.
    """

    query: Float[Tensor, "samples heads queries width"]
    key: Float[Tensor, "samples heads keys width"]
    value: Float[Tensor, "samples heads keys value_width"]
    mask: Tensor | None
    causal: bool
    scale: float
    gradient: Float[Tensor, "samples heads queries value_width"] | None = None

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

    def score_gradient(self, queries: slice = slice(None)) -> Float[Tensor, "samples heads some s"]:
        """Return G = ∂L/∂Y of some queries, or numbers that are 0 where it would be."""
        logits = self.logits(queries)
        sees_none = logits.amax(-1, keepdim=True) == -math.inf  # then P is 0, as in torch
        P = torch.softmax(logits, -1).masked_fill(sees_none, 0.0)
        if self.gradient is None:
            return P
        own = P * (self.gradient[:, :, queries] @ self.value.mT)
        return self.scale * (own - P * own.sum(-1, keepdim=True))

    def change(self, move: Move, queries: slice = slice(None)) -> Tensor:
        """Return ΔY = Δq kᵀ + q Δkᵀ of some queries."""
        dq, dk = move
        left = torch.cat([dq[:, :, queries], self.query[:, :, queries]], -1)
        return left @ torch.cat([self.key, dk], -1).mT

    def moves(self, move: Move) -> Float[Tensor, "samples heads 3"]:
        """Return ‖g‖², ⟨ΔY, g⟩ and ‖ΔY‖² over the active scores of every sample and head."""

        def of(queries: slice) -> Tensor:
            G = self.score_gradient(queries)
            change = torch.where(G != 0, self.change(move, queries), 0)
            pairs = (G, G), (change, G), (change, change)
            return torch.stack([torch.einsum("nhts,nhts->nh", a, b) for a, b in pairs], -1)

        return torch.stack([of(queries) for queries in self.parts]).sum(0)

    def scales(self, moves: Sequence[Move], moment: float) -> Float[Tensor, "samples heads 3"]:
        """Return number, Σ and Σ of squares of an estimate of D_ts, of every sample and head.

        It is the sum of the squares of some moves: of one by a random change of the parameters from
        a normal distribution, whose square has the mean D_ts and the mean square 3 D_ts²; or,
        exactly, of those by a unit change of each parameter.

        Args:
            moves: the moves.
            moment: mean square of the estimate, as a multiple of D_ts².
        """

        def of(queries: slice) -> Tensor:
            counts = self.score_gradient(queries) != 0
            D = wide(sum(self.change(move, queries).square() for move in moves) * counts)
            return torch.stack([x.sum((2, 3)) for x in (counts, D, D.square() / moment)], -1)

        return torch.stack([of(queries) for queries in self.parts]).sum(0)

    def spread(self, digit: float) -> Float[Tensor, "samples heads 7"]:
        """Return where every head looks.

        The largest logit that a query sees, the same times `digit`, ‖q‖ and ‖k‖; Σ of the entropies
        of P, each over the largest one that is possible, Σ of P at the first key, and the number of
        queries, of those that see two keys or more, as are the logits.

        Args:
            digit: the last digit of 1 in the dtype of q and k.
        """
        norms = [x.norm(dim=-1).amax(-1) for x in (self.query, self.key)]

        def of(queries: slice) -> Tensor:
            logits = self.logits(queries)
            is_seen = logits > -math.inf
            keys = is_seen.sum(-1)
            counts = keys > 1
            P = torch.softmax(logits.where(counts[..., None], 0), -1)
            entropy = torch.special.entr(P).sum(-1) / keys.clamp(min=2).to(P.dtype).log()
            sums = [(x * counts).sum(-1) for x in (entropy, P[..., 0])]
            largest = logits.where(counts[..., None] & is_seen, -math.inf).amax((2, 3))
            return torch.stack([largest, *sums, counts.sum(-1)])

        largest, *sums = torch.stack([of(queries) for queries in self.parts], 1)
        most = largest.amax(0)
        return torch.stack([most, most * digit, *norms, *(x.sum(0) for x in sums)], -1)

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
