"""Parameters of some fixes, computed from the run that the fix is for."""

import math
from collections.abc import Collection, Iterable, Mapping
from statistics import median

import numpy as np

from adiv_monitor.diagnosis.finding import Advice
from adiv_monitor.diagnosis.health import HEALTH
from adiv_monitor.diagnosis.readings import at_first
from adiv_monitor.diagnosis.record import Record

USUAL = 0.9  # momentum, and Adam's β₁
MOVES = 0.01  # move of activations, relative to their length, in a step of a model that learns
AT_MOST = 100.0  # largest factor on a layer's learning rate
LEAST, MOST = 0.7, 1.4  # factors between them change nothing that can be told
# update_ratio of a layer over the median layer's, at the first step. Healthy nets have 1/25 to 24.
OVERDRIVEN, STARVED = 30.0, 50.0


def less_momentum(momentum: float) -> float:
    """Return the momentum to try next: 0.9 if it is above 0.95, else half of it."""
    return USUAL if momentum > (1 + USUAL) / 2 else momentum / 2


def clip_norm(record: Record) -> float:
    """Return the 90th percentile of the gradient's norms, as Google's tuning playbook advises.

    It is 1 if no norm is finite and positive.
    """
    norms = [n for n in record.gradient_norms if math.isfinite(n) and n > 0]
    return float(np.quantile(norms, 0.9)) if norms else 1.0


def usual_factor(moves: Iterable[float]) -> float | None:
    """Return the power of ten on the learning rate at which layers would move by `MOVES`.

    A small move is proportional to the learning rate, with plain gradient descent as with Adam. The
    layer that moves most decides.

    Args:
        moves: typical `update_ratio` of layers.

    Returns:
        The factor; None if no layer moves, or one by a number that is not finite.
    """
    largest = max(moves, default=0.0)
    factor = MOVES / largest if largest > 0 else 0.0
    return 10.0 ** round(math.log10(factor)) if 0 < factor < math.inf else None


def other_rates(factors: Iterable[float]) -> tuple[Advice, ...]:
    """Return advice to multiply the learning rate by each of some factors."""
    return tuple(Advice(f"learning rate × {f:g}", f"rate*{f:g}") for f in factors)


def rates_per_layer(record: Record, layers: Collection[str] = ()) -> Mapping[str, float]:
    """Return factors on the learning rates of layers that move unlike the median layer.

    A factor is limit / u, with a layer's largest `update_ratio` u of the first two measured steps:
    below 1 where it moves too far, above 1 where it stands still. The limit is the nearest value
    that is healthy and on this side of the median. Not by `effective_lr`: where gradients vanish on
    the way down, it is largest in the lowest layers, which hardly move.

    Args:
        record: The record of the run.
        layers: The layers to include; empty: all.

    Returns:
        Layer → factor, 0.01 to 100, for the layers outside of the limits; none from 0.7 to 1.4.
    """
    steps = [{path: t.value for path, t in step.items() if t.value > 0}
             for step in at_first(record, "update_ratio")]  # fmt: skip
    if not any(steps):
        return {}
    middle = median(steps[0].values() or [math.nan])
    low, high = HEALTH["update_ratio"].healthy
    found = {}
    for path in layers or steps[0]:
        move = max((step[path] for step in steps if path in step), default=middle)
        if move > middle * OVERDRIVEN:
            found[path] = max(min(high, middle * OVERDRIVEN), middle) / move
        elif move < middle / STARVED:
            found[path] = min(max(low, middle / STARVED), middle) / move
    factors = {path: min(max(f, 1 / AT_MOST), AT_MOST) for path, f in found.items()}
    return {path: f for path, f in factors.items() if not LEAST <= f <= MOST}
