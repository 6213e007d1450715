"""Weights that are repeated for every sample, as by `weight.expand(batch, -1, -1)`.

The functions that take a repetition determine its role. If only products take it, it is the weight
of a linear map. Otherwise it counts as data from then on, with the parameter as an offset.
"""

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from adiv_layers.autocast import without_autocast
from torch import Tensor
from torch.utils._pytree import tree_map_only

from adiv_monitor.capture.forwards import Forwards, Function
from adiv_monitor.capture.hook import trains
from adiv_monitor.capture.layer_rows import Call
from adiv_monitor.capture.layers import Layers
from adiv_monitor.capture.takes import Takes
from adiv_monitor.capture.weights.provenance import Provenance
from adiv_monitor.capture.weights.tape import whole_of
from adiv_monitor.features.uses import FunctionCall, Use, name_of, uses_in
from adiv_monitor.rerun.nested import tensors_in


@dataclass(eq=False)
class Repetition:
    """A repeated weight.

    Attributes:
        use: the use of the weight as an offset.
        result: the repeated tensor.
        forward: the number of the forward call in which it was made.
        known: whether its role is known.
        calls: the calls of linear layers of which it is the weight so far.
    """

    use: Use
    result: Tensor
    forward: int
    known: bool = False
    calls: list[Call] = field(default_factory=list)

    def once(self, tensor: Tensor) -> Tensor:
        """Return the weight with size 1 in every dimension that the tensor repeats.

        The tensor is a repetition or a view of one. If it has no repeated dimension, return it
        unchanged.
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


Noting = Callable[[list[Tensor]], AbstractContextManager[object]]


class Repetitions:
    """The repetitions in the running forward pass that are not known to be offsets.

    Args:
        forwards: the running forward calls.
        layers: the layers.
        provenance: the provenance of tensors.
        takes: receives the uses.
        noting: (tensors) → the context in which uses of these tensors are passed on.

    Attributes:
        shown: id of a tensor → the tensor, which is a repetition or a view of one, and that
            repetition.
    """

    def __init__(
        self,
        forwards: Forwards,
        layers: Layers,
        provenance: Provenance,
        takes: Takes,
        noting: Noting,
    ) -> None:
        self._forwards = forwards
        self._layers = layers
        self._provenance = provenance
        self._takes = takes
        self._noting = weakref.WeakMethod(noting)  # its object holds this one
        self.shown: dict[int, tuple[Tensor, Repetition]] = {}

    def add(self, repetition: Repetition) -> None:
        """Add a repetition that was just made."""
        self.shown[id(repetition.result)] = repetition.result, repetition

    def of(self, tensor: Tensor) -> Repetition | None:
        """Return the repetition that a tensor is or views, or None."""
        return self.shown[id(tensor)][1] if id(tensor) in self.shown else None

    def among(self, tensors: Iterable[Tensor]) -> list[Repetition]:
        """Return the repetitions that any of the tensors is or views."""
        found = (self.of(tensor) for tensor in tensors)
        return list(dict.fromkeys(repetition for repetition in found if repetition is not None))

    def is_view(self, result: object, of: Repetition) -> bool:
        """Return whether a result is only a view of a repetition, and remember it if so."""
        if result is of.result:
            return True
        if not isinstance(result, Tensor) or whole_of(result) is not whole_of(of.result):
            return False
        if of.result._base is None or 0 in result.stride():
            self.shown[id(result)] = result, of
        else:  # the view selects one repetition, which is the weight itself
            of.known = True
        return True

    def went_into(
        self,
        repetition: Repetition,
        function: Function,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        """Determine a repetition's role from a function that was called with it."""
        if self.is_view(result, repetition):
            return
        if not self._is_linear(repetition, function, args, kwargs, result):
            self.is_offset(repetition)

    def _is_linear(
        self,
        repetition: Repetition,
        function: Function,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> bool:
        """Pass on the use of a repeated weight in a product. Return False if it is no product."""
        shown = [t for t in tensors_in(args, kwargs) if self.of(t) is repetition]
        if len(shown) != 1 or not isinstance(result, Tensor) or not trains(result):
            return False
        weight = repetition.once(shown[0])
        if not self._provenance.is_trained(weight):
            return False
        given, named = _replaced((args, kwargs), shown[0], weight)
        call = FunctionCall(result, self._provenance.of_model, self._forwards.inside)
        with self._noted(weight), without_autocast(result):
            uses = uses_in(name_of(function), call, given, named)
            found = [use for use in uses if use.weight is weight and use.kind == "linear"]
            if len(found) != 1 or not _fits(found[0], result):
                return False
            noted = self._takes.use(found[0], result)
            repetition.calls += [] if noted is None else [noted]
            repetition.known = True
        return True

    def is_offset(self, repetition: Repetition) -> None:
        """Take the repetition as an offset, and withdraw the calls that took it as a weight."""
        self.shown = {k: found for k, found in self.shown.items() if found[1] is not repetition}
        self._layers.withdraw(repetition.calls)
        use, result = repetition.use, repetition.result
        weight = use.bias if use.weight is None else use.weight
        assert weight is not None
        with self._noted(weight), without_autocast(result):
            self._takes.use(use, result)

    def _noted(self, weight: Tensor) -> AbstractContextManager[object]:
        noting = self._noting()
        assert noting is not None
        return noting([weight])

    def forward_ends(self, *, raised: bool) -> None:
        """Take unused repetitions as offsets when the module's forward that made them ends."""
        number = self._forwards.number
        every = dict.fromkeys(repetition for _, repetition in self.shown.values())
        for repetition in every:
            if repetition.forward == number and not repetition.known and not raised:
                self.is_offset(repetition)
        if self._forwards.is_outermost:
            self.shown.clear()


def _replaced(value: Any, tensor: Tensor, by: Tensor) -> Any:
    """Return the arguments with one tensor replaced by another."""
    return tree_map_only(Tensor, lambda given: by if given is tensor else given, value)


def _fits(use: Use, result: Tensor) -> bool:
    """Return whether a use's rows have one entry per output of its weight."""
    assert use.weight is not None
    return use.shaped(use.weight).shape[-2] == use.layout(result).shape[-1]
