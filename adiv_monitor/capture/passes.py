"""Follows the backward passes of a step: gradients at the loss, and gradients that are zeroed."""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from adiv_monitor.capture.batch import given_of
from adiv_monitor.capture.guard import Guard, call_all
from adiv_monitor.capture.hook import has_data, on_gradient, trains
from adiv_monitor.rerun.nested import tensors_in


@dataclass(eq=False)
class Pass:
    """A backward pass.

    Attributes:
        task: the number of its graph task: later passes have greater ones.
        trains: whether it belongs to a training step.
        has_graph: whether its gradients get a graph of their own.
        steps: the number of optimizer steps that had begun.
        entered: the gradients with which it entered losses, by number of the loss.
        accumulates: whether it accumulated gradients of watched parameters.
    """

    task: int
    trains: bool
    has_graph: bool
    steps: int
    entered: dict[int, Tensor] = field(default_factory=dict)
    accumulates: bool = False


class Zeroed(NamedTuple):
    """Passes whose gradients were zeroed, at one layer.

    Attributes:
        tasks: their graph tasks.
        norm: norm of what they brought.
        is_other: whether an optimizer stepped, or a weight changed, since.
    """

    tasks: Sequence[int]
    norm: Tensor
    is_other: bool


class Passes:
    """The backward passes of a step.

    Args:
        guard: runs the bodies of hooks; None: one that raises.
        steps: returns the number of optimizer steps that have begun.

    Attributes:
        meant: whether zeroed passes are meant: inputs are differentiated, as for adversarial ones.
        zeroed: the passes whose gradients were zeroed, layer by layer.
        given: the `given_of` what the first loss was given.
        shapes: the shapes of the tensors that it was given.
    """

    def __init__(self, guard: Guard | None = None, steps: Callable[[], int] = int) -> None:
        self.meant = False
        self.zeroed: list[Zeroed] = []
        self.given: dict[str, list[Tensor]] = {}
        self.shapes: tuple[tuple[int, ...], ...] = ()
        self._guard, self._steps = guard or Guard(), steps
        self._hooks: list[RemovableHandle] = []
        self._found: dict[int, Pass] = {}  # by graph task
        self._active = True

    def running(self) -> Pass:
        """Return the backward pass that runs in this thread."""
        task = torch._C._current_graph_task_id()
        if task < 0 or task not in self._found:
            self._found[task] = Pass(task, trains(None), torch.is_grad_enabled(), self._steps())
        return self._found[task]

    def detach(self) -> None:
        """Remove every hook; those in graphs that are already built become inactive."""
        self._active = False
        call_all(*[hook.remove for hook in self._hooks])

    def follow(self, loss: Tensor, given: Sequence[Any] = ()) -> None:
        """Record the gradient with which backward passes enter a loss of one element.

        Args:
            loss: the loss.
            given: the arguments that it was computed from, if they are known.
        """
        if not self._active or type(loss) is not Tensor or any(n != 1 for n in loss.shape):
            return
        arrive = partial(self._guard, self._enters, len(self._hooks))
        with torch._C.DisableTorchFunction():
            self._hooks.append(on_gradient(loss, arrive))
            self.given = self.given or given_of(given)
            self.shapes = self.shapes or tuple(tuple(x.shape) for x in tensors_in(*given))

    def _enters(self, number: int, gradient: Tensor | None) -> None:
        """Copy the gradient at a loss, which the user may have given and may overwrite."""
        if self._active and gradient is not None and has_data(gradient):
            self.running().entered[number] = gradient.detach().clone().reshape(())

    def _counted(self) -> list[Pass]:
        """Return the passes that entered a loss and accumulated gradients, also one within them."""
        entered = [of for _, of in sorted(self._found.items()) if of.entered]
        tasks = [of.task for of in entered]
        places = {bisect_right(tasks, of.task) for of in self._found.values() if of.accumulates}
        return [entered[place - 1] for place in sorted(places) if place]

    @property
    def losses(self) -> list[Tensor]:
        """For each pass, the gradient at the loss; the sum over the losses that it has."""
        return [reduce(torch.add, of.entered.values()) for of in self._counted()]

    @property
    def unused(self) -> int:
        """The number of losses with a graph that no backward pass has entered."""
        entered = (of.entered for of in self._found.values())
        return len({*range(len(self._hooks))}.difference(*entered))

    def told(self, losses: Sequence[float], norms: Sequence[float]) -> tuple[Sequence[float], int]:
        """Return the step's gradients at the loss, and the number of its zeroed passes.

        Passes whose gradients belong to another step (of another optimizer, SAM's first one, or one
        that an AMP scaler skipped, since they are not finite) count for neither.

        Args:
            losses: `losses`, on the host.
            norms: those of `zeroed`, on the host.
        """
        others = [
            max(found.tasks)
            for found, norm in zip(self.zeroed, norms, strict=True)
            if found.is_other or not math.isfinite(norm)
        ]
        last = max(others, default=-1)
        first = sum(of.task <= last for of in self._counted())
        zeroed = {task for found in self.zeroed for task in found.tasks if task > last}
        return losses[first:], 0 if self.meant else len(zeroed)
