"""Tracks the gradient of a sharded parameter, which is unsharded only within a backward pass.

A pass leaves the gradient on the unsharded parameter. Then it is averaged over the ranks, and each
rank adds its part to the `.grad` of the sharded parameter. The sum over all passes of a step
therefore exists nowhere unsharded: this module adds it up for sampled entries.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from adiv_monitor.capture.accumulation import Accumulation, Owner
from adiv_monitor.capture.entries import sampled_entries
from adiv_monitor.capture.weights.shards import part_of
from adiv_monitor.capture.world import world_size
from adiv_monitor.features.rows import to_compute_dtype
from adiv_monitor.maths import dots


class ShardAccumulation(Accumulation):
    """Follows a sharded parameter's gradient through the backward passes of a step.

    Args:
        parameter: the sharded parameter.
        stand_in: the unsharded parameter that is used in its place.
        owner: the owner, which knows the layers.
        waiting: whether a gradient of earlier passes has not reached the sharded parameter yet.
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
        self._arrived: tuple[int, Tensor] | None = None  # graph task, sampled entries
        self._waits = False  # whether a gradient of earlier passes was not averaged yet

    def left(self) -> Tensor | None:
        """Return sampled entries of the gradient that backward left; None: unknown."""
        return self._entries

    @property
    def held(self) -> Tensor | None:
        """The gradient that the optimizer gets on this rank."""
        return self._sharded.grad

    def _before(self, gradient: Tensor) -> None:
        """Inspect a gradient before it is accumulated, or returned by `autograd.grad`."""
        super()._before(gradient)
        entries = to_compute_dtype(sampled_entries(self._part(gradient))).reshape(-1).clone()
        self._arrived = torch._C._current_graph_task_id(), entries
        self._waits = self._parameter.grad is not None or self._is_waiting()

    def _after(self, parameter: nn.Parameter) -> None:
        """Update the rows after a gradient was accumulated."""
        if self._arrived is None or self._arrived[0] != torch._C._current_graph_task_id():
            return
        self._owner.accumulates()
        entries, self._arrived = self._arrived[1], None
        held = self._sharded.grad
        is_kept = self._waits or (held is not None and not self._owner.shards_were_zeroed())
        if not is_kept:
            self._entries = self.foreign = None
        elif self._entries is None and held is not None:
            # This rank's part. The ranks' gradients were summed and divided by their number.
            self.foreign = dots.norm(part_of(held)) * world_size()
        self._count_pass(self._sharded, None, zeroed=not is_kept)
        for rows in self._owner.users(self._known_as):
            if not is_kept:
                rows.reset()
            rows.fold()
        self._entries = entries if self._entries is None else self._entries + entries


def is_zero(parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether this rank's parts of all gradients that exist are zero.

    The part of a single parameter may well be zero: an embedding's part without any used row.
    """
    parts = [part_of(p.grad) for p in parameters if p.grad is not None]
    if not parts:
        return True
    return not bool(torch.stack(torch._foreach_norm(parts)).any())
