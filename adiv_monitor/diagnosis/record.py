"""The observations of an audited run, as plain data on which all rules work."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from adiv_monitor.diagnosis.finding import Trial
from adiv_monitor.report import StepReport


@dataclass(frozen=True)
class Facts:
    """Model, optimizer, data and settings of a run.

    Attributes:
        model: qualified name of the model's class.
        parameters: number of elements of all its parameters.
        trainable: number of elements of the trainable parameters.
        optimizer: name of the optimizer's class.
        settings: settings of the optimizer's parameter groups by name ("lr", "momentum", …); those
            of the first group where they differ.
        batch_size: number of samples of the first batch.
        batches: number of different batches; if fewer than steps, they were repeated.
        steps: number of requested steps.
        every_n_steps: steps whose number is a multiple of this were measured.
        seed: seed of random numbers.
        device: device of the run.
        torch: version of torch.
        seconds_per_step: median over the steps without measurement; over all steps if each was
            measured.
        clip_norm: gradients were clipped to this norm; None: they were not.
        resumed: the optimizer had taken steps before, and remembered them.
        step_cost: what one step costs, counted in operators and sizes: the seconds that it takes on
            a usual machine. Trials have as many steps as follow from it. NaN: not counted.
        data: the data in words: the command's `--data`, or the class of the loader and of its data
            set; "": not known.
        loss: the name of the loss; "": the model's own, or not known.
        trained: what the weights had been through before, in words, if they are known to be no
            initialisation: "weights have been trained: 300 steps during import"; else "".
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
    data: str = ""
    loss: str = ""
    trained: str = ""


@dataclass(frozen=True)
class InputStatistics:
    """Statistics of one floating-point input of the model, over the batches that were seen.

    Attributes:
        mean: mean of all entries.
        std: standard deviation of all entries.
        minimum: smallest entry.
        maximum: largest entry.
        feature_mean_spread: standard deviation, over features, of the features' means.
        feature_std_ratio: largest standard deviation of a feature over the median one of those
            that are not constant; NaN where all are.
        length_cv: std / mean over samples of ‖x‖²: the spread of the samples' norms.
        features: number of entries of one sample (for images, channels of one pixel).
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
    """Statistics of the units (channels, features) of one activation function, over many batches.

    Attributes:
        function: name of the function, e.g. "relu".
        units: number of units.
        dead: number of units at their flat end for every row of every batch that was seen, with the
            final weights of the run.
        saturated: share of entries where the function is flat (its slope is below 2 % of the
            largest).
        batches: number of batches in which it ran; a module that receives few samples may be
            skipped in some.
    """

    function: str
    units: int
    dead: int
    saturated: float
    batches: int


@dataclass(frozen=True)
class WeightStatistics:
    """Statistics of the weight of one linear map before training.

    The map is a linear layer, a convolution, or a product with a parameter that no such layer
    holds.

    Attributes:
        gain: rms of its entries · √fan-in: the ratio of the rms of outputs to that of inputs. About
            0.6 with torch's initialisation, 1.4 with He's, 1 with Xavier's.
        bias: rms of the bias; 0 without one.
        alike: share of its output units that are equal to another one to the last digit.
        normalised: whether its outputs go directly into a normalisation, which removes their scale.
        bare: whether it is a parameter that no linear or convolutional layer holds.
        rms: rms of its entries.
        gradient_gain: rms of its entries · √fan-out: the ratio of the rms of gradients before the
            map to that behind it.
        largest: largest |entry| · √fan-in: at most 1 with torch's initialisation.
        last: whether the loss, but no other map, takes its outputs: models may have several heads.
    """

    gain: float
    bias: float
    alike: float
    normalised: bool = False
    bare: bool = False
    rms: float = 0.0
    gradient_gain: float = float("inf")
    largest: float = 0.0
    last: bool = False


@dataclass(frozen=True)
class ActivatedOutput:
    """An activation function whose outputs the loss treats as logits.

    Attributes:
        function: name of the function, e.g. "relu".
        module: path of the module in which it ran; None: outside of all modules.
    """

    function: str
    module: str | None


@dataclass(frozen=True)
class Wiring:
    """The connection of parameters and inputs to training.

    Attributes:
        not_held: trainable parameters that have a gradient and that the optimizer does not hold.
        unreached: trainable parameters that never received a gradient from the loss.
        zero_gradient: parameters whose gradient was zero in every step.
        frozen: parameters with requires_grad=False.
        input_matters: ‖outputs − outputs with inputs exchanged between samples‖ / ‖outputs‖, before
            training or with the final weights, whichever is larger; 0: the model ignores its
            inputs. NaN: unknown.
        unused: those of `unreached` that the loss does not depend on at all: their modules never
            ran, or their outputs were not used.
    """

    not_held: tuple[str, ...] = ()
    unreached: tuple[str, ...] = ()
    zero_gradient: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    input_matters: float = float("nan")
    unused: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fact:
    """One fact that a question found.

    Attributes:
        place: path of a module, name of a parameter, or a function with its line.
        numbers: measured numbers, by name.
        words: further facts by name: functions, shapes as they were called.
    """

    place: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Probed:
    """The answer to one question about copies of the model: found, nothing found, or unknown.

    Attributes:
        facts: facts that were found; empty: none.
        untold: reason why the result is unknown; "" if it is known.
    """

    facts: tuple[Fact, ...] = ()
    untold: str = ""


@dataclass(frozen=True)
class Record:
    """The observations of one audited run.

    Attributes:
        facts: model, optimizer, data and settings of the run.
        losses: loss of each step's batch before the step; ends with the first that is not finite.
        gradient_norms: ‖gradient of all trained parameters‖ at each step, before clipping.
        reports: reports of the measured steps; layers in the order in which they first ran.
        inputs: statistics of the model's inputs, by the argument's name or number.
        units: statistics of activation functions, by path of the module in which they ran (several:
            `path#2`, …).
        wiring: the connection of parameters and inputs to training.
        first_non_finite: place of the first value that is not finite ("loss", "gradient of
            encoder.weight", "output of encoder"), in the order of computation; None: there is none.
        overfit: the trial of overfitting one small batch; None: not tried.
        rates: factor on the learning rate → its trial; empty: not tried.
        notes: further facts needed to interpret the record.
        chance: the loss of a constant prediction, e.g. log(classes) for cross-entropy; None:
            unknown.
        parameter_norms: ‖all parameters that the optimizer holds‖ before each step; empty: not
            recorded.
        weights: statistics of weights before training, by path of the module, in the same order.
        activated_output: the activation function, or softmax, between the model and a loss that has
            its own softmax or sigmoid; None: there is none.
        descent_share: decrease of the loss of a few samples along its gradient before training,
            over the decrease that the gradient predicts, in ever shorter steps; for the part of the
            model where it is smallest. 1; less if parts of the loss oppose each other, as in a
            generative adversarial network. None: unknown.
        interrupted: whether a keyboard interrupt ended the run early.
        repeats: whether a copy that begins anew has the same first loss. If not, the loss keeps
            something from call to call: runs can't be compared, and nothing is tried.
        trained: whether the weights were trained or loaded before this run: no initialisation.
        moving_targets: whether the loss of the same outputs changed in training, because its
            targets or samples come from the network or from a memory. It is no measure then.
        loss_steps: the steps that the losses are of, where some are missing; empty: 0, 1, 2, ….
        non_finite_since: the step at which `first_non_finite` was seen; None: not known.
        probed: name of a question → what it found; empty: not asked.
        lost: what the copy could not be given of the run, or does otherwise, in a few words each.
        skipped: the first step whose loss was not finite although a later one was, and how many
            there were; None: none. `first_non_finite` leaves them out.
        own_losses: step → the loss of the user's own run at that step; empty: not given.
    """

    facts: Facts
    losses: tuple[float, ...]
    gradient_norms: tuple[float, ...]
    reports: tuple[StepReport, ...]
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
    repeats: bool = True
    activated_output: ActivatedOutput | None = None
    descent_share: float | None = None
    trained: bool = False
    moving_targets: bool = False
    loss_steps: tuple[int, ...] = ()
    non_finite_since: int | None = None
    probed: Mapping[str, Probed] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    own_losses: Mapping[int, float] = field(default_factory=dict)
    skipped: tuple[int, int] | None = None

    def found_by(self, question: str) -> tuple[Fact, ...]:
        """Return the facts that a question found; empty if it found none, or was not asked."""
        return self.probed[question].facts if question in self.probed else ()

    @property
    def is_audited(self) -> bool:
        """Whether an audit ran the training; else only its reports are known."""
        return bool(self.facts.model)

    @property
    def steps_of_losses(self) -> Sequence[int]:
        """The steps of the losses."""
        return self.loss_steps or range(len(self.losses))
