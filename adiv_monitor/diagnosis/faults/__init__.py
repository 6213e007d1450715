"""All faults, by family."""

from dataclasses import replace
from importlib import import_module

from adiv_monitor.diagnosis.faults.fault import FAULTS, NOT_LEARNT, RULES, Fault, family_of
from adiv_monitor.diagnosis.finding import RATES, Finding
from adiv_monitor.diagnosis.record import Record

# Causes before their consequences: a fault that exists before training, or at its first step, is
# not caused by the learning rate. `states` come last: whatever hinders training makes a higher
# learning rate look better.
FAMILY_NAMES = ("parameters", "could_train", "wiring", "samples", "targets", "loss", "data",
                "inputs", "initialisation", "optimizer", "rates", "units", "states")  # fmt: skip
for _name in FAMILY_NAMES:
    import_module(f"{__name__}.{_name}")


def found(record: Record) -> list[Finding]:
    """Return the findings of all rules that are asked of such a run.

    They are in the order of the families, and of the rules' places in these.
    """
    findings: list[Finding] = []
    this = "audit" if record.is_audited else "monitor"
    asked = [rule for rule, of in RULES.items() if of in ("", this)]
    for rule in sorted(asked, key=lambda rule: FAMILY_NAMES.index(family_of(rule))):
        findings += rule(record)
    rest = [f for rule, of in RULES.items() if of == "rest" for f in rule(record, findings)]
    return [_completed(finding, record) for finding in findings + rest]


def _completed(finding: Finding, record: Record) -> Finding:
    """Say of a fault that exists before the first step since when, and that no rate helps."""
    if not {*NOT_LEARNT} <= {*FAULTS[finding.name].explains}:
        return finding
    if record.is_audited and finding.since is None:
        finding = replace(finding, since=0)
    if finding.not_advised:
        return finding
    said = "Another learning rate does not help."
    return replace(finding, not_advised=said, against=RATES)


def could_show(record: Record) -> list[str]:
    """Return the names of the faults that the record of a monitor's run could show."""
    order = sorted(FAULTS, key=lambda name: FAMILY_NAMES.index(FAULTS[name].family))
    return [name for name in order if FAULTS[name].shown_by(record)]


__all__ = ["FAULTS", "Fault", "could_show", "found"]
