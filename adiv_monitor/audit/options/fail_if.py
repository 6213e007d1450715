"""Rules by which an audit fails, for gates in continuous integration: parsed, never evaluated."""

from collections.abc import Iterator
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

from adiv_monitor import alarms
from adiv_monitor.alarms import Rule
from adiv_monitor.audit.options.usage import UsageError, one_line
from adiv_monitor.audit.report import AuditReport
from adiv_monitor.diagnosis.faults import FAULTS
from adiv_monitor.diagnosis.finding import STRENGTHS

# Former names of findings → what is there instead.
_RETIRED = {
    **dict.fromkeys(("module-repeated", "joined-with-itself", "self-pairs", "label-smoothing"), ""),
    "gradient-differs": "; torch.autograd.gradcheck tells whether a gradient is right",
}


def parse(text: str) -> Rule:
    """Parse a rule.

    A rule is `[LAYERS:] MEASURE > NUMBER` (or >=, <, <=), where LAYERS is a glob pattern over
    layers; or `[LAYERS:] NAME`, the name of a finding; or `act`, `watch` or `note`, which holds for
    any finding of this strength or a greater one.

    Raises:
        ValueError: The text is no such rule, or there is no such measure or finding.
    """
    if (rule := alarms.parse(text)) is not None:
        return rule
    layers, _, name = (part.strip() for part in text.rpartition(":"))
    if name in _RETIRED:
        raise ValueError(f"{text!r}: {name!r} is no longer looked for{_RETIRED[name]}")
    names = (*FAULTS, *STRENGTHS)
    if name not in names:
        close = " or ".join(get_close_matches(name, names, 2) or ("dead-units", "act"))
        raise ValueError(
            f"{text!r}: expected [LAYERS:] MEASURE > NUMBER with one of > >= < <=, or the name or "
            f"strength of a finding, such as {close}"
        )
    return Rule(text, layers or "*", name)


def hits(rule: Rule, report: AuditReport) -> list[str]:
    """Return where the rule holds, with the values: one text for each layer, or for each finding.

    A value is a hit if it exceeds the limit by more than two of its standard errors, at any
    measured step. A value without direction (NaN), or with an unknown error, is no hit.

    Raises:
        UsageError: No layer that the rule names has the measure, so nothing was compared.
    """
    if not rule.comparison:
        return list(_findings(rule, report))
    reports = report.record.reports
    compared = [(step.step, *of) for step in reports for of in alarms.compared(rule, step)]
    if not compared:
        of_all = replace(rule, layers="*")
        known = sorted({layer for x in reports for layer, *_ in alarms.compared(of_all, x)})
        raise UsageError(
            f"--fail-if {rule.text!r}: nothing could be compared: {rule.measure} was measured at "
            f"{one_line(', '.join(known)) or 'no layer'}; some measures need their option"
        )
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
