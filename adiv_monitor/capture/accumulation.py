"""Tracks a parameter's `.grad`: the passes that accumulate it and the factors applied since.

The rows of a step are in the units of the gradient that a backward pass left. The optimizer may get
that gradient clipped, unscaled, or zeroed and computed anew. Only gradients that are really
accumulated count: `torch.autograd.grad` runs a parameter's tensor hooks too, but not its
post-accumulate hooks.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from adiv_monitor.capture.entries import is_small, sampled_entries
from adiv_monitor.capture.gradient_shares import GradientShare
from adiv_monitor.capture.guard import call_all
from adiv_monitor.capture.hook import ON_ACCUMULATION, ON_GRADIENT, take_off
from adiv_monitor.capture.layer_rows import LayerRows
from adiv_monitor.capture.passes import Passes
from adiv_monitor.capture.weights.shards import gradient_part, part_of
from adiv_monitor.maths import dots
from adiv_monitor.rerun.surroundings import version
from adiv_monitor.rerun.thread import surely

# What follows a parameter's gradient: the rows of a layer, or the shares of its calls.
Accumulated = LayerRows | GradientShare


class Owner(Protocol):
    """Owns the accumulations and knows the layers."""

    passes: Passes

    @property
    def is_alone(self) -> bool:
        """Whether there was one rank when the running backward pass began."""

    def users(self, parameter: nn.Parameter) -> Sequence[Accumulated]:
        """Return all objects that follow a parameter's gradient."""

    def was_zeroed(self, now: Tensor, left: Tensor) -> bool:
        """Return whether `.grad` was zeroed, from ‖.grad‖ now and as the last pass left it."""

    def shards_were_zeroed(self) -> bool:
        """Return whether the gradients of all sharded parameters were zeroed."""

    def accumulates(self) -> None:
        """Note that a pass accumulates a gradient."""

    def hook(
        self, parameter: nn.Parameter, function: Callable[..., None], *args: Any
    ) -> Callable[..., None]:
        """Return a hook on a parameter that calls a function, with these arguments first."""


def _goes_first(handle: RemovableHandle) -> None:
    """Move a hook before the others: torch runs hooks in the order of their dictionary."""
    hooks = handle.hooks_dict_ref()
    if hooks is not None and len(hooks) > 1:
        others = {key: hook for key, hook in hooks.items() if key != handle.id}
        surely(_put_behind, hooks, others)


def _put_behind(hooks: dict[int, Any], others: dict[int, Any]) -> None:
    for key in others:
        hooks.pop(key, None)
    hooks.update(others)


class Accumulation:
    """Follows one parameter's `.grad` through the backward passes of a step.

    Args:
        parameter: the parameter.
        owner: the owner, which knows the layers that use the parameter.
        of: the parameter under which the owner knows it; None: the same.
    """

    def __init__(
        self, parameter: nn.Parameter, owner: Owner, of: nn.Parameter | None = None
    ) -> None:
        self._parameter = parameter
        self._owner = owner
        self._known_as = parameter if of is None else of
        self._left: Tensor | None = None  # .grad as the last pass left it, or norms of its parts
        self._left_norm: Tensor | None = None  # the norm of `_left`
        self._entries: Tensor | None = None  # sampled entries of `.grad`
        # Before a pass: graph task, ‖.grad‖, whether something wrote to it since the last pass.
        self._held: tuple[int, Tensor | None, bool] = (-1, None, False)
        self._tensor: tuple[weakref.ref[Tensor], int] | None = None  # as the last pass left it
        self._arriving: tuple[weakref.ref[Tensor], int] | None = None
        self._tasks: list[int] = []  # the passes that accumulated since the gradient was zeroed
        self._at = (-1, -1)  # at the last of them: parameter's version, steps of optimizers
        self.foreign: Tensor | None = None  # ‖.grad‖ from before any row was seen
        self._ended: Tensor | None = None  # sampled entries of `.grad` at the end of the last pass
        self._hooks: list[tuple[Callable[..., None], Sequence[str]]] = []  # with torch's tables

    def attach(self) -> None:
        """Register the hooks. `remove` removes them, even if this method raises."""
        parameter, kind = self._parameter, type(self)
        on_gradient, after = parameter.register_hook, parameter.register_post_accumulate_grad_hook
        self._put_on(on_gradient, ON_GRADIENT, kind._before)
        _goes_first(self._put_on(after, ON_ACCUMULATION, kind._after))

    def _put_on(
        self,
        register: Callable[..., RemovableHandle],
        where: Sequence[str],
        body: Callable[..., None],
    ) -> RemovableHandle:
        hook = self._owner.hook(self._known_as, body, self)
        self._hooks.append((hook, where))  # before registering, which may be interrupted
        return register(hook)

    def remove(self) -> None:
        """Remove the hooks."""
        call_all(*[partial(take_off, self._parameter, *hook) for hook in self._hooks])
        self._hooks.clear()  # a cycle would keep gradients until it is collected

    def left(self) -> Tensor | None:
        """Return a tensor with the norm of the gradient that backward left; None: unknown.

        It is the gradient itself or the norms of its parts. A gradient from `autograd.grad` that
        the user assigned to `.grad` counts too.
        """
        if self._left is not None:
            return self._left
        grad = self._parameter.grad
        if grad is None or self._arriving is None:
            return None
        given, version = self._arriving
        if given() is not grad or grad._version != version:
            return None
        grad = self._part(grad)
        return grad if is_small(grad) else dots.norms(grad)

    @property
    def entries(self) -> Tensor | None:
        """Sampled entries of the gradient that backward left; None: not kept."""
        return self._entries

    @property
    def held(self) -> Tensor | None:
        """The gradient that the optimizer gets on this rank."""
        return self._parameter.grad

    def pass_ended(self, held: Tensor) -> None:
        """Sample the gradient after a backward pass, when ranks have reduced gradients in it.

        Args:
            held: the gradient now.
        """
        self._ended = sampled_entries(part_of(held)).flatten().clone()

    def since_ended(self) -> Tensor | None:
        """Return sampled entries of the gradient now and after the last pass; None: unknown."""
        if self._ended is None or self.held is None:
            return None
        now = sampled_entries(part_of(self.held)).flatten()
        return torch.stack([now, self._ended]) if now.shape == self._ended.shape else None

    def _before(self, gradient: Tensor) -> None:
        """Inspect a gradient before it is accumulated, or returned by `autograd.grad`."""
        for rows in self._owner.users(self._known_as):
            rows.settle()
        held = self._parameter.grad
        norm = None if held is None else dots.norm(self._part(held))
        touched = held is not None and not self._untouched(held)
        self._held = torch._C._current_graph_task_id(), norm, touched
        self._arriving = weakref.ref(gradient), gradient._version

    def _after(self, parameter: nn.Parameter) -> None:
        """Update the rows after a gradient was accumulated."""
        if parameter.grad is None:  # another hook ran first and removed it
            return
        self._owner.accumulates()
        task, held, touched = self._held
        left = factor = None
        if task != torch._C._current_graph_task_id():
            held = None
        if held is not None and self._left_norm is not None:
            # Waiting for the device pays off only where torch's version counter shows a write.
            left = self._left_norm
            if (touched or held.is_cpu) and self._owner.was_zeroed(held, left):
                held = None
            elif self._owner.is_alone and not (held.is_cpu and held == left):
                factor = torch.where(left == 0, 1.0, held / left)  # of several ranks: an average
        elif held is not None:
            self.foreign = held
        followed = False
        for user in self._owner.users(self._known_as):
            if held is None:
                user.reset()
            elif factor is not None:
                user.rescale(factor)
            user.fold()
            if type(user) is GradientShare and user.parameter is self._parameter:
                followed |= user.is_known and self._owner.is_alone
        if held is None:
            self.foreign = None
        self._count_pass(parameter, self._left_norm, zeroed=held is None)
        grad = self._part(parameter.grad)
        parts = dots.norms(grad)
        self._left_norm = torch.linalg.vector_norm(parts)
        if is_small(grad):
            self._left = grad.clone()
            self._entries = sampled_entries(self._left).reshape(-1)
        else:
            self._left = parts
            self._entries = None if followed else sampled_entries(grad).clone().reshape(-1)
        self._tensor = weakref.ref(parameter.grad), parameter.grad._version

    def _count_pass(self, parameter: Tensor, left: Tensor | None, *, zeroed: bool) -> None:
        """Count a pass, and tell which passes before it were zeroed.

        Args:
            parameter: the parameter that optimizers step.
            left: the norm of the gradient that the pass before it left, if known.
            zeroed: whether that gradient was zeroed.
        """
        passes = self._owner.passes
        at = version(parameter), passes.steps()
        if zeroed and self._tasks:
            passes.were_zeroed(id(self._known_as), self._tasks, left, is_other=at != self._at)
            self._tasks = []
        self._tasks.append(torch._C._current_graph_task_id())
        self._at = at

    @property
    def is_assigned(self) -> bool:
        """Whether `.grad` is another tensor than the one that the last pass left."""
        return self._tensor is not None and self._tensor[0]() is not self._parameter.grad

    def _part(self, gradient: Tensor) -> Tensor:
        """Return this rank's part of a gradient."""
        return gradient_part(gradient, self._parameter)

    def _untouched(self, held: Tensor) -> bool:
        """Return whether this is the tensor that the last pass left, without writes since."""
        if self._tensor is None:
            return False
        left, version = self._tensor
        return left() is held and held._version == version
