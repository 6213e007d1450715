"""What of a layer was not finite in a step: the sums of squares that came to the host tell."""

import math
from collections.abc import Iterator, Mapping

import numpy as np

from adiv_monitor.capture.selection import listed
from adiv_monitor.maths.readings import Array, Numbers
from adiv_monitor.report import LayerReading

# Sums over rows whose terms are squares of features.
_OF_FEATURES = ("scale", "scale_sum", "scale_sums", "scale_norms")


def non_finite(numbers: Numbers) -> tuple[str, ...]:
    """Which of "inputs", "outputs", "gradient" and "update" hold NaN, infinity, or overflow.

    A sum of squares is finite only if each of its terms is. The features, the gradient and the
    parameters' update are summed over all rows or entries; outputs over the rows that were seen.
    """
    found = {
        "inputs": not _all_finite(numbers.values, _OF_FEATURES),
        "outputs": not _of_rows_finite(numbers, "z"),
        "gradient": not (
            _of_rows_finite(numbers, "G")
            and _all_finite(numbers.values, ("G_G",))
            and math.isfinite(numbers.dots["gamma_gamma"])
        ),
        "update": not all(math.isfinite(numbers.dots.get(name, 0.0)) for name in ("w_w", "a_a")),
    }
    return tuple(what for what, is_broken in found.items() if is_broken)


def notes(readings: Mapping[str, LayerReading]) -> Iterator[str]:
    """One sentence for each kind of what is not finite."""
    for what in ("inputs", "outputs", "gradient", "update"):
        if paths := [path for path, reading in readings.items() if what in reading.non_finite]:
            verb = "are" if what.endswith("s") else "is"
            yield f"The {what} of {listed(paths)} {verb} not finite."


def _all_finite(values: Mapping[str, Array], names: tuple[str, ...]) -> bool:
    return all(bool(np.isfinite(values[name]).all()) for name in names if name in values)


def _of_rows_finite(numbers: Numbers, vector: str) -> bool:
    if vector not in numbers.vectors:
        return True
    place = numbers.vectors.index(vector)
    return bool(np.isfinite(numbers.values["products"][:, place, place]).all())
