"""All faults, by family."""

from types import FunctionType

from adiv_monitor.diagnosis.faults import (
    could_train,
    data,
    initialisation,
    inputs,
    loss,
    numbers,
    optimizer,
    parameters,
    rates,
    samples,
    states,
    targets,
    units,
)
from adiv_monitor.diagnosis.faults.fault import FAULTS, RULES, Fault, fault, finds
from adiv_monitor.diagnosis.finding import Finding
from adiv_monitor.diagnosis.record import Record

# Causes before their consequences: a fault that exists before training, or at its first step, is
# not caused by the learning rate. `states` come last: whatever hinders training makes a higher
# learning rate look better.
FAMILIES = (
    parameters,
    could_train,
    samples,
    targets,
    loss,
    data,
    numbers,
    inputs,
    initialisation,
    optimizer,
    rates,
    units,
    states,
)
FAMILY_NAMES = [family.__name__.rpartition(".")[2] for family in FAMILIES]
_PLACES = {family.__name__: place for place, family in enumerate(FAMILIES)}


def found(record: Record) -> list[Finding]:
    """Return the findings of all rules that are asked of such a run.

    They are in the order of the families, and of the rules' places in these.
    """
    this = "audit" if record.is_audited else "monitor"
    asked = [rule for rule, of in RULES.items() if of in ("", this)]
    findings = [f for rule in sorted(asked, key=_place) for f in rule(record)]
    return [*findings, *states.outside_healthy(record, findings)]


def could_show(record: Record) -> list[str]:
    """Return the names of the faults that the record of a monitor's run could show."""
    order = sorted(FAULTS, key=lambda name: FAMILY_NAMES.index(FAULTS[name].family))
    return [name for name in order if FAULTS[name].shown_by(record)]


def _place(rule: FunctionType) -> tuple[int, int]:
    return _PLACES.get(rule.__module__, len(_PLACES)), rule.__code__.co_firstlineno


__all__ = ["FAULTS", "RULES", "Fault", "could_show", "fault", "finds", "found"]
