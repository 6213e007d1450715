"""Observation of a fork's training: its gradients and values that are not finite."""

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from adiv_monitor.audit.experiments import non_finite
from adiv_monitor.audit.experiments.repeated_loss import RepeatedLoss
from adiv_monitor.audit.experiments.wiring import Gradients
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.audit.training.train import Progress, Watch, gradient_norm


class Watching(Watch):
    """Observes gradients, and recomputes a batch's loss after each measured step."""

    def __init__(
        self,
        setup: Setup,
        fork: Fork,
        every_n_steps: int,
        progress: Progress | None,
        end_step: Callable[[], None],
    ) -> None:
        """Register the hooks; `end_step` is called after each step."""
        self._fork = fork
        self._every = every_n_steps
        self._end_step = end_step
        self._progress = progress
        self._repeated: RepeatedLoss | None = None
        self._loss = math.nan
        self._given = _gradients(setup.model)
        self.gradients = Gradients(fork)
        self.realised: dict[int, float] = {}
        self.first_non_finite: str | None = None

    def begins(self, step: int, batch: Any) -> None:
        """Keep the random numbers and buffers that the forward pass begins with."""
        if self._repeated is None:  # the first batch may make parameters of lazy modules
            self._repeated = RepeatedLoss(self._fork)
        else:
            self._repeated.keep()

    def has_loss(self, step: int, batch: Any, loss: float) -> None:
        """If the loss is not finite, locate the first such value."""
        self._loss = loss
        if not math.isfinite(loss) and self.first_non_finite is None and self._repeated is not None:
            self.first_non_finite = non_finite.in_forward(self._fork, self._repeated, step, batch)

    def has_gradients(self, step: int, loss: Tensor) -> None:
        """Observe the gradients and check that only the fork received any."""
        if step == 0:
            _check_untouched(self._given)
        self.gradients.look()
        if self.first_non_finite is None and not math.isfinite(gradient_norm(self._fork.optimizer)):
            self.first_non_finite = non_finite.in_backward(self._fork.model)

    def has_stepped(self, step: int, batch: Any) -> None:
        """Recompute the batch's loss after a measured step; a loss may run once only."""
        self._end_step()
        if step % self._every == 0 and self._repeated is not None:
            with suppress(Exception):
                self.realised[step] = self._repeated.of(batch) - self._loss
        if self._progress is not None:
            self._progress("training", step + 1, len(self._fork.batches))


Gradient = tuple[nn.Parameter, Tensor | None, Tensor | None]


def _gradients(model: nn.Module) -> list[Gradient]:
    """Return the parameters with their gradients, and copies of these."""
    return [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]


def _check_untouched(before: list[Gradient]) -> None:
    """Compare the gradients of the user's model with those before a copy's backward pass.

    Raises:
        ValueError: The user's model received gradients; its former ones are restored.
    """
    touched = [
        (p, grad, values) for p, grad, values in before
        if p.grad is not grad or (grad is not None and not grad.equal(values))  # type: ignore[arg-type]
    ]  # fmt: skip
    for parameter, grad, values in touched:
        parameter.grad = grad if grad is None or values is None else grad.copy_(values)
    before.clear()
    if touched:
        raise ValueError(
            "audit(loss=…): loss(model, batch) used the model that was given to audit, "
            "expected the one that it is called with, a copy: use its first argument"
        )
