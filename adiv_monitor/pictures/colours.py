"""Colours of values: the same for a measure in all runs, so that pictures are comparable."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from adiv_monitor.diagnosis.health import HEALTH
from adiv_monitor.report import SIZES, WORST

TOO_LITTLE, HEALTHY, TOO_MUCH = "#08519c", "#e3ebdf", "#b30000"
_OF_HEALTH = (TOO_LITTLE, HEALTHY, HEALTHY, HEALTHY, TOO_MUCH)
# Viridis of Matplotlib, without its darkest eighth.
_IN_ORDER = ("#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725")
# Striped cells have no value; the stripes prevent either colour from being read as a value.
NOT_FINITE, NO_VALUE = ("#000000", "#ff3fd8"), ("#ffffff", "#c9ced6")
_STRIPES = 6  # pixels from one stripe to the next
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class Scale(NamedTuple):
    """The colour scale of a measure whose values are coloured by order, not by health.

    Attributes:
        low: lower end; smaller values have the same colour.
        high: upper end; larger values have the same colour.
        healthy: range of the layers of 30 healthy runs
            (tests/benchmarks/results/separation.md), rounded; None: not known.
        logarithmic: whether equal distances are equal ratios.
    """

    low: float = 0.0
    high: float = 1.0
    healthy: tuple[float, float] | None = None
    logarithmic: bool = False


_ROWS = Scale(1, 1e6, None, True)
# Scales that cover all of 182 runs, healthy or not; those without a healthy range are rounded to
# powers of ten. All other measures are cosines, shares and exponents, on the default scale from 0
# to 1.
SCALES: Mapping[str, Scale] = MappingProxyType(
    {
        "descent": Scale(1e-6, 10, (4e-4, 0.3), True),
        "update_cosine": Scale(0, 1, (0.03, 0.8)),
        "effective_lr": Scale(1e-3, 1e5, (0.2, 800), True),
        "scale_mean": Scale(1, 1e6, (3, 600), True),
        "interference_ratio": Scale(0.1, 100, None, True),
        "first_order_error": Scale(1e-3, 10, None, True),
        **dict.fromkeys(("scale_max", "scale_p05", "scale_p50", "scale_p95"), _ROWS),
        "attention_scale_mean": Scale(1e-3, 1e6, None, True),
        "attention_scale_cv": Scale(0, 10),
        **dict.fromkeys(("effective_rank", "attention_logit_max"), Scale(1, 1e4, None, True)),
        **dict.fromkeys((x for x in SIZES if "share" not in x), Scale(1e-6, 1e4, None, True)),
        "weight_update_ratio": Scale(1e-5, 1, None, True),
        "output_rms": Scale(1e-3, 1e3, None, True),
        "output_change_rms": Scale(1e-6, 1e3, None, True),
    }
)
# Cosines that may be negative; all other measures are norms, or shares of them.
_SIGNED = frozenset(
    ("update_cosine", "gradient_cosine", "parameter_cosine", "projection_cosine", "applied_cosine")
).union(
    ("realised_cosine", "single_layer_share", "attention_cosine", "attention_gradient_cosine"),
    (f"row_cosine_{which}" for which in ("mean", "p05", "p50", "p95")),
    ("alpha", "omega", "u", "cumulative"),
)


class Bar(NamedTuple):
    """The colour bar of a measure.

    Attributes:
        low: place of its lower end.
        high: place of its upper end.
        ticks: place → value in words; the most important first.
        healthy: places between which healthy layers lie, if the colours don't show it.
    """

    low: float
    high: float
    ticks: dict[float, str]
    healthy: tuple[float, float] | None


def is_judged(measure: str) -> bool:
    """Return whether the measure's colours show how healthy a value is, not just its order."""
    return measure in HEALTH and bool(HEALTH[measure].knots)


def places(measure: str, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the places of values among the measure's colours, 0 to 1; NaN stays."""
    if is_judged(measure):
        return (HEALTH[measure].level(values) + 1) / 2
    low, high, _, logarithmic = SCALES.get(measure, Scale())
    clipped = np.clip(values, low, high)
    if logarithmic:
        low, high, clipped = math.log(low), math.log(high), np.log(clipped)
    return np.asarray((clipped - low) / (high - low), dtype=np.float64)


def bar(measure: str) -> Bar:
    """Return the measure's colour bar: the limits of healthy values, then the ends."""
    limits, healthy = {}, None
    if is_judged(measure):
        at = {(level + 1) / 2: value for value, level in HEALTH[measure].knots}
        limits = {p: v for p, v in at.items() if p in (0.25, 0.75)}
    else:
        scale = SCALES.get(measure, Scale())
        at = {0.0: scale.low, 1.0: scale.high}
        if scale.healthy is not None:
            first, last = places(measure, np.asarray(scale.healthy)).tolist()
            limits = dict(zip((first, last), scale.healthy, strict=True))
            healthy = first, last
    ends = min(at), max(at)
    below = "≤ " if at[ends[0]] > 0 or measure in _SIGNED else ""
    above = "≥ " if at[ends[1]] != 1 else ""
    ticks = {place: _shortly(value) for place, value in limits.items()}
    ticks[ends[0]] = below + _shortly(at[ends[0]])
    ticks[ends[1]] = above + _shortly(at[ends[1]])
    return Bar(*ends, ticks, healthy)


def painted(measure: str, places: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Return the colours at places of the measure: shape × red, green, blue; NaN is white.

    Colours by order are darkest at the bad end.
    """
    anchors = _OF_HEALTH if is_judged(measure) else _IN_ORDER
    if anchors is _IN_ORDER and WORST.get(measure) == "max":
        anchors = anchors[::-1]
    at = np.linspace(0, 1, len(anchors))
    rgb = np.array([_rgb(colour) for colour in anchors])
    found = np.stack([np.interp(places, at, rgb[:, i]) for i in range(3)], axis=-1)
    return np.asarray(np.nan_to_num(found, nan=255).round(), dtype=np.uint8)


def stripe(pixels: NDArray[np.uint8], where: NDArray[np.bool_], colours: tuple[str, str]) -> None:
    """Draw slanted stripes of the second colour on the first over some of the pixels."""
    rows, columns = np.nonzero(where)
    on_stripe = (rows + columns) % _STRIPES < _STRIPES // 3
    ground, line = (np.array(_rgb(colour), dtype=np.uint8) for colour in colours)
    pixels[rows, columns] = np.where(on_stripe[:, None], line, ground)


def plain(colour: str, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return pixels of a single colour."""
    return np.full((*shape, 3), _rgb(colour), dtype=np.uint8)


def _rgb(colour: str) -> tuple[int, int, int]:
    red, green, blue = bytes.fromhex(colour.removeprefix("#"))
    return red, green, blue


def _shortly(value: float) -> str:
    """Format a value, with large and small powers of ten in exponent form.

    >>> _shortly(0.009), _shortly(70.0), _shortly(1e-6)
    ('0.009', '70', '10⁻⁶')
    """
    exponent = math.log10(value) if value > 0 else 0.0
    if abs(exponent) > 3 and exponent == round(exponent):
        return "10" + str(round(exponent)).translate(_SUPERSCRIPT)
    return f"{value:g}"
