"""From numbers on the host to readings of attentions, and why there is none of others."""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from adiv_monitor.capture.selection import listed
from adiv_monitor.maths.attention import attention_reading
from adiv_monitor.maths.sums import Array
from adiv_monitor.report import AttentionReading


@dataclass
class Attended:
    """One attention of a step.

    Attributes:
        samples: that received a gradient.
        precision: rounding of the coarsest number on the way.
        values: numbers, by name: what `attention_reading` takes, and `query_error`, `key_error`,
            `output_error` and `scale_error`, by how much what was made again is off.
        no_scale: why there is no scale among them, if that is known.
    """

    samples: int
    precision: float
    values: dict[str, Tensor] = field(default_factory=dict)
    no_scale: str = ""


def attention_outcome(
    attended: Mapping[str, Attended],
    values: Mapping[str, Mapping[str, Array]],
    refused: Mapping[str, str],
) -> tuple[dict[str, AttentionReading], list[str]]:
    """Readings by path, and notes.

    Args:
        attended: by path, what was looked at.
        values: by path, the numbers of those.
        refused: path → why there are none.
    """
    missing = dict(refused)
    no_scale = {path: seen.no_scale for path, seen in attended.items() if seen.no_scale}
    readings = {}
    for path, seen in attended.items():
        numbers = dict(values[path])
        tolerance = _tolerance(seen.precision)
        errors = {what: float(numbers.pop(f"{what}_error")) for what in ("query", "key", "output")}
        off = [f"{what} (by {e:.2g})" for what, e in errors.items() if not e <= tolerance]
        if off:
            missing[path] = (
                f"run once more on some samples, its {', '.join(off)} was not that of the forward "
                "pass: it depends on more than its inputs on these samples (BatchNorm, a cache, "
                "random numbers?)"
            )
            continue
        scale_error = float(numbers.pop("scale_error", 0.0))
        if not scale_error <= tolerance:
            no_scale[path] = (
                "it is not the sum over rows of known uses of parameters (queries and keys have a "
                "weight in common, tokens are mixed before the scores, a layer weighs its "
                "gradient, or a use is not known)"
            )
        if path in no_scale:
            numbers = {n: x for n, x in numbers.items() if not n.startswith("scale_")}
        readings[path] = attention_reading(numbers, seen.samples)
    return readings, [
        *_notes("Attention of {} is not measured: {}.", missing),
        *_notes("The attention scale of {} is not told: {}.", no_scale),
    ]


def _tolerance(precision: float) -> float:
    """How far rounding may take two ways to one number apart, relative to it.

    Products of float32 may be taken with fewer digits (TensorFloat-32), half precision has few; and
    some libraries' norms and rotations round to float32 in any case.
    """
    return min(max(1e-4, 50 * math.sqrt(precision)), 0.05)


def _notes(sentence: str, reasons: Mapping[str, str]) -> list[str]:
    """One for each reason."""
    paths = defaultdict(list)
    for path, reason in reasons.items():
        paths[reason].append(path or "the model itself")
    return [sentence.format(listed(several), reason) for reason, several in paths.items()]
