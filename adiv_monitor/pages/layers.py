"""The table of layers at one measured step, with a row per layer."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from adiv_monitor.diagnosis.health import measure_title, worst_layers
from adiv_monitor.pages.chain import Block, Part, bar, chain
from adiv_monitor.report import WORST, LayerReading, StepReport, taken
from adiv_monitor.report.wording import cell, listed, number

COLUMNS = (
    *("update_cosine", "gradient_cosine", "attainable_cosine", "realised_cosine", "scale_cv"),
    *("common_share", "interference_ratio", "harmed_fraction", "effective_lr", "update_ratio"),
)
# Measures whose worst layer is named, and that comparisons show.
NAMED = (
    *("update_cosine", "gradient_cosine", "scale_cv", "interference_ratio", "harmed_fraction"),
    "effective_lr",
)


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


class Row(NamedTuple):
    """A layer's row of the table.

    Attributes:
        path: path of the layer.
        about: its kind and its rows, in words.
        bar: the remaining cosine as blocks of a bar; empty without a direction.
        words: the bar in words.
        share: the remaining cosine; None without a direction.
        ceiling: the largest cosine that any step of the layer could keep; None: not measured.
        cells: the measures.
    """

    path: str
    about: str
    bar: tuple[Block, ...]
    words: str
    share: float | None
    ceiling: float | None
    cells: tuple[Cell, ...]


class Layers(NamedTuple):
    """The table of layers."""

    step: int
    measures: tuple[str, ...]
    rows: tuple[Row, ...]
    lowest: float


class End(NamedTuple):
    """The bad end of a measure, or one of both ends if neither is bad.

    Attributes:
        title: title of the measure, with the end if both are named.
        text: the value at this end.
        layers: layers that may have the value; one, if the errors leave one candidate.
    """

    title: str
    text: str
    layers: tuple[str, ...]


def layer_table(report: StepReport) -> Layers:
    """Return the table of the layers of a report."""
    measures = taken(report, COLUMNS)
    chains = {path: chain(reading) for path, reading in report.layers.items()}
    lowest = min((p.after for parts in chains.values() for p in parts), default=0.0)
    lowest = max(min(lowest, 0.0), -1.0)
    worst = worst_layers(report)
    rows = tuple(
        _row(path, reading, chains[path], lowest)._replace(
            cells=tuple(_cell(reading, m, path in worst.get(m, ())) for m in measures)
        )
        for path, reading in report.layers.items()
    )
    return Layers(report.step, measures, rows, lowest)


def worst(report: StepReport, measures: Collection[str] = NAMED) -> Iterator[End]:
    """Yield the bad ends of measures, as far as errors separate the layers, but no ideal ones."""
    for measure, summary in report.summary().items():
        if measure not in measures or summary.min_layers == summary.max_layers:
            continue
        bad, title = WORST.get(measure), measure_title(measure)
        if bad != "max" and not (bad and summary.min > 1 - 1e-3):
            which = title if bad else f"{title}, lowest"
            yield _end(which, report, measure, summary.min_layers, summary.min)
        if bad != "min" and not (bad and summary.max == 0):
            which = title if bad else f"{title}, highest"
            yield _end(which, report, measure, summary.max_layers, summary.max)


def _end(
    title: str, report: StepReport, measure: str, layers: tuple[str, ...], value: float
) -> End:
    readings = report.readings(measure)
    error = min(readings[path].standard_error.get(measure, 0.0) for path in layers)
    return End(title, number(value, error), layers)


def worst_lines(report: StepReport, measures: Collection[str] = NAMED) -> list[str]:
    """Return `worst` as lines of Markdown."""
    return [
        f"- {end.title}: {end.text} in {'one of ' * (len(end.layers) > 1)}"
        + listed(list(end.layers), as_code=True)
        for end in worst(report, measures)
    ]


def _row(path: str, reading: LayerReading, parts: tuple[Part, ...], lowest: float) -> Row:
    seen, total = reading.rows_seen, reading.rows_total
    rows = f"{total:,}" if seen == total else f"{seen:,} of {total:,}"
    share = parts[-1].after if parts else None
    ceiling = _finite(reading.attainable_cosine)
    about = f"{reading.kind} · {rows} rows"
    return Row(path, about, bar(parts, lowest), _bar_words(parts), share, ceiling, ())


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
