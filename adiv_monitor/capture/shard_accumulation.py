"""What happens to the gradient of a sharded parameter, which is whole only within a backward pass.

A pass leaves it on the parameter that stands in for the sharded one; then it is averaged over the
ranks, and each adds its part to the `.grad` of the sharded parameter. So what all passes of a
step have left is nowhere as a whole: it is added up here, entry by entry, of some entries.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from adiv_monitor.capture.accumulation import Accumulation, Owner
from adiv_monitor.capture.updates import sampled_entries
from adiv_monitor.capture.weights.shards import part_of
from adiv_monitor.capture.world import world_size
from adiv_monitor.features.rows import to_compute_dtype
from adiv_monitor.maths import dots


class ShardAccumulation(Accumulation):
    """Follows a sharded parameter's gradient through the backward passes of a step.

    Args:
        parameter: the sharded one.
        stand_in: what is used in its place.
        owner: knows the layers.
        waiting: whether earlier passes left some that has not come to the sharded one.
    """

    def __init__(
        self,
        parameter: nn.Parameter,
        stand_in: nn.Parameter,
        owner: Owner,
        waiting: Callable[[], bool],
    ) -> None:
        super().__init__(stand_in, owner, parameter)
        self._sharded = parameter
        self._is_waiting = waiting
        self._arrived: tuple[int, Tensor] | None = None  # graph task, some entries
        self._waits = False  # what earlier passes left was not averaged yet

    def left(self) -> Tensor | None:
        """Some of its entries; None: unknown."""
        return self._entries

    @property
    def held(self) -> Tensor | None:
        """The gradient as far as the optimizer is to see it here."""
        return self._sharded.grad

    def _before(self, gradient: Tensor) -> None:
        """Just before a gradient is accumulated, or returned by `autograd.grad`."""
        super()._before(gradient)
        entries = to_compute_dtype(sampled_entries(self._part(gradient))).reshape(-1).clone()
        entries = self._if_alike(entries, gradient)
        self._arrived = torch._C._current_graph_task_id(), entries
        self._waits = self._parameter.grad is not None or self._is_waiting()

    def _after(self, parameter: nn.Parameter) -> None:
        """A gradient was accumulated."""
        if self._arrived is None or self._arrived[0] != torch._C._current_graph_task_id():
            return
        self._owner.accumulates()
        entries, self._arrived = self._arrived[1], None
        held = self._sharded.grad
        is_kept = self._waits or (held is not None and not self._owner.shards_were_zeroed())
        if not is_kept:
            self._entries = self.foreign = None
        elif self._entries is None and held is not None:
            # As far as it is here: ranks' own add up, and are divided by their number.
            self.foreign = dots.norm(part_of(held)) * world_size()
        for rows in self._owner.users(self._known_as):
            if not is_kept:
                rows.reset()
            rows.fold()
        self._entries = entries if self._entries is None else self._entries + entries


def is_zero(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether the gradients of all of these are zero, where there are any, as far as they are here.

    That of one alone may well be: of an embedding's part none of whose rows was looked up.
    """
    parts = [part_of(p.grad) for p in parameters if p.grad is not None]
    if not parts:
        return True
    return not bool(torch.stack(torch._foreach_norm(parts)).any())
