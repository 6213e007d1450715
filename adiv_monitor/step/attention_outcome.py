"""Readings of attentions from the numbers on the host, and notes on missing ones."""

from collections import defaultdict
from collections.abc import Mapping

from adiv_monitor.capture.selection import listed
from adiv_monitor.maths.attention import attention_reading
from adiv_monitor.maths.attention_sums import AttentionSums
from adiv_monitor.maths.sums import Array
from adiv_monitor.report import AttentionReading


def attention_outcome(
    attention: Mapping[str, AttentionSums[Array]], refused: Mapping[str, str]
) -> tuple[dict[str, AttentionReading], list[str]]:
    """Return readings by path, and notes.

    Args:
        attention: records by path.
        refused: path → why there is no record.
    """
    broken = {path for path, sums in attention.items() if sums.broken}
    missing = {**refused, **dict.fromkeys(broken, "its queries or keys are not finite")}
    paths = defaultdict(list)
    for path, reason in missing.items():
        paths[reason].append(path or "the model itself")
    return (
        {p: attention_reading(sums) for p, sums in attention.items() if p not in broken},
        [f"Attention of {listed(of)} is not measured: {why}." for why, of in paths.items()],
    )
