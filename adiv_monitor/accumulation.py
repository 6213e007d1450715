"""What happens to a parameter's `.grad`: accumulated by which pass, multiplied by what since.

The rows of a step are in the units of the gradient that a backward pass left; the optimizer may
see that gradient clipped, unscaled, or zeroed and made anew. Only what really is accumulated counts:
`torch.autograd.grad` runs a parameter's tensor hooks too, but not its post-accumulate hooks.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from adiv_monitor import dots
from adiv_monitor.updates import some


class Rows(Protocol):
    """What is to follow the parameter's gradient: the rows of a layer that it belongs to."""

    def reset(self) -> None:
        """What had been accumulated is gone."""

    def rescale(self, factor: Tensor) -> None:
        """What had been accumulated was multiplied by a factor."""

    def rescale_arrived(self, factor: Tensor) -> None:
        """What is about to be accumulated was multiplied by a factor."""

    def fold(self) -> None:
        """A gradient is accumulated."""


Guard = Callable[[Callable[..., None]], Callable[..., None]]


def _on(register: Callable[..., Any], hook: Callable[..., None]) -> RemovableHandle:
    handle: RemovableHandle = register(hook)
    return handle


class Accumulation:
    """Follows one parameter's `.grad` through the backward passes of a step.

    Args:
        parameter: the parameter.
        users: rows of the layers that use it.
        zeroed: (‖.grad‖ now, as the last pass left it) → whether it was zeroed since.
        guard: wraps the hooks.
    """

    def __init__(
        self,
        parameter: nn.Parameter,
        users: Callable[[], Sequence[Rows]],
        zeroed: Callable[[Tensor, Tensor], bool],
        guard: Guard,
    ) -> None:
        self._parameter = parameter
        self._users = users
        self._zeroed = zeroed
        self._left: Tensor | None = None  # ‖.grad‖ as the last pass left it
        self._entries: Tensor | None = None  # some of its entries
        # Before a pass: graph task, ‖.grad‖, whether something wrote to it since the last one.
        self._held: tuple[int, Tensor | None, bool] = (-1, None, False)
        self._tensor: tuple[weakref.ref[Tensor], int] | None = None  # as the last pass left it
        self._arriving: tuple[weakref.ref[Tensor], int] | None = None
        self._raw: Tensor | None = None  # ‖gradient‖ before hooks of the user's
        self.foreign: Tensor | None = None  # ‖.grad‖ that was there before any row was seen
        self._handles: list[RemovableHandle] = []
        hooked = bool(parameter._backward_hooks)
        if hooked:  # they may change the gradient: look at it before the first of them
            self._add(_on(parameter.register_hook, guard(self._before_hooks)), first=True)
        self._add(_on(parameter.register_hook, guard(self._before)))
        after = _on(parameter.register_post_accumulate_grad_hook, guard(self._after))
        self._add(after, first=True)

    def _add(self, handle: RemovableHandle, *, first: bool = False) -> None:
        self._handles.append(handle)
        hooks = handle.hooks_dict_ref()
        if first and hooks is not None:
            hooks.move_to_end(handle.id, last=False)

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def factor(self) -> Tensor | None:
        """‖gradient now‖ / ‖gradient that backward left‖, NaN if both are 0; None: unknown."""
        grad = self._parameter.grad
        if grad is None:
            return None
        if self._left is not None:
            return dots.norm(grad) / self._left
        if self._arriving is not None:
            # What `autograd.grad` gave, put there by hand and not written to since.
            given, version = self._arriving
            if given() is grad and grad._version == version:
                return torch.ones((), device=grad.device)
        return None

    def likeness(self) -> Tensor | None:
        """Dot products of some entries of the gradient, then and now, (2, 2); None: unknown."""
        grad = self._parameter.grad
        if grad is None or self._entries is None:
            return None
        now = some(grad.detach()).reshape(-1)
        if now.shape != self._entries.shape:
            return None
        # The squares of AMP's scaled gradients are no float32 numbers.
        pair = torch.stack([self._entries, now]).double()
        return pair @ pair.T

    def _before_hooks(self, gradient: Tensor) -> None:
        self._raw = dots.norm(gradient)

    def _before(self, gradient: Tensor) -> None:
        """Just before a gradient is accumulated, or returned by `autograd.grad`."""
        held = self._parameter.grad
        norm = None if held is None else dots.norm(held)
        touched = held is not None and not self._untouched(held)
        self._held = torch._C._current_graph_task_id(), norm, touched
        self._arriving = weakref.ref(gradient), gradient._version
        if self._raw is not None:  # the rows have what came before the user's hooks
            factor = dots.norm(gradient) / self._raw
            for rows in self._users():
                rows.rescale_arrived(factor)
            self._raw = None

    def _after(self, parameter: nn.Parameter) -> None:
        """A gradient was accumulated."""
        if parameter.grad is None:  # an optimizer that steps inside the backward pass
            return
        task, held, touched = self._held
        if task != torch._C._current_graph_task_id():
            held = None
        if held is not None and self._left is not None:
            # Only where something wrote to it is it worth a look at the device.
            if touched and self._zeroed(held, self._left):
                held = None
        elif held is not None:
            self.foreign = held
        for rows in self._users():
            if held is None:
                rows.reset()
            elif self._left is not None:
                rows.rescale(held / self._left)
            rows.fold()
        if held is None:
            self.foreign = None
        self._left = dots.norm(parameter.grad)
        self._entries = some(parameter.grad.detach()).reshape(-1).clone()
        self._tensor = weakref.ref(parameter.grad), parameter.grad._version

    def _untouched(self, held: Tensor) -> bool:
        """Whether this is the tensor that the last pass left, and nothing has written to it."""
        if self._tensor is None:
            return False
        left, version = self._tensor
        return left() is held and held._version == version
