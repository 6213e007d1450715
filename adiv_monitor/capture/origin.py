"""What in a forward pass is made of the model alone, and of which parameters: all else is data."""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from adiv_monitor.capture.pieces import Pieces, Source


class Origin:
    """Follows parameters, buffers and constants through the functions of one step.

    Args:
        model: the model.
        trained: the parameters to measure.
    """

    def __init__(self, model: nn.Module, trained: Iterable[nn.Parameter]) -> None:
        self.pieces = Pieces()
        self._trained = {id(p): p for p in trained}
        self._held: dict[int, Tensor] = {id(p): p for p in model.parameters()}
        self._held |= {id(buffer): buffer for buffer in model.buffers()}
        self._made: dict[int, weakref.ref[Tensor]] = {}

    def of_model(self, value: object) -> bool:
        """Whether it is no data: a parameter, a buffer, a constant, or made of these alone."""
        if id(value) in self._held or not isinstance(value, Tensor):
            return True
        made = self._made.get(id(value))
        if made is not None and made() is value:
            return True
        base = value._base
        return base is not None and self.of_model(base)

    def is_trained(self, value: Tensor) -> bool:
        """Whether it depends on a parameter to measure, and on no data."""
        return self.source(value) is not None

    def source(self, value: Tensor | None) -> Source | None:
        """Of which parameters it is made, and how; None if of none that are measured."""
        if value is None or not value.requires_grad:
            return None
        parameter = self._trained.get(id(value))
        if parameter is None and value._base is not None:
            parameter = self._trained.get(id(value._base))
        return None if parameter is None else self.pieces.source(value, parameter)

    def remember(self, result: object) -> None:
        """What a function made of the model alone."""
        for tensor in tensors_in(result):
            if id(tensor) not in self._held:
                self._made[id(tensor)] = weakref.ref(tensor)

    def forget(self, value: object) -> None:
        """Data was written into a tensor, and into what it is a view of."""
        if isinstance(value, Tensor):
            for written in (value, value._base):
                self._made.pop(id(written), None)


def tensors_in(*values: Any) -> list[Tensor]:
    """The tensors among values, and in their lists."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(*value)
        elif isinstance(value, dict):
            found += tensors_in(*value.values())
    return found
