"""All-gathered gradients and updates of sharded parameters, one parameter at a time.

The effect of a step on a row depends on the complete gradient and update. A rank that does not
participate in an all-gather would keep the others waiting forever. So all ranks first agree on it
through the process group's store, and a rank that fails after that still participates.
"""

import math
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from adiv_monitor.capture.selection import Layer, Selection
from adiv_monitor.capture.weights.pieces import Parts, gradient
from adiv_monitor.capture.weights.shards import is_shard, part_of, sharded_as
from adiv_monitor.features.rows import compute_dtype, to_compute_dtype
from adiv_monitor.step.parameter_steps import ParameterSteps

WHY_NOT = (
    "its parameters are sharded, and not all ranks took part in gathering them (is there a rank "
    "without a monitor, or one that skipped the step or failed?)"
)


class UnshardedParameters:
    """All-gather of sharded parameters' gradients and updates in one step.

    Args:
        selection: the measured parameters, the same in all ranks.
        agree: returns whether all ranks participate in the point of a name, after waiting for them.

    Attributes:
        all_participate: all ranks participate in the all-gather of the gradients.
    """

    def __init__(self, selection: Selection, agree: Callable[[str], bool]) -> None:
        self._sharded = selection.shards
        self._named = selection.names
        self._agree = agree
        # Of all-gathers that were agreed on and have not begun, tensors with the parts' placement.
        self._pending: deque[Tensor] = deque()
        self._reached: list[nn.Parameter] = []  # with a gradient, in all ranks or in none
        self._before: dict[int, Tensor] = {}
        self.all_participate = False
        self._unsharded: dict[int, Tensor] = {}
        self._given: set[Layer] = set()

    @property
    def has_shards(self) -> bool:
        """Whether any measured parameter is sharded."""
        return bool(self._sharded)

    def gradients(self, wanted: Collection[int]) -> bool:
        """Agree on gathering the gradients; return whether all ranks agree.

        Args:
            wanted: ids of the parameters whose gradients are needed.
        """
        self._reached = [p for p in self._sharded if p.grad is not None and id(p) in wanted]
        self._before.clear()
        self._pending.clear()
        self.all_participate = self._agree_on("gradient", self._reached)
        return self.all_participate

    def keep(self, steps: ParameterSteps) -> None:
        """Copy the parameters of which `steps` has no copy, before an optimizer step."""
        known = [p for p in self._reached if steps.before(p) is None]
        self._before = {id(p): part_of(p).clone() for p in known}

    def updates(self) -> bool:
        """Agree on gathering the updates; return whether all ranks participate."""
        return self.all_participate and self._agree_on("update", self._reached)

    def _agree_on(self, point: str, pending: Sequence[Tensor]) -> bool:
        if not self._reached:
            return False
        largest = max(self._reached, key=Tensor.numel)
        # Fail now if memory is short, not when the other ranks already wait.
        torch.empty(2 * largest.numel(), dtype=compute_dtype(largest), device=largest.device)
        # All ranks must agree on the same parameters to measure, and the same tensors to gather.
        which = [self._named[id(p)] for p in self._reached]
        meant = repr((self._named.values(), which, [(t.shape, t.placements) for t in pending]))  # type: ignore[attr-defined]
        agreed = self._agree(f"{point} of {len(which)} {zlib.crc32(meant.encode()):08x}")
        if agreed:
            self._pending.extend(pending)
        return agreed

    def settle(self) -> None:
        """Participate in all pending collectives with NaN, after a failure in this rank."""
        while self._pending:
            part = part_of(self._pending[0])
            self._whole(torch.full_like(part, math.nan, dtype=compute_dtype(part)))
        self._unsharded.clear()

    def _whole(self, part: Tensor) -> Tensor:
        """Perform the next pending collective, and return the unsharded tensor."""
        sharded = sharded_as(to_compute_dtype(part).contiguous(), self._pending[0])
        self._pending.popleft()  # right before the collective: all that is pending has not begun
        whole: Tensor = sharded.full_tensor().detach()
        return whole

    def of_gradients(self, layers: Sequence[Layer]) -> Iterator[tuple[Layer, Parts]]:
        """Yield layers with γ of their pieces, as soon as their parameters are gathered."""
        for _ in self._made(gradient):
            yield from self._ready(layers)
        self._unsharded.clear()

    def of_updates(
        self, layers: Sequence[Layer], steps: ParameterSteps
    ) -> Iterator[tuple[Layer, Parts]]:
        """Yield layers with the negative update of their pieces, once these are gathered."""

        def taken(parameter: nn.Parameter) -> Tensor:
            before = self._before.pop(id(parameter), None)
            if before is not None:
                return to_compute_dtype(before) - to_compute_dtype(part_of(parameter))
            taken = steps.update_of(parameter)
            assert taken is not None
            return taken

        for _ in self._made(taken):
            yield from self._ready(layers)
        self._unsharded.clear()

    def _made(
        self, part: Callable[[nn.Parameter], Tensor]
    ) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield every parameter with the all-gathered tensor; `part` returns this rank's part."""
        self._given = set()
        for parameter in self._reached:
            whole = self._whole(part(parameter))
            self._unsharded[id(parameter)] = whole
            yield parameter, whole

    def _ready(self, layers: Sequence[Layer]) -> Iterator[tuple[Layer, Parts]]:
        """Yield layers whose parameters are all gathered; release tensors of no more use."""
        for layer in layers:
            if layer in self._given or any(id(p) not in self._unsharded for p in spread(layer)):
                continue
            self._given.add(layer)
            pieces = [piece for piece in layer.pieces if is_shard(piece.parameter)]
            yield layer, {x.key: x.of(self._unsharded[id(x.parameter)]) for x in pieces}
        wanted = {id(p) for x in layers if x not in self._given for p in spread(x)}
        self._unsharded = {key: whole for key, whole in self._unsharded.items() if key in wanted}


def spread(layer: Layer) -> Sequence[nn.Parameter]:
    """Return the sharded parameters of a layer."""
    return [parameter for parameter in layer.parameters if is_shard(parameter)]
