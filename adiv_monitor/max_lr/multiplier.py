"""Multipliers n^(−a) of weights, as parametrizations of torch's."""

from math import prod

from torch import Tensor, nn
from torch.nn.utils import parametrize


class Multiplier(nn.Module):
    """The weight times a constant, n^(−a)."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, weight: Tensor) -> Tensor:
        """What the layer uses."""
        return weight * self.factor

    def right_inverse(self, weight: Tensor) -> Tensor:
        """What is stored so that the layer uses this."""
        return weight / self.factor


def multiplier_of(module: nn.Module, name: str) -> float | None:
    """By what a weight of a module is multiplied; None: it has no multiplier."""
    if not parametrize.is_parametrized(module, name):
        return None
    makers = module.parametrizations[name]  # type: ignore[index]
    factors = [maker.factor for maker in makers if isinstance(maker, Multiplier)]
    return prod(factors) if factors else None
