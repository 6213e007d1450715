"""All-gathered gradients and updates of sharded parameters, one parameter at a time.

The effect of a step on a row depends on the complete gradient and update. A rank that does not
participate in an all-gather would keep the others waiting forever. So all ranks first agree on it
through the process group's store, and a rank that fails after that still participates.
"""

import math
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from adiv_monitor.capture.selection import Layer, Selection
from adiv_monitor.capture.weights.pieces import Parts, Piece
from adiv_monitor.capture.weights.shards import is_shard, part_of, sharded_as
from adiv_monitor.features.rows import compute_dtype, to_compute_dtype

WHY_NOT = (
    "its parameters are sharded, and not all ranks took part in gathering them (is there a rank "
    "without a monitor, or one that skipped the step or failed?)"
)


@dataclass(eq=False)
class UnshardedParameters:
    """All-gather of sharded parameters' gradients and updates in one step.

    Attributes:
        selection: the measured parameters, the same in all ranks.
        agree: returns whether all ranks participate in the point of a name, after waiting for them.
        all_participate: all ranks participate in the all-gather of the gradients.
    """

    selection: Selection
    agree: Callable[[str], bool]
    all_participate: bool = False
    # Of all-gathers that were agreed on and have not begun, tensors with the parts' placement.
    _pending: deque[Tensor] = field(default_factory=deque)
    _reached: list[nn.Parameter] = field(default_factory=list)  # with a gradient, in all or none

    def gradients(self, wanted: Collection[int]) -> None:
        """Agree on gathering the gradients.

        Args:
            wanted: ids of the parameters whose gradients are needed.
        """
        self._reached = [p for p in self.selection.shards if p.grad is not None and id(p) in wanted]
        self._pending.clear()
        self.all_participate = self._agree_on("gradient")

    def others(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return the parameters to gather of which none of these pieces is the whole, as pieces."""
        whole = {id(piece.parameter) for piece in pieces if piece.view is None}
        reached = self._reached if self.all_participate else ()
        return [Piece(p) for p in reached if id(p) not in whole]

    def updates(self) -> None:
        """Agree on gathering the updates."""
        if self.all_participate:
            self._agree_on("update")

    def _agree_on(self, point: str) -> bool:
        if not self._reached:
            return False
        largest = max(self._reached, key=Tensor.numel)
        # Fail now if memory is short, not when the other ranks already wait.
        torch.empty(2 * largest.numel(), dtype=compute_dtype(largest), device=largest.device)
        # All ranks must agree on the same parameters to measure, and the same tensors to gather.
        names = self.selection.names
        which = [(names[id(p)], p.shape, p.placements) for p in self._reached]  # type: ignore[attr-defined]
        meant = repr((names.values(), which))
        agreed = self.agree(f"{point} of {len(which)} {zlib.crc32(meant.encode()):08x}")
        if agreed:
            self._pending.extend(self._reached)
        return agreed

    def settle(self) -> None:
        """Participate in all pending collectives with NaN, after a failure in this rank."""
        while self._pending:
            part = part_of(self._pending[0])
            self._whole(torch.full_like(part, math.nan, dtype=compute_dtype(part)))

    def _whole(self, part: Tensor) -> Tensor:
        """Perform the next pending collective, and return the unsharded tensor."""
        sharded = sharded_as(to_compute_dtype(part).contiguous(), self._pending[0])
        self._pending.popleft()  # right before the collective: all that is pending has not begun
        whole: Tensor = sharded.full_tensor().detach()
        return whole

    def gathered(
        self, layers: Iterable[Layer], part: Callable[[nn.Parameter], Tensor]
    ) -> Iterator[tuple[Layer, Parts | None]]:
        """Yield layers with their all-gathered pieces, as soon as they are there.

        Layers without sharded parameters come first, those that can't be gathered last, with None.

        Args:
            layers: the layers.
            part: returns what this rank has of a parameter's tensor.
        """
        waiting = []
        for layer in layers:
            if self.selection.shards and spread(layer):
                waiting.append(layer)
            else:
                yield layer, {}
        whole: dict[int, Tensor] = {}
        for parameter in self._reached if self._pending else ():
            whole[id(parameter)] = self._whole(part(parameter))
            for layer in [x for x in waiting if all(id(p) in whole for p in spread(x))]:
                waiting.remove(layer)
                pieces = [piece for piece in layer.pieces if is_shard(piece.parameter)]
                yield layer, {x.key: x.of(whole[id(x.parameter)]) for x in pieces}
            wanted = {id(p) for layer in waiting for p in spread(layer)}
            whole = {key: of for key, of in whole.items() if key in wanted}
        yield from ((layer, None) for layer in waiting)


def spread(layer: Layer) -> Sequence[nn.Parameter]:
    """Return the sharded parameters of a layer."""
    return [parameter for parameter in layer.parameters if is_shard(parameter)]
