"""Which modules use their own parameters in one known way: found once, then plain hooks do.

A watched step sees every function that is called (`watching`). Most modules call one that takes
their parameters, with what they were given, and return what it gives: a linear layer, a
convolution, a norm, an embedding. What such a call is made of is kept, and put together again from
what a hook on the module gets, so that later steps watch no functions there.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from adiv_monitor.capture.selection import Layer, Selection
from adiv_monitor.capture.weights.pieces import Pieces
from adiv_monitor.features.uses import as_it_is

# Steps that are watched as a whole: the first ones, and each so many.
_FIRST, _EVERY = 2, 16
_NUMBERS = (bool, int, float, complex)


class _Input(NamedTuple):
    """What a forward was given, by place or by name."""

    place: int | str


class _Own(NamedTuple):
    """A parameter or buffer of the module."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """A module whose use of parameters a plain hook can take.

    Attributes:
        module: the module.
        kind: its class.
        forward: a `forward` that it has besides its class's; None: none.
        settings: its own plain attributes, such as its mode or its stride.
        calls: of its forward in the step in which this was learnt.
        function: what takes its parameters, as rules know it; "": a rule of its class tells.
        args: what the function got: places of tensors, and constants.
        kwargs: see args.
        layers: that its uses are, in their order.
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
        """Whether the module is as it was, as far as it can tell."""
        module, held = self.module, self.module.__dict__
        if type(module) is not self.kind or held.get("forward") is not self.forward:
            return False
        return [(name, held.get(name)) for name, _ in self.settings] == self.settings

    def given(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """What the function got in a call of the module; None if that was called otherwise."""
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
    """A call that takes trained parameters, in the forward of a module that runs.

    Attributes:
        function: its name, as rules know it.
        args: what it got.
        kwargs: see args.
        result: what it gave.
        versions: of the memory of all these tensors, when it was made.
        layers: that its uses are, in their order.
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
        """The call, when it was just made."""
        return cls(function, args, kwargs, result, _versions(args, kwargs, result), layers)

    def known(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object
    ) -> Known | None:
        """The module's use of its parameters, if this call is all that there is of it."""
        if output is not self.result or any(x.shaped is not as_it_is for x in self.layers):
            return None  # the one is another tensor, the other may hold on to tensors of this step
        if _versions(self.args, self.kwargs, self.result) != self.versions:
            return None  # a hook would come too late
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
    """The module as it is now."""
    attributes = vars(module)
    settings = [(name, _copy(value)) for name, value in attributes.items() if _is_constant(value)]
    forward = attributes.get("forward")
    return Known(module, type(module), forward, settings, 0, function, args, kwargs, layers)


def _place(value: object, places: Mapping[int, object]) -> object:
    """Raises LookupError for what is neither a constant nor at hand when the module has run."""
    if isinstance(value, Tensor):
        return places[id(value)]
    if not _is_constant(value):
        raise LookupError
    return _copy(value)


def _copy(constant: object) -> object:
    """The constant, which nobody can change."""
    return list(constant) if isinstance(constant, list) else constant


def _is_constant(value: object) -> bool:
    """Whether it is no part of a batch, and can be compared."""
    if isinstance(value, tuple | list):
        return all(isinstance(part, _NUMBERS) for part in value)
    return isinstance(value, (*_NUMBERS, str, type(None)))


def _versions(args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> tuple[int, ...]:
    values = (*args, *kwargs.values(), result)
    return tuple([value._version for value in values if isinstance(value, Tensor)])


@dataclass
class Record:
    """What the watched modules of one step were seen to do.

    Attributes:
        outermost: those that no other one called.
        calls: how often each was called.
        found: by module, its use of parameters; None: it has none of its own.
        others: modules whose uses plain hooks can't take.
    """

    outermost: dict[nn.Module, None] = field(default_factory=dict)
    calls: Counter[nn.Module] = field(default_factory=Counter)
    found: dict[nn.Module, Known | None] = field(default_factory=dict)
    others: set[nn.Module] = field(default_factory=set)

    def ruled(self, module: nn.Module) -> None:
        """A forward has run of a module whose class has a rule."""
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
        """A forward has run, in which these calls were made."""
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
    """How a step is looked at where uses are known.

    Attributes:
        known: modules with plain hooks.
        watched: modules in which functions are watched.
        outermost: modules that are called first.
        unseen: ids of parameters with a gradient, and no use that was seen when all was watched.
    """

    known: dict[nn.Module, Known]
    watched: list[nn.Module]
    outermost: list[nn.Module]
    unseen: set[int]


class Trace:
    """Learns from watched steps what plain hooks can do in later ones.

    Attributes:
        pieces: of the parameters, as long as the same are measured.
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
        """How the coming step is to be looked at; None: it is watched as a whole.

        Args:
            selection: what is measured in it.
            suspects: paths of layers whose gradients were not those of their rows.
        """
        if not self._is_known(selection, suspects):
            self.pieces = Pieces()
            return None
        if self._suspects is None:  # so it was when all was seen
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
        """A step was looked at.

        Args:
            selection: what was measured in it.
            plan: how it was looked at.
            record: what was seen of watched modules.
            unseen: ids of parameters that have a gradient, and no use that was seen.
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
