"""What was seen of an audited run: plain data, from which everything else follows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from adiv_monitor.diagnosis.finding import Trial
from adiv_monitor.report import StepReport


@dataclass(frozen=True)
class Facts:
    """What was run.

    Attributes:
        model: qualified name of the model's class.
        parameters: elements of all its parameters.
        trainable: elements of those that are trainable.
        optimizer: name of the optimizer's class.
        settings: of its parameter groups, by name ("lr", "momentum", …); of the first group, where
            they differ.
        batch_size: samples of the first batch.
        batches: different batches; fewer than steps: they were repeated.
        steps: steps that were asked for.
        every_n_steps: each step whose number is a multiple of this was measured.
        seed: of random numbers.
        device: where it ran.
        torch: version.
        seconds_per_step: median over the plain steps; over all, where each was measured.
        clip_norm: gradients were clipped to this norm; None: they were not.
        resumed: the optimizer had taken steps before, and remembered them.
        step_cost: what one step costs, counted in operators and sizes: the seconds that it takes on
            a usual machine. Trials have as many steps as follow from it. NaN: not counted.
    """

    model: str
    parameters: int
    trainable: int
    optimizer: str
    settings: Mapping[str, Any]
    batch_size: int
    batches: int
    steps: int
    every_n_steps: int
    seed: int
    device: str
    torch: str
    seconds_per_step: float
    clip_norm: float | None = None
    resumed: bool = False
    step_cost: float = float("nan")


@dataclass(frozen=True)
class InputStatistics:
    """One floating-point input of the model, over the batches that were seen.

    Attributes:
        mean: of all entries.
        std: of all entries.
        minimum: smallest entry.
        maximum: largest entry.
        feature_mean_spread: standard deviation, over features, of the features' means.
        feature_std_ratio: largest standard deviation of a feature over the median one of those
            that are not constant; NaN where all are.
        length_cv: std / mean over samples of ‖x‖²: how different in length samples are.
        features: entries of one sample (of one pixel: channels, where it has places).
    """

    mean: float
    std: float
    minimum: float
    maximum: float
    feature_mean_spread: float
    feature_std_ratio: float
    length_cv: float
    features: int


@dataclass(frozen=True)
class UnitStatistics:
    """The units (channels, features) of one activation function, over many batches.

    Attributes:
        function: its name, e.g. "relu".
        units: how many there are.
        dead: units that were at their flat end for every row of every batch that was seen, with the
            weights that the run ended with.
        saturated: share of entries that lie where the function is flat (its slope is below 2 % of
            the largest).
        batches: batches that it ran in; a part that few samples are sent to may sit some out.
    """

    function: str
    units: int
    dead: int
    saturated: float
    batches: int


@dataclass(frozen=True)
class WeightStatistics:
    """The weight of one linear or convolutional layer before training.

    Attributes:
        gain: rms of its entries · √fan-in: how many times longer outputs are than inputs, entry
            for entry. About 0.6 as torch initialises layers, 1.4 as He does, 1 as Xavier does.
        bias: rms of the bias; 0 without one.
        alike: share of its output units that equal another to the last digit.
        normalised: whether its outputs go as they are into a normalisation, which takes their
            length out.
    """

    gain: float
    bias: float
    alike: float
    normalised: bool = False


@dataclass(frozen=True)
class ActivatedOutput:
    """An activation function whose outputs the loss takes for logits.

    Attributes:
        function: its name, e.g. "relu".
        module: path of the module in which it ran; None: in none.
    """

    function: str
    module: str | None


@dataclass(frozen=True)
class Wiring:
    """Whether all that should take part in training does.

    Attributes:
        not_held: trainable parameters that have a gradient and that the optimizer does not hold.
        unreached: trainable parameters that the loss never sent a gradient to.
        zero_gradient: parameters whose gradient was zero in every step.
        frozen: parameters with requires_grad=False.
        input_matters: ‖outputs − outputs where inputs are exchanged between samples‖ / ‖outputs‖,
            before training or with the weights that it ended with, whichever is more; 0: the model
            ignores its inputs. NaN where it can't be told.
        unused: those of `unreached` that the loss does not depend on at all: their modules never
            ran, or what they gave was not used.
    """

    not_held: tuple[str, ...] = ()
    unreached: tuple[str, ...] = ()
    zero_gradient: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    input_matters: float = float("nan")
    unused: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fact:
    """One thing that a probe found.

    Attributes:
        place: the path of a module, the name of a parameter, or a function with its line.
        numbers: what was measured there, by name.
        words: what else is to be said of it, by name: functions, shapes as they were called.
    """

    place: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Probed:
    """What one question to copies of the model gave: found, looked and not found, or can't tell.

    Attributes:
        facts: what was found; empty: nothing.
        untold: why it can't be told; "" where it can.
    """

    facts: tuple[Fact, ...] = ()
    untold: str = ""


@dataclass(frozen=True)
class Alternative:
    """A layer at one step, as it would be; the gradients that reach it are held as they are.

    Attributes:
        gradient_cosine: as the monitor's measure of that name.
        scale_cv: as the monitor's measure of that name.
        effective_lr: of a plain gradient step of learning rate 1, as the monitor's measure.
    """

    gradient_cosine: float
    scale_cv: float
    effective_lr: float


@dataclass(frozen=True)
class Record:
    """One audited run.

    Attributes:
        facts: what was run.
        losses: of each step's batch before the step; ends with the first that is not finite.
        gradient_norms: ‖gradient of all trained parameters‖ at each step, before clipping.
        reports: of the measured steps; layers in the order in which they first ran.
        realised: measured step → how much larger its batch's loss is after the step.
        inputs: by the argument's name or number.
        units: by path of the module in which the activation function ran (several: `path#2`, …).
        wiring: whether all takes part.
        first_non_finite: where the first value that is not finite was seen ("loss", "gradient of
            encoder.weight", "output of encoder"), in the order of computation; None: nowhere.
        overfit: the trial of learning one small batch by heart; None: not tried.
        rates: factor on the learning rate → its trial; empty: not tried.
        notes: what a reader must know to trust all this.
        chance: the loss of answering without looking at the inputs, e.g. log(classes) for
            cross-entropy; None: not known.
        parameter_norms: ‖all parameters that the optimizer holds‖ before each step; empty: not
            looked at.
        weights: by path of the module, as they were before training, in the same order.
        double_softmax: the model's outputs are probabilities, and the loss takes their softmax once
            more; None: can't be told.
        activated_output: the activation function, or softmax, between the model and a loss that has
            a softmax or sigmoid of its own; None: there is none.
        descent_share: how much the loss of a few samples falls along its gradient before training,
            over what the gradient promises, in ever shorter steps; of the model's parts, the one
            where it falls least. 1; less where parts of the loss oppose each other, as in a
            generative adversarial network. None: can't be told.
        interrupted: whether the keyboard ended the run early.
        repeats: whether a copy that begins anew has the same first loss. If not, the loss keeps
            something from call to call: runs can't be compared, and nothing is tried.
        hurried: the time for trials (try_seconds) was over before all of them had run: what they
            gave depends on the clock.
        loss_steps: the steps that the losses are of, where some are missing; empty: 0, 1, 2, ….
        non_finite_since: the step at which `first_non_finite` was seen; None: not known.
        probed: name of a probe → what it found; empty: not asked.
        lost: what the copy could not be given of the run, or does otherwise, in a few words each.
        own_losses: step → the loss of the user's own run at that step; empty: not given.
    """

    facts: Facts
    losses: tuple[float, ...]
    gradient_norms: tuple[float, ...]
    reports: tuple[StepReport, ...]
    realised: Mapping[int, float] = field(default_factory=dict)
    inputs: Mapping[str, InputStatistics] = field(default_factory=dict)
    units: Mapping[str, UnitStatistics] = field(default_factory=dict)
    wiring: Wiring = field(default_factory=Wiring)
    first_non_finite: str | None = None
    overfit: Trial | None = None
    rates: Mapping[float, Trial] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    chance: float | None = None
    parameter_norms: tuple[float, ...] = ()
    weights: Mapping[str, WeightStatistics] = field(default_factory=dict)
    interrupted: bool = False
    double_softmax: bool | None = None
    repeats: bool = True
    activated_output: ActivatedOutput | None = None
    descent_share: float | None = None
    hurried: bool = False
    loss_steps: tuple[int, ...] = ()
    non_finite_since: int | None = None
    probed: Mapping[str, Probed] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    own_losses: Mapping[int, float] = field(default_factory=dict)

    def found_by(self, probe: str) -> tuple[Fact, ...]:
        """What a probe found; empty where it found nothing, or was not asked."""
        return self.probed[probe].facts if probe in self.probed else ()

    @property
    def is_audited(self) -> bool:
        """Whether an audit ran the training; else it is known by its reports alone."""
        return bool(self.facts.model)

    @property
    def steps_of_losses(self) -> Sequence[int]:
        """The step that each of the losses is of."""
        return self.loss_steps or range(len(self.losses))
