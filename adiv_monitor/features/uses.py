"""Uses of parameters by functions: one rule per family of functions, in `functions`.

A *use* is one call of a function whose result is linear in a parameter of the model. Its rows,
features and ∂L/∂z follow from the call's arguments and from a hook on its result.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor

from adiv_monitor.features.features import Features
from adiv_monitor.features.rows import Rows, Whole


def as_it_is(tensor: Tensor) -> Tensor:
    """Return the tensor itself: the layout of (..., channels)."""
    return tensor


def channels_second(tensor: Tensor) -> Tensor:
    """Move the channels of (batch, channels, ...) to the last dimension."""
    return tensor.movedim(1, -1)


def unknown(*_: object, **__: object) -> None:
    """Return None: nothing is known."""
    return


class Refused(Exception):
    """Raised by a rule for a call that can't be measured; the message says why."""


NESTED = "it is used with nested tensors, which are not measured: pad them"


@dataclass(frozen=True)
class Use:
    """One call of a function that uses a parameter: z = Φ_W Wᵀ + φ_b ⊗ b + other terms.

    It refers to the call's activations and must not be kept.

    Attributes:
        kind: kind of layer shown in reports.
        weight: the tensor that `Features.by_weight` multiplies, as the function got it.
        bias: the tensor that `Features.by_bias` multiplies, as the function got it.
        features: returns φ of the chosen rows.
        layout: (tensor shaped like the function's result) → a view of z or of its gradient with
            the channels in the last dimension, so that all dimensions before it are rows.
        whole: returns the lengths of all rows; None where one pass is not enough.
        shaped: reshapes a tensor shaped like `weight` to the shape that the features expect.
        part: name of the part of the module, where one call uses several parts.
        form: anything else on which `shaped`, or the features' reading of weight and bias, depends.
        times: returns Φ_W v of all rows, (*rows, m), for vectors v (width, m) in place of each
            output's weights; None: it follows from the features.
    """

    kind: str
    weight: Tensor | None
    bias: Tensor | None
    features: Callable[[Rows], Features]
    layout: Callable[[Tensor], Tensor] = as_it_is
    whole: Callable[[Rows], Whole | None] = unknown
    shaped: Callable[[Tensor], Tensor] = as_it_is
    part: str = ""
    form: object = None
    times: Callable[[Tensor], Tensor] | None = None


@dataclass(slots=True)
class FunctionCall:
    """Information about a call for its rule, besides the arguments.

    Attributes:
        result: the function's result.
        of_model: returns whether a tensor depends on parameters and constants alone, not on data.
        inside: the opened Python function of torch that makes this call; "" if none.
    """

    result: Tensor
    of_model: Callable[[object], bool]
    inside: str = ""

    def has_data(self, *values: object) -> bool:
        """Whether any of the values is data."""
        return not all(map(self.of_model, values))

    def is_weight(self, value: object) -> TypeGuard[Tensor]:
        """Whether the value is a tensor computed from the model alone that a gradient reaches."""
        return isinstance(value, Tensor) and value.requires_grad and self.of_model(value)


Found = Sequence[Use | None]
FunctionRule = Callable[..., Use | Found | None]
R = TypeVar("R", bound=FunctionRule)

_RULES: dict[str, FunctionRule] = {}

# Functions of torch whose arguments differ from those of their namesakes in torch.nn.functional.
_NAMESAKES = (torch.batch_norm, torch.instance_norm, torch.embedding, torch.embedding_bag)


def name_of(function: Callable[..., Any]) -> str:
    """Return the name under which rules know a function."""
    name: str = getattr(function, "__name__", "")
    return f"torch.{name}" if function in _NAMESAKES else name


def uses(*names: str) -> Callable[[R], R]:
    """Register the decorated rule for functions of these names, or `opened function.name`.

    A rule gets the `FunctionCall` and the function's arguments. It returns one use, several, or
    None where no parameter is in an argument in which the function is linear.
    """

    def decorate(rule: R) -> R:
        for name in names:
            _RULES[name] = rule
        return rule

    return decorate


def rule_of(function: str, inside: str = "") -> FunctionRule | None:
    """Return the rule of a function, called in an opened function; None: it has none."""
    return _RULES.get(f"{inside}.{function}") or _RULES.get(function)


def uses_in(
    function: str, call: FunctionCall, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Sequence[Use]:
    """Return the uses of parameters in a call of a function; none if it has no rule.

    There are also none if the rule does not accept the arguments: a function and a method of the
    same name may differ.

    Raises:
        Refused: the call can't be measured.
    """
    rule = rule_of(function, call.inside)
    if rule is None or not call.result.is_floating_point():
        return ()
    if not _takes(rule, len(args), tuple(kwargs)):
        return ()
    return found_by(rule, call, args, kwargs)


def found_by(
    rule: FunctionRule, call: FunctionCall, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Sequence[Use]:
    """Return the uses that a rule finds in a call."""
    if call.result.is_nested:
        raise Refused(NESTED)
    found = rule(call, *args, **kwargs)
    several = found if isinstance(found, list | tuple) else (found,)
    return [use for use in several if use is not None]


@cache
def _takes(rule: FunctionRule, count: int, names: tuple[str, ...]) -> bool:
    """Whether a rule accepts `count` positional arguments and keyword arguments of these names."""
    try:
        inspect.signature(rule).bind(None, *(None,) * count, **dict.fromkeys(names))
    except TypeError:
        return False
    return True
