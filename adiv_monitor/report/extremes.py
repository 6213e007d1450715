"""Smallest and largest values of a measure over all layers, given their standard errors."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple


class Extreme(NamedTuple):
    """The smallest or largest value of a measure, given the standard errors of its values.

    Attributes:
        value: value of the extreme layer; of several candidates, their common value.
        layers: layers that may have the extreme value, by value; a single one if it is certain.
    """

    value: float
    layers: tuple[str, ...]


def smallest(estimates: Iterable[tuple[float, float, str]]) -> Extreme:
    """Return the smallest of one or more values that are known to within their standard errors.

    A layer is certain to lie below another if the gap between their values is more than two
    combined errors, 2·√(σ₁² + σ₂²), and more than rounding. The candidates for the smallest value
    are the layers below which no other layer is certain to lie. One value fits all candidates:
    their mean weighted by 1/σ², or an exact value (σ = 0) if there is one.

    With one candidate, this is the plain smallest value. With several, the plain smallest value
    would be noise: for equal layers it lies further below their value the more layers there are.
    The mean does so a fifth to a third as much (4 to 200 layers).

    Args:
        estimates: (value, standard error, layer); a NaN error means that the value is unknown.
    """
    kept: list[tuple[float, float, str]] = []
    surest: list[tuple[float, float]] = []  # kept ones, each with a smaller error than before
    for value, error, layer in sorted(estimates, key=lambda estimate: estimate[0]):
        error = math.inf if math.isnan(error) else error
        # If a is below b and b is below c, a is below c. So it suffices to compare with the kept
        # layers. Among those, one with larger value and larger error adds nothing.
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
    """One measure over all layers that have it, without NaN values.

    If the standard errors leave several candidates for an end, `min` and `max` are the value that
    fits all candidates (see `smallest`), never beyond the median, rather than one layer's noise.

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
        """The layer of the smallest value; None if several layers may have it."""
        return self.min_layers[0] if len(self.min_layers) == 1 else None

    @property
    def max_layer(self) -> str | None:
        """The layer of the largest value; None if several layers may have it."""
        return self.max_layers[0] if len(self.max_layers) == 1 else None


def summary(estimates: list[tuple[float, float, str]]) -> MeasureSummary:
    """Return smallest, median and largest of (value, standard error, layer)."""
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
