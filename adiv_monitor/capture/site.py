"""Where a module uses its parameters: known from a survey, so that a plain hook can catch the use.

In a survey, every function that is called is intercepted (`watching`). Most modules call one
function with their parameters and their inputs, and return its result: a linear layer, a
convolution, a norm, an embedding. The arguments of that call are recorded by origin and rebuilt
from the arguments of a hook on the module, so that later steps need not watch functions there.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from adiv_monitor.capture.forwards import Called
from adiv_monitor.capture.selection import Layer
from adiv_monitor.features.uses import FunctionRule, as_it_is, name_of, rule_of

_NUMBERS = (bool, int, float, complex)
_HOOKED = "_is_full_backward_hook"  # torch sets it with a backward hook, which no use depends on


# Of a module whose uses a plain hook can't catch: functions are watched in it.
SPECIAL = "special"


@dataclass(frozen=True, slots=True)
class Site:
    """A module whose use of its parameters a plain hook can catch.

    Attributes:
        module: the module.
        kind: its class.
        forward: a `forward` in the module's own attributes; None: there is none.
        settings: its own plain attributes, such as its mode or its stride, by name.
        rule: the rule of the function that takes its parameters.
        constants: the function's arguments, the positional ones first; None where they are not
            constant.
        names: the names of the keyword arguments.
        own: places in `constants` of parameters and buffers of the module, with their names.
        given: places of arguments of its forward, with the positions or names of these.
        layers: the layers of its uses, in order.
    """

    module: nn.Module
    kind: type[nn.Module]
    forward: object
    settings: Mapping[str, object]
    rule: FunctionRule
    constants: Sequence[Any]
    names: Sequence[str]
    own: Sequence[tuple[int, str]]
    given: Sequence[tuple[int, Any]]
    layers: Sequence[Layer]

    def arguments(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any], Sequence[Any]] | None:
        """Return the function's arguments in a call of the module, and which of them it was given.

        None: its class, its `forward` or one of its plain attributes has changed.
        """
        module, held = self.module, self.module.__dict__
        if type(module) is not self.kind or held.get("forward") is not self.forward:
            return None
        if not self.settings.items() <= held.items():
            return None
        values, parameters = [*self.constants], module._parameters
        try:
            for at, place in self.given:
                values[at] = args[place] if type(place) is int else kwargs[place]
            for at, name in self.own:
                values[at] = parameters[name] if name in parameters else module._buffers[name]
        except (IndexError, KeyError):
            return None
        inputs = [values[at] for at, _ in self.given]
        if not self.names:
            return values, {}, inputs
        first = len(values) - len(self.names)
        return values[:first], dict(zip(self.names, values[first:], strict=True)), inputs


def site_of(
    module: nn.Module, call: Called, args: tuple[Any, ...], kwargs: dict[str, Any], output: object
) -> Site | None:
    """Return the site of a module that made one call; None if a hook can't catch its use."""
    rule = rule_of(name_of(call.function))
    is_shaped = any(x.shaped is not as_it_is for x in call.layers)
    if rule is None or output is not call.result or is_shaped:
        return None  # another output; or a shaping that may hold tensors of this step
    values = (*call.args, *call.kwargs.values())
    if versions(*values, call.result) != call.versions:
        return None  # a hook would run too late
    held = (*module._parameters.items(), *module._buffers.items())
    names = {id(x): name for name, x in held if x is not None}
    places = {id(x): at for at, x in (*enumerate(args), *kwargs.items())}
    own, given = list[tuple[int, str]](), list[tuple[int, Any]]()
    for at, value in enumerate(values):
        is_tensor = isinstance(value, Tensor)
        if is_tensor and id(value) in places:
            given.append((at, places[id(value)]))
        elif is_tensor and id(value) in names:
            own.append((at, names[id(value)]))
        elif not _is_constant(value):
            return None
    settings = {k: x for k, x in vars(module).items() if _is_constant(x) and k != _HOOKED}
    constants = [None if isinstance(x, Tensor) else deepcopy(x) for x in values]
    forward = vars(module).get("forward")
    of_module = module, type(module), forward, deepcopy(settings)
    return Site(*of_module, rule, constants, [*call.kwargs], own, given, call.layers)


def versions(*values: object) -> list[int]:
    """Return the versions of the tensors among these values, which increase with every write."""
    return [value._version for value in values if isinstance(value, Tensor)]


def _is_constant(value: object) -> bool:
    """Return whether a value is comparable and no part of a batch."""
    if isinstance(value, tuple | list):
        return all(isinstance(part, _NUMBERS) for part in value)
    return isinstance(value, (*_NUMBERS, str, type(None)))
