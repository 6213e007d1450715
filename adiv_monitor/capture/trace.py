"""Finds modules that use their own parameters in one known way, so that plain hooks suffice.

In a watched step, every function that is called is intercepted (`watching`). Most modules call one
function with their parameters and their inputs, and return its result: a linear layer, a
convolution, a norm, an embedding. The arguments of that call are recorded by origin and rebuilt
from the arguments of a hook on the module, so that later steps need not watch functions there.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from adiv_monitor.capture.selection import Layer, Selection
from adiv_monitor.capture.weights.pieces import Pieces
from adiv_monitor.features.uses import as_it_is

# The first steps are watched as a whole, and then one in this many.
_FIRST, _EVERY = 2, 16
_NUMBERS = (bool, int, float, complex)


class _Input(NamedTuple):
    """An argument of the module's forward, by position or by name."""

    place: int | str


class _Own(NamedTuple):
    """A parameter or buffer of the module."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """A module whose use of parameters a plain hook can capture.

    Attributes:
        module: the module.
        kind: its class.
        forward: a `forward` in the module's own attributes; None: there is none.
        settings: its own plain attributes, such as its mode or its stride.
        calls: the number of calls of its forward in the step in which it was recorded.
        function: the name of the function that takes its parameters; "": its class has a rule.
        args: the arguments of the function: origins of tensors, and constants.
        kwargs: see args.
        layers: the layers of its uses, in order.
    """

    module: nn.Module
    kind: type[nn.Module]
    forward: object
    settings: list[tuple[str, object]]
    calls: int
    function: str
    args: Sequence[object]
    kwargs: Mapping[str, object]
    layers: Sequence[Layer]

    @property
    def holds(self) -> bool:
        """Whether class, `forward` and plain attributes of the module are unchanged."""
        module, held = self.module, self.module.__dict__
        if type(module) is not self.kind or held.get("forward") is not self.forward:
            return False
        return [(name, held.get(name)) for name, _ in self.settings] == self.settings

    def given(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the function's arguments in a call of the module, or None if these don't match."""
        if not self.holds:
            return None
        try:
            return (
                tuple([self._at(value, args, kwargs) for value in self.args]),
                {name: self._at(value, args, kwargs) for name, value in self.kwargs.items()},
            )
        except (IndexError, KeyError):
            return None

    def _at(self, value: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
        if isinstance(value, _Input):
            place = value.place
            return args[place] if isinstance(place, int) else kwargs[place]
        if isinstance(value, _Own):
            held = self.module._parameters.get(value.name)
            return self.module._buffers[value.name] if held is None else held
        return value


@dataclass(frozen=True, slots=True, eq=False)
class Called:
    """A call that takes trained parameters, in the forward of a running module.

    Attributes:
        function: its name as rules use it.
        args: its arguments.
        kwargs: see args.
        result: its result.
        versions: the versions of all these tensors when the call was made.
        layers: the layers of its uses, in order.
    """

    function: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Tensor
    versions: tuple[int, ...]
    layers: Sequence[Layer]

    @classmethod
    def of(
        cls,
        function: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Tensor,
        layers: Sequence[Layer],
    ) -> "Called":
        """Return the record of a call that was just made."""
        return cls(function, args, kwargs, result, _versions(args, kwargs, result), layers)

    def known(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object
    ) -> Known | None:
        """Return the module's use of its parameters if this call alone describes it."""
        if output is not self.result or any(x.shaped is not as_it_is for x in self.layers):
            return None  # another output; or a shaping that may hold tensors of this step
        if _versions(self.args, self.kwargs, self.result) != self.versions:
            return None  # a hook would run too late
        places: dict[int, object] = {
            id(tensor): _Own(name)
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        }
        given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        places |= {id(value): _Input(place) for place, value in given if isinstance(value, Tensor)}
        try:
            took = [_place(value, places) for value in self.args]
            named = {name: _place(value, places) for name, value in self.kwargs.items()}
        except LookupError:
            return None
        return _known(module, self.function, took, named, self.layers)


def _known(
    module: nn.Module,
    function: str,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    layers: Sequence[Layer],
) -> Known:
    """Return the record of the module in its present state."""
    attributes = vars(module)
    settings = [(name, _copy(value)) for name, value in attributes.items() if _is_constant(value)]
    forward = attributes.get("forward")
    return Known(module, type(module), forward, settings, 0, function, args, kwargs, layers)


def _place(value: object, places: Mapping[int, object]) -> object:
    """Return the origin of a tensor, or a copy of a constant.

    Raises:
        LookupError: the value is neither a constant nor available to a hook on the module.
    """
    if isinstance(value, Tensor):
        return places[id(value)]
    if not _is_constant(value):
        raise LookupError
    return _copy(value)


def _copy(constant: object) -> object:
    """Return the constant, copied if it is mutable."""
    return list(constant) if isinstance(constant, list) else constant


def _is_constant(value: object) -> bool:
    """Return whether a value is comparable and no part of a batch."""
    if isinstance(value, tuple | list):
        return all(isinstance(part, _NUMBERS) for part in value)
    return isinstance(value, (*_NUMBERS, str, type(None)))


def _versions(args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> tuple[int, ...]:
    values = (*args, *kwargs.values(), result)
    return tuple([value._version for value in values if isinstance(value, Tensor)])


@dataclass
class Record:
    """The record of the watched modules in one step.

    Attributes:
        outermost: the modules that no other module called.
        calls: the number of calls of each module.
        found: module → its use of parameters; None: it has none of its own.
        others: the modules whose uses plain hooks can't capture.
    """

    outermost: dict[nn.Module, None] = field(default_factory=dict)
    calls: Counter[nn.Module] = field(default_factory=Counter)
    found: dict[nn.Module, Known | None] = field(default_factory=dict)
    others: set[nn.Module] = field(default_factory=set)

    def ruled(self, module: nn.Module) -> None:
        """Record a forward of a module whose class has a rule."""
        self.calls[module] += 1
        self.found[module] = _known(module, "", [], {}, [])

    def ended(
        self,
        module: nn.Module,
        called: Sequence[Called],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: object,
    ) -> None:
        """Record a forward in which these calls were made."""
        self.calls[module] += 1
        if module in self.others:
            return
        known = called[0].known(module, args, kwargs, output) if len(called) == 1 else None
        if called and known is None:
            self.others.add(module)
        elif module in self.found:
            if not _alike(self.found[module], known):
                self.others.add(module)
        else:
            self.found[module] = known


def _alike(one: Known | None, other: Known | None) -> bool:
    if one is None or other is None:
        return one is other
    names = ("settings", "function", "args", "kwargs", "layers")
    return all(getattr(one, name) == getattr(other, name) for name in names)


@dataclass
class Plan:
    """The modules to hook in a step in which uses are known.

    Attributes:
        known: the modules with plain hooks.
        watched: the modules in which functions are watched.
        outermost: the modules that are called first.
        unseen: ids of parameters that had a gradient but no visible use when all was watched.
    """

    known: dict[nn.Module, Known]
    watched: list[nn.Module]
    outermost: list[nn.Module]
    unseen: set[int]


class Trace:
    """Learns from watched steps in which modules plain hooks suffice later.

    Attributes:
        pieces: the pieces of the parameters, as long as the same parameters are measured.
    """

    def __init__(self) -> None:
        self.pieces = Pieces()
        self._steps = 0
        self._doubted = True
        self._held: object = None  # the parameters that were measured
        self._outermost: list[nn.Module] = []
        self._known: dict[nn.Module, Known | None] = {}
        self._unseen: set[int] = set()
        self._suspects: set[str] | None = None

    def plan(self, selection: Selection, suspects: Collection[str]) -> Plan | None:
        """Return the plan for the next step, or None if it must be watched as a whole.

        Args:
            selection: the parameters to measure in it.
            suspects: paths of layers whose gradient differed from that of their rows.
        """
        if not self._is_known(selection, suspects):
            self.pieces = Pieces()
            return None
        if self._suspects is None:  # the state when all was watched
            self._suspects = set(suspects)
        known: dict[nn.Module, Known] = {}
        watched: list[nn.Module] = []
        for module in selection.modules:
            if module not in self._known:
                watched.append(module)
            elif (found := self._known[module]) is not None:
                if found.holds:
                    known[module] = found
                else:
                    watched.append(module)
        return Plan(known, watched, self._outermost, self._unseen)

    def _is_known(self, selection: Selection, suspects: Collection[str]) -> bool:
        due = self._steps < _FIRST or self._steps % _EVERY == 0
        if due or self._doubted or selection.held is not self._held:
            return False
        return self._suspects is None or self._suspects.issuperset(suspects)

    def learn(
        self, selection: Selection, plan: Plan | None, record: Record, unseen: set[int]
    ) -> None:
        """Record the result of a step.

        Args:
            selection: the parameters that were measured in it.
            plan: the plan of the step.
            record: the record of the watched modules.
            unseen: ids of parameters that have a gradient but no visible use.
        """
        self._steps += 1
        for module in record.others:
            self._known.pop(module, None)
        if plan is None:
            self._doubted, self._suspects = False, None
            self._held, self._outermost = selection.held, [*record.outermost]
            self._known.clear()
            self._unseen = unseen
        elif not unseen <= self._unseen:
            self._doubted = True
        if plan is not None:
            for module, known in plan.known.items():
                if record.calls[module] != known.calls:
                    self._known.pop(module, None)
        for module, found in record.found.items():
            if module not in record.others:
                calls = record.calls[module]
                self._known[module] = found and replace(found, calls=calls)
