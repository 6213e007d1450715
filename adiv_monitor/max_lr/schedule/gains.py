"""Factors of learning rates from exponents, and limits of their change."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from adiv_monitor.max_lr.model import Ratios

_FULL: Ratios = (None, None, None)


@dataclass(frozen=True)
class Smoothing:
    """Smoothing of the gains over readings.

    Attributes:
        beta: share of a gain's logarithm that stays at each reading, 0 to 1.
        cap: largest gain, and largest inverse of a gain, ≥ 1.
        limit: largest factor of change from one reading to the next, ≥ 1.
    """

    beta: float = 0.8
    cap: float = 8.0
    limit: float = 1.25

    def __post_init__(self) -> None:
        if not 0 <= self.beta < 1:
            raise ValueError(f"beta={self.beta}: expected a share, 0 to below 1")
        for name in ("cap", "limit"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 1):
                raise ValueError(f"{name}={value}: expected a factor of at least 1")

    def next(self, log_gain: float, gain_exponent: float, width: int) -> float:
        """Return log m ← β log m + (1 − β) clip((c_full − c) log n), changed by at most the limit.

        Args:
            log_gain: the current log m.
            gain_exponent: c_full − c.
            width: n of the layer.
        """
        most, step = math.log(self.cap), math.log(self.limit)
        target = min(max(gain_exponent * math.log(width), -most), most)
        new = self.beta * log_gain + (1 - self.beta) * target
        return min(max(new, log_gain - step), log_gain + step)


def usable(ratios: Mapping[str, Ratios], before: Mapping[str, Ratios]) -> dict[str, Ratios]:
    """Return each ratio, or its previous value if it is None; None if both are."""
    return {
        path: tuple(  # type: ignore[misc]  # three of them
            old if new is None else new
            for new, old in zip(of_layer, before.get(path, _FULL), strict=True)
        )
        for path, of_layer in ratios.items()
    }


def all_finite(ratios: Mapping[str, Ratios]) -> bool:
    """Whether no ratio is NaN or infinite."""
    values = (value for of_layer in ratios.values() for value in of_layer)
    return all(value is None or math.isfinite(value) for value in values)


def factors(log_gains: Mapping[str, float], *, normalise: bool) -> dict[str, float]:
    """Return m of each layer; if normalised, their geometric mean is 1."""
    middle = math.fsum(log_gains.values()) / len(log_gains) if normalise and log_gains else 0.0
    return {path: math.exp(value - middle) for path, value in log_gains.items()}
