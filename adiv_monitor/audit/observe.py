"""One fork, trained under a monitor: all that is seen of it."""

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from adiv_monitor.arguments import DEFAULT_MAX_ROWS
from adiv_monitor.audit.batches import size_of
from adiv_monitor.audit.beginning import chance, weights
from adiv_monitor.audit.record import Facts, Record
from adiv_monitor.audit.setup import Fork, Setup
from adiv_monitor.audit.train import Course, Watch, train
from adiv_monitor.capture.again.surroundings import Buffers, Surroundings, untouched
from adiv_monitor.monitor import Monitor

Progress = Callable[[str, int, int], None]


def observe(
    setup: Setup,
    *,
    every_n_steps: int,
    max_rows: int | None = DEFAULT_MAX_ROWS,
    realised: bool = False,
    attention: bool = False,
    progress: Progress | None = None,
) -> tuple[Record, bool]:
    """Train one fork under a monitor.

    Args:
        setup: what is trained.
        every_n_steps: each step whose number is a multiple of this is measured.
        max_rows: as the monitor's.
        realised: as the monitor's.
        attention: as the monitor's.
        progress: called after each step with ("training", steps done, steps).

    Returns:
        What was seen, and whether the keyboard ended it early.
    """
    fork = setup.fork()
    facts = _facts(setup, fork, every_n_steps)
    watch = _Watching(fork, every_n_steps, progress)
    with Monitor(
        fork.model,
        fork.optimizer,
        every_n_steps=every_n_steps,
        max_rows=max_rows,
        attainable=True,
        attention=attention,
        realised=realised,
        keep=setup.steps,
        seed=setup.seed,
    ) as monitor:
        course = train(fork, watch)
    facts = Facts(**{**vars(facts), "seconds_per_step": _plain_seconds(course, every_n_steps)})
    record = Record(
        facts=facts,
        losses=tuple(course.losses),
        gradient_norms=tuple(course.gradient_norms),
        reports=tuple(monitor.reports),
        realised=watch.realised,
        chance=chance(setup),
        parameter_norms=tuple(course.parameter_norms),
        weights=weights(setup.model),
    )
    return record, course.interrupted


class _Watching(Watch):
    """Reads, after each measured step, the loss of its batch again."""

    def __init__(self, fork: Fork, every_n_steps: int, progress: Progress | None) -> None:
        self._fork = fork
        self._every = every_n_steps
        self._progress = progress
        self._modules = list(fork.model.modules())
        held = {x.device for x in (*fork.model.parameters(), *fork.model.buffers())}
        self._devices = [device for device in held if device.type not in ("cpu", "meta")]
        self._before: Surroundings | None = None
        self._loss: float | None = None
        self.realised: dict[int, float] = {}

    def begins(self, step: int, batch: Any) -> None:
        self._before, self._loss = None, None
        if step % self._every == 0:
            self._before = Surroundings(self._modules, self._devices, Buffers())

    def has_gradients(self, step: int, loss: Tensor) -> None:
        if self._loss is None:
            self._loss = float(loss.detach())

    def has_stepped(self, step: int, batch: Any) -> None:
        if self._before is not None and self._loss is not None:
            with untouched(self._modules, self._devices), self._before.again(), torch.no_grad():
                self.realised[step] = float(self._fork.loss(self._fork.model, batch)) - self._loss
        if self._progress is not None:
            self._progress("training", step + 1, len(self._fork.batches))


def _facts(setup: Setup, fork: Fork, every_n_steps: int) -> Facts:
    parameters = list(fork.model.parameters())
    groups = fork.optimizer.param_groups
    return Facts(
        model=_qualified(setup.model),
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        optimizer=type(fork.optimizer).__name__,
        settings={name: value for name, value in groups[0].items() if name != "params"},
        batch_size=size_of(setup.batches[0]),
        batches=len(setup.batches),
        steps=setup.steps,
        every_n_steps=every_n_steps,
        seed=setup.seed,
        device=str(parameters[0].device),
        torch=torch.__version__,
        seconds_per_step=float("nan"),
        clip_norm=setup.clip_norm,
    )


def _qualified(model: nn.Module) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}"


def _plain_seconds(course: Course, every_n_steps: int) -> float:
    plain = [s for step, s in enumerate(course.seconds) if step % every_n_steps]
    return median(plain) if plain else float("nan")
