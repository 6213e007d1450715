"""Records the calls of functions that compute tensors from parameters alone.

A weight that a function gets is often not a parameter: 1 + p, W/σ(W), W + s·B A, or a clone that
was edited in place. The tape records the functions that computed it and their input tensors. It
keeps no results and no graph.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from adiv_monitor.capture.weights.pieces import Strides
from adiv_monitor.features.rows import compute_dtype
from adiv_monitor.features.uses import Refused
from adiv_monitor.rerun.nested import tensors_in
from adiv_monitor.rerun.randomness import Randomness

Function = Callable[..., Any]

_CASTS = ("to", "float", "double", "half", "bfloat16", "type", "type_as")
# These functions use only shape, dtype and device of a tensor.
_FORMS = ("zeros_like", "ones_like", "empty_like", "new_zeros", "new_ones", "new_empty")
_IN_PLACE = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__")


@dataclass(frozen=True, eq=False)
class Root:
    """A tensor with memory of its own, which others may be views of.

    Attributes:
        key: identifies the root.
        stride: its strides.
        parameter: the trained parameter, if the root is one.
        constant: its value, if it depended on no parameter when it was first passed to a call.
        version: the version of the constant's memory; every write increases it.
    """

    key: int
    stride: tuple[int, ...]
    parameter: nn.Parameter | None = None
    constant: Tensor | None = None
    version: int = 0


@dataclass(frozen=True)
class Ref:
    """A tensor that was passed to a call: a root, or a view of it."""

    root: Root
    strides: Strides | None = None

    def of(self, memory: Tensor) -> Tensor:
        """Return the same view of a tensor that stands for the root."""
        if self.strides is None:
            return memory
        size, stride, offset = self.strides.size, self.strides.stride, self.strides.offset
        return memory.as_strided(size, stride, memory.storage_offset() + offset)


@dataclass(frozen=True, eq=False)
class Recorded:
    """A call of a function.

    Attributes:
        number: its position in the order of calls.
        function: the function.
        name: the name of the function.
        args: its arguments, with a `Ref` for each tensor.
        kwargs: see args.
        reads: those `Ref`s.
        made: the new root of each result, in order; None: the result is a constant or a view.
        written: keys of the roots whose memory it wrote to.
        gradients: whether gradients were enabled.
        randomness: the state of the random numbers before the call, if it drew any.
        drawn_for: the dtype for which they were drawn.
    """

    number: int
    function: Function
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    reads: tuple[Ref, ...]
    made: tuple[Root | None, ...]
    written: frozenset[int]
    gradients: bool
    randomness: Randomness | None
    drawn_for: torch.dtype | None

    def again(self, tensor_of: Callable[[Ref], Tensor]) -> Any:
        """Make the call again with other tensors and the same random numbers."""

        def given(ref: Ref) -> Tensor:
            tensor = tensor_of(ref)
            coarse = self.drawn_for is not None and tensor.is_floating_point()
            return tensor.to(self.drawn_for) if coarse else tensor

        args, kwargs = tree_map_only(Ref, given, (self.args, dict(self.kwargs)))
        drawing = nullcontext() if self.randomness is None else self.randomness.again()
        with torch.set_grad_enabled(self.gradients), drawing:
            return self.function(*args, **kwargs)


@dataclass(frozen=True)
class PendingCall:
    """A call that is about to be made."""

    function: Function
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    gradients: bool
    given: Mapping[Ref, Tensor]
    versions: Mapping[Ref, int]
    randomness: Randomness


class Tape:
    """Records calls that compute tensors from parameters.

    Args:
        trained: the parameters to measure, by id.
        parameters: all parameters of the model; all may change before the step is measured.
        buffers: all buffers of the model, which may change too.
    """

    def __init__(
        self,
        trained: Mapping[int, nn.Parameter],
        parameters: Iterable[nn.Parameter],
        buffers: Iterable[Tensor],
    ) -> None:
        self._trained = trained
        self._buffers = {id(buffer) for buffer in buffers}
        # The optimizer writes to this memory.
        changing = (p for p in parameters if p.requires_grad and not is_lazy(p))
        self._changing = {memory_of(p) for p in changing}
        self._roots: dict[int, tuple[weakref.ref[Tensor], Root]] = {}
        self._touching: dict[int, list[Recorded]] = defaultdict(list)  # by root
        self._parameters: dict[int, frozenset[int]] = {}  # by root, ids
        self._ended: dict[int, str] = {}
        self._keys, self._numbers = count(), count()

    def parameters_of(self, tensor: Tensor) -> frozenset[int]:
        """Return ids of the trained parameters that the tensor was computed from."""
        root = self._known(whole_of(tensor))
        return frozenset() if root is None else self._parameters_of(root)

    def ended_in(self, parameter: Tensor) -> str | None:
        """Return the last recorded function that took a parameter; None: there is none."""
        return self._ended.get(id(parameter))

    def forget(self, tensor: Tensor) -> None:
        """Forget a tensor into whose memory data was written."""
        self._roots.pop(id(whole_of(tensor)), None)

    # --- recording -------------------------------------------------------------------------------

    def begin(
        self,
        function: Function,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        gradients: bool,
    ) -> PendingCall:
        """Prepare to record a call, all of whose tensors come from the model."""
        name = function.__name__
        given: dict[Ref, Tensor] = {}
        if name in _CASTS:
            args, kwargs = args[:1], {}

        def ref(tensor: Tensor) -> Ref:
            written = is_in_place(name) and tensor is args[0]
            found = self.ref(tensor, copies=written)
            given[found] = tensor
            return found

        refs, named = tree_map_only(Tensor, ref, (args, dict(kwargs)))
        versions = {found: tensor._version for found, tensor in given.items()}
        device = next(tensor.device for tensor in given.values() if tensor.requires_grad)
        randomness = Randomness([device])
        return PendingCall(function, name, refs, named, gradients, given, versions, randomness)

    def end(self, call: PendingCall, results: Iterable[Tensor]) -> None:
        """Record a call that wrote to a tensor or whose result depends on parameters.

        Args:
            call: the call.
            results: its results, unless they are data.
        """
        written = {r.root.key for r, t in call.given.items() if t._version != call.versions[r]}
        known = {id(whole_of(tensor)) for tensor in call.given.values()}
        results, made = list(results), []
        for tensor in results:
            made.append(None if id(whole_of(tensor)) in known else self._new(tensor))
            known.add(id(whole_of(tensor)))
        if not written and not any(made):
            self._let_go(call)
            return
        parameters = frozenset[int]().union(*(self._parameters_of(ref.root) for ref in call.given))
        drew = not call.randomness.is_still(call.randomness.now())
        function, args, kwargs = call.function, call.args, call.kwargs
        if call.name in _CASTS:
            (cast,) = results
            dtype = compute_dtype(cast) if cast.is_floating_point() else cast.dtype
            kwargs = {"dtype": dtype, "device": cast.device}
            function = _moved
        recorded = Recorded(
            number=next(self._numbers),
            function=function,
            name=call.name,
            args=args,
            kwargs=kwargs,
            reads=tuple(call.given),
            made=tuple(made),
            written=frozenset(written),
            gradients=call.gradients,
            randomness=call.randomness if drew else None,
            drawn_for=results[0].dtype if drew and results else None,
        )
        for key in {root.key for root in made if root is not None} | written:
            self._touching[key].append(recorded)
            self._parameters[key] = self._parameters.get(key, frozenset()) | parameters
        self._ended |= dict.fromkeys(parameters, call.name)

    def _let_go(self, call: PendingCall) -> None:
        """Release the constants of a call that is not recorded."""
        for ref, tensor in call.given.items():
            if ref.root.constant is not None and ref.root.key not in self._touching:
                self._roots.pop(id(whole_of(tensor)), None)

    def ref(self, tensor: Tensor, *, copies: bool = False) -> Ref:
        """Return the reference to a tensor; `copies`: the call is about to write to it."""
        whole = whole_of(tensor)
        if whole.requires_grad and not tensor.requires_grad:  # detached: a constant from here on
            return Ref(self._constant(tensor.detach().clone()))
        if is_retyped(tensor) and not tensor.requires_grad:
            return Ref(self._constant(tensor.detach()))
        if is_retyped(tensor):
            raise Refused(
                f"its memory is read as {tensor.dtype} instead of {whole.dtype}: a change can't be "
                "followed through that"
            )
        root = self._known(whole)
        if root is None or (root.constant is not None and self._is_outdated(root)):
            root = self._register(whole, copies=copies)
        if tensor is whole:
            return Ref(root)
        return Ref(root, Strides.between(tensor, whole))

    def _known(self, whole: Tensor) -> Root | None:
        reference, root = self._roots.get(id(whole), (None, None))
        return root if reference is not None and reference() is whole else None

    def _is_outdated(self, root: Root) -> bool:
        assert root.constant is not None
        return root.key not in self._touching and root.constant._version != root.version

    def _register(self, whole: Tensor, *, copies: bool) -> Root:
        if id(whole) in self._trained:
            parameter = self._trained[id(whole)]
            root = Root(next(self._keys), whole.stride(), parameter)
        else:
            changes = id(whole) in self._buffers or memory_of(whole) in self._changing
            value = whole.detach()
            root = self._constant(value.clone() if copies or changes else value)
        self._roots[id(whole)] = weakref.ref(whole), root
        return root

    def _constant(self, value: Tensor) -> Root:
        return Root(next(self._keys), value.stride(), None, value, value._version)

    def _new(self, result: Tensor) -> Root | None:
        """Return the root of a call's result; a result may be a view of a hidden tensor."""
        if not result.requires_grad:
            return None
        whole = whole_of(result)
        root = Root(next(self._keys), whole.stride())
        self._roots[id(whole)] = weakref.ref(whole), root
        return root

    def _parameters_of(self, root: Root) -> frozenset[int]:
        if root.parameter is not None:
            return frozenset((id(root.parameter),))
        return self._parameters.get(root.key, frozenset())

    # --- looking back ----------------------------------------------------------------------------

    def making_of(self, ref: Ref) -> list[Recorded]:
        """Return the calls that determine the tensor's present value, in order.

        These are the calls that made its root or wrote to it and, recursively, those that
        determined their inputs at that time.
        """
        found: dict[int, Recorded] = {}
        seen_to: dict[int, int] = {}
        waiting = [(ref.root.key, next(self._numbers))]
        while waiting:
            key, end = waiting.pop()
            if seen_to.get(key, -1) >= end:
                continue
            seen_to[key] = end
            for call in self._touching.get(key, ()):
                if call.number < end and call.number not in found:
                    found[call.number] = call
                    waiting += [(given.root.key, call.number) for given in call.reads]
        return [found[number] for number in sorted(found)]


def values_in(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors in a function's arguments whose values matter, not just dtype or shape."""
    if name in _CASTS:
        return tensors_in(*args[:1])
    return [] if name in _FORMS else tensors_in(*args, *kwargs.values())


def is_in_place(name: str) -> bool:
    """Return whether a function of this name writes to its first argument."""
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def whole_of(tensor: Tensor) -> Tensor:
    """Return the tensor that this one is a view of, or itself if it is no view."""
    return tensor if tensor._base is None else tensor._base


def is_retyped(tensor: Tensor) -> bool:
    """Return whether it is a view of another dtype, such as a real view of complex numbers."""
    return tensor._base is not None and tensor.dtype != tensor._base.dtype


def memory_of(tensor: Tensor) -> int:
    """Return an identifier of the memory that a tensor uses."""
    memory: int = tensor.untyped_storage()._cdata
    return memory


def _moved(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Replace a cast: lower precision than that of the measures would only add rounding."""
    return tensor.to(device, dtype, copy=True)
