"""The known uses of parameters: modules in which functions need not be watched.

In a survey, every function that is called is intercepted (`watching`). Most modules call one
function with their parameters and their inputs, and return its result: a linear layer, a
convolution, a norm, an embedding. The arguments of that call are recorded by origin and rebuilt
from the arguments of a hook on the module, so that later steps need not watch functions there.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from adiv_monitor.capture.selection import Layer, Selection
from adiv_monitor.capture.weights.pieces import Pieces
from adiv_monitor.features.uses import as_it_is

# After so many surveys in a row that changed nothing, there are no more.
_IN_VAIN = 3
_LAST = (
    f"{_IN_VAIN} surveys of all functions have changed nothing (experts, layer drop, two networks "
    "in turns?): there are no more, and functions that a module began to use since are not seen."
)
_UNKNOWN = object()
_NUMBERS = (bool, int, float, complex)
_HOOKED = "_is_full_backward_hook"  # torch sets it with a backward hook, which no use depends on


ArgumentKey = int | str  # position or name of a function's argument


class Given(NamedTuple):
    """The arguments of a function in one call of its module.

    Attributes:
        args: the positional arguments.
        kwargs: the keyword arguments.
        inputs: the tensors among them that the module's forward was given.
        trained: the parameters of the module among them that require a gradient.
    """

    args: list[Any]
    kwargs: dict[str, Any]
    inputs: list[Tensor]
    trained: list[Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """A module whose use of parameters a plain hook can capture.

    Attributes:
        module: the module.
        kind: its class.
        forward: a `forward` in the module's own attributes; None: there is none.
        settings: its own plain attributes, such as its mode or its stride, by name.
        function: the name of the function that takes its parameters; "": its class has a rule.
        arguments: by place, those by position first, whence the function's arguments come: "own"
            with a name among the module's parameters and buffers, "given" with a place among the
            arguments of its forward, or "constant" with the value.
        layers: the layers of its uses, in order.
    """

    module: nn.Module
    kind: type[nn.Module]
    forward: object
    settings: Mapping[str, object]
    function: str
    arguments: Mapping[ArgumentKey, tuple[str, Any]]
    layers: Sequence[Layer]

    @property
    def holds(self) -> bool:
        """Whether class, `forward` and plain attributes of the module are unchanged."""
        module, held = self.module, self.module.__dict__
        if type(module) is not self.kind or held.get("forward") is not self.forward:
            return False
        return self.settings.items() <= held.items()

    def given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Given | None:
        """Return the function's arguments in a call of the module, or None if these don't match."""
        if not self.holds:
            return None
        parameters, buffers = self.module._parameters, self.module._buffers
        found = Given([], {}, [], [])
        try:
            for place, (whence, value) in self.arguments.items():
                if whence == "given":
                    value = args[value] if isinstance(value, int) else kwargs[value]
                    found.inputs.append(value)
                elif whence == "own":
                    name, value = value, parameters.get(value)
                    if value is None:
                        value = buffers[name]
                    elif value.requires_grad:
                        found.trained.append(value)
                if isinstance(place, int):
                    found.args.append(value)
                else:
                    found.kwargs[place] = value
        except (IndexError, KeyError):
            return None
        return found


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

    def known(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object
    ) -> Known | None:
        """Return the module's use of its parameters if this call alone describes it."""
        if output is not self.result or any(x.shaped is not as_it_is for x in self.layers):
            return None  # another output; or a shaping that may hold tensors of this step
        if versions(self.args, self.kwargs, self.result) != self.versions:
            return None  # a hook would run too late
        held = (*module._parameters.items(), *module._buffers.items())
        taken: dict[int, tuple[str, Any]] = {
            **{id(x): ("own", name) for name, x in held if x is not None},
            **{id(x): ("given", at) for at, x in _by_place(args, kwargs) if isinstance(x, Tensor)},
        }
        arguments: dict[ArgumentKey, tuple[str, Any]] = {}
        for place, value in _by_place(self.args, self.kwargs):
            if isinstance(value, Tensor) and id(value) in taken:
                arguments[place] = taken[id(value)]
            elif _is_constant(value):
                arguments[place] = "constant", deepcopy(value)
            else:
                return None
        return _known(module, self.function, arguments, self.layers)


def _by_place(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[ArgumentKey, object]]:
    yield from enumerate(args)
    yield from kwargs.items()


def _known(
    module: nn.Module,
    function: str,
    arguments: Mapping[ArgumentKey, tuple[str, Any]],
    layers: Sequence[Layer],
) -> Known:
    """Return the record of the module in its present state."""
    held = vars(module)
    constant = {name: value for name, value in held.items() if _is_constant(value)}
    constant.pop(_HOOKED, None)
    kind, forward = type(module), held.get("forward")
    return Known(module, kind, forward, deepcopy(constant), function, arguments, layers)


def _is_constant(value: object) -> bool:
    """Return whether a value is comparable and no part of a batch."""
    if isinstance(value, tuple | list):
        return all(isinstance(part, _NUMBERS) for part in value)
    return isinstance(value, (*_NUMBERS, str, type(None)))


def versions(args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> tuple[int, ...]:
    """Return the versions of all tensors of a call."""
    values = (*args, *kwargs.values(), result)
    return tuple([value._version for value in values if isinstance(value, Tensor)])


@dataclass
class Record:
    """The record of the modules in one step.

    Attributes:
        calls: the number of calls of each module.
        found: module → its use of parameters; None: it has none of its own.
        others: the modules whose uses plain hooks can't capture.
    """

    calls: Counter[nn.Module] = field(default_factory=Counter)
    found: dict[nn.Module, Known | None] = field(default_factory=dict)
    others: set[nn.Module] = field(default_factory=set)

    def ruled(self, module: nn.Module) -> None:
        """Record a forward of a module whose class has a rule."""
        self.calls[module] += 1
        self.found[module] = _known(module, "", {}, [])

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
        known = called[0].known(module, args, kwargs, output) if len(called) == 1 else None
        if (called and known is None) or not _alike(self.found.get(module, known), known):
            self.others.add(module)
        self.found[module] = known


def _alike(one: Known | None, other: Known | None) -> bool:
    if one is None or other is None:
        return one is other
    names = ("settings", "function", "arguments", "layers")
    return all(getattr(one, name) == getattr(other, name) for name in names)


@dataclass
class Plan:
    """How the modules are followed in a step after a survey.

    Attributes:
        known: the modules whose uses are known.
        watched: the modules in which functions are watched.
        unseen: ids of parameters that had a gradient but no visible use when all was watched.
    """

    known: dict[nn.Module, Known]
    watched: list[nn.Module]
    unseen: set[int]


class Trace:
    """What surveys have learned: in which modules functions need not be watched.

    The first step is a survey, in which all functions are watched. There is another one if other
    parameters are measured, a parameter without a visible use has a gradient, or the gradient of
    more layers differs from that of their rows; but no more after some that changed nothing.

    Attributes:
        pieces: the pieces of the parameters, as long as the same parameters are measured.
    """

    def __init__(self) -> None:
        self.pieces = Pieces()
        self._held: object = None  # the parameters that were measured
        self._places: list[tuple[int, str]] | None = None  # of these
        self._doubted = False
        self._in_vain = 0  # surveys in a row that changed nothing
        self._known: dict[nn.Module, Known | None] = {}
        self._unseen: set[int] = set()
        self._suspects: set[str] | None = None

    def plan(self, selection: Selection, suspects: Collection[str]) -> Plan | None:
        """Return the plan for the next step; None: it is a survey.

        Args:
            selection: the parameters to measure in it.
            suspects: paths of layers whose gradient differed from that of their rows.
        """
        if self._places != _places(selection):
            self.pieces = Pieces()
            return None
        if self._suspects is None:  # the state after a survey
            self._suspects = set(suspects)
        is_doubted = self._doubted or not self._suspects.issuperset(suspects)
        if is_doubted and self._in_vain < _IN_VAIN:
            self._in_vain += 1
            return None
        known, watched = dict[nn.Module, Known](), list[nn.Module]()
        for module in selection.modules:
            found = self._known.get(module, _UNKNOWN)
            if isinstance(found, Known) and found.holds:
                known[module] = found
            elif found is not None:
                watched.append(module)
        return Plan(known, watched, self._unseen)

    def learn(
        self, selection: Selection, plan: Plan | None, record: Record, unseen: set[int]
    ) -> str | None:
        """Record the result of a step, and return a note if it was the last survey.

        Args:
            selection: the parameters that were measured in it.
            plan: the plan of the step.
            record: the record of the modules.
            unseen: ids of parameters that have a gradient but no visible use.
        """
        before = dict(self._known)
        if plan is None:
            self._known.clear()
        self._known |= record.found
        for module in record.others:
            self._known.pop(module, None)
        self._doubted = plan is not None and not unseen <= self._unseen
        if plan is not None:
            return None
        if unseen != self._unseen or before.keys() != self._known.keys():
            self._in_vain = 0
        self._held, self._places = selection.held, _places(selection)
        self._unseen, self._suspects = unseen, None
        return _LAST if self._in_vain == _IN_VAIN else None


def _places(selection: Selection) -> list[tuple[int, str]]:
    """Return ids and names of the parameters to measure."""
    return [(key, x.full_name) for key, places in selection.places.items() for x in places]
