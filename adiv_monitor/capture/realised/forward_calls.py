"""Records the forward passes of one step as their caller sees them, so that they can be rerun.

A step may have many forward passes: micro-batches, an encoder and a decoder called in turn, a
discriminator on real and on fake samples, the module that computes the loss. An input that is the
output of an earlier pass, or a view of it, is recognised and recomputed in a rerun. All other
inputs are data and reused. Tensors are found in tuples, lists and dicts; other objects are passed
on unchanged.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from adiv_monitor.capture.selection import is_wrapper
from adiv_monitor.capture.whole_modules.graph import leaves_of
from adiv_monitor.rerun.randomness import Randomness
from adiv_monitor.rerun.surroundings import Buffers, Surroundings, version


class NotRepeatable(Exception):
    """Raised if a forward pass can't be rerun, with the reason; this is no failure."""


class CallPlace(NamedTuple):
    """The place of a layer's call within a step.

    Attributes:
        call: the number of the forward pass.
        recomputed: whether the call is in a backward pass that recomputes a part of this forward
            pass (checkpointing).
        path: the path of the layer.
        number: the number of earlier calls of the layer there.
    """

    call: int
    recomputed: bool
    path: str
    number: int


@dataclass(frozen=True)
class _Output:
    """An output tensor of a call, identified without holding it."""

    call: int
    number: int
    memory: StorageWeakRef
    layout: tuple[torch.Size, tuple[int, ...]]
    offset: int
    version: int

    @classmethod
    def of(cls, tensor: Tensor, call: int, number: int) -> "_Output":
        layout = tensor.shape, tensor.stride()
        return cls(call, number, _memory(tensor), layout, _offset(tensor), version(tensor))


@dataclass(frozen=True)
class _Given:
    """A placeholder for an input that is an earlier call's output or a view of it."""

    output: _Output
    layout: tuple[torch.Size, tuple[int, ...]]
    offset: int

    def again(self, given: dict[int, list[Tensor]]) -> Tensor:
        tensor = given[self.output.call][self.output.number]
        if (tensor.shape, tensor.stride()) != self.output.layout:
            raise NotRepeatable("a module returns a tensor of another shape when it runs again")
        return tensor.as_strided(*self.layout, _offset(tensor) + self.offset)


@dataclass(frozen=True)
class _Data:
    """An input that no call produced: the tensor without its graph, not copied."""

    tensor: Tensor
    version: int
    is_leaf: bool  # gradients with respect to it may be computed

    @classmethod
    def of(cls, tensor: Tensor) -> "_Data":
        is_leaf = tensor.requires_grad and tensor.is_leaf
        return cls(tensor.detach(), version(tensor), is_leaf)

    def again(self, given: dict[int, list[Tensor]]) -> Tensor:
        if version(self.tensor) != self.version:
            raise NotRepeatable("an input of the forward pass was changed in place since")
        return self.tensor.detach().requires_grad_(self.is_leaf)


@dataclass(eq=False)
class ForwardCall:
    """One forward pass.

    Attributes:
        module: the module that was called.
        inputs: the leaves of its arguments, tensors as data or placeholders.
        structure: the tree structure of its arguments.
        surroundings: the other state that the call depended on.
        outputs: its output tensors; None while it runs or if it raised.
    """

    module: nn.Module
    inputs: list[Any]
    structure: Any
    surroundings: Surroundings
    outputs: list[_Output] | None = None

    @property
    def needs(self) -> set[int]:
        """The numbers of the calls that produced its inputs."""
        return {x.output.call for x in self.inputs if isinstance(x, _Given)}

    def run(self, given: dict[int, list[Tensor]], begin: Callable[[], object]) -> list[Tensor]:
        """Rerun the module with the same data and return its output tensors.

        Args:
            given: the new outputs of earlier calls, by number.
            begin: called when the state at the time of the call is restored.

        Raises:
            NotRepeatable: the data was changed since, or a tensor of `given` has another shape.
        """
        inputs = [x.again(given) if isinstance(x, _Data | _Given) else x for x in self.inputs]
        args, kwargs = tree_unflatten(inputs, self.structure)
        with self.surroundings.again():
            begin()
            return tensors_of(self.module(*args, **kwargs))


class _Running(threading.local):
    """The number of the call that runs in a thread."""

    def __init__(self) -> None:
        self.call: int | None = None


@dataclass(eq=False)
class ForwardCalls:
    """Records the forward passes of one step.

    Attributes:
        modules: all modules that may run in them.
        parameters: ids of the parameters that the step may change.
        devices: the devices on which the modules may draw random numbers.
        fail: called with the exception if recording fails; recording then stops.
        calls: the recorded calls.
        refusal: the reason why they can't be rerun.
        counts: by path, the number of calls of a layer in each forward pass.
    """

    modules: Collection[nn.Module]
    parameters: Collection[int]
    devices: Collection[torch.device]
    fail: Callable[[Exception], None]
    calls: list[ForwardCall] = field(default_factory=list)
    refusal: str = ""
    counts: dict[str, Counter[tuple[int, bool]]] = field(
        default_factory=lambda: defaultdict(Counter)
    )
    # Outputs of the calls, by memory.
    _given: dict[StorageWeakRef, list[_Output]] = field(default_factory=lambda: defaultdict(list))
    _buffers: Buffers = field(default_factory=Buffers)
    _running: _Running = field(default_factory=_Running)
    _first_open: int = 0  # the first call since the last recomputation
    _recomputed: bool = False

    @property
    def running(self) -> int | None:
        """The number of the call that runs in this thread."""
        return self._running.call

    def began(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        around: Iterable[nn.Module],
    ) -> None:
        """Record that a module's forward begins inside those of other modules."""
        if self.refusal or is_wrapper(module) or not all(map(is_wrapper, around)):
            return
        if torch._C._current_graph_task_id() != -1:  # a backward pass recomputes a part of a call
            self._recomputed = True
            return
        if self._recomputed:
            self._first_open, self._recomputed = len(self.calls), False
        try:
            self.begin(module, args, kwargs)
        except NotRepeatable as reason:
            self.refusal = str(reason)
        except Exception as error:
            self.refusal = f"{type(error).__name__}: {error}"
            self.fail(error)

    def ended(self, module: nn.Module, output: Any, around: Iterable[nn.Module]) -> None:
        """Record that a module's forward has ended; `output` is None if it raised."""
        number = self._running.call
        call = None if number is None else self.calls[number]
        if call is not None and module is call.module and all(map(is_wrapper, around)):
            self.end(output)

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the beginning of a call.

        Raises:
            NotRepeatable: an input can't be recomputed.
        """
        leaves, structure = tree_flatten((args, kwargs))
        inputs = [self._input(x, module) if isinstance(x, Tensor) else x for x in leaves]
        random = Randomness(self.devices, self.modules)
        surroundings = Surroundings(random, self.modules, self._buffers)
        self.calls.append(ForwardCall(module, inputs, structure, surroundings))
        self._running.call = len(self.calls) - 1

    def end(self, output: Any) -> None:
        """Record the end of the running call."""
        number, self._running.call = self._running.call, None
        if number is not None and output is not None:
            found = enumerate(tensors_of(output))
            outputs = [_Output.of(tensor, number, i) for i, tensor in found]
            self.calls[number].outputs = outputs
            for given in outputs:
                self._given[given.memory].append(given)

    def place(self, path: str) -> CallPlace | None:
        """Return the place of a layer's call that is being made, or None if it is ambiguous."""
        call = self._running.call
        recomputed = call is None
        if call is None:
            call = len(self.calls) - 1
            if call != self._first_open:  # no call, or several that may be recomputed
                return None
        key, counts = (call, recomputed), self.counts[path]
        counts[key] += 1
        return CallPlace(*key, path, counts[key] - 1)

    def forget(self, path: str) -> None:
        """Remove a layer that turned out not to exist."""
        self.counts.pop(path, None)

    def in_order(self, numbers: Iterable[int]) -> list[int]:
        """Return these calls and all calls that their inputs depend on, in order.

        Raises:
            NotRepeatable: one of the calls did not end.
        """
        needed: set[int] = set()
        waiting = set(numbers)
        while waiting:
            number = waiting.pop()
            call = self.calls[number]
            if call.outputs is None:
                kind = type(call.module).__name__
                raise NotRepeatable(f"{kind} returned no tensor, or raised an exception")
            needed.add(number)
            waiting |= call.needs - needed
        return sorted(needed)

    def _input(self, tensor: Tensor, module: nn.Module) -> _Data | _Given:
        """Return the record of an input: data, or an earlier call's output.

        Raises:
            NotRepeatable: code outside of the modules computed it from such an output.
        """
        for output in self._given.get(_memory(tensor), ()) if _has_memory(tensor) else ():
            if output.version == version(tensor):
                layout = tensor.shape, tensor.stride()
                return _Given(output, layout, _offset(tensor) - output.offset)
        if not leaves_of([tensor], ()).isdisjoint(self.parameters):
            raise NotRepeatable(
                f"an input of {type(module).__name__} was computed, outside of the modules that "
                "are called, from an output of one of them; move that code into a module that "
                "also calls them"
            )
        return _Data.of(tensor)


def tensors_of(output: Any) -> list[Tensor]:
    """Return the tensors in a module's output."""
    return [x for x in tree_leaves(output) if isinstance(x, Tensor) and _has_memory(x)]


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and torch._C._has_storage(tensor)


def _memory(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _offset(tensor: Tensor) -> int:
    return int(tensor.storage_offset())
