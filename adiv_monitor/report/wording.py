"""Wording for human readers: numbers with errors, shares, and layers that were not measured."""

import math
from collections import defaultdict

from adiv_monitor.printable import code, counted, layer_words
from adiv_monitor.report import AlignmentReading, AttentionReading, LayerReading, StepReport

_MOST_LINES = 12
NOT_FINITE = "NaN"  # shown for a reading of a layer with values that are not finite
NO_GRADIENT = "no gradient reached it in this step"  # why a module was not measured
IDLE = "idle"  # shown for a reading of a layer of which no sampled row has a gradient
_OF_PARAMETERS = ("parameter_cosine", "projection_cosine", "applied_cosine")


def number(value: float, error: float = 0.0) -> str:
    """Format a value with three decimals or as a power of ten, without digits below its error.

    The last digit stands where the first digit of the standard error does. "≈0" is a value closer
    to zero than its error, so without a known sign. "–" is no direction (NaN), "?" an unknown
    value, whose error is not finite.
    """
    if math.isnan(value):
        return "–"
    if not math.isfinite(error):
        return "?"
    if math.isinf(value):
        return f"{value:.0f}"
    places = 3
    if error > 0:
        if abs(value) < error:
            return "≈0"
        place = -math.floor(math.log10(error))
        value, places = round(value, place), min(place, 3)
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.{max(places, 0)}f}"
    if error > 0:
        return f"{value:.{min(max(place + math.floor(math.log10(abs(value))), 0), 1)}e}"
    return f"{value:.1e}"


def cell(reading: LayerReading | AttentionReading | AlignmentReading, measure: str) -> str:
    """Format a measure as tables show it; "" if it was not taken."""
    value = getattr(reading, measure)
    if value is None:
        return ""
    if math.isnan(value) and isinstance(reading, LayerReading):
        if reading.non_finite:
            return NOT_FINITE
        if 0 < reading.rows_seen == reading.rows_without_gradient and (
            measure not in _OF_PARAMETERS
        ):
            return IDLE
    return number(value, reading.standard_error.get(measure, 0.0))


def rows_words(reading: LayerReading | AttentionReading | AlignmentReading) -> str:
    """Return the number of rows, or samples, that were examined, in words."""
    if isinstance(reading, AttentionReading):
        seen = total = reading.samples_seen
    elif isinstance(reading, AlignmentReading):
        seen = total = reading.rows
    else:
        seen, total = reading.rows_seen, reading.rows_total
    return f"{total:,}" if seen == total else f"{seen:,} of {total:,}"


def percent(share: float) -> str:
    """Format a share between 0 and 1; only exact 0 and 1 become "0%" and "100%"."""
    if share in (0, 1):
        return f"{share:.0%}"
    return f"{min(max(share, 0.001), 0.999):.1%}"


def non_finite_words(report: StepReport, what: str, layer: str = "") -> str:
    """Return words for a non-finite tensor and its layer: "the outputs of Linear 'net.0'"."""
    if what == "loss":
        return "the loss"
    return f"the {what} of {layer_words(layer, report.layers[layer].module)}"


def trained(report: StepReport) -> str:
    """Return words for the parameters that the report's coverage refers to."""
    return "the trained parameters" + ("" if report.turn is None else f" of {report.turn}")


def not_measured(report: StepReport, *, as_code: bool = False) -> list[str]:
    """List what was not measured: where, how much and why; one line per reason, largest first.

    Args:
        report: the report to describe.
        as_code: whether to format names as Markdown code.
    """
    paths: dict[str, list[str]] = defaultdict(list)
    for path, reason in report.unsupported.items():
        paths[reason].append(path)
    parameters: dict[str, dict[str, int]] = defaultdict(dict)
    for name, elements in report.unmeasured.items():
        owner = name if name in report.unsupported else name.rpartition(".")[0]
        if owner in report.unsupported:  # else the whole step was not measured, as a note says
            parameters[report.unsupported[owner]][name] = elements
    lines = [
        (
            sum(parameters[reason].values()),
            f"{_where(found, parameters[reason], as_code)}: {reason}",
        )
        for reason, found in paths.items()
    ]
    lines.sort(key=lambda line: -line[0])
    shown = lines if len(lines) <= _MOST_LINES else lines[: _MOST_LINES - 1]
    said = [line for _, line in shown]
    if rest := lines[len(shown) :]:
        count = counted(sum(elements for elements, _ in rest), "element")
        said.append(f"{len(rest)} more reasons for {count} are in the report's `unsupported`")
    return said


def _where(paths: list[str], parameters: dict[str, int], as_code: bool) -> str:
    """Name the modules (for one module, also its parameters) and the number of their elements."""
    names = listed([path or "the model itself" for path in paths], as_code=as_code)
    if not parameters:
        return names
    count = counted(sum(parameters.values()), "element")
    if len(paths) > 1 or paths[0] in parameters:
        return f"{names} ({count})"
    own = [name.removeprefix(f"{paths[0]}.") for name in parameters]
    return f"{names} ({listed(own, as_code=as_code)}: {count})"


def listed(names: list[str], *, as_code: bool = False) -> str:
    """List three names and the number of further ones; "" stands for the whole model."""
    said = (code(name) if as_code and name else name or "the model itself" for name in names[:3])
    shown = ", ".join(said)
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3:,} more"
