"""Detection of non-finite tensors of a layer, from sums of squares on the host."""

from collections.abc import Iterator, Mapping

import numpy as np

from adiv_monitor.capture.selection import listed
from adiv_monitor.maths.sums import Array, LayerSums, Vector, of_rows
from adiv_monitor.report import LayerReading


def non_finite(layer: LayerSums[Array]) -> tuple[str, ...]:
    """Return which of "inputs", "outputs", "gradient" and "update" hold NaN, inf, or overflow.

    A sum of squares is finite only if each of its terms is. The features, the gradient and the
    parameters' update are summed over all rows or entries; the outputs over the sampled rows.
    """
    blocks, totals, dots = layer.blocks, layer.totals, layer.dots
    scales = None if totals is None else totals.scales
    of_features = (
        layer.scale,
        *(() if blocks is None else (blocks.sums, blocks.norms)),
        None if scales is None else scales.sum,
    )
    gradient = of_rows(layer, Vector.G, Vector.G), None if totals is None else totals.G_G
    is_broken = {
        "inputs": _any_broken(*of_features),
        "outputs": _any_broken(of_rows(layer, Vector.Z, Vector.Z)),
        "gradient": _any_broken(*gradient, dots.gamma_gamma),
        "update": _any_broken(dots.w_w, dots.a_a),
    }
    return tuple(what for what, is_so in is_broken.items() if is_so)


def notes(readings: Mapping[str, LayerReading]) -> Iterator[str]:
    """Yield one sentence for each kind of tensor that is not finite."""
    for what in ("inputs", "outputs", "gradient", "update"):
        if paths := [path for path, reading in readings.items() if what in reading.non_finite]:
            verb = "are" if what.endswith("s") else "is"
            yield f"The {what} of {listed(paths)} {verb} not finite."


def _any_broken(*several: Array | float | None) -> bool:
    return any(not np.isfinite(of).all() for of in several if of is not None)
