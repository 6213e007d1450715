"""How the sinks for human readers say it: numbers with errors, shares, what was not measured."""

import math
from collections import defaultdict

from adiv_monitor.printable import code, layer_words
from adiv_monitor.report import StepReport

_MOST_LINES = 12
NOT_FINITE = "NaN"  # in place of a reading of a layer in which something is not finite


def number(value: float, error: float = 0.0) -> str:
    """The value to three decimals, or as a power of ten, without digits that its error blurs.

    The last digit stands where the first digit of the standard error does. "≈0" is a value that
    lies closer to zero than its error: it has no sign. "–" is no direction (NaN), "?" a value of
    which nothing is known, because its error is not finite.
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


def percent(share: float) -> str:
    """A share between 0 and 1; "100%" is all and "0%" nothing, and what is close is neither."""
    if share in (0, 1):
        return f"{share:.0%}"
    return f"{min(max(share, 0.001), 0.999):.1%}"


def non_finite_words(report: StepReport, what: str, layer: str = "") -> str:
    """What was not finite, and where, as a part of a sentence: "the outputs of Linear 'net.0'"."""
    if what == "loss":
        return "the loss"
    return f"the {what} of {layer_words(layer, report.layers[layer].module)}"


def trained(report: StepReport) -> str:
    """Of which parameters the report's coverage is a share."""
    return "the trained parameters" + ("" if report.turn is None else f" of {report.turn}")


def not_measured(report: StepReport, *, as_code: bool = False) -> list[str]:
    """What was not measured: where, how much and why; one line per reason, the largest first.

    Args:
        report: the report.
        as_code: whether names are code in Markdown.
    """
    paths: dict[str, list[str]] = defaultdict(list)
    for path, reason in report.unsupported.items():
        paths[reason].append(path)
    parameters: dict[str, dict[str, int]] = defaultdict(dict)
    for name, elements in report.unmeasured.items():
        owner = name if name in report.unsupported else name.rpartition(".")[0]
        if owner in report.unsupported:  # else the step as a whole was not measured: a note says so
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
        count = _count(sum(elements for elements, _ in rest))
        said.append(f"{len(rest)} more reasons for {count} are in the report's `unsupported`")
    return said


def _where(paths: list[str], parameters: dict[str, int], as_code: bool) -> str:
    """The modules (of one module: its parameters too) and how much they hold."""
    names = listed([path or "the model itself" for path in paths], as_code=as_code)
    if not parameters:
        return names
    count = _count(sum(parameters.values()))
    if len(paths) > 1 or paths[0] in parameters:
        return f"{names} ({count})"
    own = [name.removeprefix(f"{paths[0]}.") for name in parameters]
    return f"{names} ({listed(own, as_code=as_code)}: {count})"


def listed(names: list[str], *, as_code: bool = False) -> str:
    """Three names and how many more there are; a name that is empty is that of the whole model."""
    said = (code(name) if as_code and name else name or "the model itself" for name in names[:3])
    shown = ", ".join(said)
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3:,} more"


def _count(elements: int) -> str:
    return f"{elements:,} element{'' if elements == 1 else 's'}"
