"""The record of one attention on the probe: sums over the scores of every sample and head.

    g = ∂L/∂Y of the scores Y_ts     ΔY = the change of the scores by a move of the parameters
    D_ts = ‖∂Y_ts/∂Θ‖²               the attention scale

Only active scores count, g ≠ 0: masked scores are not. Where g is not known, all others count. The
numbers (type `T`) are tensors until the one transfer of a step, and float64 arrays afterwards. On
the host the records of several calls or ranks are merged into one.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from adiv_monitor.features.scores import Attention, Move
from adiv_monitor.maths.sums import Array

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSums(Generic[T]):
    """The record of one attention on the probe.

    Attributes:
        broken: 1 if q or k is not finite, else 0; ().
        count: number of active scores, (samples, heads).
        scale: estimates of Σ D_ts over them, (samples, heads, estimates), one of each random move;
            a single one is exact.
        scale_square: Σ D_ts², likewise.
        G_G: ‖g‖², (samples, heads); None if g is not known.
        e: ⟨ΔY, g⟩ and ‖ΔY‖² of a plain gradient step, as a descent direction, (samples, heads, 2);
            None if g is not known.
        d: the same of the optimizer's step; None if no step was taken.
        spread: (samples, heads, 7): the largest logit that a query sees, the same times `digit`,
            ‖q‖ and ‖k‖; Σ of the entropies of P, each over the largest one that is possible, Σ of P
            at the first key, and the number of queries, of those that see two keys or more, as are
            the logits.
    """

    broken: T
    count: T
    scale: T
    scale_square: T
    G_G: T | None = None
    e: T | None = None
    d: T | None = None
    spread: T | None = None


# A function that returns g, or any numbers that are 0 at inactive scores, of a slice of the queries
OfScores = Callable[[slice], Float[Tensor, "samples heads some keys"]]


def move_sums(
    call: Attention, score_gradient: OfScores, move: Move
) -> tuple[Float[Tensor, "samples heads"], Float[Tensor, "samples heads 2"]]:
    """Return ‖g‖², and ⟨ΔY, g⟩ and ‖ΔY‖², over the active scores of every sample and head.

    Args:
        call: the attention.
        score_gradient: returns g.
        move: Δq and Δk.
    """
    parts = []
    for queries in call.parts:
        G = score_gradient(queries)
        change = torch.where(G != 0, call.change(move, queries), 0)
        pairs = (G, G), (change, G), (change, change)
        parts.append(torch.stack([torch.einsum("nhts,nhts->nh", a, b) for a, b in pairs]))
    G_G, *of_move = torch.stack(parts).sum(0)
    return G_G, torch.stack(of_move, -1)


def scale_sums(
    call: Attention, active: OfScores, moves: Sequence[Move], moment: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return number, Σ and Σ of squares of an estimate of D_ts, of every sample and head.

    It is the sum of the squares of some moves: of one by a random change of the parameters from a
    normal distribution, whose square has the mean D_ts and the mean square 3 D_ts²; or, exactly, of
    those by a unit change of each parameter.

    Args:
        call: the attention.
        active: returns numbers that are 0 at the inactive scores.
        moves: the moves.
        moment: mean square of the estimate, as a multiple of D_ts².
    """
    parts = []
    for queries in call.parts:
        counts = active(queries) != 0
        D = torch.stack([call.change(move, queries).square() for move in moves]).sum(0) * counts
        wide = D if D.device.type == "mps" else D.double()
        parts.append([x.sum((2, 3)) for x in (counts, wide, wide.square() / moment)])
    count, total, square = (torch.stack(of_parts).sum(0) for of_parts in zip(*parts, strict=True))
    return count, total, square


def spread_sums(call: Attention, digit: float) -> Float[Tensor, "samples heads 7"]:
    """Return `spread` of an attention; digit: the last digit of 1 in the dtype of q and k."""
    norms, parts = [x.norm(dim=-1).amax(-1) for x in (call.query, call.key)], []
    for queries in call.parts:
        logits = call.logits(queries)
        is_seen = logits > -math.inf
        keys = is_seen.sum(-1)
        counts = keys > 1
        P = torch.softmax(logits.where(counts[..., None], 0), -1)
        entropy = torch.special.entr(P).sum(-1) / keys.clamp(min=2).to(P.dtype).log()
        sums = [(x * counts).sum(-1) for x in (entropy, P[..., 0])]
        largest = logits.where(counts[..., None] & is_seen, -math.inf).amax((2, 3))
        parts.append(torch.stack([largest, *sums, counts.sum(-1)]))
    found = torch.stack(parts)
    largest = found[:, 0].amax(0)
    return torch.stack([largest, largest * digit, *norms, *found[:, 1:].sum(0)], -1)


def combined(of: Callable[..., Any], *records: AttentionSums[Any]) -> AttentionSums[Any]:
    """Return a record of the results of a function of each of the records' numbers (type `T`).

    A field that one of the records lacks is None in the result.
    """
    values = ([getattr(x, f.name) for x in records] for f in fields(AttentionSums))
    return AttentionSums(*(None if any(x is None for x in xs) else of(*xs) for xs in values))


def tensors_of(sums: AttentionSums[T]) -> list[T]:
    """Return the numbers of a record, in order."""
    found: list[T] = []
    combined(found.append, sums)
    return found


def merge(several: Sequence[AttentionSums[Array]]) -> AttentionSums[Array]:
    """Merge the records of several calls or ranks with equally many heads: concatenate samples.

    An exact sum takes the place of every estimate if others were estimated.
    """

    def joined(*xs: Array) -> Array:
        if xs[0].ndim < 2:
            return np.asarray(np.max(xs))
        more = np.max([x.shape[2:] for x in xs], 0).astype(int)
        return np.concatenate([np.broadcast_to(x, (*x.shape[:2], *more)) for x in xs])

    return combined(joined, *several)
