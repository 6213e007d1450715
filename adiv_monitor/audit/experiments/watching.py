"""Observation of a fork's training: gradients, the order of modules, values that are not finite."""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from torch import Tensor, nn

from adiv_monitor.audit.experiments.repeated_loss import RepeatedLoss
from adiv_monitor.audit.training.batches import tensors
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.audit.training.train import Progress, Watch, gradient_norm, held
from adiv_monitor.diagnosis.record import Wiring


class Watching(Watch):
    """Observes gradients, and recomputes a batch's loss after each measured step.

    Attributes:
        ran: Paths of the modules that hold parameters, in the order in which they first ran.
        realised: Measured step → change of its batch's loss by the step.
        first_non_finite: Place of the first value that is not finite; None: there is none.
    """

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
        self._named = dict(fork.model.named_parameters())
        self._unreached = {name for name, p in self._named.items() if p.requires_grad}
        self._zero = set(self._unreached)
        self.ran: dict[str, None] = {}
        self.realised: dict[int, float] = {}
        self.first_non_finite: str | None = None
        self._handles = [
            module.register_forward_pre_hook(lambda *_, path=path: self.ran.setdefault(path))
            for path, module in fork.model.named_modules()
            if any(p is not None for p in module._parameters.values())
        ]

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
            self.first_non_finite = _in_forward(self._fork, self._repeated, step, batch)

    def has_gradients(self, step: int, loss: Tensor) -> None:
        """Observe the gradients and check that only the fork received any."""
        if step == 0:
            _check_untouched(self._given)
        for name in sorted(self._zero):
            gradient = self._named[name].grad
            if gradient is not None:
                self._unreached.discard(name)
                if bool((gradient.coalesce().values() if gradient.is_sparse else gradient).any()):
                    self._zero.discard(name)
        if self.first_non_finite is None and not math.isfinite(gradient_norm(self._fork.optimizer)):
            self.first_non_finite = _in_backward(self._fork.model)

    def has_stepped(self, step: int, batch: Any) -> None:
        """Recompute the batch's loss after a measured step; a loss may run once only."""
        self._end_step()
        if step % self._every == 0 and self._repeated is not None:
            with suppress(Exception):
                self.realised[step] = self._repeated.of(batch) - self._loss
        if self._progress is not None:
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


# Gradients of the user's own model

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


# The first value that is not finite


def _in_forward(fork: Fork, loss: RepeatedLoss, step: int, batch: Any) -> str:
    """Locate the first value that is not finite in a forward pass whose loss is not finite.

    The weights must be those of that pass. The order is that of the computation: the weights, the
    data, the outputs of modules, the loss.
    """
    when = f"after step {step - 1}" if step else "before training"
    given = [
        *((f"parameter {name} {when}", x) for name, x in fork.model.named_parameters()),
        *((f"buffer {name} {when}", x) for name, x in fork.model.named_buffers()),
        *(("data", x) for x in tensors(batch)),
    ]
    found = [place for place, x in given if _is_broken(x)]
    return found[0] if found else _in_modules(fork.model, loss, batch) or "loss"


def _in_backward(model: nn.Module) -> str:
    """Locate the first gradient that is not finite, in the order of the backward pass."""
    for name, parameter in reversed(list(model.named_parameters())):
        if parameter.grad is not None and not bool(parameter.grad.to_dense().isfinite().all()):
            return f"gradient of {name}"
    return "norm of the gradient"


def _in_modules(model: nn.Module, loss: RepeatedLoss, batch: Any) -> str:
    """Run the forward pass again and return the first module whose output is not finite.

    NaN and +∞ have precedence over -∞.
    """
    broken: list[str] = []
    infinite: list[str] = []

    def look(path: str, module: nn.Module, args: Any, output: Any) -> None:
        outputs = list(tensors(output))
        if any(map(_is_broken, outputs)):
            broken.append(path or type(module).__name__)
        elif not all(bool(x.isfinite().all()) for x in outputs):
            infinite.append(path or type(module).__name__)

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(partial(look, path)))
        loss.of(batch)
    return next((f"output of {path}" for path in broken or infinite), "")


def _is_broken(x: Tensor) -> bool:
    """Return whether the tensor holds NaN or +∞; masks consist of -∞."""
    return x.is_floating_point() and bool((x.isnan() | x.isposinf()).any())
