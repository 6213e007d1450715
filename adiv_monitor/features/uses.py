"""How functions use parameters: one rule per family of functions, in `functions`.

A *use* is one call of a function whose result is linear in a parameter of the model. Its rows,
features and ∂L/∂z follow from the call's arguments and from a hook on its result.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor

from adiv_monitor.features.features import Features
from adiv_monitor.features.rows import Rows
from adiv_monitor.features.whole import LateScales, Whole


def as_it_is(tensor: Tensor) -> Tensor:
    """The layout of (..., channels)."""
    return tensor


def channels_second(tensor: Tensor) -> Tensor:
    """The layout of (batch, channels, ...)."""
    return tensor.movedim(1, -1)


def _not_cheap() -> None:
    return None


class Refused(Exception):
    """A call that can't be measured, and why: no failure."""


@dataclass(frozen=True)
class Use:
    """One call of a function, as far as a parameter is concerned: z = Φ_W Wᵀ + φ_b ⊗ b + what else.

    It refers to the call's activations and must not be kept.

    Attributes:
        kind: what reports call it.
        weight: the tensor that `Features.by_weight` multiplies, as the function got it.
        bias: the tensor that `Features.by_bias` multiplies, as the function got it.
        features: φ of the chosen rows.
        layout: (tensor shaped like the function's result) → a view of z or of its gradient with
            the channels in the last dimension, so that all dimensions before it are rows.
        whole: what one pass says of all rows; None where that is not cheap.
        shaped: brings a tensor shaped like `weight` into the shape that the features expect.
        part: what of its module this is, where one call uses several parts.
        form: what else the features depend on, in how they read weight and bias.
        late: where every row has several scales, those of all rows, for when the gradient comes;
            None where that is not cheap.
    """

    kind: str
    weight: Tensor | None
    bias: Tensor | None
    features: Callable[[Rows], Features]
    layout: Callable[[Tensor], Tensor] = as_it_is
    whole: Callable[[], Whole | None] = _not_cheap
    shaped: Callable[[Tensor], Tensor] = as_it_is
    part: str = ""
    form: object = None
    late: Callable[[], LateScales | None] = _not_cheap


def shape_alike(
    one: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor], weight: Tensor | None
) -> bool:
    """Whether two ways of shaping a weight put its entries into the same places."""
    if one is other or weight is None:
        return True
    views = one(weight.detach()), other(weight.detach())
    memory = {tensor.untyped_storage()._cdata for tensor in (weight, *views)}
    if len(memory) == 1:
        first, second = ((v.shape, v.stride(), v.storage_offset()) for v in views)
        return first == second
    entries = torch.arange(weight.numel()).view(weight.shape)
    return torch.equal(one(entries), other(entries))


@dataclass(frozen=True)
class FunctionCall:
    """What a rule may ask about a call, besides its arguments.

    Attributes:
        result: what the function gave.
        of_model: whether a tensor is made of the model's parameters and constants alone: no data.
        inside: the Python function of torch's that was opened and makes this call; "" if none.
        trains: gradients will be asked for, so that a rule refuses what spoils these alone.
    """

    result: Tensor
    of_model: Callable[[object], bool]
    inside: str = ""
    trains: bool = True

    def has_data(self, *values: object) -> bool:
        """Whether any of them is data."""
        return not all(map(self.of_model, values))

    def is_weight(self, value: object) -> TypeGuard[Tensor]:
        """Whether it is made of the model alone, and a gradient flows back to that."""
        return isinstance(value, Tensor) and value.requires_grad and self.of_model(value)


FunctionRule = Callable[..., Use | Sequence[Use] | None]
R = TypeVar("R", bound=FunctionRule)

_RULES: dict[str, FunctionRule] = {}

# Functions of torch's that take other arguments than those of the same name in torch.nn.functional.
_NAMESAKES = (torch.batch_norm, torch.instance_norm, torch.embedding, torch.embedding_bag)


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function, as rules know it."""
    name: str = getattr(function, "__name__", "")
    return f"torch.{name}" if function in _NAMESAKES else name


def uses(*names: str) -> Callable[[R], R]:
    """Decorate the rule of the functions of these names, or `opened function.name`.

    A rule gets the `FunctionCall` and what the function got, and returns the use, or several, or
    None where the parameter is not where the function is linear in it.
    """

    def decorate(rule: R) -> R:
        for name in names:
            _RULES[name] = rule
        return rule

    return decorate


def uses_in(
    function: str, call: FunctionCall, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Sequence[Use]:
    """The uses that a call of a function is; none if that is not known.

    Nor where the arguments are other than the rule knows: functions and methods of one name differ.
    """
    rule = _RULES.get(f"{call.inside}.{function}") or _RULES.get(function)
    if rule is None or not call.result.is_floating_point():
        return ()
    if kwargs.get("out", call) is None:
        kwargs = {name: value for name, value in kwargs.items() if name != "out"}
    if not _takes(rule, len(args), tuple(kwargs)):
        return ()
    found = rule(call, *args, **kwargs)
    if found is None:
        return ()
    return (found,) if isinstance(found, Use) else found


@cache
def _takes(rule: FunctionRule, count: int, names: tuple[str, ...]) -> bool:
    """Whether a rule can be given so many arguments, and those of these names."""
    try:
        inspect.signature(rule).bind(None, *(None,) * count, **dict.fromkeys(names))
    except TypeError:
        return False
    return True
