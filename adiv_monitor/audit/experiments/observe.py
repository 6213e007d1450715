"""Observes one fork that is trained under a monitor."""

import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from adiv_monitor.arguments import DEFAULT_MAX_ROWS
from adiv_monitor.audit.experiments import measure
from adiv_monitor.audit.experiments.calls import Call, given, is_callers, watched
from adiv_monitor.audit.experiments.changed_inputs import RepeatedLoss, of_few
from adiv_monitor.audit.experiments.data import input_statistics, spread
from adiv_monitor.audit.experiments.exchange import input_matters
from adiv_monitor.audit.experiments.loss_inputs import activated_output
from adiv_monitor.audit.experiments.modules import Units
from adiv_monitor.audit.experiments.questions import asked
from adiv_monitor.audit.experiments.state import are_trained, unused, weights
from adiv_monitor.audit.training.batches import copied, size_of, tensors
from adiv_monitor.audit.training.setup import Fork, Setup, seeded
from adiv_monitor.audit.training.train import Progress, Watch, gradient_norm, held, silent, train
from adiv_monitor.capture.selection import listed
from adiv_monitor.diagnosis.course import FEWEST, is_opposed
from adiv_monitor.diagnosis.faults.inputs import HIDDEN
from adiv_monitor.diagnosis.record import Facts, Record, Wiring
from adiv_monitor.monitor import Monitor
from adiv_monitor.report.plain import without_secrets
from adiv_monitor.rerun.eager import forced_eager

T = TypeVar("T")
_FRAME = re.compile(r'File "(.+?)", line (\d+)')  # of the traceback in an anomaly's warning
_FUNCTION = re.compile(r"Function '(\w+?)(?:Backward\d*)?'")
# Least number of batches, and of values of each unit, with which the trained model is examined.
BATCHES, SAMPLES, MOST_BATCHES = 8, 512, 32
_LEARNT = 0.9  # first loss over that of a constant prediction: weights that were drawn predict less
_NO_INPUTS = "Nothing is known of the model's inputs: the loss did not call the model itself."
_ANEW = (
    "A copy that begins anew has another first loss than the run had: the loss, or what it calls, "
    "keeps something from call to call. Runs can't be compared, so nothing was tried."
)
_MOVING = (
    "The loss is no measure: the optimizer maximises it, or that of the same outputs changes in "
    "training, as targets or samples come from the network or from what training keeps. The audit "
    "does not judge learning rates, fixes or overfitting by such a loss."
)
_OPPOSED = (
    "In ever shorter steps, the loss falls by {:.3g} times the decrease that its gradient "
    "predicts: parts of it oppose each other, as in a generative adversarial network, or the "
    "gradient is not that of the loss. The audit does not judge learning rates by the fall of such "
    "a loss."
)
# Most of these batches whose inputs are exchanged between samples, until outputs change by this.
EXCHANGED, CLEARLY = 2, 0.1


def observe(
    setup: Setup,
    *,
    every_n_steps: int,
    max_rows: int | None = DEFAULT_MAX_ROWS,
    progress: Progress = silent,
) -> Record:
    """Train one fork under a monitor, and observe the trained model.

    Args:
        setup: training setup.
        every_n_steps: each step whose number is a multiple of this is measured.
        max_rows: as for the monitor.
        progress: called after each step with ("training", steps done, steps).

    Raises:
        TypeError, ValueError: the setup can't be trained; the message says why.
    """
    fork = setup.fork()
    trains = _trains_any(fork)
    monitor = Monitor(
        fork.model,
        fork.optimizer if trains else None,
        every_n_steps=every_n_steps,
        max_rows=max_rows,
        attainable=not setup.is_costly,  # which would take longer than the step
        keep=setup.steps,
        seed=setup.seed,
    )
    watch = Watching(setup, fork, progress, (lambda: None) if trains else monitor.end_step)
    monitor.attach()
    try:
        # The record reports overflow; squares in the measures may overflow in float64, too.
        with np.errstate(over="ignore", invalid="ignore"):
            course = train(fork, watch)
    finally:
        monitor.close(quietly=True)
        watch.remove()
    ran, copies = list(watch.ran), measure.averages(setup.model)
    record = Record(
        facts=_facts(setup, fork, every_n_steps, course.seconds),
        losses=tuple(course.losses),
        gradient_norms=tuple(course.gradient_norms),
        reports=tuple(replace(r, layers=in_order(r.layers, ran)) for r in monitor.reports),
        wiring=watch.wiring(copies),
        first_non_finite=watch.first_non_finite,
        parameter_norms=tuple(course.parameter_norms),
        notes=tuple(_notes(setup)),
        interrupted=course.interrupted,
        lost=tuple(_lost(setup, fork, copies)),
    )
    return record if course.interrupted else _looked_at(record, setup, fork, ran)


def in_order(layers: Mapping[str, T], ran: Sequence[str]) -> dict[str, T]:
    """Return facts about layers by path, in the order in which their modules first ran.

    Modules may be registered in any order; only the forward pass shows which comes first. Modules
    that did not run come last; a part of a module (`attention.q`) runs when the module does.
    """
    places = {path: place for place, path in enumerate(ran)}

    def place(path: str) -> int:
        while path not in places and path:
            path = path.rpartition(".")[0]
        return places.get(path, len(places))

    return {path: layers[path] for path in sorted(layers, key=place)}


def _looked_at(record: Record, setup: Setup, fork: Fork, ran: Sequence[str]) -> Record:
    """Add to a record the facts from forward passes of the trained fork and of untrained ones."""
    found: dict[str, Any] = {}
    notes, wiring = list(record.notes), record.wiring
    try:
        small = of_few(setup) if setup.is_costly else setup
        inputs = input_statistics(setup.fork())
        if inputs is None:
            notes.append(_NO_INPUTS)
        with torch.enable_grad():
            repeats = measure.same(setup.fork().first_loss(), record.losses[0])
        begin = in_order(weights(setup), list(filter(None, ran)))  # the root's parts are no layers
        found |= {"weights": begin, "inputs": inputs or {}, "repeats": repeats}
        if not repeats:
            notes.append(_ANEW)
        else:
            found |= _beginning(record, setup)
            if is_opposed(replace(record, **found)):
                notes.append(_OPPOSED.format(found["descent_share"]))
            if measure.is_maximised(setup) or measure.moving_targets(small, fork):
                found["moving_targets"] = True
                notes.append(_MOVING)
        names = unused(setup.fork(), setup.batches[0], wiring.unreached)
        found["probed"] = asked(setup, fork, small=small)
        # A model that died in training used its inputs before: that is another fault.
        forks = [setup.fork()]
        if all(bool(p.isfinite().all()) for p in fork.model.parameters()):
            found["units"] = _units(fork, spread(setup.batches, MOST_BATCHES))
            forks.append(fork)
        matters = math.nan
        for of, batch in product(forks, spread(setup.batches, EXCHANGED)):
            if not matters > CLEARLY:
                matters = float(np.fmax(matters, input_matters(of, batch)))
        found["wiring"] = replace(wiring, unused=names, input_matters=matters)
    except KeyboardInterrupt:
        found["interrupted"] = True
    return replace(record, **found, notes=tuple(notes))


def _beginning(record: Record, setup: Setup) -> dict[str, Any]:
    """Return what is known of the state in which training begins."""
    constant = measure.chance(setup)
    below = constant is not None and 0 < record.losses[0] < _LEARNT * constant
    return {
        "chance": constant,
        "activated_output": activated_output(setup.fork()),
        "descent_share": measure.descent_share(setup),
        "trained": below or are_trained(setup),
    }


def _units(fork: Fork, batches: Sequence[Any]) -> Any:
    units = Units(fork.model)
    with seeded(fork.seed), forced_eager(), torch.no_grad():
        for number, batch in enumerate(batches):
            if number < BATCHES or units.fewest_values < SAMPLES:
                with units.watching():
                    fork.loss(fork.model, copied(batch))
    return units.statistics()


def _trains_any(fork: Fork) -> bool:
    """Return whether the optimizer holds any trained parameter; if not, a rule reports that."""
    own = {id(p) for p in fork.model.parameters() if p.requires_grad}
    return any(id(p) in own for p in held(fork.optimizer))


def _lost(setup: Setup, fork: Fork, copies: Sequence[str]) -> Iterator[str]:
    """Yield differences between the copy and the run, for the verdict."""
    if fork.lost:
        on = ", ".join(dict.fromkeys(fork.lost))
        yield f"hooks on {on} do not run, because they may change your objects"
    if not setup.model.training:
        yield "the model was given in evaluation mode and is trained in training mode"
    if hasattr(getattr(setup.optimizer, "step", None), "_wrapped_by_lr_sched"):
        highest = max(setup.lifted.values(), default=0.0)
        up_to = "up to " * (len(set(setup.lifted.values())) > 1)
        at = f" (the copy trains at {up_to}{highest:.3g}, the highest rate of the warm-up)"
        yield "no scheduler runs" + ("" if not highest else at)
    if copies:
        yield f"if your loop updates {listed(copies)}, as an average or a target, the copy does not"


def _notes(setup: Setup) -> Iterator[str]:
    if setup.steps < FEWEST:
        yield f"{setup.steps} steps are too few to judge the loss: use at least {FEWEST}."
    if getattr(setup.optimizer, "state", None):
        yield "The optimizer has taken steps before; the run goes on from its state."


def _facts(setup: Setup, fork: Fork, every_n_steps: int, seconds: Sequence[float]) -> Facts:
    parameters = list(fork.model.parameters())
    kind = type(setup.model)
    group = fork.optimizer.param_groups[0]
    return Facts(
        model=f"{kind.__module__}.{kind.__qualname__}",
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        optimizer=type(fork.optimizer).__name__,
        settings={n: _plain(x) for n, x in without_secrets(group).items() if n != "params"},
        batch_size=size_of(setup.batches[0]),
        batches=len(setup.batches),
        steps=setup.steps,
        every_n_steps=every_n_steps,
        seed=setup.seed,
        device=str(parameters[0].device),
        torch=str(torch.__version__),
        step_cost=setup.cost,
        seconds_per_step=median(seconds or [math.nan]),
        clip_norm=setup.clip_norm,
        resumed=bool(getattr(setup.optimizer, "state", None)),
    )


def _plain(value: object) -> Any:
    """Return a setting as plain data."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    return value if isinstance(value, (bool, int, float, str, type(None))) else repr(value)


# Gradients, the order of modules, values that are not finite


class Watching(Watch):
    """Observes gradients, the order of modules, and the first value that is not finite.

    Attributes:
        ran: Paths of the modules that hold parameters, in the order in which they first ran.
        first_non_finite: Place of the first value that is not finite; None: there is none.
    """

    def __init__(
        self, setup: Setup, fork: Fork, progress: Progress, end_step: Callable[[], None]
    ) -> None:
        """Register the hooks; `end_step` is called after each step."""
        self._fork = fork
        self._end_step = end_step
        self._progress = progress
        self._named = dict(fork.model.named_parameters())
        self._unreached = {name for name, p in self._named.items() if p.requires_grad}
        self._zero = set(self._unreached)
        self.ran: dict[str, None] = {}
        self.first_non_finite: str | None = None
        self._handles = [
            module.register_forward_pre_hook(lambda *_, path=path: self.ran.setdefault(path))
            for path, module in fork.model.named_modules()
            if any(p is not None for p in module._parameters.values())
        ]
        self._handles += [m.register_forward_pre_hook(_refuse) for m in setup.model.modules()]

    def begins(self, step: int, batch: Any) -> None:
        """Keep the random numbers and buffers that the forward pass begins with."""
        self._repeated, self._batch = RepeatedLoss(self._fork), batch

    def has_loss(self, step: int, batch: Any, loss: float) -> None:
        """If the loss is not finite, locate the first such value."""
        if not math.isfinite(loss) and self.first_non_finite is None:
            self.first_non_finite = _in_forward(self._fork, self._repeated, step, batch)

    def has_gradients(self, step: int, loss: Tensor) -> None:
        """Observe the gradients."""
        for name in sorted(self._zero):
            gradient = self._named[name].grad
            if gradient is not None:
                self._unreached.discard(name)
                if bool((gradient.coalesce().values() if gradient.is_sparse else gradient).any()):
                    self._zero.discard(name)
        if self.first_non_finite is None and not math.isfinite(gradient_norm(self._fork.optimizer)):
            self.first_non_finite = _in_backward(self._fork.model, self._repeated, self._batch)

    def has_stepped(self, step: int, batch: Any) -> None:
        """Complete the step, and report it."""
        self._end_step()
        self._progress("training", step + 1, len(self._fork.batches))

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def wiring(self, copies: Sequence[str]) -> Wiring:
        """Return the observed wiring; copies of a trained part are meant to be frozen."""
        inside = tuple(f"{name}." for name in copies)
        held_ones = set(map(id, held(self._fork.optimizer)))
        trainable = [name for name, p in self._named.items() if p.requires_grad]
        reached = [name for name in trainable if name not in self._unreached]
        frozen = [name for name, p in self._named.items() if not p.requires_grad]
        return Wiring(
            not_held=tuple(n for n in reached if id(self._named[n]) not in held_ones),
            unreached=tuple(n for n in trainable if n in self._unreached),
            zero_gradient=tuple(n for n in reached if n in self._zero),
            frozen=tuple(n for n in frozen if not n.startswith(inside)),
        )


def _refuse(module: nn.Module, args: Any) -> None:
    """Refuse a pass of the user's own model that would give it gradients.

    Raises:
        ValueError: This is one.
    """
    if torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
        raise ValueError(
            "audit(loss=…): loss(model, batch) used the model that was given to audit, "
            "expected the one that it is called with, a copy: use its first argument"
        )


# The first value that is not finite


def _in_forward(fork: Fork, loss: RepeatedLoss, step: int, batch: Any) -> str:
    """Locate the first value that is not finite in a forward pass whose loss is not finite.

    The weights must be those of that pass. The order is that of the computation: the weights, the
    data, the results of functions.
    """
    when = f"after step {step - 1}" if step else "before training"
    state = [
        *((f"parameter {name} {when}", x) for name, x in fork.model.named_parameters()),
        *((f"buffer {name} {when}", x) for name, x in fork.model.named_buffers()),
        *(("data", x) for x in tensors(batch)),
    ]
    found = [place for place, x in state if _is_broken(x)]

    def see(call: Call) -> None:
        if any(map(_is_broken, tensors(call.result))):
            several = [x for x in given(call) if x.ndim and x.shape[-1] > 1]  # one is log(0), say
            rows = any(bool(x.isneginf().all(-1).any()) for x in several)
            found.append(f"result of {call.place}{HIDDEN * rows}")

    if not found:
        with patch.object(fork, "loss", watched(fork.loss, see)):
            loss.of(batch)
    return found[0] if found else "loss"


def _in_backward(model: nn.Module, loss: RepeatedLoss, batch: Any) -> str:
    """Locate the first gradient that is not finite, by one more backward pass.

    Autograd's anomaly mode names the function whose gradient is NaN, and warns of the line that
    called it. If there is none, as where gradients are infinite, the first parameter is named.
    """
    own = {p: p.grad for p in model.parameters()}
    for p in own:
        p.grad = None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            with torch.autograd.detect_anomaly():
                loss.of(batch, backward=True)
        except Exception as error:
            frames = _FRAME.findall(" ".join(str(warned.message) for warned in told))
            lines = [f"{Path(file).name}:{line}" for file, line in frames if is_callers(file)]
            if (function := _FUNCTION.search(str(error))) and lines:
                return f"gradient of {function[1].lower()} ({lines[-1]})"
        finally:
            for p, gradient in own.items():
                p.grad = gradient
    for name, parameter in reversed([*model.named_parameters()]):
        if parameter.grad is not None and not bool(parameter.grad.to_dense().isfinite().all()):
            return f"gradient of {name}"
    return "norm of the gradient"


def _is_broken(x: Tensor) -> bool:
    """Return whether the tensor holds NaN or +∞; masks consist of -∞."""
    return x.is_floating_point() and bool((x.isnan() | x.isposinf()).any())
