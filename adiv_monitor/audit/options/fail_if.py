"""Rules by which an audit fails, for gates in continuous integration: parsed, never evaluated."""

import re
from collections.abc import Iterator
from difflib import get_close_matches
from fnmatch import fnmatchcase

from adiv_monitor import alarms
from adiv_monitor.alarms import Rule
from adiv_monitor.audit.options.usage import UsageError
from adiv_monitor.audit.report import AuditReport
from adiv_monitor.diagnosis.faults import FAULTS
from adiv_monitor.diagnosis.finding import STRENGTHS

_NAME = re.compile(r"(?:(?P<layers>.+):)?\s*(?P<finding>[a-z][a-z0-9]*(?:-[a-z0-9]+)*)")
# Former names of findings → what is there instead.
_RETIRED = dict.fromkeys(
    ("module-repeated", "joined-with-itself", "self-pairs"), "no longer looked for"
)


def parse(text: str) -> Rule:
    """Parse a rule.

    A rule is `[LAYERS:] MEASURE > NUMBER` (or >=, <, <=), where LAYERS is a glob pattern over
    layers; or `[LAYERS:] NAME`, the name of a finding; or `act`, `watch` or `note`, which holds for
    any finding of this strength or a greater one.

    Raises:
        UsageError: The text is no such rule, or there is no such measure or finding.
    """
    try:
        rule = alarms.parse(text)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if rule is not None:
        return rule
    if (match := _NAME.fullmatch(text.strip())) is not None:
        if match["finding"] in _RETIRED:
            raise UsageError(f"{text!r}: {match['finding']!r} is {_RETIRED[match['finding']]}")
        names = (*FAULTS, *STRENGTHS)
        if match["finding"] not in names:
            close = get_close_matches(match["finding"], names, 2) or sorted(names)
            raise UsageError(
                f"{text!r}: there is no finding {match['finding']!r}; expected one such as "
                f"{', '.join(close)}"
            )
        return Rule(text, (match["layers"] or "*").strip(), match["finding"])
    raise UsageError(
        f"{text!r}: expected [LAYERS:] MEASURE > NUMBER with one of > >= < <=, such as 'encoder.*: "
        "update_cosine < 0'; or the name of a finding"
    )


def hits(rule: Rule, report: AuditReport) -> list[str]:
    """Return where the rule holds, with the values: one text for each layer, or for each finding.

    A value is a hit if it exceeds the limit by more than two of its standard errors, at any
    measured step. A value without direction (NaN), or with an unknown error, is no hit.

    Raises:
        UsageError: No layer that the rule names has the measure, so nothing was compared.
    """
    if not rule.comparison:
        return list(_findings(rule, report))
    compared = [
        (step.step, *of_layer)
        for step in report.record.reports
        for of_layer in alarms.compared(rule, step)
    ]
    if not compared:
        raise UsageError(_nothing(rule, report))
    found: dict[str, list[str]] = {}
    for step, layer, value, error in compared:
        if rule.holds(value, error):
            shown = f"{value:.4g}" + (f" ± {error:.1g}" if error else "")
            found.setdefault(layer, []).append(f"{shown} (step {step})")
    return [f"{layer}: {', '.join(values)}" for layer, values in found.items()]


def _findings(rule: Rule, report: AuditReport) -> Iterator[str]:
    """Yield the findings of the rule's name or strength at the layers that the rule names."""
    for finding in report.findings:
        as_strong = STRENGTHS[STRENGTHS.index(finding.strength) :]
        at = [layer for layer in finding.layers if fnmatchcase(layer, rule.layers)]
        if rule.measure in (finding.name, *as_strong) and (at or rule.layers == "*"):
            yield f"{finding.name} ({finding.strength}) at {', '.join(at) or 'the model'}"


def _nothing(rule: Rule, report: AuditReport) -> str:
    layers = {layer for step in report.record.reports for layer in step.readings(rule.measure)}
    if not layers:
        why = "no layer was measured"
    elif any(fnmatchcase(layer, rule.layers) for layer in layers):
        why = f"no such layer has the measure {rule.measure}"
    else:
        some = ", ".join(sorted(layers)[:5]) + (", …" if len(layers) > 5 else "")
        why = f"{rule.layers!r} matches no layer; there are {some}"
    return f"--fail-if {rule.text!r}: nothing could be compared: {why}"
