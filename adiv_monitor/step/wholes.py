"""Sharded parameters' gradients and updates, made whole, one parameter at a time.

What a step does to a row takes all of the gradient and of the update. To put them together is a
collective: a process that doesn't come would keep the others waiting for ever. So all agree first,
through the store by which they met (`Exchange.agree`): either all come to it, or none. What fails
in one of them after that keeps it from no collective that was agreed on (`Wholes.settle`).
"""

import math
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from adiv_monitor.capture.selection import Layer
from adiv_monitor.capture.updates import ParameterSteps, some
from adiv_monitor.capture.weights.pieces import Parts, gradient
from adiv_monitor.capture.weights.shards import is_shard, part_of, sharded_as
from adiv_monitor.features.rows import exact, exact_type

# Whether all processes have come to the same point, of this name.
Agree = Callable[[str], bool]
WHY_NOT = (
    "its parameters are spread over the processes, which did not all come to put them together (a "
    "process without a monitor, that skipped the step or failed?)"
)


class Wholes:
    """Makes them whole around one step.

    Args:
        parameters: those that are measured, the same in all processes.
        agree: asks the other processes.

    Attributes:
        come: all processes have come to make the gradients whole.
        entries: some entries of the gradient, by id of the parameter.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], agree: Agree) -> None:
        self._sharded = [p for p in parameters if is_shard(p)]
        self._agree = agree
        self._reached: list[nn.Parameter] = []  # have a gradient: all processes', or none's
        self._before: dict[int, Tensor] = {}
        self.come = False
        self._wholes: dict[int, Tensor] = {}
        self._owed: deque[nn.Parameter] = deque()  # of which wholes are to be made yet
        self._given: set[Layer] = set()
        self.entries: dict[int, Tensor] = {}

    def gradients(self, steps: ParameterSteps, wanted: Collection[int], *, updates: bool) -> bool:
        """Whether gradients can be made whole; what is not in `steps` is kept for the update.

        Args:
            steps: has copies of parameters.
            wanted: ids of the parameters whose gradients are.
            updates: an optimizer step follows.
        """
        self._reached = [p for p in self._sharded if p.grad is not None and id(p) in wanted]
        known = [p for p in self._reached if updates and steps.before(p) is None]
        self._before = {id(p): part_of(p).clone() for p in known}
        self.entries.clear()
        self._owed.clear()
        self.come = self._all_come("gradient")
        return self.come

    def updates(self) -> bool:
        """Whether updates can be."""
        return self.come and self._all_come("update")

    def _all_come(self, point: str) -> bool:
        if not self._reached:
            return False
        largest = max(self._reached, key=Tensor.numel)
        # A process without room for it must not find out when the others wait.
        torch.empty(2 * largest.numel(), dtype=exact_type(largest), device=largest.device)
        reached = set(map(id, self._reached))
        which = [i for i, p in enumerate(self._sharded) if id(p) in reached]
        agreed = self._agree(f"{point} of {len(which)} {zlib.crc32(repr(which).encode()):08x}")
        if agreed:
            self._owed.extend(self._reached)
        return agreed

    def settle(self) -> None:
        """Come to what all have agreed on, where something has failed here; with no numbers."""
        while self._owed:
            parameter = self._owed.popleft()
            part = part_of(parameter)
            nothing = torch.full_like(part, math.nan, dtype=exact_type(part))
            sharded_as(nothing, parameter).full_tensor()
        self._wholes.clear()

    def of_gradients(self, layers: Sequence[Layer]) -> Iterator[tuple[Layer, Parts]]:
        """Layers with γ of their pieces, as the parameters come; those without one don't."""
        for parameter, whole in self._made(gradient):
            self.entries[id(parameter)] = exact(some(whole)).reshape(-1).clone()
            yield from self._ready(layers)
        self._wholes.clear()

    def of_updates(
        self, layers: Sequence[Layer], steps: ParameterSteps
    ) -> Iterator[tuple[Layer, Parts]]:
        """Layers with what the step took away from their pieces, likewise."""

        def taken(parameter: nn.Parameter) -> Tensor:
            kept = self._before.pop(id(parameter), None)
            before = steps.before(parameter) if kept is None else kept
            assert before is not None
            return exact(before) - exact(part_of(parameter))

        for _ in self._made(taken):
            yield from self._ready(layers)
        self._wholes.clear()

    def _made(
        self, part: Callable[[nn.Parameter], Tensor]
    ) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Every parameter with the whole of what this process has a part of."""
        self._given = set()
        while self._owed:
            parameter = self._owed[0]
            sharded = sharded_as(exact(part(parameter)).contiguous(), parameter)
            self._owed.popleft()  # right before: whatever is still owed was not begun
            whole = sharded.full_tensor().detach()
            self._wholes[id(parameter)] = whole
            yield parameter, whole

    def _ready(self, layers: Sequence[Layer]) -> Iterator[tuple[Layer, Parts]]:
        """The layers all of whose parameters have come; what no other needs is let go."""
        for layer in layers:
            if layer in self._given or any(id(p) not in self._wholes for p in spread(layer)):
                continue
            self._given.add(layer)
            pieces = [piece for piece in layer.pieces if is_shard(piece.parameter)]
            yield layer, {x.key: x.of(self._wholes[id(x.parameter)]) for x in pieces}
        wanted = {id(p) for x in layers if x not in self._given for p in spread(x)}
        self._wholes = {key: whole for key, whole in self._wholes.items() if key in wanted}


def spread(layer: Layer) -> Sequence[nn.Parameter]:
    """The parameters of a layer of which each process holds a part."""
    return [parameter for parameter in layer.parameters if is_shard(parameter)]
