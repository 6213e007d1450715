"""Detection of non-finite tensors of a layer, from sums of squares on the host."""

from collections.abc import Iterator, Mapping

import numpy as np

from adiv_monitor.capture.selection import listed
from adiv_monitor.maths.sums import Array, StepSums
from adiv_monitor.report import LayerReading


def non_finite(sums: StepSums, layer: int) -> tuple[str, ...]:
    """Return which of "inputs", "outputs", "gradient" and "update" hold NaN, inf, or overflow.

    A sum of squares is finite only if each of its terms is. The features, the gradient and the
    parameters' update are summed over all rows or entries; the outputs over the sampled rows.
    """
    line, rows = sums.layers[layer], sums.of("rows", layer)
    of_scales = [rows[name] for name in ("scale", "mean", "off")]
    known = of_scales[: 3 if line["groups"] > 1 else line["groups"]]
    of_all = [] if np.isnan(line["active"]) else [line["G_G"]]
    is_broken = {
        "inputs": _any_broken(*known, *([line["scale_sum"]] if line["knows_scales"] else [])),
        "outputs": _any_broken(rows["z_z"]),
        "gradient": _any_broken(rows["G_G"], *of_all, line["gamma_gamma"]),
        "update": _any_broken(line["w_w"], line["a_a"]),
    }
    return tuple(what for what, is_so in is_broken.items() if is_so)


def notes(readings: Mapping[str, LayerReading]) -> Iterator[str]:
    """Yield one sentence for each kind of tensor that is not finite."""
    for what in ("inputs", "outputs", "gradient", "update"):
        if paths := [path for path, reading in readings.items() if what in reading.non_finite]:
            verb = "are" if what.endswith("s") else "is"
            yield f"The {what} of {listed(paths)} {verb} not finite."


def _any_broken(*several: Array | float) -> bool:
    return any(not np.isfinite(of).all() for of in several)
