"""Observes one fork that is trained under a monitor."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from adiv_monitor.arguments import DEFAULT_MAX_ROWS
from adiv_monitor.audit.experiments.answers import double_softmax
from adiv_monitor.audit.experiments.averages import averages
from adiv_monitor.audit.experiments.backward import descent_share
from adiv_monitor.audit.experiments.beginning import are_trained, chance, weights
from adiv_monitor.audit.experiments.digits import told
from adiv_monitor.audit.experiments.exchange import input_matters
from adiv_monitor.audit.experiments.loss_inputs import activated_output
from adiv_monitor.audit.experiments.moving_targets import moving_targets
from adiv_monitor.audit.experiments.probed import probe
from adiv_monitor.audit.experiments.questions import asked
from adiv_monitor.audit.experiments.step_cost import step_cost
from adiv_monitor.audit.experiments.units import Units
from adiv_monitor.audit.experiments.watching import Watching
from adiv_monitor.audit.experiments.wiring import unused
from adiv_monitor.audit.training.batches import copied, size_of
from adiv_monitor.audit.training.setup import Fork, Setup, seeded
from adiv_monitor.audit.training.train import Course, Progress, held, train
from adiv_monitor.capture.selection import listed
from adiv_monitor.diagnosis.course import FEWEST, is_opposed
from adiv_monitor.diagnosis.hidden import without_secrets
from adiv_monitor.diagnosis.record import Facts, Record, Wiring
from adiv_monitor.monitor import Monitor
from adiv_monitor.rerun.eager import forced_eager

T = TypeVar("T")
# Least number of batches, and of samples, with which the trained model is examined.
BATCHES, SAMPLES, MOST_BATCHES = 8, 512, 32
_LEARNT = 0.9  # first loss over that of a constant prediction: weights that were drawn predict less
_MOVING = (
    "The loss of the same outputs changes in training: its targets or samples come from the "
    "network, or from what training keeps. The audit does not judge learning rates, fixes or "
    "overfitting by such a loss."
)
EXCHANGED = 2  # number of these batches whose inputs are exchanged between samples


def observe(
    setup: Setup,
    *,
    every_n_steps: int,
    max_rows: int | None = DEFAULT_MAX_ROWS,
    realised: bool = False,
    attention: bool = False,
    alignment: bool = False,
    progress: Progress | None = None,
) -> Record:
    """Train one fork under a monitor, and observe the trained model.

    Args:
        setup: training setup.
        every_n_steps: each step whose number is a multiple of this is measured.
        max_rows: as for the monitor.
        realised: as for the monitor.
        attention: as for the monitor.
        alignment: whether to measure alignments, on the first batch.
        progress: called after each step with ("training", steps done, steps).

    Raises:
        TypeError, ValueError: the setup can't be trained; the message says why.
    """
    fork = setup.fork()
    begin = weights(setup)
    mattered = input_matters(fork, _spread(setup.batches)[:EXCHANGED])
    trains = _trains_any(fork)
    monitor = Monitor(
        fork.model,
        fork.optimizer if trains else None,
        every_n_steps=every_n_steps,
        max_rows=max_rows,
        attainable=True,
        attention=attention,
        alignment=probe(setup) if alignment else None,
        realised=realised,
        keep=setup.steps,
        seed=setup.seed,
    )
    watch = Watching(
        setup, fork, every_n_steps, progress, (lambda: None) if trains else monitor.end_step
    )
    monitor.attach()
    try:
        # The record reports overflow; squares in the measures may overflow in float64, too.
        with np.errstate(over="ignore", invalid="ignore"):
            course = train(fork, watch)
    finally:
        monitor.close(quietly=True)
        watch.remove()
    ran, copies = watch.gradients.ran, averages(setup.model, setup.loss)
    record = Record(
        facts=_facts(setup, fork, every_n_steps, course),
        losses=tuple(course.losses),
        gradient_norms=tuple(course.gradient_norms),
        reports=tuple(told(replace(r, layers=in_order(r.layers, ran))) for r in monitor.reports),
        realised=watch.realised,
        inputs=watch.inputs.statistics(),
        wiring=_without_copies(watch.gradients.wiring(mattered), copies),
        first_non_finite=watch.first_non_finite,
        parameter_norms=tuple(course.parameter_norms),
        weights=in_order(begin, list(filter(None, ran))),  # the root's own parts are no layers
        notes=(*_notes(setup, fork), *watch.notes()),
        interrupted=course.interrupted,
        lost=_lost(setup, fork, copies),
    )
    return record if course.interrupted else _looked_at(record, setup, fork)


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


def _looked_at(record: Record, setup: Setup, fork: Fork) -> Record:
    """Add to a record the facts from forward passes of the trained fork and of an untrained one."""
    try:
        if not _repeats(record, setup):
            note = (
                "A copy that begins anew has another first loss than the run had: the loss, or "
                "what it calls, keeps something from call to call. Runs can't be compared, so "
                "nothing was tried."
            )
            record = replace(record, repeats=False, notes=(*record.notes, note))
        else:
            facts = replace(record.facts, step_cost=step_cost(setup))
            record = _with_beginning(replace(record, facts=facts), setup)
            if moving_targets(setup, fork):
                record = replace(record, moving_targets=True, notes=(*record.notes, _MOVING))
        record = replace(record, wiring=_with_unused(record.wiring, setup))
        record = replace(record, probed=asked(setup, fork))
        if not all(bool(p.isfinite().all()) for p in fork.model.parameters()):
            note = "Activation functions were not looked at: the weights are not finite at the end."
            return replace(record, notes=(*record.notes, note))
        batches = _spread(setup.batches)
        units = _units(fork, batches)
        matters = [record.wiring.input_matters, input_matters(fork, batches[:EXCHANGED])]
    except KeyboardInterrupt:
        return replace(record, interrupted=True)
    # A model that died in training used its inputs before: that is another fault.
    most = max((x for x in matters if not math.isnan(x)), default=math.nan)
    return replace(record, units=units, wiring=replace(record.wiring, input_matters=most))


def _with_beginning(record: Record, setup: Setup) -> Record:
    record = replace(
        record,
        chance=chance(setup),
        double_softmax=double_softmax(setup),
        activated_output=activated_output(setup.fork()),
        descent_share=descent_share(setup),
    )
    below = record.chance is not None and 0 < record.losses[0] < _LEARNT * record.chance
    record = replace(record, trained=below or are_trained(setup))
    if not is_opposed(record):
        return record
    note = (
        "In ever shorter steps, the loss falls by "
        f"{record.descent_share:.3g} times the decrease that its gradient predicts: parts of it "
        "oppose each other, as in a generative adversarial network, or the gradient is not that of "
        "the loss. The audit does not judge learning rates by the fall of such a loss."
    )
    return replace(record, notes=(*record.notes, note))


def _repeats(record: Record, setup: Setup) -> bool:
    """Return whether a copy begins with the same loss, or neither has a finite one."""
    fork = setup.fork()
    with torch.enable_grad():
        again = float(fork.first_loss().detach())
    first = record.losses[0]
    # On the CPU, up to the order of sums; other devices may choose other kernels for a copy.
    exact = 1e-6 if torch.device(record.facts.device).type == "cpu" else 1e-3
    is_same = math.isclose(again, first, rel_tol=exact, abs_tol=1e-12)
    return is_same or not (math.isfinite(again) or math.isfinite(first))


def _with_unused(wiring: Wiring, setup: Setup) -> Wiring:
    if not wiring.unreached:
        return wiring
    return replace(wiring, unused=unused(setup.fork(), setup.batches[0], wiring.unreached))


def _units(fork: Fork, batches: Sequence[Any]) -> Any:
    units = Units(fork.model)
    with seeded(fork.seed), forced_eager(), torch.no_grad():
        for batch in batches:
            with units.watching():
                fork.loss(fork.model, copied(batch))
    return units.statistics()


def _spread(batches: Sequence[Any]) -> list[Any]:
    """Return some batches, evenly spread over all of them."""
    wanted = math.ceil(SAMPLES / max(size_of(batches[0]), 1))
    count = min(max(BATCHES, wanted), MOST_BATCHES, len(batches))
    return [batches[i * len(batches) // count] for i in range(count)]


def _trains_any(fork: Fork) -> bool:
    """Return whether the optimizer holds any trained parameter; if not, a rule reports that."""
    own = {id(p) for p in fork.model.parameters() if p.requires_grad}
    return any(id(p) in own for p in held(fork.optimizer))


def _without_copies(wiring: Wiring, copies: Sequence[str]) -> Wiring:
    """Leave out the frozen parameters of copies of a trained part: they are meant to be frozen."""
    inside = tuple(f"{name}." for name in copies)
    frozen = tuple(name for name in wiring.frozen if not name.startswith(inside))
    return replace(wiring, frozen=frozen)


def _lost(setup: Setup, fork: Fork, copies: Sequence[str]) -> tuple[str, ...]:
    """Return differences between the copy and the run for the verdict; notes have more details."""
    found = []
    if fork.lost:
        found.append(f"hooks on {', '.join(dict.fromkeys(fork.lost))} do not run")
    if not setup.model.training:
        found.append("the model was given in evaluation mode and is trained in training mode")
    if hasattr(getattr(setup.optimizer, "step", None), "_wrapped_by_lr_sched"):
        found.append(f"no scheduler runs{_at_the_peak(setup)}")
    if copies:
        found.append(
            f"if your loop updates {listed(copies)}, as an average or a target, the copy does not"
        )
    return tuple(found)


def _notes(setup: Setup, fork: Fork) -> list[str]:
    found = []
    if fork.lost:
        on = ", ".join(dict.fromkeys(fork.lost))
        found.append(f"Hooks on {on} do not run: the objects that they refer to can't be copied.")
    if not setup.model.training:
        found.append("The model was given in evaluation mode; it is trained in training mode.")
    if setup.steps < FEWEST:
        found.append(f"{setup.steps} steps are too few to judge the loss: use at least {FEWEST}.")
    optimizer = setup.optimizer
    if isinstance(optimizer, torch.optim.Optimizer):
        if _is_resumed(setup):
            found.append("The optimizer has taken steps before; the run goes on from its state.")
        if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            at_which = _at_the_peak(setup) or ": the learning rates stay constant"
            found.append(f"No scheduler runs{at_which}.")
    return found


def _at_the_peak(setup: Setup) -> str:
    """Return at which rate the copy trains if a warm-up raises that of the run, else ""."""
    rates = [f"{rate:.3g}" for rate in sorted(setup.lifted.values())]
    if not rates:
        return ""
    up_to = "up to " * (len(set(rates)) > 1)
    return f" (the copy trains at {up_to}{rates[-1]}, the highest rate of the warm-up)"


def _is_resumed(setup: Setup) -> bool:
    return isinstance(setup.optimizer, torch.optim.Optimizer) and bool(setup.optimizer.state)


def _facts(setup: Setup, fork: Fork, every_n_steps: int, course: Course) -> Facts:
    parameters = list(fork.model.parameters())
    kind = type(setup.model)
    plain = [s for step, s in enumerate(course.seconds) if step % every_n_steps]
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
        seconds_per_step=median(plain or course.seconds or [math.nan]),
        clip_norm=setup.clip_norm,
        resumed=_is_resumed(setup),
    )


def _plain(value: object) -> Any:
    """Return a setting as plain data."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    return value if isinstance(value, (bool, int, float, str, type(None))) else repr(value)
