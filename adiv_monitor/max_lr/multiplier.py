"""Multipliers (n/n₀)^(−a) of weights, as parametrizations of torch's."""

from torch import Tensor, nn
from torch.nn.utils import parametrize

from adiv_monitor.max_lr.exponents import Parametrization


class Multiplier(nn.Module):
    """The weight times a constant, (n/n₀)^(−a).

    Args:
        ratio: n/n₀, the layer's width over that at the base.
        exponent: a.
        parametrization: the one that asks for it.
    """

    def __init__(self, ratio: float, exponent: float, parametrization: Parametrization) -> None:
        super().__init__()
        self.ratio = ratio
        self.exponent = exponent
        self.parametrization = parametrization
        self.factor: float = ratio**-exponent

    def forward(self, weight: Tensor) -> Tensor:
        """What the layer uses."""
        return weight * self.factor

    def right_inverse(self, weight: Tensor) -> Tensor:
        """What is stored so that the layer uses this."""
        return weight / self.factor


def multiplier_of(module: nn.Module, name: str) -> Multiplier | None:
    """By what a weight of a module is multiplied; None: it has no multiplier."""
    if not parametrize.is_parametrized(module, name):
        return None
    makers = module.parametrizations[name]  # type: ignore[index]
    return next((maker for maker in makers if isinstance(maker, Multiplier)), None)


def parametrization_of(model: nn.Module) -> Parametrization | None:
    """The parametrization that a model's multipliers are of; None: it has none."""
    found = (module for module in model.modules() if isinstance(module, Multiplier))
    first = next(found, None)
    return None if first is None else first.parametrization
