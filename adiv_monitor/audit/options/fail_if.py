"""Rules by which an audit fails, for gates in continuous integration: parsed, never evaluated."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Hit:
    """A rule that holds at a layer or for a finding; `text` says where, with the value."""

    rule: Rule
    text: str


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


def hits(rule: Rule, report: AuditReport) -> list[Hit]:
    """Return where the rule holds: one hit for each layer, or for each finding.

    A value is a hit if it exceeds the limit by more than two of its standard errors, at any
    measured step. A value without direction (NaN), or with an unknown error, is no hit.

    Raises:
        UsageError: No layer that the rule names has the measure, so nothing was compared.
    """
    if not rule.comparison:
        return list(_findings(rule, report))
    found: dict[str, list[str]] = {}
    compared = False
    for step in report.record.reports:
        for layer, reading in step.readings(rule.measure).items():
            value = getattr(reading, rule.measure)
            if value is None or not fnmatchcase(layer, rule.layers):
                continue
            compared = True
            error = reading.standard_error.get(rule.measure, 0.0)
            if rule.holds(value, error):
                shown = f"{value:.4g}" + (f" ± {error:.1g}" if error else "")
                found.setdefault(layer, []).append(f"{shown} (step {step.step})")
    if not compared:
        raise UsageError(_nothing(rule, report))
    return [Hit(rule, f"{layer}: {', '.join(values)}") for layer, values in found.items()]


def _findings(rule: Rule, report: AuditReport) -> Iterator[Hit]:
    """Yield the findings of the rule's name or strength at the layers that the rule names."""
    for finding in report.findings:
        if rule.measure in STRENGTHS:
            meant = STRENGTHS.index(finding.strength) <= STRENGTHS.index(rule.measure)
        else:
            meant = finding.name == rule.measure
        at = [layer for layer in finding.layers if fnmatchcase(layer, rule.layers)]
        if meant and (at or rule.layers == "*"):
            where = ", ".join(at) or "the model"
            yield Hit(rule, f"{finding.name} ({finding.strength}) at {where}")


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
