"""The ends of a measure over all layers, as far as the errors of its values tell."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple


class Extreme(NamedTuple):
    """The end of a measure, as far as the errors of its values tell.

    Attributes:
        value: of the layer there, or what the layers there have in common.
        layers: those that may be the one, by value; it is told which only if there is one.
    """

    value: float
    layers: tuple[str, ...]


def smallest(estimates: Iterable[tuple[float, float, str]]) -> Extreme:
    """The smallest of several values that are known to their standard errors; of one at least.

    A layer is told to lie below another where the gap between their values is more than two
    combined errors, 2·√(σ₁² + σ₂²), and more than rounding. The layers below which no other is told
    to lie may be the smallest. No two of these are told apart, so one value fits all of them:
    their mean weighted by 1/σ², an exact value (σ = 0) where there is one.

    It is the plain smallest value where it is told which layer has that. Elsewhere that would be
    noise: of layers that are equal it lies further below their value the more they are, which this
    does a fifth to a third as much (4 to 200 layers).

    Args:
        estimates: (value, standard error, layer); a NaN error is one that may be anything.
    """
    kept: list[tuple[float, float, str]] = []
    surest: list[tuple[float, float]] = []  # of those kept, each with a smaller error than before
    for value, error, layer in sorted(estimates, key=lambda estimate: estimate[0]):
        error = math.inf if math.isnan(error) else error
        # What lies below a layer that lies below this one also lies below this one; and what does
        # so with a larger error and a larger value than another, the other does, too.
        if not any(_is_below(v, e, value, error) for v, e in surest):
            kept.append((value, error, layer))
            if not surest or error < surest[-1][1]:
                surest.append((value, error))
    return Extreme(_common(kept), tuple(layer for _, _, layer in kept))


def _is_below(value: float, error: float, other: float, other_error: float) -> bool:
    beyond_error = other - value > 2 * math.hypot(error, other_error)
    return beyond_error and not math.isclose(value, other, rel_tol=1e-6)


def _common(kept: list[tuple[float, float, str]]) -> float:
    least = min(error for _, error, _ in kept)
    if least == 0 or len(kept) == 1:
        return next(value for value, error, _ in kept if error == least)
    if least == math.inf:
        return fmean(value for value, _, _ in kept)
    weights = [((least / error) ** 2, value) for value, error, _ in kept if error < math.inf]
    return sum(w * value for w, value in weights) / sum(w for w, _ in weights)


@dataclass(frozen=True)
class MeasureSummary:
    """One measure over all layers that have it (NaN left out).

    Where the standard errors don't tell which layer is at an end, `min` and `max` are not some
    layer's noise but what fits the layers that may be (see `smallest`), never beyond the median.

    Attributes:
        min: the smallest value.
        median: the median of the values.
        max: the largest value.
        min_layers: the layers that may have the smallest value.
        max_layers: the layers that may have the largest value.
    """

    min: float
    median: float
    max: float
    min_layers: tuple[str, ...]
    max_layers: tuple[str, ...]

    @property
    def min_layer(self) -> str | None:
        """The layer of the smallest value; None where it can't be told which that is."""
        return self.min_layers[0] if len(self.min_layers) == 1 else None

    @property
    def max_layer(self) -> str | None:
        """The layer of the largest value; None where it can't be told which that is."""
        return self.max_layers[0] if len(self.max_layers) == 1 else None


def summary(estimates: list[tuple[float, float, str]]) -> MeasureSummary:
    """Smallest, median and largest of (value, standard error, layer)."""
    middle = median(value for value, _, _ in estimates)
    low = smallest(estimates)
    high = smallest((-value, error, layer) for value, error, layer in estimates)
    return MeasureSummary(
        min=min(low.value, middle),
        median=middle,
        max=max(-high.value, middle),
        min_layers=low.layers,
        max_layers=high.layers,
    )
