"""All rules, causes before what follows from them."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from adiv_monitor.diagnosis.finding import STRENGTHS, Advice, Finding, unrefuted
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.diagnosis.rules import (
    initialisation,
    inputs,
    interference,
    loss,
    numbers,
    optimizer,
    rates,
    states,
    units,
    wiring,
)

Rule = Callable[[Record], Iterable[Finding]]

# What is so before training, or at its first step, no rate can have done. Inputs come to be ignored
# by what stands in front of that rule. A rate that is too low comes late: whatever hinders training
# makes a higher one look better.
RULES: tuple[Rule, ...] = (
    wiring.not_held,
    wiring.unreached,
    loss.double_softmax,
    loss.activated_logits,
    wiring.frozen,
    numbers.non_finite_from_the_start,
    inputs.input_scale,
    inputs.input_mean,
    inputs.row_spread,
    inputs.target_scale,
    initialisation.bad_initialisation,
    wiring.input_lost,
    initialisation.vanishing,
    initialisation.exploding,
    rates.uneven_rates,
    optimizer.decay_fights,
    optimizer.projection_fights,
    optimizer.optimizer_turns,
    rates.rate_too_high,
    wiring.input_ignored,
    units.dead_units,
    units.saturated_units,
    optimizer.clipping_always,
    rates.rate_too_low,
    numbers.became_non_finite,
    loss.cannot_overfit,
    loss.loss_stuck,
    interference.interference,
)


# What follows from others: of reports alone, in which nothing is tried, it gives no advice of its
# own beside them, and is no more than worth watching.
SYMPTOMS = frozenset({"rate-too-low", "loss-stuck", "stands-still", "outside-healthy"})


def _behind_its_cause(finding: Finding, findings: Iterable[Finding]) -> Finding:
    causes = [f for f in findings if f.name not in SYMPTOMS and f.strength != "note"]
    if finding.name not in SYMPTOMS or not causes:
        return finding
    strength = "watch" if finding.strength == "act" else finding.strength
    return replace(
        finding, strength=strength, advice=(Advice("fix first what stands above"),), not_advised=""
    )


def diagnose(record: Record) -> tuple[Finding, ...]:
    """What is wrong: strongest first, and within a strength causes before symptoms.

    Of a run known by its reports alone, values that are not finite come first: nobody trained a
    copy to find out what they follow from. A learning rate that was tried and pays overrules what a
    rule says would not help.
    """
    findings = [finding for rule in RULES for finding in rule(record)]
    findings += states.outside_healthy(record, findings)
    if not record.is_audited:
        findings = [_behind_its_cause(finding, findings) for finding in findings]
    said = [unrefuted(finding, record.rates.values()) for finding in findings]

    def order(finding: Finding) -> tuple[int, bool]:
        is_first = finding.name == "non-finite" and not record.is_audited
        return STRENGTHS.index(finding.strength), not is_first

    return tuple(sorted(said, key=order))
