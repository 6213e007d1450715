"""The record of one attention on the probe: sums over the scores of every sample and head.

    g = ∂L/∂Y of the scores Y_ts     ΔY = the change of the scores by a move of the parameters
    D_ts = ‖∂Y_ts/∂Θ‖²               the attention scale

Only active scores count, g ≠ 0: masked scores are not. Where g is not known, all others count. The
numbers (type `T`) are tensors until the one transfer of a step, and float64 arrays afterwards. On
the host the records of several calls or ranks are merged into one.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from adiv_monitor.features.scores import Attention, Move
from adiv_monitor.maths.sums import Array

T = TypeVar("T")


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
        count: number of these scores, (samples, heads).
        sum: Σ D_ts, (samples, heads).
        square: Σ D_ts², (samples, heads); both in float64 where the device has it.
        error: relative error of one of the scales, by comparison with its whole gradient; ().
        share: share of all scores of these samples whose scale is computed.
    """

    count: T
    sum: T
    square: T
    error: T
    share: float


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSums(Generic[T]):
    """The record of one attention on the probe.

    Attributes:
        precision: rounding of the queries' dtype.
        broken: 1 if q or k is not finite, else 0; ().
        G_G: ‖g‖², (samples, heads); None if g is not known.
        e: sums of a plain gradient step, as a descent direction; None if g is not known.
        d: sums of the optimizer's step, as a descent direction; None if no step was taken.
        scale: sums of the attention scales; None if they are not known.
        no_scale: why `scale` is None.
    """

    precision: float
    broken: T
    G_G: T | None = None
    e: MoveSums[T] | None = None
    d: MoveSums[T] | None = None
    scale: ScaleSums[T] | None = None
    no_scale: str = ""

    @property
    def tolerance(self) -> float:
        """Largest relative difference that rounding explains between two ways to one number.

        Float32 products may be computed with fewer digits (TensorFloat-32), half precision has few,
        and some libraries' norms and rotations always round to float32.
        """
        return min(max(1e-4, 50 * math.sqrt(self.precision)), 0.05)


ScoreGradient = Callable[[slice], Float[Tensor, "samples heads some keys"]]


def move_sums(
    call: Attention, score_gradient: ScoreGradient, move: Move
) -> tuple[Float[Tensor, "samples heads"], MoveSums[Tensor]]:
    """Return ‖g‖² and the sums of a move, over the active scores of every sample and head.

    Args:
        call: the attention.
        score_gradient: returns G of a slice of the queries.
        move: Δq and Δk.
    """
    parts = []
    for queries in call.parts:
        G = score_gradient(queries)
        change = torch.where(G != 0, call.change(move, queries), 0)
        pairs = (G, G), (change, G), (change, change)
        parts.append(torch.stack([torch.einsum("nhts,nhts->nh", a, b) for a, b in pairs]))
    G_G, of_move, square = torch.stack(parts).sum(0)
    return G_G, MoveSums(of_move, square)


def active_scores(
    call: Attention,
    score_gradient: ScoreGradient | None,
    keys: Int[Tensor, "samples heads queries draws"],
) -> Bool[Tensor, "samples heads queries draws"]:
    """Return whether the scores Y_ts with some keys s are active: g ≠ 0, or P ≠ 0 without g.

    Args:
        call: the attention.
        score_gradient: see `move_sums`; None: not known.
        keys: for every sample, head and query some keys, −1 for none.
    """
    asks = score_gradient or call.probabilities
    active = []
    for queries in call.parts:
        some = keys[:, :, queries]
        active.append((asks(queries).gather(-1, some.clamp(min=0)) != 0) & (some >= 0))
    return torch.cat(active, 2)


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
    wide = torch.where(active, scale, 0)
    wide = wide if wide.device.type == "mps" else wide.double()
    sums = wide.sum((2, 3)), wide.square().sum((2, 3))
    return ScaleSums(active.sum((2, 3)), *sums, error, share)


def combined(of: Callable[..., Any], *records: Any) -> Any:
    """Return a record of the results of a function of each of the records' numbers (type `T`)."""
    first = records[0]
    if is_dataclass(first) and not isinstance(first, type):
        each = {f.name: [getattr(x, f.name) for x in records] for f in fields(first)}
        return replace(first, **{name: combined(of, *values) for name, values in each.items()})
    return first if first is None or isinstance(first, int | float | str) else of(*records)


def tensors_of(sums: AttentionSums[T]) -> list[T]:
    """Return the numbers of a record, in order."""
    found: list[T] = []
    combined(found.append, sums)
    return found


def with_arrays(sums: AttentionSums[Any], arrays: Iterator[Array]) -> AttentionSums[Array]:
    """Return the record with other numbers, in the order of `tensors_of`."""
    made: AttentionSums[Array] = combined(lambda _: next(arrays), sums)
    return made


def merge(several: Sequence[AttentionSums[Array]]) -> AttentionSums[Array]:
    """Merge the records of several calls or ranks with equally many heads: concatenate samples.

    A field that one of the records lacks is None in the result.
    """
    lacking: dict[str, Any] = {
        name: None
        for name in ("G_G", "e", "d", "scale")
        if any(getattr(sums, name) is None for sums in several)
    }
    alike = [replace(sums, **lacking) for sums in several]
    whole: AttentionSums[Array] = combined(
        lambda *xs: np.concatenate(xs) if xs[0].ndim == 2 else np.asarray(np.max(xs)), *alike
    )
    shares = [sums.scale.share for sums in alike if sums.scale is not None]
    return replace(
        whole,
        precision=max(sums.precision for sums in several),
        scale=whole.scale and replace(whole.scale, share=min(shares)),
        no_scale=next((sums.no_scale for sums in several if sums.no_scale), ""),
    )
