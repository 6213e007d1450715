"""The causes that lower the cosine of a step, and by how much each of them does.

A step that moved the activations straight downhill would have a cosine of 1. The measures of the
spec (sections 2 and 4) add one cause after the other:

    1 ─scale→ diagonal_cosine ─interference→ gradient_cosine ─optimizer→ update_cosine
      ─depth→ realised_cosine

so the differences between neighbours are the causes' parts, and sum to the loss of cosine. A part
may be negative: an optimizer can raise a cosine that interference lowered.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from adiv_monitor.report import LayerReading

# Cause → the first measure that includes it, in the order of the chain.
CHAIN: Mapping[str, str] = {
    "scale": "diagonal_cosine",
    "interference": "gradient_cosine",
    "optimizer": "update_cosine",
    "depth": "realised_cosine",
}
WIDTH, HEIGHT = 120, 22  # of a bar


@dataclass(frozen=True)
class Part:
    """The loss of cosine by one cause, or by several if a measure between them is missing.

    Attributes:
        causes: names of the causes.
        before: the cosine without them; 1 for the first.
        after: the cosine with them.
        error: standard error of `before - after`, as if both were independent.
    """

    causes: tuple[str, ...]
    before: float
    after: float
    error: float

    @property
    def taken(self) -> float:
        """The loss of cosine; negative for a gain."""
        return self.before - self.after


class Block(NamedTuple):
    """A block of a bar, from left to right, in units of the picture."""

    cause: str
    x: float
    width: float


def chain(reading: LayerReading) -> tuple[Part, ...]:
    """Return the causes' parts in one layer; measures that the layer lacks are skipped."""
    parts: list[Part] = []
    causes: tuple[str, ...] = ()
    before, error = 1.0, 0.0
    for cause, measure in CHAIN.items():
        causes += (cause,)
        value = getattr(reading, measure)
        if value is None or not math.isfinite(value):
            continue
        own = reading.standard_error.get(measure, 0.0)
        parts.append(Part(causes, before, value, math.hypot(error, own)))
        causes, before, error = (), value, own
    return tuple(parts)


def mean_chain(readings: Mapping[str, LayerReading]) -> tuple[tuple[Part, ...], int]:
    """Return each cause's mean part over the layers that have all causes separately.

    Depth is included if all these layers have it.

    Returns:
        The parts, in the chain's order, and the number of layers; () and 0 if there are none.
    """
    chains = map(chain, readings.values())
    whole = [
        parts for parts in chains if len(parts) >= 3 and all(len(p.causes) == 1 for p in parts)
    ]
    depth = min(map(len, whole), default=0)
    return tuple(_mean([parts[i] for parts in whole]) for i in range(depth)), len(whole)


def _mean(parts: Sequence[Part]) -> Part:
    before, after = fmean(p.before for p in parts), fmean(p.after for p in parts)
    return Part(parts[0].causes, before, after, math.hypot(*(p.error for p in parts)) / len(parts))


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
