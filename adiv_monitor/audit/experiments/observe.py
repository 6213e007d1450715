"""Observes one fork that is trained under a monitor."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from adiv_monitor.alignment.probe import Probe
from adiv_monitor.arguments import DEFAULT_MAX_ROWS
from adiv_monitor.audit.experiments.averages import averages
from adiv_monitor.audit.experiments.backward import descent_share
from adiv_monitor.audit.experiments.beginning import are_trained, chance, weights
from adiv_monitor.audit.experiments.changed_inputs import arguments
from adiv_monitor.audit.experiments.data import input_statistics, spread
from adiv_monitor.audit.experiments.digits import told
from adiv_monitor.audit.experiments.exchange import input_matters
from adiv_monitor.audit.experiments.loss_inputs import activated_output
from adiv_monitor.audit.experiments.moving_targets import moving_targets, same
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
from adiv_monitor.diagnosis.plain import without_secrets
from adiv_monitor.diagnosis.record import Facts, Record
from adiv_monitor.monitor import Monitor
from adiv_monitor.rerun.eager import forced_eager

T = TypeVar("T")
# Least number of batches, and of samples, with which the trained model is examined.
BATCHES, SAMPLES, MOST_BATCHES = 8, 512, 32
_LEARNT = 0.9  # first loss over that of a constant prediction: weights that were drawn predict less
_NO_INPUTS = "Nothing is known of the model's inputs: the loss did not call the model itself."
_ANEW = (
    "A copy that begins anew has another first loss than the run had: the loss, or what it calls, "
    "keeps something from call to call. Runs can't be compared, so nothing was tried."
)
_MOVING = (
    "The loss of the same outputs changes in training: its targets or samples come from the "
    "network, or from what training keeps. The audit does not judge learning rates, fixes or "
    "overfitting by such a loss."
)
_OPPOSED = (
    "In ever shorter steps, the loss falls by {:.3g} times the decrease that its gradient "
    "predicts: parts of it oppose each other, as in a generative adversarial network, or the "
    "gradient is not that of the loss. The audit does not judge learning rates by the fall of such "
    "a loss."
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
    trains = _trains_any(fork)
    monitor = Monitor(
        fork.model,
        fork.optimizer if trains else None,
        every_n_steps=every_n_steps,
        max_rows=max_rows,
        attainable=True,
        attention=attention,
        alignment=_probe(setup) if alignment else None,
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
    ran, copies = list(watch.ran), averages(setup.model, setup.loss)
    record = Record(
        facts=_facts(setup, fork, every_n_steps, course),
        losses=tuple(course.losses),
        gradient_norms=tuple(course.gradient_norms),
        reports=tuple(told(replace(r, layers=in_order(r.layers, ran))) for r in monitor.reports),
        realised=watch.realised,
        wiring=watch.wiring(copies),
        first_non_finite=watch.first_non_finite,
        parameter_norms=tuple(course.parameter_norms),
        notes=tuple(_notes(setup)),
        interrupted=course.interrupted,
        lost=tuple(_lost(setup, fork, copies)),
    )
    return record if course.interrupted else _looked_at(record, setup, fork, ran)


def _probe(setup: Setup) -> Probe:
    """Return the arguments that the loss calls the model with for the first batch.

    Raises:
        ValueError: The loss does not call the model itself.
    """
    given = arguments(setup.fork(), setup.batches[0])
    if not given:
        raise ValueError(
            "audit(alignment=True): the loss did not call the model itself, expected model(…) in "
            "it, whose arguments are the probe: leave alignment out"
        )
    named = all(name.isidentifier() for name in given)  # not those of *args
    return Probe(given if named else tuple(given.values()), seed=setup.seed)


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
    notes = list(record.notes)
    batches = _spread(setup.batches)
    try:
        begin = in_order(weights(setup), list(filter(None, ran)))  # the root's parts are no layers
        inputs = input_statistics(setup.fork())
        if inputs is None:
            notes.append(_NO_INPUTS)
        with torch.enable_grad():
            repeats = same(setup.fork().first_loss(), record.losses[0])
        found |= {"weights": begin, "inputs": inputs or {}, "repeats": repeats}
        if not repeats:
            notes.append(_ANEW)
        else:
            found |= _beginning(record, setup)
            if is_opposed(replace(record, **found)):
                notes.append(_OPPOSED.format(found["descent_share"]))
            if moving_targets(setup, fork):
                found["moving_targets"] = True
                notes.append(_MOVING)
        wiring = record.wiring
        names = unused(setup.fork(), setup.batches[0], wiring.unreached)
        # A model that died in training used its inputs before: that is another fault.
        matters = [input_matters(setup.fork(), batches[:EXCHANGED])]
        found["probed"] = asked(setup, fork)
        if all(bool(p.isfinite().all()) for p in fork.model.parameters()):
            found["units"] = _units(fork, batches)
            matters.append(input_matters(fork, batches[:EXCHANGED]))
        most = max((x for x in matters if not math.isnan(x)), default=math.nan)
        found["wiring"] = replace(wiring, unused=names, input_matters=most)
    except KeyboardInterrupt:
        found["interrupted"] = True
    return replace(record, **found, notes=tuple(notes))


def _beginning(record: Record, setup: Setup) -> dict[str, Any]:
    """Return what is known of the state in which training begins."""
    constant, output = chance(setup), activated_output(setup.fork())
    below = constant is not None and 0 < record.losses[0] < _LEARNT * constant
    return {
        "facts": replace(record.facts, step_cost=step_cost(setup)),
        "chance": constant,
        "double_softmax": output is not None and output.function == "softmax",
        "activated_output": output,
        "descent_share": descent_share(setup),
        "trained": below or are_trained(setup),
    }


def _units(fork: Fork, batches: Sequence[Any]) -> Any:
    units = Units(fork.model)
    with seeded(fork.seed), forced_eager(), torch.no_grad():
        for batch in batches:
            with units.watching():
                fork.loss(fork.model, copied(batch))
    return units.statistics()


def _spread(batches: Sequence[Any]) -> list[Any]:
    """Return at least some batches, and as many as it takes to hold some samples."""
    wanted = math.ceil(SAMPLES / max(size_of(batches[0]), 1))
    return spread(batches, min(max(BATCHES, wanted), MOST_BATCHES))


def _trains_any(fork: Fork) -> bool:
    """Return whether the optimizer holds any trained parameter; if not, a rule reports that."""
    own = {id(p) for p in fork.model.parameters() if p.requires_grad}
    return any(id(p) in own for p in held(fork.optimizer))


def _lost(setup: Setup, fork: Fork, copies: Sequence[str]) -> Iterator[str]:
    """Yield differences between the copy and the run, for the verdict."""
    if fork.lost:
        on = ", ".join(dict.fromkeys(fork.lost))
        yield f"hooks on {on} do not run, because their objects can't be copied"
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
    if _is_resumed(setup):
        yield "The optimizer has taken steps before; the run goes on from its state."


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
