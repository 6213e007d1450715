"""Readings of attentions from the numbers on the host, and notes on missing ones."""

import math
from collections import defaultdict
from collections.abc import Mapping

from adiv_monitor.capture.selection import listed
from adiv_monitor.maths.attention import attention_reading
from adiv_monitor.maths.attention_sums import AttentionSums
from adiv_monitor.maths.records import leaves, replaced
from adiv_monitor.maths.sums import Array
from adiv_monitor.report import AttentionReading

_OTHERWISE = (
    "when it ran again on some samples, its {} was not that of the forward pass: it depends on "
    "more than its inputs on these samples (BatchNorm, a cache, random numbers?)"
)
_NO_SUM_OF_ROWS = (
    "it is not the sum over rows of known uses of parameters (queries and keys share a weight, "
    "tokens are mixed before the scores, a layer scales its gradient, or a use is not known)"
)


def attention_outcome(
    attention: Mapping[str, AttentionSums[Array]], refused: Mapping[str, str]
) -> tuple[dict[str, AttentionReading], list[str]]:
    """Return readings by path, and notes.

    Args:
        attention: records by path.
        refused: path → why there is no record.
    """
    missing = dict(refused)
    no_scale = {path: sums.no_scale for path, sums in attention.items() if sums.no_scale}
    readings = {}
    for path, sums in attention.items():
        tolerance = sums.errors.tolerance
        errors = [(what, float(error)) for what, error in leaves(sums.errors)]
        if any(math.isnan(error) for _, error in errors):
            missing[path] = "its queries, keys, values or outputs are not finite"
            continue
        off = [f"{what} (by {error:.2g})" for what, error in errors if not error <= tolerance]
        if off:
            missing[path] = _OTHERWISE.format(", ".join(off))
            continue
        if sums.scale is not None and not sums.scale.error <= tolerance:
            no_scale[path] = _NO_SUM_OF_ROWS
        if path in no_scale:
            sums = replaced(sums, scale=None)
        readings[path] = attention_reading(sums)
    return readings, [
        *_notes("Attention of {} is not measured: {}.", missing),
        *_notes("The attention scale of {} is not measured: {}.", no_scale),
    ]


def _notes(sentence: str, reasons: Mapping[str, str]) -> list[str]:
    """Return one note for each reason."""
    paths = defaultdict(list)
    for path, reason in reasons.items():
        paths[reason].append(path or "the model itself")
    return [sentence.format(listed(several), reason) for reason, several in paths.items()]
