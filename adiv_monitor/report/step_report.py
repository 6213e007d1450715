"""The report of one step."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from adiv_monitor.printable import counted
from adiv_monitor.report.alignment import ALIGNMENT_MEASURES, AlignmentReading
from adiv_monitor.report.attention import ATTENTION_MEASURES, AttentionReading
from adiv_monitor.report.extremes import MeasureSummary, summary
from adiv_monitor.report.layer import MEASURES, LayerReading
from adiv_monitor.report.written import plain, read

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# Shows a report as "text", "html" or "figure"; set by a higher layer of the package.
Shows = Callable[["StepReport", str], Any]
_ways: list[Shows] = []  # has one element once the package is imported


def show_by(shows: Shows) -> None:
    """Set the function by which `print`, notebooks and `plot` show all reports."""
    _ways[:] = [shows]


@dataclass(frozen=True)
class Alarm:
    """A rule of the user's that holds in a layer.

    Attributes:
        rule: the rule as written; for a function, its name.
        layer: path of the layer in which the rule holds.
        value: value of the measure that the rule compares; None for a function.
        standard_error: standard error of the value.
        non_finite: for the rule `non_finite`, what is not finite, in words.
    """

    rule: str
    layer: str
    value: float | None = None
    standard_error: float = 0.0
    non_finite: str = ""

    def __str__(self) -> str:
        if self.non_finite:
            return f"{self.rule}: {self.non_finite}"
        place = f"{self.layer or 'the model itself'}: {self.rule}"
        if self.value is None:
            return place
        error = f" ± {self.standard_error:.1g}" if self.standard_error else ""
        return f"{place}: {self.value:.4g}{error}"


@dataclass(frozen=True)
class Turn:
    """The modules whose turn it is, if layers are measured in turn.

    Attributes:
        first: number of the first module with parameters of its own that is measured in this step,
            from 1.
        last: number of the last one.
        of: number of all such modules; modules that share a parameter count as one.
        elements: number of elements of the trained parameters whose turn it is.
    """

    first: int
    last: int
    of: int
    elements: int = 0

    def __str__(self) -> str:
        return f"modules {self.first:,} to {self.last:,} of {self.of:,}"


@dataclass(frozen=True)
class Spike:
    """A loss far above those before it, or not finite, unlike the one before.

    Attributes:
        step: the step whose loss it is.
        loss: this loss.
        usual: the median of the 16 losses before it.
        sigmas: how far it lies above that, in standard deviations of the 128 before it, on a
            logarithmic scale where losses are above zero; infinite if it is not finite. Of k losses
            in a row, the lowest times √k.
        layers: layer → how many times as far as before it moves, if more than twice, the worst
            first: its update in this report over that in the last one before the spike. Layers
            whose weights have grown in between come first, with how much they have.
    """

    step: int
    loss: float
    usual: float
    sigmas: float
    layers: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        said = f"At step {self.step:,} the loss is {self.loss:.3g}, after {self.usual:.3g}."
        moved = [f"'{path}' (× {times:,.0f})" for path, times in [*self.layers.items()][:3]]
        return f"{said} Moves are larger than before in {', '.join(moved)}." if moved else said


@dataclass(frozen=True)
class StepReport:
    """Readings of all layers at one step; with `Monitor(layers_per_step=…)`, of those in turn.

    Attributes:
        step: optimizer steps taken before this one: the first is 0.
        layers: readings by module path.
        unsupported: module path → why this module, which has parameters, was not measured; for a
            single parameter of a module, the parameter's path.
        coverage: share of the elements of all parameters that the optimizer trains (without
            optimizer: of all trainable ones) that lie in measured layers, 0 to 1. With layers in
            turn, of those whose turn it is; unsupported modules have no turn.
        notes: further facts needed to interpret the numbers, one sentence each.
        unmeasured: trained, chosen parameters that lie in no measured layer, with the number of
            their elements.
        interval: steps from one measured step to the next, as of this step.
        gradient_norm: norm of the gradient that the optimizer saw, over all parameters of measured
            layers; None without any.
        unclipped_gradient_norm: the same before clipping, and after unscaling of an AMP loss; None
            where a layer's gradient is not its rows' times a known factor.
        update_norm: norm of the optimizer's update of these parameters; None without an optimizer.
        clipped_share: share of the measured steps so far whose gradient was clipped, of those of
            which this is known; None: of none.
        attention: readings by the path of the attention module; empty unless requested.
        realised_loss_change: loss of the probe after this step minus that before it; None unless
            requested.
        alignment: readings of the probe right after this step, by layer; empty unless requested.
        alarms: rules of the user's that hold (`Monitor(alarms=…)`), with their layers.
        turn: the modules whose turn it is; None if all layers are measured.
        losses: optimizer step → loss of that step's batch before the step, for the steps since the
            last report up to this one, as far as known (`Monitor.log_loss`, `Monitor(loss=…)`);
            empty if no loss was passed.
        learning_rates: `lr` of each of the optimizer's parameter groups, as used by the step; empty
            without an optimizer, or if a group has none.
        groups: layer → number of the parameter group that holds its weight, from 0; empty if all
            groups have the same learning rate.
        optimizer: class name of the optimizer, e.g. "AdamW"; "" without one.
        maximize: whether the optimizer raises the loss, by `maximize=True` in all its groups.
        settings: the optimizer's other settings by name, such as "momentum", "beta1" and
            "weight_decay", one number for each parameter group, as used by the step.
        new_state: whether the optimizer's state was made anew in this step, or between the last
            measured one and this.
        other_optimizers: class names of other optimizers that stepped between this optimizer's last
            step and this one.
        changed_by: class names of those of them that changed parameters of the measured layers.
        trainable: number of elements of all trainable parameters of the model; 0: not counted.
        frozen: module path → elements of its parameters, for the outermost modules that hold frozen
            parameters alone (`requires_grad` is False, and no gradient).
        not_held: module path → elements of its trainable parameters that have a gradient, but that
            this optimizer does not hold, and that nothing has changed since the last measured step.
        cut_off: module path → elements of its trained parameters that no gradient reached, although
            the module ran before a measured layer whose input carries no gradient, and that nothing
            has changed since the last measured step, as a moving average does.
        removed: module path → elements of its trained parameters whose gradient was there after the
            backward pass, and is removed or zero as the optimizer steps; or comes after the step.
        zeroed_passes: number of this step's backward passes whose gradients were zeroed before the
            optimizer stepped, though no optimizer stepped and no weight changed since; 0 if the
            graph is gone through again, or the gradient then changes by more than a factor.
        loss_gradients: for each backward pass of this step, the gradient at the loss: 1 for
            `loss.backward()`, 1/k for the mean over k micro-batches, the scale of an AMP scaler; of
            several losses in one pass the sum. Empty if no loss of one element is known, by
            `Monitor(loss=…)`, that the passes go through.
        unused_losses: number of losses that this step computes with a graph and that no backward
            pass enters; 0 where the loss is no module.
        loss_counts: number of losses that a step computes with a graph → how many steps since the
            last report computed so many, of the module that `Monitor(loss=…)` got.
        rate_falls: how often so far the first group's learning rate fell below a half within one
            step after it had risen in several, as where a warm-up begins again.
        evaluated: paths of dropouts and of normalisations with running statistics, if they are in
            eval mode since the whole model was in eval mode in this step's forward pass.
        batch: weighted sums of the tensors that enter the first measured module in this step, in
            its first call; with several ranks, in the first of them.
        batch_spread: for each of these sums, how far it differs between batches of this size, if
            they are drawn at random: √n times its deviation between the n samples.
        next_batch: `batch` of the next step: equal if the same batch came again; empty if it is
            not known.
        outputs: what the outputs are that the step's first loss is called with, if that is known.
            "probabilities": with labels of whole numbers, as from a softmax, none is below 0, and
            those of each sample sum to 1; with targets of the same dtype, as from a sigmoid, all
            are in [0, 1]. "rectified": as from a ReLU, none is below 0, and more than 5 % are 0.
            "over samples": those of each class, or their exponentials, sum to 1. Only outputs of
            one or two dimensions, of at most 100 classes, are looked at.
        labels: how many targets of each class the step's first loss is called with, of at most 100,
            where of 4,096 and more every so many count; or how many are 0 and 1, if they are real
            numbers, and all are. Empty: not known.
        target_moments: variance and mean of all entries of the real targets that this loss is
            called with; empty: they are labels, or not known.
        loss_module: the class name of the loss, if it is a module of torch's own that computes the
            losses of these steps alone; else "".
        loss_settings: which of reduction, ignore_index, label_smoothing, weight and pos_weight are
            not torch's defaults in this module.
        loss_weights: the weights of the classes in this module, or 1 and its `pos_weight`; empty
            without any.
        loss_shapes: the shapes of the tensors with which the step's first loss is called.
        norm_passes: how many passes in training mode the running statistics of the first
            normalisation that counts them had taken in as the optimizer stepped; None: none does.
        norm_momenta: path → momentum of the normalisations in training mode whose running
            statistics are those of the last batch (0.9 and more), or hardly move (below 0.005).
        random_states: checksums of torch's random numbers on the device of the parameters, as the
            step's first forward pass began, and as its optimizer stepped.
        weights_returned: how much of the way that the weights went since an earlier measured step
            was undone as this step began: 1 if they equal those of that step, 0 if they are
            farther away than ever; the largest over the earlier steps; None: not known.
        dropout: largest rate of the model's dropout modules; 0 without any.
        rescaled: layers of whose parameters the gradients were multiplied by different factors.
        spikes: the losses of steps between the last report and this one that lie far above those
            before them.
        gradient_norms: step → norm of the gradient that the optimizer saw, for the steps since the
            last report up to this one, over all parameters that may be measured; empty without
            `Monitor(watch="norms")`.
        update_norms: the same of the optimizer's update.
    """

    step: int
    layers: Mapping[str, LayerReading]
    unsupported: Mapping[str, str]
    coverage: float
    notes: tuple[str, ...] = ()
    unmeasured: Mapping[str, int] = field(default_factory=dict)
    interval: int | None = None
    gradient_norm: float | None = None
    unclipped_gradient_norm: float | None = None
    update_norm: float | None = None
    clipped_share: float | None = None
    attention: Mapping[str, AttentionReading] = field(default_factory=dict)
    realised_loss_change: float | None = None
    alignment: Mapping[str, AlignmentReading] = field(default_factory=dict)
    alarms: tuple[Alarm, ...] = ()
    turn: Turn | None = None
    losses: Mapping[int, float] = field(default_factory=dict, repr=False)
    learning_rates: tuple[float, ...] = ()
    groups: Mapping[str, int] = field(default_factory=dict)
    optimizer: str = ""
    maximize: bool = False
    settings: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    new_state: bool = False
    other_optimizers: tuple[str, ...] = ()
    changed_by: tuple[str, ...] = ()
    trainable: int = 0
    frozen: Mapping[str, int] = field(default_factory=dict)
    not_held: Mapping[str, int] = field(default_factory=dict)
    cut_off: Mapping[str, int] = field(default_factory=dict)
    removed: Mapping[str, int] = field(default_factory=dict)
    zeroed_passes: int = 0
    loss_gradients: tuple[float, ...] = ()
    unused_losses: int = 0
    loss_counts: Mapping[int, int] = field(default_factory=dict)
    rate_falls: int = 0
    evaluated: tuple[str, ...] = ()
    batch: tuple[float, ...] = ()
    batch_spread: tuple[float, ...] = ()
    next_batch: tuple[float, ...] = ()
    outputs: str = ""
    labels: tuple[int, ...] = ()
    target_moments: tuple[float, ...] = ()
    loss_module: str = ""
    loss_settings: tuple[str, ...] = ()
    loss_weights: tuple[float, ...] = ()
    loss_shapes: tuple[tuple[int, ...], ...] = ()
    norm_passes: int | None = None
    norm_momenta: Mapping[str, float] = field(default_factory=dict)
    random_states: tuple[int, ...] = ()
    weights_returned: float | None = None
    dropout: float = 0.0
    rescaled: tuple[str, ...] = ()
    spikes: tuple[Spike, ...] = ()
    gradient_norms: Mapping[int, float] = field(default_factory=dict, repr=False)
    update_norms: Mapping[int, float] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        said = [f"step {self.step}", counted(len(self.layers), "layer")]
        said.append(f"coverage {self.coverage:.3g}")
        if self.loss is not None:
            said.append(f"loss {self.loss:.4g}")
        if (broken := self.first_non_finite) is not None:
            what, layer = broken
            said.append(f"{what} not finite" + f" in {layer!r}" * bool(layer))
        if self.alarms:
            said.append(counted(len(self.alarms), "alarm"))
        return f"<StepReport: {', '.join(said)}>"

    def __str__(self) -> str:
        return str(_ways[0](self, "text"))

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows."""
        return str(_ways[0](self, "html"))

    def plot(self) -> "Figure":
        """Draw the layers of this step by measures, as colours; the figure is not shown.

        Raises:
            ImportError: the package matplotlib is missing.
            ValueError: there is nothing to draw.
        """
        figure: Figure = _ways[0](self, "figure")
        return figure

    @property
    def loss(self) -> float | None:
        """Loss of this step's batch before the step; None if it is not known."""
        return self.losses.get(self.step)

    @property
    def ends_round(self) -> bool:
        """Whether this report completes a round: no layer is left whose turn is still to come."""
        return self.turn is None or self.turn.last == self.turn.of

    @property
    def first_non_finite(self) -> tuple[str, str] | None:
        """The first non-finite tensor of the step, in the order of computation, and its layer.

        The order is: forward "inputs" and "outputs" of layers, then the "loss" (without a layer:
        ""), backward the "gradient", then the "update". None: all examined tensors are finite.
        """
        return next(self.non_finite(), None)

    def non_finite(self) -> Iterator[tuple[str, str]]:
        """Iterate over all non-finite tensors of the step, in the order of `first_non_finite`."""
        layers = list(self.layers.items())
        yield from _broken(layers, "inputs", "outputs")
        if self.loss is not None and not math.isfinite(self.loss):
            yield "loss", ""
        yield from _broken(reversed(layers), "gradient")
        yield from _broken(layers, "update")

    @property
    def descent(self) -> float | None:
        """Σ of the layers' descents: the first-order decrease of the loss; None without descents.

        It belongs to the gradient that the optimizer saw. If that was clipped, or is a sum over
        micro-batches, its units differ from those of `realised_loss_change`, which is of the probe.
        """
        descents = [r.descent for r in self.layers.values() if r.descent is not None]
        if not all(map(math.isfinite, descents)):
            return sum(descents)  # fsum raises an error for ∞ − ∞
        return math.fsum(descents) if descents else None

    def to_dict(self) -> dict[str, Any]:
        """Return the report as nested plain data."""
        layers = {path: r.to_dict() for path, r in self.layers.items()}
        record: dict[str, Any] = plain(replace(self, layers={}))
        return {**record, "layers": layers, "descent": self.descent, "loss": self.loss}

    @staticmethod
    def from_dict(record: Mapping[str, Any]) -> "StepReport":
        """Read a report back from a record of `to_dict`, exactly.

        Lines of the JSON-lines sink are read, too: numbers may be "Infinity", "-Infinity" or "NaN",
        and null in place of a number is NaN.

        Raises:
            ValueError: a value does not fit; the message says where, what it is and what is
                expected.
        """
        return read(StepReport, record)

    def to_rows(self) -> list[dict[str, Any]]:
        """Return a flat record per layer, ready for a data frame.

        `loss` is the loss of this step's batch, `learning_rate` that of the layer's parameter
        group; NaN: not known. Measures that rest on sampled rows in some layer have their standard
        errors in a column `<measure>_standard_error` (0: exact in this layer).
        """
        readings = self.layers.values()
        sampled = [m for m in MEASURES if any(m in r.standard_error for r in readings)]
        rows = []
        for path, reading in self.layers.items():
            record = reading.to_dict()
            record |= record.pop("own", {})
            errors = record.pop("standard_error")
            columns = {f"{m}_standard_error": errors.get(m, 0.0) for m in sampled if m in record}
            known = {"loss": math.nan if self.loss is None else self.loss}
            known["learning_rate"] = self.learning_rate(path)
            rows.append({"step": self.step, "layer": path, **known, **record, **columns})
        return rows

    def learning_rate(self, layer: str) -> float:
        """Return the learning rate of a layer's weight; NaN: not known."""
        group = self.groups.get(layer, -1) if self.groups else 0
        is_known = 0 <= group < len(self.learning_rates)
        return self.learning_rates[group] if is_known else math.nan

    def attention_rows(self) -> list[dict[str, Any]]:
        """Return a flat record per head of every attention module, ready for a data frame."""
        return [
            {"step": self.step, "attention": path, **row}
            for path, reading in self.attention.items()
            for row in reading.to_rows()
        ]

    def readings(
        self, measure: str
    ) -> (
        Mapping[str, LayerReading] | Mapping[str, AttentionReading] | Mapping[str, AlignmentReading]
    ):
        """Return the readings of the kind that has this measure, by path."""
        if measure in ALIGNMENT_MEASURES:
            return self.alignment
        return self.attention if measure in ATTENTION_MEASURES else self.layers

    def summary(self) -> dict[str, MeasureSummary]:
        """Return smallest, median and largest value of every measure, with their layers."""
        return {
            measure: summary(estimates)
            for measure in (*MEASURES, *ATTENTION_MEASURES, *ALIGNMENT_MEASURES)
            if (estimates := self._estimates(measure))
        }

    def _estimates(self, measure: str) -> list[tuple[float, float, str]]:
        return [
            (value, reading.standard_error.get(measure, 0.0), path)
            for path, reading in self.readings(measure).items()
            if (value := getattr(reading, measure)) is not None and not math.isnan(value)
        ]


def taken(report: StepReport, measures: Iterable[str]) -> tuple[str, ...]:
    """Return those of the measures that some layer of the report has, including NaN values."""

    def is_there(measure: str) -> bool:
        readings = report.readings(measure).values()
        return any(getattr(reading, measure) is not None for reading in readings)

    return tuple(filter(is_there, measures))


def _broken(layers: Iterable[tuple[str, LayerReading]], *kinds: str) -> Iterator[tuple[str, str]]:
    """Yield the non-finite tensors of these kinds, with their layers."""
    for path, reading in layers:
        yield from ((kind, path) for kind in kinds if kind in reading.non_finite)
