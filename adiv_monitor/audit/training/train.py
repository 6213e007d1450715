"""The training loop of a fork."""

import inspect
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from adiv_monitor.audit.training.batches import copied
from adiv_monitor.audit.training.setup import Fork, seeded

Progress = Callable[[str, int, int], None]  # part of the work, units done, units in all


def silent(part: str, done: int, units: int) -> None:
    """Report no progress."""


@dataclass
class Course:
    """The curves that every training run records.

    Attributes:
        losses: Loss of each step's batch before the step; the first that is not finite is the last.
        gradient_norms: ‖gradient of all parameters that the optimizer holds‖, before clipping; NaN
            where the loss is not finite and so not differentiated.
        seconds: Duration of each step.
        parameter_norms: ‖all parameters that the optimizer holds‖ before each step.
        interrupted: Whether the keyboard ended the run early.
    """

    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    parameter_norms: list[float] = field(default_factory=list)
    interrupted: bool = False


class Watch:
    """Base class of observers of a fork's training; every callback does nothing unless overridden.

    The `batch` is the fork's own, so an observer must call a model on a copy: a model may write
    into its batch.
    """

    def begins(self, step: int, batch: Any) -> None:
        """Called before the forward pass of a step."""

    def has_loss(self, step: int, batch: Any, loss: float) -> None:
        """Called after the forward pass of a step. If the loss is not finite, the run ends here."""

    def has_gradients(self, step: int, loss: Tensor) -> None:
        """Called after the backward pass of a step, before clipping."""

    def has_stepped(self, step: int, batch: Any) -> None:
        """Called after the optimizer has stepped."""


class _NotFinite(Exception):
    """Raised inside the closure to end a step whose loss is not finite."""


def train(fork: Fork, watch: Watch | None = None) -> Course:
    """Train a fork on its batches, one step each, until a loss is not finite or Ctrl-C is pressed.

    Random numbers begin at the fork's seed. If the loss is not finite no step is taken: the weights
    stay those that led to it.

    Raises:
        TypeError: The loss is no tensor of one number with a gradient.
    """
    course = Course()
    try:
        with seeded(fork.seed), torch.enable_grad():
            for step, batch in enumerate(fork.batches):
                _step(fork, step, batch, course, watch or Watch())
                if not math.isfinite(course.losses[-1]):
                    break
    except KeyboardInterrupt:
        course.interrupted = True
    return course


def _step(fork: Fork, step: int, batch: Any, course: Course, watch: Watch) -> None:
    """Take a step, and record the first call of its closure when the step is complete."""
    began = time.perf_counter()
    length = _norm([p.detach() for p in held(fork.optimizer)])
    watch.begins(step, batch)
    losses: list[float] = []
    norms: list[float] = []

    def closure() -> Tensor:
        fork.optimizer.zero_grad()
        loss = fork.loss(fork.model, copied(batch))
        losses.append(_number(loss))
        if len(losses) == 1:
            watch.has_loss(step, batch, losses[0])
            if not math.isfinite(losses[0]):
                raise _NotFinite
        loss.backward()  # type: ignore[no-untyped-call]
        watch.has_gradients(step, loss)
        if not norms:
            norms.append(gradient_norm(fork.optimizer))
        if fork.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(held(fork.optimizer), fork.clip_norm)
        return loss

    given = inspect.signature(type(fork.optimizer).step).parameters.get("closure")
    with suppress(_NotFinite):
        if given is not None and given.default is inspect.Parameter.empty:  # LBFGS
            fork.optimizer.step(closure)  # type: ignore[arg-type]
        else:
            closure()
            fork.optimizer.step()
    course.losses.append(losses[0])
    course.gradient_norms.append(norms[0] if norms else math.nan)
    course.parameter_norms.append(length)
    course.seconds.append(time.perf_counter() - began)
    if norms:
        watch.has_stepped(step, batch)


def gradient_norm(optimizer: Optimizer) -> float:
    """Return ‖gradient‖ of all parameters that the optimizer holds; 0 if none has a gradient."""
    return _norm([p.grad for p in held(optimizer) if p.grad is not None])


def held(optimizer: Optimizer) -> list[Tensor]:
    """Return all parameters that an optimizer holds."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _norm(tensors: list[Tensor]) -> float:
    dense = [x.coalesce().values() if x.is_sparse else x for x in tensors]
    return float(torch.nn.utils.get_total_norm(dense)) if dense else 0.0


def _number(loss: object) -> float:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        got = type(loss).__name__
        if isinstance(loss, Tensor):
            got = f"shape {tuple(loss.shape)}" + ", without a gradient" * (not loss.requires_grad)
        told = "expected a tensor of one number that has a gradient: take the mean, without .item()"
        raise TypeError(f"audit(loss=…): loss(model, batch) gave {got}, {told}")
    return float(loss.detach())
