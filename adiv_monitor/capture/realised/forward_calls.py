"""The forward passes of one step as their caller sees them: modules, inputs, what these depend on.

A step may have many: micro-batches, an encoder and a decoder that are called one after the other, a
discriminator on real and on fake samples, the module that computes the loss. What one of them gave
and another got, as it was or as a view of it, is known for that when they are run again. All other
inputs are data: the same tensors again. They are looked for in tuples, lists and dicts; what other
objects hold is taken as it is.
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
from adiv_monitor.rerun.randomness import Randomness
from adiv_monitor.rerun.surroundings import Buffers, Surroundings, version


class NotRepeatable(Exception):
    """A forward pass can't be run again, and why: no failure."""


class CallPlace(NamedTuple):
    """Where in a step a layer was called.

    Attributes:
        call: in which forward pass.
        recomputed: in a backward pass, which recomputes a part of that one (checkpointing).
        path: the layer.
        number: how often it had been called there before.
    """

    call: int
    recomputed: bool
    path: str
    number: int


@dataclass(frozen=True)
class _Output:
    """A tensor that a call gave, without holding it."""

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
    """Stands for an input that is what an earlier call gave, or a view of that."""

    output: _Output
    layout: tuple[torch.Size, tuple[int, ...]]
    offset: int

    def again(self, given: dict[int, list[Tensor]]) -> Tensor:
        tensor = given[self.output.call][self.output.number]
        if (tensor.shape, tensor.stride()) != self.output.layout:
            raise NotRepeatable("a module gives a tensor of another shape when run again")
        return tensor.as_strided(*self.layout, _offset(tensor) + self.offset)


@dataclass(frozen=True)
class _Data:
    """An input that no call gave: the tensor without its graph, not copied."""

    tensor: Tensor
    version: int
    is_leaf: bool  # gradients with respect to it may be asked for

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
        module: what was called.
        inputs: what its arguments are made of.
        structure: how they are made of it.
        surroundings: what else the call depended on.
        outputs: the tensors that it gave; None while it runs, and if it raised.
    """

    module: nn.Module
    inputs: list[Any]
    structure: Any
    surroundings: Surroundings
    outputs: list[_Output] | None = None

    @property
    def needs(self) -> set[int]:
        """The calls that gave its inputs."""
        return {x.output.call for x in self.inputs if isinstance(x, _Given)}

    def run(self, given: dict[int, list[Tensor]], begin: Callable[[], object]) -> list[Tensor]:
        """The tensors that the module gives now, with the same data.

        Args:
            given: by number of an earlier call, what it gives now.
            begin: called when all is as it was then.

        Raises:
            NotRepeatable: the data were changed since, or `given` has another shape.
        """
        inputs = [x.again(given) if isinstance(x, _Data | _Given) else x for x in self.inputs]
        args, kwargs = tree_unflatten(inputs, self.structure)
        with self.surroundings.again():
            begin()
            return tensors_of(self.module(*args, **kwargs))


class _Running(threading.local):
    """The call that runs in a thread."""

    def __init__(self) -> None:
        self.call: int | None = None


@dataclass(eq=False)
class ForwardCalls:
    """Notes the forward passes of one step.

    Attributes:
        modules: all that may run in them.
        parameters: ids of those that the step may change.
        devices: those on which the modules may draw random numbers, besides the host.
        fail: called with the exception if noting fails; no more is noted then.
        calls: those noted.
        refusal: why they can't be run again.
        counts: by path, how often a layer was called in each.
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
    # What they gave, by where in memory it is.
    _given: dict[StorageWeakRef, list[_Output]] = field(default_factory=lambda: defaultdict(list))
    _buffers: Buffers = field(default_factory=Buffers)
    _running: _Running = field(default_factory=_Running)
    _first_open: int = 0  # of the calls since the last recomputation
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
        """A module's forward begins, inside those of others."""
        if self.refusal or is_wrapper(module) or not all(map(is_wrapper, around)):
            return
        if torch._C._current_graph_task_id() != -1:  # a part of a call, once more
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
        """A module's forward has ended; `output` is None if it raised."""
        number = self._running.call
        call = None if number is None else self.calls[number]
        if call is not None and module is call.module and all(map(is_wrapper, around)):
            self.end(output)

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call begins.

        Raises:
            NotRepeatable: an input can't be made again.
        """
        leaves, structure = tree_flatten((args, kwargs))
        inputs = [self._input(x, module) if isinstance(x, Tensor) else x for x in leaves]
        random = Randomness({torch.device("cpu"), *self.devices}, self.modules)
        surroundings = Surroundings(random, self.modules, self._buffers)
        self.calls.append(ForwardCall(module, inputs, structure, surroundings))
        self._running.call = len(self.calls) - 1

    def end(self, output: Any) -> None:
        """The call that runs has ended."""
        number, self._running.call = self._running.call, None
        if number is not None and output is not None:
            found = enumerate(tensors_of(output))
            outputs = [_Output.of(tensor, number, i) for i, tensor in found]
            self.calls[number].outputs = outputs
            for given in outputs:
                self._given[given.memory].append(given)

    def place(self, path: str) -> CallPlace | None:
        """The place of a layer's call that is made now; None where it can't be told."""
        call = self._running.call
        recomputed = call is None
        if call is None:
            call = len(self.calls) - 1
            if call != self._first_open:  # none, or a part of which one?
                return None
        key, counts = (call, recomputed), self.counts[path]
        counts[key] += 1
        return CallPlace(*key, path, counts[key] - 1)

    def forget(self, path: str) -> None:
        """There is no such layer after all."""
        self.counts.pop(path, None)

    def in_order(self, numbers: Iterable[int]) -> list[int]:
        """These calls and those that gave their inputs.

        Raises:
            NotRepeatable: one of them did not end.
        """
        needed: set[int] = set()
        waiting = set(numbers)
        while waiting:
            number = waiting.pop()
            call = self.calls[number]
            if call.outputs is None:
                raise NotRepeatable(f"{type(call.module).__name__} gave nothing: did it raise?")
            needed.add(number)
            waiting |= call.needs - needed
        return sorted(needed)

    def _input(self, tensor: Tensor, module: nn.Module) -> _Data | _Given:
        """An input: data, or what an earlier call gave.

        Raises:
            NotRepeatable: it was made of that by code outside.
        """
        for output in self._given.get(_memory(tensor), ()) if _has_memory(tensor) else ():
            if output.version == version(tensor):
                layout = tensor.shape, tensor.stride()
                return _Given(output, layout, _offset(tensor) - output.offset)
        if _depends_on(tensor, self.parameters):
            raise NotRepeatable(
                f"an input of {type(module).__name__} was computed, outside of the modules that "
                "are called, from what one of them gave; a module that does both has one forward"
            )
        return _Data.of(tensor)


def tensors_of(output: Any) -> list[Tensor]:
    """The tensors of what a module gave."""
    return [x for x in tree_leaves(output) if isinstance(x, Tensor) and _has_memory(x)]


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and torch._C._has_storage(tensor)


def _memory(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _offset(tensor: Tensor) -> int:
    return int(tensor.storage_offset())


def _depends_on(tensor: Tensor, parameters: Collection[int]) -> bool:
    """Whether the tensor's graph leads to one of these parameters, by id."""
    waiting, seen = [tensor.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in parameters:
            return True
        waiting += [following for following, _ in node.next_functions]
    return False
