"""Numbers as JSON may have them."""

import math


def number(written: float | str | None) -> float:
    """A number as JSON may have it: "Infinity", "-Infinity", "NaN" or null (NaN) if not finite."""
    return math.nan if written is None else float(written)
