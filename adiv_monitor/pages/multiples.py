"""Small pictures in the rows of a table: a distribution, and a bar of the causes.

Each takes a few hundred characters, so that a table of hundreds of layers stays small.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from adiv_monitor.pages.chain import Part
from adiv_monitor.report import QUANTILE_LEVELS

WIDTH, HEIGHT = 120, 22
_BINS = 40


@dataclass(frozen=True)
class Axis:
    """The horizontal axis of all pictures of a column.

    Attributes:
        low: value at the left end.
        high: value at the right end.
        logarithmic: whether equal distances are equal ratios.
    """

    low: float
    high: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        """Return the position of a value, from 0 to 1, clipped at the ends."""
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(max(value, self.low))
        return min(max((value - low) / (high - low), 0.0), 1.0)


@dataclass(frozen=True)
class Block:
    """A block of a bar, from left to right, in units of the picture."""

    cause: str
    x: float
    width: float


def scale_axis(quantiles: Iterable[Sequence[float]]) -> Axis:
    """Return the axis of row scales that covers all these distributions."""
    ends = [q for of_layer in quantiles for q in of_layer if q > 0 and math.isfinite(q)]
    low, high = (min(ends), max(ends)) if ends else (1.0, 1.0)
    if high < 2 * low:  # on a shorter axis, rounding would look like a distribution
        middle = math.sqrt(low * high)
        low, high = middle / 2, middle * 2
    return Axis(low, high, True)


def distribution(quantiles: Sequence[float], axis: Axis) -> str:
    """Return the outline of a histogram as an SVG path; "" if there is no distribution.

    Between two quantiles the share grows evenly along the axis. The fullest bin has full height.
    """
    if not quantiles or not all(map(math.isfinite, quantiles)):
        return ""
    bins = [0.0] * _BINS
    share = QUANTILE_LEVELS[1] - QUANTILE_LEVELS[0]
    places = [axis.at(q) * _BINS for q in quantiles]
    for left, right in pairwise(places):
        for i in range(min(int(left), _BINS - 1), min(int(right), _BINS - 1) + 1):
            overlap = min(right, i + 1) - max(left, i)
            bins[i] += share * (overlap / (right - left) if right > left else 1)
    fullest = max(bins)
    step = WIDTH / _BINS
    filled = [i for i, share in enumerate(bins) if share > 0]
    first, last = filled[0], filled[-1]
    path = [f"M{first * step:g} {HEIGHT}"]
    for i in range(first, last + 1):
        path.append(f"V{HEIGHT - (HEIGHT - 2) * bins[i] / fullest:.3g}H{(i + 1) * step:g}")
    return "".join(path) + f"V{HEIGHT}Z"


def bar(parts: Sequence[Part], lowest: float) -> tuple[Block, ...]:
    """Return the causes' parts as blocks, in drawing order, on an axis from `lowest` (≤ 0) to 1.

    The remaining cosine reaches from 0 to the last cosine. A part that wins cosine back lies on top
    of those that it wins from; its cause is called "won".
    """
    if not parts:
        return ()

    def block(cause: str, left: float, right: float) -> Block:
        unit = WIDTH / (1 - lowest)
        return Block(cause, round((left - lowest) * unit, 1), round((right - left) * unit, 1))

    kept = parts[-1].after
    blocks = [block(p.causes[-1], p.after, p.before) for p in parts if p.taken > 0]
    if kept > 0:
        blocks.append(block("kept", 0.0, kept))
    blocks += [
        block("won", max(p.before, 0.0), min(p.after, kept))
        for p in parts
        if p.taken < 0 and min(p.after, kept) > max(p.before, 0.0)
    ]
    return tuple(blocks)
