"""What the monitor says: plain, frozen data, no tensors and nothing to compute.

A measure is a float. NaN means "no direction" (a zero vector has none; it is shown as "–"), None
means "not asked for, or not defined for this layer". The definitions are in `measures.py`.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from statistics import fmean, median
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

# Equally spaced levels, 0 to 1, at which the distributions over rows are kept for histograms.
QUANTILE_LEVELS = tuple(i / 32 for i in range(33))


@dataclass(frozen=True)
class LayerReading:
    """One layer at one step.

    Attributes:
        kind: how the layer is linear in its parameters, e.g. "linear", "convolution".
        rows_seen: rows that were looked at.
        rows_total: rows that received a gradient in this step, over all micro-batches and calls.
        rows_without_gradient: rows seen whose gradient is exactly zero (padding, masked tokens):
            idle rows, which all measures but `idle_share` leave out.
        gradient_factor: what happened to the gradient between the backward pass and the step:
            ‖gradient the optimizer saw‖ / ‖gradient that backward left‖. 1 when nothing did;
            below 1 after clipping, 1/65536 after unscaling an AMP loss; NaN where it can't be told.
        features: how many numbers of a row the weight multiplies, the fan-in; None where a row is
            no such vector (a look-up, a module as a whole).
        standard_error: measure → standard error, for those measures that rest on sampled rows; the
            others are exact.
        scale_quantiles: the row scale at `QUANTILE_LEVELS`.
        row_cosine_quantiles: the row cosine at `QUANTILE_LEVELS`.

    All other attributes are the measures of `measures.py`, under their names there.
    """

    kind: str
    rows_seen: int
    rows_total: int
    rows_without_gradient: int
    gradient_factor: float
    update_cosine: float | None = None
    gradient_cosine: float | None = None
    diagonal_cosine: float | None = None
    attainable_cosine: float | None = None
    effective_lr: float | None = None
    scale_mean: float | None = None
    scale_cv: float | None = None
    scale_p05: float | None = None
    scale_p50: float | None = None
    scale_p95: float | None = None
    scale_max: float | None = None
    common_share: float | None = None
    interference_ratio: float | None = None
    row_cosine_mean: float | None = None
    row_cosine_p05: float | None = None
    row_cosine_p50: float | None = None
    row_cosine_p95: float | None = None
    harmed_fraction: float | None = None
    idle_share: float | None = None
    bias_share: float | None = None
    update_ratio: float | None = None
    descent: float | None = None
    realised_cosine: float | None = None
    single_layer_share: float | None = None
    first_order_error: float | None = None
    parameter_cosine: float | None = None
    projection_cosine: float | None = None
    applied_cosine: float | None = None
    features: int | None = None
    standard_error: Mapping[str, float] = field(default_factory=dict)
    scale_quantiles: tuple[float, ...] = field(default=(), repr=False)
    row_cosine_quantiles: tuple[float, ...] = field(default=(), repr=False)

    def measures(self) -> dict[str, float]:
        """The measures that were taken, by name; NaN where there is no direction."""
        taken = ((name, getattr(self, name)) for name in MEASURES)
        return {name: value for name, value in taken if value is not None}

    def to_dict(self, *, quantiles: bool = False) -> dict[str, Any]:
        """Everything, without the measures that were not taken; the quantiles only if asked."""
        record = {name: getattr(self, name) for name in _RECORD}
        record |= {} if self.features is None else {"features": self.features}
        record |= {**self.measures(), "standard_error": dict(self.standard_error)}
        return record | {n: list(getattr(self, n)) for n in _QUANTILES} if quantiles else record

    @staticmethod
    def from_dict(record: Mapping[str, Any]) -> "LayerReading":
        """The reading that `to_dict` made a record of; see `StepReport.from_dict`."""
        read: dict[str, Any] = {name: record[name] for name in _RECORD}
        read["gradient_factor"] = number(record["gradient_factor"])
        read["features"] = record.get("features")
        read["standard_error"] = {m: number(e) for m, e in record["standard_error"].items()}
        read |= {m: number(record[m]) for m in MEASURES if m in record}
        read |= {name: tuple(map(number, record[name])) for name in _QUANTILES if name in record}
        return LayerReading(**read)


_RECORD = ("kind", "rows_seen", "rows_total", "rows_without_gradient", "gradient_factor")
_QUANTILES = ("scale_quantiles", "row_cosine_quantiles")
_ABOUT_MEASURES = ("features", "standard_error", *_QUANTILES)
# Every measure, in the order of tables and dashboards.
MEASURES: tuple[str, ...] = tuple(
    f.name for f in fields(LayerReading) if f.name not in _RECORD + _ABOUT_MEASURES
)

# Those that take another run of the step's forward passes.
REALISED_MEASURES = ("realised_cosine", "single_layer_share", "first_order_error")

# Which end of a measure is the bad one. Measures that are missing here have no bad end: their
# spread between layers is what tells.
WORST: Mapping[str, Literal["min", "max"]] = MappingProxyType(
    {
        "update_cosine": "min",
        "gradient_cosine": "min",
        "diagonal_cosine": "min",
        "attainable_cosine": "min",
        "scale_cv": "max",
        "interference_ratio": "max",
        "row_cosine_mean": "min",
        "row_cosine_p05": "min",
        "row_cosine_p50": "min",
        "row_cosine_p95": "min",
        "harmed_fraction": "max",
        "descent": "min",
        "realised_cosine": "min",
        "first_order_error": "max",
        "parameter_cosine": "min",
        "projection_cosine": "min",
        "applied_cosine": "min",
        "attention_cosine": "min",
        "attention_gradient_cosine": "min",
        "attention_scale_cv": "max",
    }
)


@dataclass(frozen=True)
class AttentionReading:
    """One attention at one step: what the step did to its scores. See `maths/attention.py`.

    Attributes:
        samples_seen: samples of the batch that were looked at, with all heads.
        samples_total: samples that there were.
        standard_error: measure → standard error; those that are missing are exact.
        heads: measure → its value for every head.
        heads_standard_error: measure → standard error of every head's value; as above.

    All other attributes are the measures, over all heads together.
    """

    samples_seen: int
    samples_total: int
    attention_cosine: float | None = None
    attention_gradient_cosine: float | None = None
    attention_scale_mean: float | None = None
    attention_scale_cv: float | None = None
    standard_error: Mapping[str, float] = field(default_factory=dict)
    heads: Mapping[str, tuple[float, ...]] = field(default_factory=dict, repr=False)
    heads_standard_error: Mapping[str, tuple[float, ...]] = field(default_factory=dict, repr=False)

    def measures(self) -> dict[str, float]:
        """The measures that were taken, by name; NaN where there is no direction."""
        taken = ((name, getattr(self, name)) for name in ATTENTION_MEASURES)
        return {name: value for name, value in taken if value is not None}

    def to_dict(self) -> dict[str, Any]:
        """Everything, without the measures that were not taken."""
        return {
            "samples_seen": self.samples_seen,
            "samples_total": self.samples_total,
            **self.measures(),
            "standard_error": dict(self.standard_error),
            "heads": {name: list(values) for name, values in self.heads.items()},
            "heads_standard_error": {
                name: list(errors) for name, errors in self.heads_standard_error.items()
            },
        }

    @staticmethod
    def from_dict(record: Mapping[str, Any]) -> "AttentionReading":
        """The reading that `to_dict` made a record of; see `StepReport.from_dict`."""
        read: dict[str, Any] = {n: record[n] for n in ("samples_seen", "samples_total")}
        read["standard_error"] = {m: number(e) for m, e in record["standard_error"].items()}
        read |= {m: number(record[m]) for m in ATTENTION_MEASURES if m in record}
        for name in ("heads", "heads_standard_error"):
            read[name] = {m: tuple(map(number, values)) for m, values in record[name].items()}
        return AttentionReading(**read)

    def to_rows(self) -> list[dict[str, Any]]:
        """One flat record per head, with `<measure>_standard_error` for what is not exact."""
        columns = dict(self.heads)
        columns |= {f"{m}_standard_error": e for m, e in self.heads_standard_error.items()}
        return [
            {"head": head, **dict(zip(columns, values, strict=True))}
            for head, values in enumerate(zip(*columns.values(), strict=True))
        ]


# Every measure of attention, in the order of tables and dashboards.
ATTENTION_MEASURES: tuple[str, ...] = tuple(
    f.name for f in fields(AttentionReading) if f.name.startswith("attention_")
)


@dataclass(frozen=True)
class AlignmentReading:
    """How one layer's weights and their change are aligned with its inputs. See `alignment/`.

    With W₀, z₀ the weight and the inputs at the reference point, dW and dz what has changed since:

    Attributes:
        role: "embedding", "hidden", "readout" or "excluded".
        kind: "linear", "convolution" or "embedding".
        fan_in: n, the base of the logarithms.
        fan_out: outputs; of an embedding, its width.
        predecessors: the layers whose outputs make up the input.
        rows: inputs that were looked at, over all processes of the probe.
        alpha: A(dW, z₀), the update on old features. None wherever a ratio is undefined.
        omega: A(W₀, dz), old weights on the change of features.
        u: A(dW, dz), the update on that change.
        cumulative: A(W, z).
        kappa_alpha: n^(alpha − 1), 0 to 1: what stays where the width grows, as alpha does not.
        kappa_omega: the same of omega.
        kappa_u: the same of u.
        kappa_cumulative: the same of A(W, z).
        effective_rank: of A(W, z): over how many directions weights and inputs are spread alike.
        output_rms: RMS of W z, without bias.
        output_change_rms: RMS of W z − W₀ z₀.
    """

    role: str
    kind: str
    fan_in: int
    fan_out: int
    predecessors: tuple[str, ...]
    rows: int
    alpha: float | None = None
    omega: float | None = None
    u: float | None = None
    cumulative: float | None = None
    kappa_alpha: float | None = None
    kappa_omega: float | None = None
    kappa_u: float | None = None
    kappa_cumulative: float | None = None
    effective_rank: float | None = None
    output_rms: float | None = None
    output_change_rms: float | None = None

    @property
    def standard_error(self) -> Mapping[str, float]:
        """None: the rows of a probe are the same at each step, and all are looked at."""
        return {}

    def measures(self) -> dict[str, float]:
        """The measures that are defined, by name."""
        taken = ((name, getattr(self, name)) for name in ALIGNMENT_MEASURES)
        return {name: value for name, value in taken if value is not None}

    def to_dict(self) -> dict[str, Any]:
        """Everything, without the measures that are undefined."""
        record = {name: getattr(self, name) for name in ("role", "kind", "fan_in", "fan_out")}
        record |= {"predecessors": list(self.predecessors), "rows": self.rows}
        return {**record, **self.measures()}

    @staticmethod
    def from_dict(record: Mapping[str, Any]) -> "AlignmentReading":
        """The reading that `to_dict` made a record of; see `StepReport.from_dict`."""
        read = {name: record[name] for name in ("role", "kind", "fan_in", "fan_out", "rows")}
        read["predecessors"] = tuple(record["predecessors"])
        read |= {m: number(record[m]) for m in ALIGNMENT_MEASURES if m in record}
        return AlignmentReading(**read)


# Every measure of alignment, in the order of tables and dashboards.
ALIGNMENT_MEASURES: tuple[str, ...] = tuple(
    f.name for f in fields(AlignmentReading) if f.default is None
)


def number(written: float | str | None) -> float:
    """A number as JSON may have it: "Infinity", "-Infinity", "NaN" or null (NaN) if not finite."""
    return math.nan if written is None else float(written)


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
class Alarm:
    """A rule of the user's that holds in a layer.

    Attributes:
        rule: as it was written; the name of a function.
        layer: where it holds.
        value: of the measure that the rule compares; None of a function.
        standard_error: of the value.
    """

    rule: str
    layer: str
    value: float | None = None
    standard_error: float = 0.0

    def __str__(self) -> str:
        place = f"{self.layer or 'the model itself'}: {self.rule}"
        if self.value is None:
            return place
        error = f" ± {self.standard_error:.1g}" if self.standard_error else ""
        return f"{place}: {self.value:.4g}{error}"


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


@dataclass(frozen=True)
class Turn:
    """Whose turn it is, where the layers are measured in turn.

    Attributes:
        first: number of the first module with parameters of its own that is measured in this step,
            from 1.
        last: of the last one.
        of: how many there are; modules that share a parameter count as one.
        elements: of their trained parameters.
    """

    first: int
    last: int
    of: int
    elements: int = 0

    def __str__(self) -> str:
        return f"modules {self.first:,} to {self.last:,} of {self.of:,}"


@dataclass(frozen=True)
class StepReport:
    """All layers at one step; with `Monitor(layers_per_step=…)`, those whose turn it is.

    Attributes:
        step: optimizer steps taken before this one: the first is 0.
        layers: readings by module path.
        unsupported: module path → why this module, which has parameters, was not measured; the
            parameter's path where it is one parameter of a module.
        coverage: share of the elements of all parameters that the optimizer trains (without one: of
            all that are trainable) that lie in measured layers, 0 to 1. In turns, of those whose
            turn it is: what can't be measured at all has none.
        notes: what else a reader must know to trust the numbers, one sentence each.
        unmeasured: the parameters that are trained and were asked for but lie in no measured layer,
            with the number of their elements.
        interval: steps from one measured step to the next, as it stood at this one.
        attention: readings by the path of the module that attends; empty unless asked for.
        realised_loss_change: how much larger the loss of this step's batch is after the step, the
            mean over the calls of the loss; None unless asked for.
        realised_loss_changes: the same of each sample, in the order of the batches; empty where
            the loss says nothing of single samples.
        alignment: readings of the probe right after this step, by layer; empty unless asked for.
        alarms: where a rule of the user's holds (`Monitor(alarms=…)`).
        turn: whose turn it is; None where all layers are measured.
    """

    step: int
    layers: Mapping[str, LayerReading]
    unsupported: Mapping[str, str]
    coverage: float
    notes: tuple[str, ...] = ()
    unmeasured: Mapping[str, int] = field(default_factory=dict)
    interval: int | None = None
    attention: Mapping[str, AttentionReading] = field(default_factory=dict)
    realised_loss_change: float | None = None
    realised_loss_changes: tuple[float, ...] = field(default=(), repr=False)
    alignment: Mapping[str, AlignmentReading] = field(default_factory=dict)
    alarms: tuple[Alarm, ...] = ()
    turn: Turn | None = None

    @property
    def ends_round(self) -> bool:
        """Whether no layer waits for its turn any more."""
        return self.turn is None or self.turn.last == self.turn.of

    @property
    def descent(self) -> float | None:
        """Σ of the layers' descents: how far the loss falls to first order; None if there are none.

        Of the gradient that the optimizer saw: of a clipped one, or one that is the sum over
        micro-batches, it is in that one's units, and not in those of `realised_loss_change`.
        """
        descents = [r.descent for r in self.layers.values() if r.descent is not None]
        return math.fsum(descents) if descents else None

    def to_dict(self, *, quantiles: bool = False) -> dict[str, Any]:
        """The report as nested plain data; with the layers' quantiles if asked."""
        return {
            "step": self.step,
            "interval": self.interval,
            "coverage": self.coverage,
            "notes": list(self.notes),
            "unsupported": dict(self.unsupported),
            "unmeasured": dict(self.unmeasured),
            "layers": {
                path: reading.to_dict(quantiles=quantiles) for path, reading in self.layers.items()
            },
            "attention": {path: reading.to_dict() for path, reading in self.attention.items()},
            "descent": self.descent,
            "realised_loss_change": self.realised_loss_change,
            "realised_loss_changes": list(self.realised_loss_changes),
            "alignment": {path: reading.to_dict() for path, reading in self.alignment.items()},
            "alarms": [asdict(alarm) for alarm in self.alarms],
            "turn": None if self.turn is None else asdict(self.turn),
        }

    @staticmethod
    def from_dict(record: Mapping[str, Any]) -> "StepReport":
        """The report that `to_dict` made a record of, exactly.

        A line that the JSON-lines sink wrote is read, too: numbers may be "Infinity", "-Infinity"
        or "NaN", and a null where there must be a number is NaN.
        """
        change, turn = record["realised_loss_change"], record.get("turn")
        return StepReport(
            step=record["step"],
            layers={path: LayerReading.from_dict(r) for path, r in record["layers"].items()},
            unsupported=dict(record["unsupported"]),
            coverage=number(record["coverage"]),
            notes=tuple(record["notes"]),
            unmeasured=dict(record["unmeasured"]),
            interval=record["interval"],
            attention={p: AttentionReading.from_dict(r) for p, r in record["attention"].items()},
            realised_loss_change=None if change is None else number(change),
            realised_loss_changes=tuple(map(number, record["realised_loss_changes"])),
            # Reports of before there were any have no such entry.
            alignment={
                p: AlignmentReading.from_dict(r) for p, r in record.get("alignment", {}).items()
            },
            alarms=tuple(_alarm(alarm) for alarm in record.get("alarms", ())),
            turn=None if turn is None else Turn(**turn),
        )

    def to_rows(self) -> list[dict[str, Any]]:
        """One flat record per layer, ready for a data frame.

        Measures that rest on sampled rows in some layer have their standard errors in a column
        `<measure>_standard_error` (0: exact in this layer).
        """
        readings = self.layers.values()
        sampled = [m for m in MEASURES if any(m in r.standard_error for r in readings)]
        rows = []
        for path, reading in self.layers.items():
            record = reading.to_dict()
            errors = record.pop("standard_error")
            columns = {f"{m}_standard_error": errors.get(m, 0.0) for m in sampled if m in record}
            rows.append({"step": self.step, "layer": path, **record, **columns})
        return rows

    def attention_rows(self) -> list[dict[str, Any]]:
        """One flat record per head of every attention, ready for a data frame."""
        return [
            {"step": self.step, "attention": path, **row}
            for path, reading in self.attention.items()
            for row in reading.to_rows()
        ]

    def alignment_rows(self) -> list[dict[str, Any]]:
        """One flat record per layer of the probe, ready for a data frame."""
        return [
            {"step": self.step, "layer": path, **reading.to_dict()}
            for path, reading in self.alignment.items()
        ]

    def readings(
        self, measure: str
    ) -> (
        Mapping[str, LayerReading] | Mapping[str, AttentionReading] | Mapping[str, AlignmentReading]
    ):
        """Those that may have this measure, by path."""
        if measure in ALIGNMENT_MEASURES:
            return self.alignment
        return self.attention if measure in ATTENTION_MEASURES else self.layers

    def summary(self) -> dict[str, MeasureSummary]:
        """Smallest, median and largest value of every measure, and the layers they belong to."""
        return {
            measure: _summary(estimates)
            for measure in (*MEASURES, *ATTENTION_MEASURES, *ALIGNMENT_MEASURES)
            if (estimates := self._estimates(measure))
        }

    def _estimates(self, measure: str) -> list[tuple[float, float, str]]:
        return [
            (value, reading.standard_error.get(measure, 0.0), path)
            for path, reading in self.readings(measure).items()
            if (value := getattr(reading, measure)) is not None and not math.isnan(value)
        ]


def _alarm(record: Mapping[str, Any]) -> Alarm:
    value = record["value"]
    return Alarm(
        record["rule"],
        record["layer"],
        None if value is None else number(value),
        number(record["standard_error"]),
    )


def _summary(estimates: list[tuple[float, float, str]]) -> MeasureSummary:
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
