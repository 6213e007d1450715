"""The known uses of parameters: modules in which functions need not be watched.

In a survey, every function that is called is intercepted (`watching`). Most modules call one
function with their parameters and their inputs, and return its result: a linear layer, a
convolution, a norm, an embedding. The arguments of that call are recorded by origin and rebuilt
from the arguments of a hook on the module, so that later steps need not watch functions there.
"""

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from adiv_monitor.capture.selection import Layer, Selection
from adiv_monitor.capture.weights.pieces import Pieces
from adiv_monitor.features.uses import FunctionRule, as_it_is, rule_of

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

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    inputs: Sequence[Tensor]
    trained: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class Known:
    """A module whose use of parameters a plain hook can capture.

    Attributes:
        module: the module.
        kind: its class.
        forward: a `forward` in the module's own attributes; None: there is none.
        settings: its own plain attributes, such as its mode or its stride, by name.
        function: the name of the function that takes its parameters; "": its class has a rule.
        rule: the rule of that function.
        constants: the function's arguments, the positional ones first; None where they are not
            constant.
        names: the names of the keyword arguments.
        own: places in `constants` of parameters and buffers of the module, with their names.
        given: places of arguments of its forward, with the places of these.
        layers: the layers of its uses, in order.
    """

    module: nn.Module
    kind: type[nn.Module]
    forward: object
    settings: Mapping[str, object]
    function: str = ""
    rule: FunctionRule | None = None
    constants: Sequence[Any] = ()
    names: Sequence[str] = ()
    own: Sequence[tuple[int, str]] = ()
    given: Sequence[tuple[int, ArgumentKey]] = ()
    layers: Sequence[Layer] = ()

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Given | None:
        """Return the function's arguments in a call of the module; None if the module changed.

        Its class, `forward` and plain attributes must be unchanged.
        """
        module, held = self.module, self.module.__dict__
        if type(module) is not self.kind or held.get("forward") is not self.forward:
            return None
        if not self.settings.items() <= held.items():
            return None
        values, parameters = [*self.constants], module._parameters
        try:
            for at, place in self.given:
                values[at] = args[place] if type(place) is int else kwargs[place]  # type: ignore[index]
            for at, name in self.own:
                values[at] = parameters[name] if name in parameters else module._buffers[name]
        except (IndexError, KeyError):
            return None
        trained = [p for at, _ in self.own if (p := values[at]) is not None and p.requires_grad]
        inputs = [values[at] for at, _ in self.given]
        if not self.names:
            return Given(values, {}, inputs, trained)
        first = len(values) - len(self.names)
        return Given(
            values[:first], dict(zip(self.names, values[first:], strict=True)), inputs, trained
        )


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
        names = {id(x): name for name, x in held if x is not None}
        places = {id(x): at for at, x in (*enumerate(args), *kwargs.items())}
        constants, own, given = list[Any](), list[tuple[int, str]](), list[Any]()
        for at, value in enumerate((*self.args, *self.kwargs.values())):
            is_tensor = isinstance(value, Tensor)
            if is_tensor and id(value) in places:
                given.append((at, places[id(value)]))
            elif is_tensor and id(value) in names:
                own.append((at, names[id(value)]))
            elif not _is_constant(value):
                return None
            constants.append(None if is_tensor else deepcopy(value))
        return _known(
            module,
            function=self.function,
            rule=rule_of(self.function),
            constants=constants,
            names=[*self.kwargs],
            own=own,
            given=given,
            layers=self.layers,
        )


def _known(module: nn.Module, **how: Any) -> Known:
    """Return the record of the module in its present state."""
    held = vars(module)
    constant = {name: value for name, value in held.items() if _is_constant(value)}
    constant.pop(_HOOKED, None)
    return Known(module, type(module), held.get("forward"), deepcopy(constant), **how)


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
        found: module → its use of parameters; None: it has none of its own.
        others: the modules whose uses plain hooks can't capture.
    """

    found: dict[nn.Module, Known | None] = field(default_factory=dict)
    others: set[nn.Module] = field(default_factory=set)

    def ruled(self, module: nn.Module) -> None:
        """Record a forward of a module whose class has a rule."""
        self.found[module] = _known(module)

    def ended(
        self,
        module: nn.Module,
        called: Sequence[Called],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: object,
    ) -> None:
        """Record a forward in which these calls were made."""
        known = called[0].known(module, args, kwargs, output) if len(called) == 1 else None
        if (called and known is None) or self.found.get(module, known) != known:
            self.others.add(module)
        self.found[module] = known


@dataclass
class Plan:
    """How the modules are followed in a step after a survey.

    Attributes:
        known: the modules whose uses are known, by id.
        watched: the modules in which functions are watched.
        unseen: ids of parameters that had a gradient but no visible use when all was watched.
    """

    known: dict[int, Known]
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
        self._learned: Selection | None = None  # what is known holds for it
        self._plan: Plan | None = None
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
        if self._learned is not selection:
            if self._learned is None or _places(self._learned) != _places(selection):
                self.pieces, self._learned = Pieces(), None
                return None
            self._learned, self._plan = selection, None
        if self._suspects is None:  # the state after a survey
            self._suspects = set(suspects)
        is_doubted = self._doubted or not self._suspects.issuperset(suspects)
        if is_doubted and self._in_vain < _IN_VAIN:
            self._in_vain += 1
            return None
        if self._plan is None:
            known, watched = dict[int, Known](), list[nn.Module]()
            for module in selection.modules:
                found = self._known.get(module, _UNKNOWN)
                if isinstance(found, Known):
                    known[id(module)] = found
                elif found is not None:
                    watched.append(module)
            self._plan = Plan(known, watched, self._unseen)
        return self._plan

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
        if record.found or record.others:
            self._plan = None
        self._doubted = plan is not None and not unseen <= self._unseen
        if plan is not None:
            return None
        if unseen != self._unseen or before.keys() != self._known.keys():
            self._in_vain = 0
        self._learned, self._plan = selection, None
        self._unseen, self._suspects = unseen, None
        return _LAST if self._in_vain == _IN_VAIN else None


def _places(selection: Selection) -> list[tuple[int, str]]:
    """Return ids and names of the parameters to measure."""
    return [(key, x.full_name) for key, places in selection.places.items() for x in places]
