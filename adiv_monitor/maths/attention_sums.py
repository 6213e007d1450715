"""The record of one attention in a measured step: sums over the scores of every sample and head.

    g = ∂L/∂Y of the scores Y_ts     ΔY = the change of the scores by a move of the parameters
    D_ts = ‖∂Y_ts/∂Θ‖²               the attention scale

Only active scores count, g ≠ 0: masked scores are not. The numbers (type `T`) are tensors until the
one transfer of a step, and float64 arrays afterwards, as in `maths/sums.py`. On the host the
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
    """Sums for the cosine between a move of the scores and their gradient, by sample and head.

    Attributes:
        G: ⟨ΔY, g⟩, (samples, heads).
        square: ‖ΔY‖², (samples, heads).
    """

    G: T
    square: T


@dataclass(frozen=True, slots=True, eq=False)
class ScaleSums(Generic[T]):
    """Sums of the attention scales D_ts over those active scores whose scale is computed.

    Attributes:
        pivot: p, a number near the scales, so that equal scales have a spread of zero; ().
        count: number of these scores, (samples, heads).
        sum: Σ (D_ts − p), (samples, heads).
        square: Σ (D_ts − p)², (samples, heads).
        error: relative error of one of the scales, by comparison with its whole gradient; ().
        share: share of all scores of these samples whose scale is computed.
    """

    pivot: T
    count: T
    sum: T
    square: T
    error: T
    share: float


@dataclass(frozen=True, slots=True, eq=False)
class RerunErrors(Generic[T]):
    """Relative differences between the module's rerun and its forward pass; each ().

    Attributes:
        query: error of the queries.
        key: error of the keys.
        output: error of the output, or of the scaled queries where scores are explicit.
        precision: rounding of the coarsest dtype in the computation.
    """

    query: T
    key: T
    output: T
    precision: float

    @property
    def tolerance(self) -> float:
        """Largest relative difference that rounding explains between two ways to one number.

        Float32 products may be computed with fewer digits (TensorFloat-32), half precision has few,
        and some libraries' norms and rotations always round to float32.
        """
        return min(max(1e-4, 50 * math.sqrt(self.precision)), 0.05)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSums(Generic[T]):
    """The record of one attention in a measured step.

    Attributes:
        samples: number of samples that received a gradient; the sums are over some of them.
        G_G: ‖g‖², (samples, heads).
        e: sums of a plain gradient step, as a descent direction.
        errors: how closely the module's rerun reproduced its forward pass.
        d: sums of the optimizer's step, as a descent direction; None if no step was taken.
        scale: sums of the attention scales; None if they are not known.
        no_scale: why `scale` is None.
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
    """Sum over the active scores of every sample and head, for one move of the scores.

    Returns:
        ‖g‖², the sums of the move, and whether the scores Y_ts with the keys s of `keys` are
        active.

    Args:
        call: the attention.
        score_gradient: returns G of a slice of the queries.
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
    """Sum the scales over the active ones among some scores, for every sample and head.

    Args:
        scale: D_ts.
        active: which of the scores are active.
        error: as in `ScaleSums`.
        share: as in `ScaleSums`.
    """
    count = active.sum((2, 3))
    pivot = torch.where(active, scale, 0).sum() / count.sum().clamp(min=1)
    shifted = torch.where(active, scale - pivot, 0)
    sums = shifted.sum((2, 3)), shifted.square().sum((2, 3))
    return ScaleSums(pivot, count, *sums, error, share)


def map_samples(sums: AttentionSums[T], of: Callable[[T], T]) -> AttentionSums[T]:
    """Return the record with a function applied to every number of shape (samples, heads)."""
    return with_numbers(sums, [of(x) if x.ndim == 2 else x for x in numbers_of(sums)])


def merge(several: Sequence[AttentionSums[Array]]) -> AttentionSums[Array]:
    """Merge the records of several calls or ranks with equally many heads: concatenate samples.

    Errors are the largest of all. A field that one of the records lacks is None in the result.
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
    """Return the sums of the same scales relative to another pivot."""
    off = scale.pivot - pivot
    return replaced(
        scale,
        pivot=pivot,
        sum=scale.sum + off * scale.count,
        square=scale.square + 2 * off * scale.sum + off**2 * scale.count,
    )
