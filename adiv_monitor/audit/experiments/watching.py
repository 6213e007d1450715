"""Observation of a fork's training: its inputs, its gradients and values that are not finite."""

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from adiv_monitor.audit.experiments import non_finite
from adiv_monitor.audit.experiments.inputs import Inputs
from adiv_monitor.audit.experiments.repeated_loss import RepeatedLoss
from adiv_monitor.audit.experiments.wiring import Gradients
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.audit.training.train import Progress, Watch, gradient_norm


class Watching(Watch):
    """Observes inputs and gradients, and recomputes a batch's loss after each measured step."""

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
        self._failed: list[str] = []
        self._given = _Given(setup.model)
        self.inputs = Inputs(fork.model)
        self.gradients = Gradients(fork)
        self.realised: dict[int, float] = {}
        self.first_non_finite: str | None = None

    def begins(self, step: int, batch: Any) -> None:
        """Keep the random numbers and buffers that the forward pass begins with."""
        if self._repeated is None:  # the first batch may make parameters of lazy modules
            self._repeated = RepeatedLoss(self._fork)
        else:
            self._repeated.keep()
        self.inputs.watching = True

    def has_loss(self, step: int, batch: Any, loss: float) -> None:
        """If the loss is not finite, locate the first such value."""
        self.inputs.watching = False
        self._loss = loss
        if not math.isfinite(loss) and self.first_non_finite is None and self._repeated is not None:
            self.first_non_finite = non_finite.in_forward(self._fork, self._repeated, step, batch)

    def has_gradients(self, step: int, loss: Tensor) -> None:
        """Observe the gradients and check that only the fork received any."""
        if step == 0:
            self._given.check()
        self.gradients.look()
        if self.first_non_finite is None and not math.isfinite(gradient_norm(self._fork.optimizer)):
            self.first_non_finite = non_finite.in_backward(self._fork.model)

    def has_stepped(self, step: int, batch: Any) -> None:
        """Recompute the batch's loss after a measured step."""
        self._end_step()
        if step % self._every == 0 and self._repeated is not None:
            try:
                self.realised[step] = self._repeated.of(batch) - self._loss
            except Exception as error:
                self._failed.append(f"{type(error).__name__}: {error}")
        if self._progress is not None:
            self._progress("training", step + 1, len(self._fork.batches))

    def remove(self) -> None:
        """Remove all hooks from the model."""
        self.inputs.remove()
        self.gradients.remove()

    def notes(self) -> list[str]:
        """Return notes on what could not be observed."""
        found = []
        if self._failed:
            found.append(
                "How the loss really changed is not known: when a batch was given to the model "
                f"again, it failed: {self._failed[0]}"
            )
        if not self.inputs.ran:
            found.append(
                "Nothing is known of the model's inputs: the loss did not call the model itself."
            )
        return found


class _Given:
    """Detects a loss that uses the user's model in place of its argument, a copy."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = [
            (p, p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()
        ]

    def check(self) -> None:
        """Compare the gradients of the user's model with their state before a copy's backward pass.

        Raises:
            ValueError: The user's model received gradients; its former ones are restored.
        """
        touched = False
        for parameter, before, values in self._before:
            if parameter.grad is not before:
                touched = True
                parameter.grad = before
            elif before is not None and values is not None and not before.equal(values):
                touched = True
                before.copy_(values)
        self._before.clear()
        if touched:
            raise ValueError(
                "audit(loss=…): loss(model, batch) used the model that was given to audit, "
                "expected the one that it is called with, a copy: use its first argument"
            )
