"""Registered rules for modules that the function rules do not cover."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from adiv_monitor.features.features import Features
from adiv_monitor.features.uses import Use

FeatureFunction = Callable[..., Features]
Layout = Callable[[Any, Tensor], Tensor]
F = TypeVar("F", bound=FeatureFunction)


@dataclass(frozen=True)
class Rule:
    """How a type of module is linear in its parameters.

    Attributes:
        kind: kind of layer shown in reports.
        function: (module, rows, *the arguments of its forward) → features of these rows.
        layout: (module, tensor shaped like the output) → a view with the channels in the last
            dimension, so that all dimensions before it are rows.
        weight: name of the parameter that `Features.by_weight` multiplies.
        bias: name of the parameter that `Features.by_bias` multiplies.
    """

    kind: str
    function: FeatureFunction
    layout: Layout
    weight: str
    bias: str


_RULES: dict[type[nn.Module], Rule] = {}


def use_of(rule: "Rule", module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Use:
    """Return the use of a module's parameters in one call, by its rule."""
    return Use(
        rule.kind,
        module._parameters.get(rule.weight),
        module._parameters.get(rule.bias),
        lambda rows: rule.function(module, rows, *args, **kwargs),
        partial(rule.layout, module),
    )


def register_features(
    *module_types: type[nn.Module],
    kind: str | None = None,
    layout: Layout = lambda module, tensor: tensor,
    weight: str = "weight",
    bias: str = "bias",
) -> Callable[[F], F]:
    """Register a layer with the monitor: decorate a function that returns its rows' features.

    The function gets the module, the chosen `Rows`, and the arguments of the module's forward. The
    layer's output must be `Φ_W weightᵀ + φ_b ⊗ bias`; the first measured step checks that.

    Args:
        module_types: the classes of modules; subclasses that keep `forward` are included.
        kind: kind of layer shown in reports; default: the first class's name in lower case.
        layout: returns a view, with the channels last, of a tensor shaped like the output.
        weight: name of the weight parameter.
        bias: name of the bias parameter.

    Raises:
        TypeError: an argument is not a subclass of `torch.nn.Module`.

    Example:
        >>> from torch import nn
        >>> from adiv_monitor.features import DenseFeatures, Rows, register_features
        >>> class Squared(nn.Linear):
        ...     def forward(self, x):
        ...         return nn.functional.linear(x**2, self.weight)
        >>> @register_features(Squared)
        ... def squared(module, rows, x):
        ...     return DenseFeatures(rows.take(x)[:, None] ** 2)
    """
    for module_type in module_types:
        if not (isinstance(module_type, type) and issubclass(module_type, nn.Module)):
            raise TypeError(
                f"register_features: got {module_type!r}, expected subclasses of torch.nn.Module"
            )

    def decorate(function: F) -> F:
        name = kind or module_types[0].__name__.lower()
        for module_type in module_types:
            _RULES[module_type] = Rule(name, function, layout, weight, bias)
        return function

    return decorate


def find_rule(module: nn.Module) -> Rule | None:
    """Return the rule of the module's class or nearest base class, or None.

    A rule does not apply to a subclass with its own `forward`, nor to a module whose weight is
    computed from other parameters.
    """
    for base in type(module).__mro__:
        if base in _RULES:
            rule, is_own = _RULES[base], type(module).forward is base.forward
            is_derived = _is_derived(module, rule.weight) or _is_derived(module, rule.bias)
            return rule if is_own and not is_derived else None
    return None


def _is_derived(module: nn.Module, name: str) -> bool:
    """Whether a parameter is computed from others; does not read it, which would compute it."""
    if is_parametrized(module, name):
        return True
    return name not in module._parameters and isinstance(vars(module).get(name), Tensor)
