"""What happens to a parameter's `.grad`: accumulated by which pass, multiplied by what since.

The rows of a step are in the units of the gradient that a backward pass left; the optimizer may
see that gradient clipped, unscaled, or zeroed and made anew. Only what really is accumulated
counts: `torch.autograd.grad` runs a parameter's tensor hooks too, but not its post-accumulate
hooks.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from adiv_monitor.capture.gradient_shares import GradientShare
from adiv_monitor.capture.guard import call_all
from adiv_monitor.capture.hook import ON_ACCUMULATION, ON_GRADIENT, take_off
from adiv_monitor.capture.updates import is_small, sampled_entries
from adiv_monitor.capture.weights.shards import gradient_part, is_sum, lies_apart, part_of
from adiv_monitor.capture.world import world_size
from adiv_monitor.maths import dots
from adiv_monitor.rerun.thread import surely


class Accumulated(Protocol):
    """What is to follow the parameter's gradient: rows of a layer, or what its calls hand on."""

    def settle(self) -> None:
        """A gradient has come."""

    def reset(self) -> None:
        """What had been accumulated is gone."""

    def rescale(self, factor: Tensor) -> None:
        """What had been accumulated was multiplied by a factor."""

    def rescale_arrived(self, factor: Tensor) -> None:
        """What is about to be accumulated was multiplied by a factor."""

    def fold(self) -> None:
        """A gradient is accumulated."""


class Owner(Protocol):
    """Whose accumulations these are: it knows the layers."""

    def users(self, parameter: nn.Parameter) -> Sequence[Accumulated]:
        """What follows a parameter's gradient."""

    def was_zeroed(self, now: Tensor, left: Tensor) -> bool:
        """Whether it was, since the last pass left it: by ‖.grad‖ now, and as that left it."""

    def shards_were_zeroed(self) -> bool:
        """Whether those of all sharded parameters were."""

    def accumulates(self) -> None:
        """A pass accumulates a gradient."""

    def hook(self, parameter: nn.Parameter, function: Callable[..., None]) -> Callable[..., None]:
        """A hook on a parameter of which this is the body."""


def _goes_first(handle: RemovableHandle) -> None:
    """Torch runs hooks in the order in which they came into the dictionary."""
    hooks = handle.hooks_dict_ref()
    if hooks is not None and len(hooks) > 1:
        others = {key: hook for key, hook in hooks.items() if key != handle.id}
        surely(_put_behind, hooks, others)


def _put_behind(hooks: dict[int, Any], others: dict[int, Any]) -> None:
    for key in others:
        hooks.pop(key, None)
    hooks.update(others)


def _ratio(now: Tensor, before: Tensor) -> Tensor:
    """By what a gradient was multiplied; 1 where nothing was there to be multiplied."""
    return torch.where(before == 0, 1.0, now / before)


class Accumulation:
    """Follows one parameter's `.grad` through the backward passes of a step.

    Args:
        parameter: the parameter.
        owner: knows the layers, and whose parameter it is.
        of: the parameter that it is known as; None: as itself.
    """

    def __init__(
        self, parameter: nn.Parameter, owner: Owner, of: nn.Parameter | None = None
    ) -> None:
        self._parameter = parameter
        self._owner = owner
        self._known_as = parameter if of is None else of
        self._left: Tensor | None = None  # .grad as the last pass left it, or norms of its parts
        self._left_norm: Tensor | None = None  # and its norm
        self._entries: Tensor | None = None  # some of its entries
        # Before a pass: graph task, ‖.grad‖, whether something wrote to it since the last one.
        self._held: tuple[int, Tensor | None, bool] = (-1, None, False)
        self._tensor: tuple[weakref.ref[Tensor], int] | None = None  # as the last pass left it
        self._arriving: tuple[weakref.ref[Tensor], int] | None = None
        self._raw: Tensor | None = None  # ‖gradient‖ before hooks of the user's
        self.is_partial_sum = False  # ranks have terms of what passes leave
        self.foreign: Tensor | None = None  # ‖.grad‖ that was there before any row was seen
        self._ended: Tensor | None = None  # some entries of `.grad` when the last pass was over
        self._hooks: list[tuple[Callable[..., None], Sequence[str]]] = []

    def attach(self) -> None:
        """Put the hooks on; whatever comes of that, `remove` takes them off."""
        parameter = self._parameter
        on_gradient, after = parameter.register_hook, parameter.register_post_accumulate_grad_hook
        if parameter._backward_hooks:  # they may change the gradient: look at it before the first
            _goes_first(self._put_on(on_gradient, ON_GRADIENT, self._before_hooks))
        self._put_on(on_gradient, ON_GRADIENT, self._before)
        _goes_first(self._put_on(after, ON_ACCUMULATION, self._after))

    def _put_on(
        self, register: Callable[..., Any], where: Sequence[str], body: Callable[..., None]
    ) -> RemovableHandle:
        hook = self._owner.hook(self._known_as, body)
        self._hooks.append((hook, where))  # known before it is on, which may be interrupted
        handle: RemovableHandle = register(hook)
        return handle

    def remove(self) -> None:
        """Take the hooks off."""
        call_all(*(partial(take_off, self._parameter, *hook) for hook in self._hooks))

    def left(self) -> Tensor | None:
        """As long as the gradient that backward left: itself, or norms of its parts; None: unknown.

        Of the gradient that was put there by hand, and came from `autograd.grad`, the same.
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
        """Some entries of the gradient that backward left; None: not kept."""
        return self._entries

    @property
    def held(self) -> Tensor | None:
        """The gradient as far as the optimizer is to see it here."""
        return self._parameter.grad

    def pass_ended(self, held: Tensor) -> None:
        """A backward pass is over, and so is what ranks do to gradients in it.

        Args:
            held: the gradient now.
        """
        self._ended = sampled_entries(part_of(held)).flatten().clone()

    def since_ended(self) -> Tensor | None:
        """Some entries of the gradient, now and when the last pass was over; None: unknown."""
        if self._ended is None or self.held is None:
            return None
        now = sampled_entries(part_of(self.held)).flatten()
        return torch.stack([now, self._ended]) if now.shape == self._ended.shape else None

    def _before_hooks(self, gradient: Tensor) -> None:
        self._raw = dots.norm(self._part(gradient))

    def _before(self, gradient: Tensor) -> None:
        """Just before a gradient is accumulated, or returned by `autograd.grad`."""
        for rows in self._owner.users(self._known_as):
            rows.settle()
        self.is_partial_sum = is_sum(gradient)
        held = self._parameter.grad
        norm = None if held is None else dots.norm(self._part(held))
        touched = held is not None and not self._untouched(held)
        self._held = torch._C._current_graph_task_id(), norm, touched
        self._arriving = weakref.ref(gradient), gradient._version
        if self._raw is not None:  # the rows have what came before the user's hooks
            factor = _ratio(dots.norm(self._part(gradient)), self._raw)
            for rows in self._owner.users(self._known_as):
                rows.rescale_arrived(factor)
            self._raw = None

    def _after(self, parameter: nn.Parameter) -> None:
        """A gradient was accumulated."""
        if parameter.grad is None:  # another hook came first, and took it away
            return
        self._owner.accumulates()
        task, held, touched = self._held
        left = factor = None
        if task != torch._C._current_graph_task_id():
            held = None
        if held is not None and self._left_norm is not None:
            # Only where something wrote to it, as far as torch notes that, is it worth waiting for
            # the device.
            left = self._left_norm
            if (touched or held.is_cpu) and self._owner.was_zeroed(held, left):
                held = None
            elif world_size() == 1 and not (held.is_cpu and held == left):
                factor = _ratio(held, left)  # of several ranks it is what all of them left
        elif held is not None:
            self.foreign = held
        for rows in self._owner.users(self._known_as):
            if held is None:
                rows.reset()
            elif factor is not None:
                rows.rescale(factor)
            rows.fold()
        if held is None:
            self.foreign = None
        grad = self._part(parameter.grad)
        parts = dots.norms(grad)
        self._left_norm = torch.linalg.vector_norm(parts)
        if is_small(grad):
            self._left = grad.clone()
            entries: Tensor | None = sampled_entries(self._left).reshape(-1)
        else:
            self._left = parts
            entries = None if self._is_followed else sampled_entries(grad).clone().reshape(-1)
        self._entries = None if entries is None else self._if_alike(entries, parameter.grad)
        self._tensor = weakref.ref(parameter.grad), parameter.grad._version

    @property
    def _is_followed(self) -> bool:
        """Whether what calls hand on will tell all that some entries could."""
        users = self._owner.users(self._known_as)
        followed = (user for user in users if isinstance(user, GradientShare))
        known = (user.is_known and user.parameter is self._parameter for user in followed)
        return world_size() == 1 and any(known)

    def _part(self, gradient: Tensor) -> Tensor:
        """As far as this rank has it."""
        return gradient_part(gradient, self._parameter)

    def _if_alike(self, entries: Tensor, gradient: Tensor) -> Tensor:
        """Some entries of a gradient; NaN where others of it are here than of the parameter."""
        is_other = lies_apart(gradient, self._parameter) and not is_sum(gradient)
        return entries * math.nan if is_other else entries

    def _untouched(self, held: Tensor) -> bool:
        """Whether this is the tensor that the last pass left, and nothing has written to it."""
        if self._tensor is None:
            return False
        left, version = self._tensor
        return left() is held and held._version == version
