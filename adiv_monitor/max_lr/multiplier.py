"""Multipliers (n/n₀)^(−a) of weights, as torch parametrizations."""

from torch import Tensor, nn
from torch.nn.utils import parametrize

from adiv_monitor.max_lr.exponents import Parametrization


class Multiplier(nn.Module):
    """The weight times a constant, (n/n₀)^(−a).

    Args:
        ratio: n/n₀, the ratio of the layer's width to that of the base.
        exponent: a.
        parametrization: the parametrization that it belongs to.
    """

    def __init__(self, ratio: float, exponent: float, parametrization: Parametrization) -> None:
        super().__init__()
        self.ratio = ratio
        self.exponent = exponent
        self.parametrization = parametrization
        self.factor: float = ratio**-exponent

    def forward(self, weight: Tensor) -> Tensor:
        """Return the weight that the layer uses."""
        return weight * self.factor

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Return the weight to store, so that the layer uses `weight`."""
        return weight / self.factor


def multiplier_of(module: nn.Module, name: str) -> Multiplier | None:
    """Return the multiplier of a module's weight; None if it has none."""
    if not parametrize.is_parametrized(module, name):
        return None
    makers = module.parametrizations[name]  # type: ignore[index]
    return next((maker for maker in makers if isinstance(maker, Multiplier)), None)


def parametrization_of(model: nn.Module) -> Parametrization | None:
    """Return the parametrization of a model's multipliers; None if it has none."""
    found = (m.parametrization for m in model.modules() if isinstance(m, Multiplier))
    return next(found, None)
