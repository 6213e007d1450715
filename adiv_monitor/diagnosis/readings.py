"""Typical readings over the measured steps of a run, with their errors, for the rules.

Steps are judged near the peak of the learning rate.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from statistics import median
from typing import NamedTuple

from adiv_monitor.diagnosis.record import Record
from adiv_monitor.printable import layer_words
from adiv_monitor.report import NO_MAPS, LayerReading, StepReport
from adiv_monitor.report.wording import listed

# Kinds of layers whose rows are the layer's inputs unchanged; corrected layers have others.
PLAIN = ("linear", "convolution")

FEWEST_LAYERS = 3  # fewer layers have no path on which a gradient could vanish
FEWEST_REPORTS = 3  # fewest reports that show typical values
PEAK = 0.5  # of the largest learning rate so far: lower ones are warmup or intended decay
_FEWEST = 2  # fewest measured steps at the peak
_RISES = 1.01  # times the learning rate of the previous measured step

# Optimizers that divide each step by the size of past gradients, or take its sign, so that a
# constant factor on the gradient changes nothing.
_SCALE_FREE = frozenset(
    ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "SparseAdam", "Adagrad", "Adadelta", "RMSprop")
).union(("Rprop", "Adafactor", "Lion", "Muon", "AdamW8bit", "Adam8bit", "LAMB", "Lamb", "Adan"))


class Typical(NamedTuple):
    """The typical value of a measure: the median over steps, with the median standard error.

    A value within two standard errors of a limit is neither above nor below it.
    """

    value: float
    error: float
    since: int | None = None

    def above(self, limit: float) -> bool:
        """Return whether the value exceeds the limit by more than two standard errors."""
        return self.value - 2 * self.error > limit

    def below(self, limit: float) -> bool:
        """Return whether the value is below the limit by more than two standard errors."""
        return self.value + 2 * self.error < limit


def several(record: Record) -> bool:
    """Return whether there are enough reports to show what is typical."""
    return len(record.reports) >= FEWEST_REPORTS


def stepped(record: Record) -> bool:
    """Return whether several reports show an optimizer's steps."""
    return several(record) and bool(by_layer(record, "parameter_cosine"))


def reported(field: str) -> Callable[[Record], object]:
    """Return the condition that there are several reports, and that one of them holds a field."""
    return lambda record: several(record) and any(getattr(r, field) for r in record.reports)


def optimizer_of(record: Record) -> str:
    """Return the class name of the run's optimizer; "" if it is not known."""
    return record.facts.optimizer or next((r.optimizer for r in record.reports), "")


def scale_free(record: Record) -> bool:
    """Return whether the optimizer's step does not depend on a constant factor of the gradient."""
    return optimizer_of(record) in _SCALE_FREE


def resumed(record: Record) -> bool:
    """Return whether the optimizer began with the state of an earlier run."""
    of = record.reports[0].settings if record.reports and not record.reports[0].new_state else {}
    keeps = any(max(of.get(name, (0.0,))) > 0 for name in ("momentum", "beta1", "alpha"))
    return record.facts.resumed or (keeps and not record.is_audited)


def maps(record: Record) -> tuple[str, ...]:
    """Return the measured layers that map features to features, in the order of the model."""
    kinds = {p: r.kind for report in record.reports for p, r in report.layers.items()}
    return tuple(path for path, kind in kinds.items() if kind not in NO_MAPS)


def readings(record: Record, layer: str) -> dict[int, LayerReading]:
    """Return the layer's readings by step."""
    return {r.step: r.layers[layer] for r in record.reports if layer in r.layers}


def named(record: Record, layer: str) -> str:
    """Return the words for a layer in a sentence: its class, if known, and its path."""
    first = next((r.layers[layer] for r in record.reports if layer in r.layers), None)
    return layer_words(layer, first.module if first else "")


def these(record: Record, layers: Sequence[str]) -> str:
    """Return the words for several layers in a sentence: "all 12 layers", or their names."""
    paths = {path for report in record.reports for path in report.layers}
    if len(layers) == len(paths) > 3:
        return f"all {len(layers)} layers"
    return listed([named(record, path) for path in layers])


def typical(record: Record, layer: str, measure: str) -> Typical | None:
    """Return the typical value of a layer's measure; None if it was never taken or not finite."""
    found = [
        (step, value, reading.standard_error.get(measure, 0.0))
        for step, reading in readings(record, layer).items()
        if (value := getattr(reading, measure)) is not None and math.isfinite(value)
    ]
    return middle(found) if found else None


def middle(found: Sequence[tuple[int, float, float]]) -> Typical:
    """Return the typical one of (step, value, error)."""
    steps, values, errors = zip(*found, strict=True)
    return Typical(median(values), median(errors), min(steps))


def at_first(record: Record, measure: str) -> list[dict[str, Typical]]:
    """Return a measure of all maps at the first measured steps, two at most."""
    return [by_layer(replace(record, reports=(report,)), measure) for report in record.reports[:2]]


def by_layer(record: Record, measure: str) -> dict[str, Typical]:
    """Return the typical value of a measure for all maps, in the order of the model."""
    found = {path: typical(record, path, measure) for path in maps(record)}
    return {path: value for path, value in found.items() if value is not None}


def gradients(record: Record, report: StepReport) -> dict[str, float]:
    """Return ‖∂L/∂z‖ over all rows of each map at one step, in the order of the model.

    It is computed from ⟨d, G⟩ = `descent` and ⟨d, G⟩ / ‖G‖² = `effective_lr`; it is 0 for a layer
    without active rows.
    """
    norms = {p: _gradient(report.layers[p]) for p in maps(record) if p in report.layers}
    return {path: norm for path, norm in norms.items() if norm is not None}


def heard(record: Record, report: StepReport) -> dict[str, float]:
    """Return ‖gradient‖ of each map at one step, without those of branches that began at zero.

    They get no gradient in the first step, and later one as small as the weight behind them still
    is: the first of two factors of a low-rank update (LoRA), a branch whose last layer begins at
    zero. Other maps before them get a gradient from the start. If none does, the only path leads
    through them, and they count.
    """
    norms, began = gradients(record, report), gradients(record, record.reports[0])
    later = {p for r in record.reports[1:] for p, of in r.layers.items() if _gradient(of)}
    late = [path for path, norm in began.items() if norm == 0 and path in later]
    before = takewhile(lambda path: path != late[-1], began) if late else ()
    if not any(began[path] > 0 for path in before):
        return norms
    return {path: norm for path, norm in norms.items() if path not in late}


def of_same_rows(readings: Mapping[str, LayerReading], one: str, other: str) -> bool:
    """Whether two layers have rows with the same scales, as layers with the same input have."""

    def scales(path: str) -> tuple[float, ...]:
        reading = readings[path]
        return reading.rows_total, reading.scale_mean or 0.0, reading.scale_cv or 0.0

    pairs = zip(scales(one), scales(other), strict=True)
    return all(math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6) for a, b in pairs)


def looked_up(report: StepReport) -> dict[str, float]:
    """Return ‖∂L/∂z‖ over all rows of each look-up table at one step."""
    tables = {p: _gradient(r) for p, r in report.layers.items() if r.kind == "embedding"}
    return {path: norm for path, norm in tables.items() if norm is not None}


def _gradient(reading: LayerReading) -> float | None:
    if reading.idle_share == 1:
        return 0.0
    descent, rate = reading.descent, reading.effective_lr
    if descent is None or rate is None or not descent * rate > 0:
        return None
    return math.sqrt(descent / rate) if math.isfinite(descent / rate) else None


def entering(record: Record) -> tuple[str, Typical] | None:
    """Return the first layer, and the rms of the entries that reach it: √((‖φ‖² − 1) / fan-in).

    Return None if the first layer is not a plain map, for example after a look-up table or a
    normalisation: then it does not read the inputs.
    """
    firsts = (pair for report in record.reports for pair in [*report.layers.items()][:1])
    for path, first in firsts:
        if first.kind in PLAIN and first.features:
            return None if (found := entries(record, path)) is None else (path, found)
    return None


def entries(record: Record, path: str) -> Typical | None:
    """Return the rms of the entries of a map's rows; None: it is not known."""
    reading = next((r.layers[path] for r in record.reports if path in r.layers), None)
    found = typical(record, path, "scale_mean")
    if reading is None or found is None or not reading.features:
        return None
    square = max(0.0, found.value - (1.0 if reading.bias_share else 0.0))
    return Typical(math.sqrt(square / reading.features), 0.0, found.since)


def worst_first(values: Mapping[str, float]) -> tuple[str, ...]:
    """Return the layers by value, largest first."""
    return tuple(sorted(values, key=lambda path: -values[path]))


def learning_rates(record: Record) -> dict[int, float]:
    """Return the largest learning rate of the optimizer's groups by measured step, if known."""
    return {r.step: max(r.learning_rates) for r in record.reports if r.learning_rates}


def at_peak(record: Record) -> Record:
    """Return the record with only the measured steps whose learning rate is at least half the peak.

    All steps are kept if learning rates are unknown or zero, or if too few steps are at the peak to
    show what is typical.
    """
    rates = learning_rates(record)
    largest = max(rates.values(), default=0.0)
    kept = tuple(r for r in record.reports if rates.get(r.step, largest) >= PEAK * largest)
    return replace(record, reports=kept) if largest > 0 and len(kept) >= _FEWEST else record


def still_rises(record: Record) -> bool:
    """Return whether the learning rate was still rising at the last measured step."""
    rates = [*learning_rates(record).values()]
    return len(rates) >= 2 and rates[-1] == max(rates) and rates[-1] > _RISES * rates[-2]
