"""The training loop of a fork."""

import inspect
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from adiv_monitor.audit.training.batches import copied
from adiv_monitor.audit.training.setup import Fork, seeded

Progress = Callable[[str, int, int], None]  # part of the work, units done, units in all


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
        TypeError, ValueError: The loss is no tensor of one number with a gradient.
    """
    watch = Watch() if watch is None else watch
    course = Course()
    try:
        with seeded(fork.seed), torch.enable_grad():
            for step, batch in enumerate(fork.batches):
                _Step(fork, step, batch, course, watch).run()
    except _NotFinite:
        pass
    except KeyboardInterrupt:
        course.interrupted = True
    return course


class _Step:
    """One step, whose closure the optimizer may call several times; the first call is recorded."""

    def __init__(self, fork: Fork, step: int, batch: Any, course: Course, watch: Watch) -> None:
        self._fork = fork
        self._number = step
        self._batch = batch
        self._course = course
        self._watch = watch
        self._loss: float | None = None
        self._norm: float | None = None

    def run(self) -> None:
        """Take the step and record it when it is complete."""
        began = time.perf_counter()
        length = parameter_norm(self._fork.optimizer)
        self._watch.begins(self._number, self._batch)
        try:
            if _needs_closure(self._fork.optimizer):
                self._fork.optimizer.step(self._closure)  # type: ignore[arg-type]
            else:
                self._closure()
                self._fork.optimizer.step()
        except _NotFinite:
            self._write_down(began, length)
            raise
        self._write_down(began, length)
        self._watch.has_stepped(self._number, self._batch)

    def _write_down(self, began: float, length: float) -> None:
        assert self._loss is not None
        self._course.losses.append(self._loss)
        self._course.gradient_norms.append(math.nan if self._norm is None else self._norm)
        self._course.parameter_norms.append(length)
        self._course.seconds.append(time.perf_counter() - began)

    def _closure(self) -> Tensor:
        fork = self._fork
        fork.optimizer.zero_grad()
        loss = fork.loss(fork.model, copied(self._batch))
        value = _number(loss)
        if self._loss is None:
            self._loss = value
            self._watch.has_loss(self._number, self._batch, value)
            if not math.isfinite(value):
                raise _NotFinite
        _backward(loss)
        self._watch.has_gradients(self._number, loss)
        if self._norm is None:
            self._norm = gradient_norm(fork.optimizer)
        if fork.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(held(fork.optimizer), fork.clip_norm)
        return loss


def gradient_norm(optimizer: Optimizer) -> float:
    """Return ‖gradient‖ of all parameters that the optimizer holds; 0 if none has a gradient."""
    return _norm([p.grad for p in held(optimizer) if p.grad is not None])


def parameter_norm(optimizer: Optimizer) -> float:
    """Return ‖all parameters that the optimizer holds‖."""
    return _norm([p.detach() for p in held(optimizer)])


def held(optimizer: Optimizer) -> list[Tensor]:
    """Return all parameters that an optimizer holds."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _norm(tensors: list[Tensor]) -> float:
    dense = [x.coalesce().values() if x.is_sparse else x for x in tensors]
    return float(torch.nn.utils.get_total_norm(dense)) if dense else 0.0


def _needs_closure(optimizer: Optimizer) -> bool:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _backward(loss: Tensor) -> None:
    try:
        loss.backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise ValueError(
            "audit(loss=…): the graph of the loss was used before, expected a loss that only "
            "computes, anew in each step: take backward() and optimizer.step() out of it, and "
            "detach what it keeps from the step before, such as a hidden state"
        ) from error


def _number(loss: object) -> float:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(
            f"audit(loss=…): loss(model, batch) gave {got}, expected a tensor of one number: "
            "take its mean"
        )
    if not loss.requires_grad:
        raise ValueError(
            "audit(loss=…): loss(model, batch) gave a tensor without a gradient, expected one that "
            "depends on the model's parameters: no .item(), .detach() or no_grad() on the way, and "
            "some parameter with requires_grad=True"
        )
    return float(loss.detach())
