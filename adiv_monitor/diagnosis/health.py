"""Values of measures in healthy networks, which determine the colours of pictures."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from adiv_monitor.diagnosis.readings import gradients
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.report import NO_MAPS, WORST, StepReport, smallest

# Not a measure of the monitor, but computed from two: ‖∂L/∂z‖ of a layer over that of the last.
GRADIENT = "gradient"


@dataclass(frozen=True)
class Health:
    """The colouring of a measure.

    Attributes:
        short: short title, above a narrow picture; the full one is `titles.measure_title`.
        reads: how to read the measure, in one line.
        logarithmic: whether values are compared by their ratios.
        knots: (value, level), values rising: level −1 is far too little, −0.5 to 0.5 the range of
            healthy layers, 1 far too much; levels between knots are interpolated. Empty: the
            healthy range is unknown, and colours only distinguish layers.
        of_maps: whether only layers that map features to features have the measure, or are
            comparable by it.
    """

    short: str
    reads: str
    logarithmic: bool = False
    knots: tuple[tuple[float, float], ...] = ()
    of_maps: bool = False

    @property
    def healthy(self) -> tuple[float, float]:
        """The smallest and the largest value that is drawn as healthy."""
        inside = [value for value, level in self.knots if abs(level) <= 0.5]
        return min(inside), max(inside)

    @property
    def far(self) -> tuple[float, float]:
        """The values at which the colours are full: far too little, and far too much."""
        return self.knots[0][0], self.knots[-1][0]

    def level(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return levels of values between far too little (−1) and far too much (1); NaN stays."""
        at, levels = np.asarray(self.knots).T
        if self.logarithmic:
            least = at[0] * 1e-6
            at, values = np.log(at), np.log(np.maximum(values, least))
        return np.asarray(np.interp(values, at, levels), dtype=np.float64)


# Inner knots are the ends of the typical range in layers of 30 healthy runs, rounded (see
# tests/benchmarks/results/separation.md), or the limits of the audit's rules. Pictures use this
# order; the first measures reveal most of 152 planted faults.
HEALTH: Mapping[str, Health] = {
    "update_ratio": Health(
        "activations move",
        "‖Δz‖ / ‖z‖. Healthy layers read 0.009 to 0.7. Blue: hardly moves; red: jumps.",
        True,
        ((3e-4, -1), (0.009, -0.5), (0.7, 0.5), (10, 1)),
        True,
    ),
    GRADIENT: Health(
        "gradient arrives",
        "‖∂L/∂z‖ over the last layer's. Blue, below 0.03: vanishes; red, above 70: explodes.",
        True,
        ((1e-3, -1), (0.03, -0.5), (70, 0.5), (1000, 1)),
        True,
    ),
    "idle_share": Health(
        "rows without gradient",
        "Rows whose gradient is zero: padding, masked tokens, dead units. Healthy: below 0.15.",
        False,
        ((0, 0), (0.15, 0.5), (1, 1)),
    ),
    "descent": Health(
        "descent",
        "How far the loss falls by this layer, to first order. Dark: hardly, or it rises.",
    ),
    "update_cosine": Health(
        "cosine of the step", "1: activations moved straight downhill. Dark: least so."
    ),
    "effective_lr": Health(
        "effective learning rate",
        "The learning rate at which activations move downhill: best alike in all layers.",
        of_maps=True,
    ),
    "scale_mean": Health(
        "row scale", "Mean ‖φ‖² = ‖x‖² + 1: long rows make long steps.", of_maps=True
    ),
    "scale_cv": Health(
        "spread of scales",
        "std / mean of ‖φ‖². Healthy: below 0.8. Red: a few long rows set the step.",
        False,
        ((0, 0), (0.8, 0.5), (2, 1)),
    ),
    "projection_cosine": Health(
        "projection",
        "1: nothing changed the weights after the step. Blue: something turned it.",
        False,
        ((0, -1), (0.98, -0.5), (1, 0)),
    ),
}
# Measures side by side in the overview.
OVERVIEW = ("update_ratio", GRADIENT, "idle_share", "update_cosine")


def value_of(record: "Record", report: StepReport, measure: str) -> dict[str, float]:
    """Return layer → value at a step, in the network's order; NaN: no direction."""
    if measure == GRADIENT:
        norms = gradients(record, report)
        last = next(reversed(norms.values()), 0.0)
        return {path: norm / last for path, norm in norms.items()} if last > 0 else {}
    no_maps = {path for path, reading in report.layers.items() if reading.kind in NO_MAPS}
    return {
        path: value
        for path, reading in report.readings(measure).items()
        if (value := getattr(reading, measure)) is not None
        and not (measure in HEALTH and HEALTH[measure].of_maps and path in no_maps)
    }


def worst_layers(report: StepReport) -> dict[str, tuple[str, ...]]:
    """Return measure → its worst layer, if standard errors tell which one it is.

    Both ends of `update_ratio` are bad outside its healthy range. The layer with the smallest, and
    the one with the largest value is among the worst if it lies outside by two standard errors.
    """
    ends = report.summary()
    worst: dict[str, tuple[str, ...]] = {
        measure: (path,)
        for measure, bad in WORST.items()
        if measure in ends and ends[measure].min_layers != ends[measure].max_layers  # of several
        and (path := ends[measure].min_layer if bad == "min" else ends[measure].max_layer)
    }  # fmt: skip
    maps = [
        (reading.update_ratio, reading.standard_error.get("update_ratio", 0.0), path)
        for path, reading in report.layers.items()
        if reading.kind not in NO_MAPS and reading.update_ratio is not None
        and not math.isnan(reading.update_ratio)
    ]  # fmt: skip
    if len(maps) > 1:
        errors = {path: error for _, error, path in maps}
        low, high = HEALTH["update_ratio"].healthy
        least = smallest(maps)
        most = smallest((-value, error, path) for value, error, path in maps)
        outside = [
            end.layers[0]
            for end, limit in ((least, low), (most, -high))
            if len(end.layers) == 1 and end.value + 2 * errors[end.layers[0]] < limit
        ]
        worst["update_ratio"] = tuple(outside)
    return worst


def is_told(measure: str, values: NDArray[np.float64]) -> bool:
    """Return whether a picture of these values is informative: not all are equal or ideal."""
    if measure == "projection_cosine":
        return bool((values < 1 - 1e-3).any())
    return bool(
        np.isfinite(values).any() and not math.isclose(np.nanmin(values), np.nanmax(values))
    )
