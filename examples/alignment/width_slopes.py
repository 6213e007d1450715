"""Dependence of measures on width: log-log slopes with intervals, and verdicts on them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from logits import scale_named

Verdict = Literal["grows", "stays", "vanishes", "unclear"]
_TOLERANCE = 0.1  # slopes up to this have no effect of order one at usual widths
_CERTAIN = 0.25  # half of the largest interval with which a slope near zero counts as known
RATIOS = ("alpha", "omega", "u", "cumulative")


@dataclass(frozen=True)
class Run:
    """Readings of one training run.

    Attributes:
        width: width of the model.
        readings: step → layer → measures, as in `AlignmentReading.to_dict`.
    """

    width: int
    readings: Mapping[int, Mapping[str, Mapping[str, float]]]


@dataclass(frozen=True)
class Slope:
    """d log(value) / d log(width), by least squares.

    Attributes:
        value: the slope.
        half: half its 95 % interval; ∞ from two points alone.
        points: (width, value) of every run.
    """

    value: float
    half: float
    points: tuple[tuple[float, float], ...]

    @property
    def verdict(self) -> Verdict:
        """The trend of the value with growing width."""
        if self.value - self.half > _TOLERANCE:
            return "grows"
        if self.value + self.half < -_TOLERANCE:
            return "vanishes"
        return "stays" if abs(self.value) + self.half <= _TOLERANCE + _CERTAIN else "unclear"


@dataclass(frozen=True)
class LayerWidths:
    """One layer at several widths.

    Attributes:
        path: path of the layer.
        step: the training step after which the readings were taken.
        size: slope of RMS(W z), the layer's output.
        move: slope of the RMS of the output's change since the reference point: −r of the theory.
        exponents: slopes of RMS(W z)/(RMS W · RMS z) for alpha, omega, u and A(W, z), against the
            fan-in: the alignment in the limit of large width.
        kappas: n^(A − 1), the geometric mean over widths: the width-independent share of full
            alignment.
        note: of an attention's logits, how they are scaled; and at which widths outputs, or their
            moves, are not finite, or the layer is missing.
        lost: whether there is such a width.
    """

    path: str
    step: int
    size: Slope | None
    move: Slope | None
    exponents: Mapping[str, Slope]
    kappas: Mapping[str, float]
    note: str = ""
    lost: bool = False

    @property
    def verdict(self) -> Verdict:
        """The trend of the layer's move with width; muP aims at "stays"."""
        return "unclear" if self.move is None or self.lost else self.move.verdict


def slope(points: Iterable[tuple[float, float]]) -> Slope | None:
    """Return the slope of log(value) against log(width); None with fewer than two widths.

    Raises:
        ImportError: without scipy (pip install "adiv-monitor[lr]").
    """
    kept = tuple((n, value) for n, value in points if n > 0 and 0 < value < math.inf)
    if len({n for n, _ in kept}) < 2:
        return None
    try:
        from scipy import stats
    except ImportError as error:
        raise ImportError(
            'Slopes over widths need scipy: pip install "adiv-monitor[lr]"'
        ) from error
    logs = [(math.log(n), math.log(value)) for n, value in kept]
    found = stats.linregress(*zip(*logs, strict=True))
    free = len(kept) - 2
    half = float(stats.t.ppf(0.975, free) * found.stderr) if free else math.inf
    return Slope(float(found.slope), half, kept)


def layer_widths(runs: Sequence[Run]) -> list[LayerWidths]:
    """Return slopes of every layer after the last step that all runs have.

    Raises:
        ValueError: fewer than two widths, or runs without a step in common.
    """
    if len({run.width for run in runs}) < 2:
        raise ValueError(
            f"layer_widths: got runs of widths {sorted({run.width for run in runs})}, expected two "
            "widths at least"
        )
    common = set.intersection(*(set(run.readings) for run in runs))
    if not common:
        raise ValueError(
            "layer_widths: got runs without a common step, expected one that all runs have"
        )
    step = max(common)
    paths = dict.fromkeys(path for run in runs for path in run.readings[step])
    return [_of_layer(runs, path, step) for path in paths]


def _of_layer(runs: Sequence[Run], path: str, step: int) -> LayerWidths:
    records = [(r.width, r.readings[step][path]) for r in runs if path in r.readings[step]]

    def of(name: str) -> Slope | None:
        return slope((width, record.get(name, 0.0)) for width, record in records)

    exponents, kappas = {}, {}
    for name in RATIOS:
        # A log n is the logarithm of the ratio of sizes, n^A.
        known = [(r["fan_in"], r["fan_in"] ** r[name]) for _, r in records if name in r]
        found = slope(known)
        if found is not None:
            exponents[name] = found
        shares = [math.log(r[f"kappa_{name}"]) for _, r in records if name in r]
        if shares:
            kappas[name] = math.exp(math.fsum(shares) / len(shares))
    sizes = {width: int(r["head_size"]) for width, r in records if "head_size" in r}
    note = scale_named(sizes, {width: r["scale"] for width, r in records}) if sizes else ""
    lost = sorted({run.width for run in runs if not _is_known(run.readings[step].get(path, {}))})
    if lost:
        said = f"not finite, or missing, at width {', '.join(map(str, lost))}"
        note = f"{note}; {said}" if note else said
    moves = of("output_rms"), of("output_change_rms")
    return LayerWidths(path, step, *moves, exponents, kappas, note, bool(lost))


def _is_known(record: Mapping[str, float]) -> bool:
    sizes = (record.get(name, math.nan) for name in ("output_rms", "output_change_rms"))
    return all(math.isfinite(size) for size in sizes)
