"""The numbers of some fixes, as they follow from the run that they are for."""

import math
from collections.abc import Collection, Mapping, Sequence
from statistics import median

import numpy as np

from adiv_monitor.diagnosis.record import Record
from adiv_monitor.printable import quoted

USUAL = 0.9  # momentum, and Adam's β₁
SAID = 6  # layers, at most, whose rates an advice prints
AT_MOST = 100.0  # a layer's rate is changed by no larger factor


def less_momentum(momentum: float) -> float:
    """What to try in its place: 0.9, of more than 0.95; half of less."""
    return USUAL if momentum > (1 + USUAL) / 2 else momentum / 2


def clip_norm(record: Record) -> float:
    """The 90th percentile of the gradient's norms, as Google's tuning playbook advises.

    1 where none was seen that is finite.
    """
    norms = [n for n in record.gradient_norms if math.isfinite(n) and n > 0]
    return float(np.quantile(norms, 0.9)) if norms else 1.0


def rates_per_layer(record: Record, layers: Collection[str] = ()) -> Mapping[str, float]:
    """Layer → the factor on its learning rate that makes it as fast as the others: median(e) / e_l.

    e is the effective learning rate; where the optimizer divides by the gradient's size, how far
    activations move relative to their own size.

    Args:
        record: of the run.
        layers: which are wanted; empty: all.

    Returns:
        0.01 to 100; empty where the speeds of fewer than two layers are known.
    """
    plain = record.facts.optimizer in ("SGD", "ASGD")
    speeds = _speeds(record, "effective_lr" if plain else "update_ratio")
    if len(speeds) < 2:
        return {}
    middle = median(speeds.values())
    return {
        path: min(max(middle / speed, 1 / AT_MOST), AT_MOST)
        for path, speed in speeds.items()
        if not layers or path in layers
    }


def own_rates(record: Record, layers: Sequence[str]) -> str:
    """The same as advice; without numbers where the optimizer, on which they depend, is unknown."""
    factors = rates_per_layer(record, layers) if record.facts.optimizer else {}
    said = [f"× {factors[path]:.3g} for {quoted(path)}" for path in layers if path in factors]
    more = f" and {len(said) - SAID} more, each by the median layer's speed over its own"
    shown = ", ".join(said[:SAID]) + more * (len(said) > SAID)
    return "give these layers learning rates of their own" + (f": {shown}" if said else "")


def _speeds(record: Record, measure: str) -> dict[str, float]:
    """Each layer's median over the measured steps, where it is positive."""
    seen: dict[str, list[float]] = {}
    for report in record.reports:
        for path, reading in report.layers.items():
            value = getattr(reading, measure)
            if value is not None and math.isfinite(value):
                seen.setdefault(path, []).append(value)
    middles = {path: median(values) for path, values in seen.items()}
    return {path: value for path, value in middles.items() if value > 0}
