"""Follows the backward passes of a step: gradients at the loss, and gradients that are zeroed."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from adiv_monitor.capture.guard import Guard, call_all
from adiv_monitor.capture.hook import has_data, on_gradient
from adiv_monitor.rerun.thread import ThreadState


@dataclass(eq=False)
class _Zeroing:
    """Gradients that were found to be zeroed in one backward pass.

    Attributes:
        losses: number of the gradients at the loss before this pass.
        passes: by parameter, number of the passes whose gradients were zeroed.
        norms: norms of these gradients.
        is_other: whether an optimizer stepped, or a weight changed, since these passes.
    """

    losses: int
    passes: Counter[int] = field(default_factory=Counter)
    norms: list[Tensor] = field(default_factory=list)
    is_other: bool = False


class Passes:
    """The backward passes of a step that accumulate gradients of watched parameters.

    A pass counts once it has ended: one that raises leaves nothing.

    Args:
        guard: runs the bodies of hooks; None: one that raises.
        steps: returns the number of optimizer steps that have begun.

    Attributes:
        losses: for each pass, the gradient at the loss; the sum over the losses that it has.
        meant: whether zeroed passes are meant: inputs are differentiated, as for adversarial ones.
    """

    def __init__(self, guard: Guard | None = None, steps: Callable[[], int] = int) -> None:
        self.losses: list[Tensor] = []
        self.meant = False
        self.steps = steps
        self._guard = guard or Guard()
        self._hooks: list[RemovableHandle] = []
        self._running: dict[int, dict[int, Tensor]] = {}  # by graph task, by number of the loss
        self._ended: set[int] = set()  # graph tasks that accumulated gradients
        self._accumulated = 0  # the number of these, also of those that run
        self._last = -1  # the last of them
        self._zeroings: dict[int, _Zeroing] = {}  # by the last zeroed pass
        self._active = True

    def detach(self) -> None:
        """Remove every hook; those in graphs that are already built become inactive."""
        self._active = False
        self._running.clear()
        call_all(*[hook.remove for hook in self._hooks])
        self._hooks.clear()

    def follow(self, loss: Tensor) -> None:
        """Record the gradient with which backward passes enter a loss of one element."""
        if not self._active or type(loss) is not Tensor or any(n != 1 for n in loss.shape):
            return
        arrive = partial(self._guard, self._enters, len(self._hooks))
        with ThreadState(), torch._C.DisableTorchFunction():
            self._hooks.append(on_gradient(loss, arrive))

    def _enters(self, number: int, gradient: Tensor | None) -> None:
        """Copy the gradient at a loss, which the user may have given and may overwrite."""
        if not self._active or gradient is None or not has_data(gradient):
            return
        task = torch._C._current_graph_task_id()
        if task not in self._running:
            self._running[task] = {}
            _at_the_end(self._guard, self._leaves, task, self._accumulated)
        with torch._C.DisableTorchFunction():
            self._running[task][number] = gradient.detach().clone().reshape(())

    def _leaves(self, task: int, accumulated: int) -> None:
        entered = self._running.pop(task, None)
        if entered and self._accumulated > accumulated:
            with torch._C.DisableTorchFunction():
                self.losses.append(reduce(torch.add, entered.values()))

    def accumulates(self, task: int) -> None:
        """Note that the running pass accumulates a gradient."""
        if self._last == task:
            return
        self._last = task
        self._accumulated += 1
        _at_the_end(self._ended.add, task)

    def were_zeroed(self, key: int, tasks: Sequence[int], norm: Tensor, *, is_other: bool) -> None:
        """Note that the gradients of some passes were zeroed.

        Args:
            key: id of the parameter.
            tasks: the graph tasks of these passes.
            norm: norm of what they brought.
            is_other: whether an optimizer stepped, or the parameter changed, since.
        """
        last = max(tasks)
        before = sum(task <= last for task in self._ended)
        found = self._zeroings.setdefault(last, _Zeroing(min(before, len(self.losses))))
        found.passes[key] += len(self._ended.intersection(tasks))
        found.norms.append(norm)
        found.is_other |= is_other

    @property
    def norms(self) -> list[Tensor]:
        """The norms of all gradients that were zeroed."""
        return [norm for found in self._zeroings.values() for norm in found.norms]

    def told(self, losses: Sequence[float], norms: Sequence[float]) -> tuple[Sequence[float], int]:
        """Return the step's gradients at the loss, and the number of its zeroed passes.

        Passes whose gradients belong to another step (of another optimizer, SAM's first one, or one
        that an AMP scaler skipped, since they are not finite) count for neither.

        Args:
            losses: `losses`, on the host.
            norms: `norms`, on the host.
        """
        left = iter(norms)
        first, passes = 0, Counter[int]()
        for found in self._zeroings.values():
            own = [*islice(left, len(found.norms))]
            if found.is_other or not all(map(math.isfinite, own)):
                first = found.losses
                passes.clear()
            else:
                passes += found.passes
        return losses[first:], 0 if self.meant else max(passes.values(), default=0)


def _at_the_end(function: Callable[..., None], *args: Any) -> None:
    """Call a function when the running backward pass has ended without an exception."""
    torch.autograd.Variable._execution_engine.queue_callback(partial(function, *args))
