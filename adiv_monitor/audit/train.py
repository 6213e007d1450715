"""The training loop of a fork."""

import inspect
import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from adiv_monitor.audit.setup import Fork, seeded


@dataclass
class Course:
    """What every training run tells.

    Attributes:
        losses: of each step's batch before the step; ends with the first that is not finite.
        gradient_norms: ‖gradient of all parameters that the optimizer holds‖, before clipping.
        seconds: that each step took.
        parameter_norms: ‖all parameters that the optimizer holds‖ before each step.
        interrupted: whether the keyboard ended the run early.
    """

    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    parameter_norms: list[float] = field(default_factory=list)
    interrupted: bool = False


class Watch:
    """Looks on while a fork is trained; what it does not override it does not look at."""

    def begins(self, step: int, batch: Any) -> None:
        """The forward pass of a step is about to begin."""

    def has_gradients(self, step: int, loss: Tensor) -> None:
        """The backward pass of a step has ended; nothing is clipped yet."""

    def has_stepped(self, step: int, batch: Any) -> None:
        """The optimizer has stepped."""


def train(fork: Fork, watch: Watch | None = None) -> Course:
    """Train a fork on its batches, one step each, until a loss is not finite, or Ctrl-C."""
    watch = Watch() if watch is None else watch
    course = Course()
    try:
        with seeded(fork.seed), torch.enable_grad():
            for step, batch in enumerate(fork.batches):
                _step(fork, step, batch, course, watch)
                if not math.isfinite(course.losses[-1]):
                    break
    except KeyboardInterrupt:
        course.interrupted = True
    return course


def _step(fork: Fork, step: int, batch: Any, course: Course, watch: Watch) -> None:
    began = time.perf_counter()
    losses: list[float] = []
    norms: list[float] = []

    def closure() -> Tensor:
        fork.optimizer.zero_grad()
        loss = fork.loss(fork.model, batch)
        if not losses:
            losses.append(_number(loss))
        loss.backward()  # type: ignore[no-untyped-call]
        watch.has_gradients(step, loss)
        if not norms:
            norms.append(gradient_norm(fork.optimizer))
        if fork.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(_held(fork.optimizer), fork.clip_norm)
        return loss

    watch.begins(step, batch)
    course.parameter_norms.append(parameter_norm(fork.optimizer))
    if _needs_closure(fork.optimizer):
        fork.optimizer.step(closure)  # type: ignore[arg-type]
    else:
        closure()
        fork.optimizer.step()
    course.losses += losses
    course.gradient_norms += norms
    course.seconds.append(time.perf_counter() - began)
    watch.has_stepped(step, batch)


def gradient_norm(optimizer: Optimizer) -> float:
    """‖gradient‖ of all parameters that the optimizer holds; 0 where none has one."""
    gradients = [p.grad for p in _held(optimizer) if p.grad is not None]
    if not gradients:
        return 0.0
    return float(torch.nn.utils.get_total_norm(gradients))


def parameter_norm(optimizer: Optimizer) -> float:
    """‖all parameters that the optimizer holds‖."""
    return float(torch.nn.utils.get_total_norm([p.detach() for p in _held(optimizer)]))


def _held(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _needs_closure(optimizer: Optimizer) -> bool:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


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
            "depends on the model's parameters: no .item(), .detach() or no_grad() on the way"
        )
    return float(loss.detach())
