"""The causes that lower the cosine of a step, and by how much each of them does.

A step that moved the activations straight downhill would have a cosine of 1. The measures of the
spec (sections 2 and 4) add one cause after the other:

    1 ─scale→ diagonal_cosine ─interference→ gradient_cosine ─optimizer→ update_cosine
      ─depth→ realised_cosine

so the differences between neighbours are the causes' parts, and sum to the loss of cosine. A part
may be negative: an optimizer can raise a cosine that interference lowered.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from adiv_monitor.report import LayerReading

# Cause → the first measure that includes it, in the order of the chain.
CHAIN: Mapping[str, str] = MappingProxyType(
    {
        "scale": "diagonal_cosine",
        "interference": "gradient_cosine",
        "optimizer": "update_cosine",
        "depth": "realised_cosine",
    }
)


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


@dataclass(frozen=True)
class MeanPart:
    """The mean loss of cosine by one cause over several layers.

    Attributes:
        cause: name of the cause.
        taken: mean loss over the layers.
        error: standard error of `taken`.
        worst: the layer with the largest loss.
        worst_taken: the largest loss.
        worst_error: standard error of `worst_taken`.
    """

    cause: str
    taken: float
    error: float
    worst: str
    worst_taken: float
    worst_error: float


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


def mean_chain(readings: Mapping[str, LayerReading]) -> tuple[tuple[MeanPart, ...], int]:
    """Return each cause's mean part over the layers that have all causes separately.

    Depth is included if all these layers have it.

    Returns:
        The parts, in the chain's order, and the number of layers; () and 0 if there are none.
    """
    whole = {}
    for path, reading in readings.items():
        parts = chain(reading)
        if len(parts) >= 3 and all(len(part.causes) == 1 for part in parts):
            whole[path] = parts
    if not whole:
        return (), 0
    depth = min(len(parts) for parts in whole.values())
    means = [_mean((path, parts[i]) for path, parts in whole.items()) for i in range(depth)]
    return tuple(means), len(whole)


def _mean(parts: Iterable[tuple[str, Part]]) -> MeanPart:
    found = list(parts)
    worst, most = max(found, key=lambda item: item[1].taken)
    return MeanPart(
        cause=most.causes[0],
        taken=math.fsum(part.taken for _, part in found) / len(found),
        error=math.hypot(*(part.error for _, part in found)) / len(found),
        worst=worst,
        worst_taken=most.taken,
        worst_error=most.error,
    )


def mean_projection(readings: Mapping[str, LayerReading]) -> MeanPart | None:
    """Return the mean loss of the parameters' cosine by code after the optimizer's step.

    It is cos(u, −γ) − cos(a, −γ) = `parameter_cosine - applied_cosine`, in parameters, so it is not
    a link of the chain. None: not measured.
    """
    parts = []
    for path, reading in readings.items():
        before, after = reading.parameter_cosine, reading.applied_cosine
        if before is not None and after is not None and math.isfinite(before - after):
            parts.append((path, Part(("projection",), before, after, 0.0)))
    return _mean(parts) if parts else None
