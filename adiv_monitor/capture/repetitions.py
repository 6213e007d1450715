"""Weights that are repeated for every sample, as by `weight.expand(batch, -1, -1)`.

The functions that take a repetition determine its role. If only products take it, one copy per row,
it is the weight of a linear map or a gain. If a function takes it as a weight in which copies lie
within a row (a kernel for all channels), no rule describes the use. Otherwise it counts as data
from then on, with the parameter as an offset.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
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
from adiv_monitor.capture.whole_modules.without_rule import ParametersWithoutRule
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

    @property
    def weight(self) -> Tensor:
        """The weight that is repeated."""
        weight = self.use.bias if self.use.weight is None else self.use.weight
        assert weight is not None
        return weight

    def once(self, tensor: Tensor) -> Tensor:
        """Return the weight with size 1 in every dimension that the tensor repeats.

        The tensor is a repetition or a view of one. If it has no repeated dimension, return it
        unchanged.
        """
        with torch.enable_grad(), torch._C.DisableTorchFunction():
            if tensor is self.result and tensor._base is None:
                return self.weight[(None,) * (tensor.dim() - self.weight.dim())]
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
        without_rule: records the weights whose use no rule describes.
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
        without_rule: ParametersWithoutRule,
        takes: Takes,
        noting: Noting,
    ) -> None:
        self._forwards = forwards
        self._layers = layers
        self._provenance = provenance
        self._without_rule = without_rule
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
        settled = self.of(repetition.result) is None  # by functions that this one called
        if settled or self.is_view(result, repetition):
            return
        if not self._is_weight(repetition, function, args, kwargs, result):
            self.is_offset(repetition)

    def _is_weight(
        self,
        repetition: Repetition,
        function: Function,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> bool:
        """Pass on the use of a repeated weight. Return False if the function takes it as data."""
        shown = [t for t in tensors_in(args, kwargs) if self.of(t) is repetition]
        if len(shown) != 1 or not isinstance(result, Tensor) or not trains(result):
            return False
        of_model, name = self._provenance.of_model, name_of(function)
        with self._noted(repetition.weight), without_autocast(result):
            copies = shown[0].detach().requires_grad_()
            call = FunctionCall(result, lambda t: t is copies or of_model(t), self._forwards.inside)
            of_copies = _used(name, call, (args, kwargs), shown[0], copies)
            if not of_copies:
                return False
            once = repetition.once(shown[0])
            found = _used(name, call, (args, kwargs), shown[0], once)
            is_one = len(found) == 1 and found[0].weight is once
            is_known = is_one and self._provenance.is_trained(once)
            if not is_known or not _fits(found[0], of_copies[0], result):
                self._leave(repetition, name, result)
                return True
            noted = self._takes.use(found[0], result)
            repetition.calls += [] if noted is None else [noted]
            repetition.known = True
        return True

    def _leave(self, repetition: Repetition, name: str, result: Tensor) -> None:
        """Leave a weight without a rule: a function takes copies that are not one per sample."""
        self._withdraw(repetition)
        keys = self._provenance.parameters_of(repetition.weight)
        self._without_rule.leave(keys, f"torch's {name} with copies of it", [result])

    def _withdraw(self, repetition: Repetition) -> None:
        """Forget a repetition, and withdraw the calls that took it as a weight."""
        self.shown = {k: found for k, found in self.shown.items() if found[1] is not repetition}
        self._layers.withdraw(repetition.calls)

    def is_offset(self, repetition: Repetition) -> None:
        """Take the repetition as an offset, and withdraw the calls that took it as a weight."""
        self._withdraw(repetition)
        with self._noted(repetition.weight), without_autocast(repetition.result):
            self._takes.use(repetition.use, repetition.result)

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


def _used(name: str, call: FunctionCall, given: Any, copies: Tensor, by: Tensor) -> Sequence[Use]:
    """Return the uses of a tensor that replaces copies, other than as an offset."""
    args, kwargs = tree_map_only(Tensor, lambda t: by if t is copies else t, given)
    uses = uses_in(name, call, args, kwargs)
    return [use for use in uses if use.kind != "offset" and (use.weight is by or use.bias is by)]


def _fits(use: Use, of_copies: Use, result: Tensor) -> bool:
    """Return whether rows use the weight once as they use its copies: none is within the weight."""
    assert use.weight is not None
    assert of_copies.weight is not None
    if use.kind == "gain":
        return use.bias is None and use.weight.numel() == use.layout(result).shape[-1]
    if use.kind != "linear":
        return False
    once, copies = use.shaped(use.weight).shape, of_copies.shaped(of_copies.weight).shape
    return once[-2] == use.layout(result).shape[-1] and once[-2:] == copies[-2:]
