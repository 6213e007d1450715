"""Readings of attentions from the numbers on the host, and notes on missing ones."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from adiv_monitor.capture.selection import listed
from adiv_monitor.maths.attention import attention_reading
from adiv_monitor.maths.attention_sums import AttentionSums
from adiv_monitor.maths.sums import Array
from adiv_monitor.report import AttentionReading

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
    missing, no_scale = dict(refused), dict[str, str]()
    readings = {}
    for path, sums in attention.items():
        if sums.broken:
            missing[path] = "its queries or keys are not finite"
        else:
            if sums.scale is not None and not sums.scale.error <= sums.tolerance:
                sums = replace(sums, scale=None, no_scale=_NO_SUM_OF_ROWS)
            if sums.no_scale:
                no_scale[path] = sums.no_scale
            if not (sums.G_G is None and sums.scale is None):
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
