"""Weights that are shown to every sample: `weight.expand(batch, -1, -1)` and the like.

What becomes of one tells what it is. Where products take it and nothing else does, it is the weight
of a linear map. Else it is data from there on, with the parameter as an offset.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from adiv_monitor.capture.layer_rows import Call
from adiv_monitor.capture.weights.tape import whole_of
from adiv_monitor.features.uses import Use


@dataclass(eq=False)
class Repetition:
    """A weight that was repeated.

    Attributes:
        use: of the weight, as an offset.
        result: the repetitions.
        forward: the number of the forward in which they were made.
        known: whether it was seen what becomes of them.
        calls: of linear layers, whose weight it is so far.
    """

    use: Use
    result: Tensor
    forward: int
    known: bool = False
    calls: list[Call] = field(default_factory=list)

    def once(self, tensor: Tensor) -> Tensor:
        """The weight in place of the repetitions, or of a view of them: of size 1 where it is one.

        The tensor itself where that can't be had.
        """
        with torch.enable_grad(), torch._C.DisableTorchFunction():
            if tensor is self.result and tensor._base is None:
                weight = self.use.bias if self.use.weight is None else self.use.weight
                assert weight is not None
                return weight[(None,) * (tensor.dim() - weight.dim())]
            for dim, stride in enumerate(tensor.stride()):
                if stride == 0:
                    tensor = tensor.narrow(dim, 0, min(1, tensor.shape[dim]))
            return tensor


class Repetitions:
    """Those of the forward pass that runs whose parameter is not an offset so far."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Tensor, Repetition]] = {}

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._found)

    def add(self, repetition: Repetition) -> None:
        """A weight was repeated."""
        self._found[id(repetition.result)] = repetition.result, repetition

    def of(self, tensor: Tensor) -> Repetition | None:
        """What the tensor shows; None if it shows no repetition."""
        return self._found[id(tensor)][1] if id(tensor) in self._found else None

    def among(self, tensors: Iterable[Tensor]) -> list[Repetition]:
        """Those that are, or are shown by, any of these."""
        found = (self.of(tensor) for tensor in tensors)
        return list(dict.fromkeys(repetition for repetition in found if repetition is not None))

    def is_view(self, result: object, of: Repetition) -> bool:
        """Whether a function did no more than to show it otherwise; keeps that in mind."""
        if result is of.result:
            return True
        if not isinstance(result, Tensor) or whole_of(result) is not whole_of(of.result):
            return False
        if of.result._base is None or 0 in result.stride():
            self._found[id(result)] = result, of
        else:  # one of the repetitions is the weight itself
            of.known = True
        return True

    def drop(self, repetition: Repetition) -> None:
        """It is an offset."""
        self._found = {k: found for k, found in self._found.items() if found[1] is not repetition}

    def unknown(self, forward: int) -> list[Repetition]:
        """Those made in a forward of which nothing was seen to take them."""
        every = dict.fromkeys(repetition for _, repetition in self._found.values())
        return [x for x in every if x.forward == forward and not x.known]

    def clear(self) -> None:
        """The forward pass is over."""
        self._found.clear()


def replaced(value: Any, tensors: dict[int, Tensor]) -> Any:
    """Arguments with other tensors for those of these ids."""
    return tree_map_only(Tensor, lambda tensor: tensors.get(id(tensor), tensor), value)


def fits(use: Use, result: Tensor) -> bool:
    """Whether the rows of a use have an entry for each of its weight's outputs."""
    assert use.weight is not None
    with torch.no_grad():
        return use.shaped(use.weight).shape[-2] == use.layout(result).shape[-1]
