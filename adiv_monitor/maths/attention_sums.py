"""The record of one attention in a measured step: sums over the scores of every sample and head.

    g = ∂L/∂Y of the scores Y_ts     ΔY what a move of the parameters does to them
    D_ts = ‖∂Y_ts/∂Θ‖²               the attention scale

Only active scores count, g ≠ 0: what a mask hides is idle. The numbers are tensors until the one
transfer of a step, float64 arrays afterwards, as in `maths/sums.py`: `T` is which. On the host the
records of several calls, or of several ranks, are merged into one.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from adiv_monitor.features.scores import Attention, Move
from adiv_monitor.maths.records import joined, numbers_of, replaced, with_numbers
from adiv_monitor.maths.sums import Array, T


@dataclass(frozen=True, slots=True, eq=False)
class MoveSums(Generic[T]):
    """How far a move of the scores goes downhill, for every sample and head.

    Attributes:
        G: ⟨ΔY, g⟩, (samples, heads).
        square: ‖ΔY‖², likewise.
    """

    G: T
    square: T


@dataclass(frozen=True, slots=True, eq=False)
class ScaleSums(Generic[T]):
    """The attention scales of those active scores whose scale is taken.

    Attributes:
        pivot: p, a number near them, so that scales that are all the same have no spread; ().
        count: how many there are, (samples, heads).
        sum: Σ (D_ts − p), likewise.
        square: Σ (D_ts − p)², likewise.
        error: how far off one of them is, relative to it, by its whole gradient; ().
        share: of all scores of these samples, the part whose scale is taken.
    """

    pivot: T
    count: T
    sum: T
    square: T
    error: T
    share: float


@dataclass(frozen=True, slots=True, eq=False)
class RerunErrors(Generic[T]):
    """How far the module, run once more, was from its forward pass, relative to that; each ().

    Attributes:
        query: of the queries.
        key: of the keys.
        output: of the output, or of the scaled queries where scores are made explicitly.
        precision: rounding of the coarsest number on the way.
    """

    query: T
    key: T
    output: T
    precision: float

    @property
    def tolerance(self) -> float:
        """How far rounding may take two ways to one number apart, relative to it.

        Products of float32 may be taken with fewer digits (TensorFloat-32), half precision has few;
        and some libraries' norms and rotations round to float32 in any case.
        """
        return min(max(1e-4, 50 * math.sqrt(self.precision)), 0.05)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSums(Generic[T]):
    """What is known of one attention in a measured step.

    Attributes:
        samples: how many received a gradient; the numbers are of some of them.
        G_G: ‖g‖², (samples, heads).
        e: a plain gradient step, as a descent direction.
        errors: whether the module, run once more, did the same again.
        d: the optimizer's step, as a descent direction; None: there was none.
        scale: None: it is not known.
        no_scale: why it is not known.
    """

    samples: int
    G_G: T
    e: MoveSums[T]
    errors: RerunErrors[T]
    d: MoveSums[T] | None = None
    scale: ScaleSums[T] | None = None
    no_scale: str = ""


def move_sums(
    call: Attention,
    score_gradient: Callable[[slice], Float[Tensor, "samples heads some keys"]],
    move: Move,
    keys: Int[Tensor, "samples heads queries draws"],
) -> tuple[
    Float[Tensor, "samples heads"],
    MoveSums[Tensor],
    Bool[Tensor, "samples heads queries draws"],
]:
    """Sums over the active scores of every sample and head, for one move of the scores.

    Returns:
        ‖g‖², what the move does, and whether the scores Y_ts with the keys s of `keys` are active.

    Args:
        call: the attention.
        score_gradient: G of some queries.
        move: Δq and Δk.
        keys: for every sample, head and query some keys, −1 for none.
    """
    parts = []
    active = []
    for queries in call.parts:
        G = score_gradient(queries)
        asks = G != 0
        change = torch.where(asks, call.change(move, queries), 0)
        pairs = (G, G), (change, G), (change, change)
        parts.append(torch.stack([torch.einsum("nhts,nhts->nh", a, b) for a, b in pairs]))
        some = keys[:, :, queries]
        active.append(asks.gather(-1, some.clamp(min=0)) & (some >= 0))
    G_G, of_move, square = torch.stack(parts).sum(0)
    return G_G, MoveSums(of_move, square), torch.cat(active, 2)


def scale_sums(
    scale: Float[Tensor, "samples heads queries draws"],
    active: Bool[Tensor, "samples heads queries draws"],
    error: Float[Tensor, ""],
    share: float,
) -> ScaleSums[Tensor]:
    """Sums over the active ones among some scores, of every sample and head.

    Args:
        scale: D_ts.
        active: which of them are active.
        error: as in `ScaleSums`.
        share: as in `ScaleSums`.
    """
    count = active.sum((2, 3))
    pivot = torch.where(active, scale, 0).sum() / count.sum().clamp(min=1)
    shifted = torch.where(active, scale - pivot, 0)
    sums = shifted.sum((2, 3)), shifted.square().sum((2, 3))
    return ScaleSums(pivot, count, *sums, error, share)


def map_samples(sums: AttentionSums[T], of: Callable[[T], T]) -> AttentionSums[T]:
    """The record with what a function makes of every number that is one of samples and heads."""
    return with_numbers(sums, [of(x) if x.ndim == 2 else x for x in numbers_of(sums)])


def merge(several: Sequence[AttentionSums[Array]]) -> AttentionSums[Array]:
    """The record of several calls, or ranks, with equally many heads: their samples side by side.

    Errors are the largest. What some of them don't know is not known of the whole.
    """
    has_d = all(sums.d is not None for sums in several)
    scales = [sums.scale for sums in several if sums.scale is not None]
    known: Sequence[ScaleSums[Array] | None] = [None] * len(several)
    if len(scales) == len(several):
        share = min(scale.share for scale in scales)
        known = [replaced(_around(scale, scales[0].pivot), share=share) for scale in scales]
    alike = [
        replaced(sums, d=sums.d if has_d else None, scale=scale)
        for sums, scale in zip(several, known, strict=True)
    ]
    whole = joined(alike, lambda xs: np.concatenate(xs) if xs[0].ndim == 2 else np.max(xs))
    coarsest = max(sums.errors.precision for sums in several)
    return replaced(
        whole,
        samples=sum(sums.samples for sums in several),
        errors=replaced(whole.errors, precision=coarsest),
        no_scale=next((sums.no_scale for sums in several if sums.no_scale), ""),
    )


def _around(scale: ScaleSums[Array], pivot: Array) -> ScaleSums[Array]:
    """The same scales, relative to another number."""
    off = scale.pivot - pivot
    return replaced(
        scale,
        pivot=pivot,
        sum=scale.sum + off * scale.count,
        square=scale.square + 2 * off * scale.sum + off**2 * scale.count,
    )
