"""A case of the fault benchmark: a training run, how it is built, and what is planted in it."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from adiv_monitor.audit.training.setup import Fork, Loss, Setup, seeded

STEPS = 60  # of an audit
LONGER = 3 * STEPS  # of a run that judges its advice
BATCHES = LONGER + 20  # the last ones are for judging a trained model


def parameters(model: nn.Module) -> Iterable[Any]:
    return model.parameters()


@dataclass
class Run:
    """A training run that has not begun; a fault is planted by changing it.

    Attributes:
        model: what is trained.
        batches: one of each step, and some more; pairs of inputs and targets.
        loss: model, batch → scalar.
        algorithm: the optimizer's class.
        settings: of the optimizer.
        held: model → what the optimizer is given.
        clip_norm: largest norm of the gradient; None: not clipped.
    """

    model: nn.Module
    batches: list[tuple[Tensor, Tensor]]
    loss: Loss
    algorithm: type[Optimizer]
    settings: dict[str, Any]
    held: Callable[[nn.Module], Iterable[Any]] = parameters
    clip_norm: float | None = None

    def optimizer(self, model: nn.Module) -> Optimizer:
        return self.algorithm(self.held(model), **self.settings)

    def setup(self, steps: int, seed: int) -> Setup:
        batches = tuple(self.batches[:steps])
        return Setup(self.model, self.optimizer, self.loss, batches, steps, self.clip_norm, seed)


@dataclass(frozen=True)
class Healthy:
    """A run that trains as well as it can.

    Attributes:
        name: of the run.
        kind: of the network: "MLP", "CNN", "transformer", …
        make: builds it from the global random numbers.
    """

    name: str
    kind: str
    make: Callable[[], Run]

    def build(self, seed: int) -> Run:
        with seeded(seed):
            return self.make()


@dataclass(frozen=True)
class Case:
    """A healthy run with one fault planted in it.

    Attributes:
        name: of the case.
        twin: the run without the fault.
        expected: names of findings that are right, the planted fault first.
        plant: changes the run, in place.
        because: why more than one name is right.
        judged_by: "loss", or "error" where the fault changes what the loss means.
        padding: the target of places that only fill up, which have no error; None: there are none.
    """

    name: str
    twin: Healthy
    expected: Sequence[str]
    plant: Callable[[Run], None]
    because: str = ""
    judged_by: str = field(default="loss")
    padding: int | None = None

    def __post_init__(self) -> None:
        if len(self.expected) > 1 and not self.because:
            raise ValueError(f"{self.name}: several names are right, and no reason is given")

    @property
    def kind(self) -> str:
        return self.twin.kind

    def build(self, seed: int) -> Run:
        """Return the twin with the fault in it."""
        run = self.twin.build(seed)
        with seeded(seed):
            self.plant(run)
        return run


def case(
    twin: Healthy,
    what: str,
    plant: Callable[[Run], None],
    *expected: str,
    because: str = "",
    judged_by: str = "loss",
) -> Case:
    """Return a case that is named after its twin and what is planted; see `Case`."""
    return Case(f"{twin.name}: {what}", twin, expected, plant, because, judged_by)


class _Heard(nn.Module):
    """A model that keeps what it returned last; of several outputs, the first."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.output: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = self.model(*args, **kwargs)
        self.output = found[0] if isinstance(found, tuple) else found
        return found


def errors(
    fork: Fork, batches: Iterable[tuple[Tensor, Tensor]], padding: int | None = None
) -> list[float]:
    """Return the error of each batch: what the answers are worth, whatever the loss is.

    It is the share of wrong answers, averaged over classes; of sequences, of those at the last
    place of each second half's beginnings, where no input tells the answer, and of padded ones, of
    those that are no padding. For numbers of 0 and 1 it is the share of pairs in the wrong order,
    for other numbers the share of their variance that remains. The model runs inside the loss,
    since a fix may change functions that are called there.

    Args:
        fork: a trained fork.
        batches: inputs and targets that it has not seen.
        padding: the target of places that only fill up; None: there are none.
    """
    heard = _Heard(fork.model).eval()
    dtype = fork.batches[0][0].dtype
    found = []
    for inputs, targets in batches:
        parts = [(inputs.to(dtype), targets)]
        if _is_text(targets) and padding is None:
            ends = range(targets.shape[1] // 2, targets.shape[1] + 1)
            parts = [(inputs[:, :end], targets[:, :end]) for end in ends]
        each = []
        for part in parts:
            with torch.no_grad():
                fork.loss(heard, part)
            each.append(error_of(heard.output.detach().float(), part[1], padding))
        found.append(fmean(each))
    return found


def _is_text(targets: Tensor) -> bool:
    return not targets.dtype.is_floating_point and targets.ndim == 2


def error_of(output: Tensor, targets: Tensor, padding: int | None = None) -> float:
    if not output.isfinite().all():
        return math.inf
    if padding is not None:
        output, targets = output[targets.squeeze(-1) != padding], targets[targets != padding]
    elif _is_text(targets):
        return float((output[:, -1].argmax(-1) != targets[:, -1]).float().mean())
    if not targets.dtype.is_floating_point:
        answers = output.argmax(-1) if output.shape[-1] > 1 else (output[:, 0] > 0).long()
        wrong = (answers != targets).float()
        return fmean(float(wrong[targets == each].mean()) for each in targets.unique())
    output = output.reshape(targets.shape)
    if set(targets.unique().tolist()) == {0.0, 1.0}:
        pairs = output[targets == 1][:, None] - output[targets == 0][None]
        return float((pairs < 0).float().mean() + (pairs == 0).float().mean() / 2)
    return float((output - targets).square().mean() / targets.var(correction=0))
