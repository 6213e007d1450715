"""The table of layers at one measured step, with a row per layer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from adiv_monitor.diagnosis.health import worst_layers
from adiv_monitor.diagnosis.titles import measure_title
from adiv_monitor.pages.chain import Part, chain
from adiv_monitor.pages.multiples import Axis, Block, bar, distribution, scale_axis
from adiv_monitor.report import WORST, LayerReading, StepReport, taken
from adiv_monitor.report.wording import cell, number

COLUMNS = (
    "update_cosine",
    "gradient_cosine",
    "attainable_cosine",
    "realised_cosine",
    "scale_cv",
    "common_share",
    "interference_ratio",
    "harmed_fraction",
    "effective_lr",
    "update_ratio",
)
# Measures whose worst layer the verdict names.
_NAMED_WORST = (
    "update_cosine",
    "gradient_cosine",
    "scale_cv",
    "interference_ratio",
    "harmed_fraction",
    "effective_lr",
)
_COSINES = Axis(-1.0, 1.0)


@dataclass(frozen=True)
class Cell:
    """A value as it is printed, and for sorting; `worst` if the errors leave one candidate.

    `blanks` as wide as a digit replace the decimals that are missing up to three, so that
    right-aligned decimal points are below each other.
    """

    text: str
    value: float | None
    worst: bool = False

    @property
    def blanks(self) -> str:
        """Blanks in place of missing decimals."""
        _, point, decimals = self.text.partition(".")
        if "e" in self.text or not self.text[-1:].isdigit():
            return ""
        return "\u2007" * (3 - len(decimals)) + "\u2008" * (not point)


@dataclass(frozen=True)
class Kept:
    """The remaining cosine of a layer, as a bar.

    Attributes:
        bar: blocks of the bar; empty without a direction.
        words: the bar in words.
        share: the remaining cosine; None without a direction.
        ceiling: the largest cosine that any step of the layer could keep; None: not measured.
    """

    bar: tuple[Block, ...]
    words: str
    share: float | None
    ceiling: float | None


@dataclass(frozen=True)
class Distribution:
    """A distribution over rows, as the outline of a histogram.

    Attributes:
        outline: SVG path; "" without quantiles.
        words: ends and median of the distribution.
        middle: the median, by which the table is sorted.
    """

    outline: str
    words: str
    middle: float | None

    @classmethod
    def of(cls, quantiles: Sequence[float], axis: Axis) -> "Distribution":
        """Return the distribution of evenly spaced quantiles from the smallest to the largest."""
        if not quantiles:
            return cls("", "", None)
        low, middle, high = quantiles[0], quantiles[len(quantiles) // 2], quantiles[-1]
        words = f"from {low:.3g} to {high:.3g}, median {middle:.3g}"
        return cls(distribution(quantiles, axis), words, _finite(middle))


@dataclass(frozen=True)
class Row:
    """A layer's row of the table."""

    path: str
    about: str
    kept: Kept
    cosines: Distribution
    scales: Distribution
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Layers:
    """The table of layers."""

    step: int
    measures: tuple[str, ...]
    rows: tuple[Row, ...]
    scale_axis: Axis
    lowest: float


@dataclass(frozen=True)
class End:
    """The bad end of a measure, or one of both ends if neither is bad.

    Attributes:
        measure: name of the measure.
        text: the value at this end.
        layers: layers that may have the value; one, if the errors leave one candidate.
        which: "lowest" or "highest" if neither end is the bad one, else "".
    """

    measure: str
    text: str
    layers: tuple[str, ...]
    which: str = ""

    @property
    def title(self) -> str:
        """Title of the measure, with the end if both are named."""
        title = measure_title(self.measure)
        return f"{title}, {self.which}" if self.which else title


def layer_table(report: StepReport) -> Layers:
    """Return the table of the layers of a report."""
    measures = taken(report, COLUMNS)
    axis = scale_axis(r.scale_quantiles for r in report.layers.values())
    chains = {path: chain(reading) for path, reading in report.layers.items()}
    lowest = min((p.after for parts in chains.values() for p in parts), default=0.0)
    lowest = max(min(lowest, 0.0), -1.0)
    worst = worst_layers(report)
    rows = [
        _row(path, reading, chains[path], measures, worst, axis, lowest)
        for path, reading in report.layers.items()
    ]
    return Layers(report.step, measures, tuple(rows), axis, lowest)


def worst(report: StepReport) -> list[End]:
    """Return the ends of measures that the verdict names, as far as errors separate the layers."""
    said: list[End] = []
    for measure, summary in report.summary().items():
        if measure not in _NAMED_WORST or summary.min_layers == summary.max_layers:
            continue
        bad = WORST.get(measure)
        lowest, highest = ("", "") if bad else ("lowest", "highest")
        if bad != "max":
            said.append(_end(report, measure, summary.min_layers, summary.min, lowest))
        if bad != "min":
            said.append(_end(report, measure, summary.max_layers, summary.max, highest))
    return said


def _end(
    report: StepReport, measure: str, layers: tuple[str, ...], value: float, which: str
) -> End:
    errors = [report.layers[path].standard_error.get(measure, 0.0) for path in layers]
    return End(measure, number(value, min(errors)), layers, which)


def _row(
    path: str,
    reading: LayerReading,
    parts: tuple[Part, ...],
    measures: Sequence[str],
    worst: dict[str, tuple[str, ...]],
    axis: Axis,
    lowest: float,
) -> Row:
    seen, total = reading.rows_seen, reading.rows_total
    rows = f"{total:,}" if seen == total else f"{seen:,} of {total:,}"
    return Row(
        path=path,
        about=f"{reading.kind} · {rows} rows",
        kept=Kept(
            bar=bar(parts, lowest),
            words=_bar_words(parts),
            share=parts[-1].after if parts else None,
            ceiling=_finite(reading.attainable_cosine),
        ),
        cosines=Distribution.of(reading.row_cosine_quantiles, _COSINES),
        scales=Distribution.of(reading.scale_quantiles, axis),
        cells=tuple(
            _cell(reading, measure, path in worst.get(measure, ())) for measure in measures
        ),
    )


def _cell(reading: LayerReading, measure: str, worst: bool) -> Cell:
    value = getattr(reading, measure)
    if value is None:
        return Cell("", None)
    return Cell(cell(reading, measure), _finite(value), worst)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _bar_words(parts: Sequence[Part]) -> str:
    if not parts:
        return "no direction"
    said = [f"cosine {number(parts[-1].after, parts[-1].error)}"]
    for part in parts:
        verb = ("raise" if part.taken < 0 else "lower") + "s" * (len(part.causes) == 1)
        change = number(abs(part.taken), part.error)
        said.append(f"{' and '.join(part.causes)} {verb} it by {change}")
    return ", ".join(said)
