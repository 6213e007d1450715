"""Trials of the fixes of findings in short runs, before they are recommended."""

from collections.abc import Sequence
from dataclasses import replace

from adiv_monitor.audit.training.setup import Setup
from adiv_monitor.audit.training.train import Progress
from adiv_monitor.audit.trials.fixes import FIXES, DoesNotApply
from adiv_monitor.audit.trials.trial import (
    FOR_FIXES,
    NEVER,
    Bench,
    Cap,
    CapReached,
    affordable,
    best_rate,
    silent,
    within,
)
from adiv_monitor.diagnosis.course import FEWEST
from adiv_monitor.diagnosis.diagnose import explained, fault_of, is_cause
from adiv_monitor.diagnosis.faults.remedies import other_rates
from adiv_monitor.diagnosis.finding import (
    NO_STEPS,
    NO_TIME,
    STRENGTHS,
    Advice,
    Finding,
    Trial,
    unrefuted,
)
from adiv_monitor.diagnosis.record import Record

FIRST = (3, 1, 0)  # number of fixes of a finding that are tried, by its strength
Outcomes = dict[tuple[str, tuple[str, ...]], Trial | str]  # of fix and layers: why it is not tried

NOT_AMONG_THE_FIRST = "only the first fixes of a finding are tried"


def tried(
    findings: Sequence[Finding],
    setup: Setup,
    record: Record,
    *,
    cap: Cap = NEVER,
    progress: Progress = silent,
) -> tuple[Finding, ...]:
    """Return the findings with their first fixes tried from the same weights and batches.

    Of findings to act on, the first three fixes are tried, all first ones before the second ones;
    then the first fix of those to watch. The very first is tried whatever it costs, in the fewest
    possible steps. Fixes beyond the cost of all trials say that they were not tried.

    The advice of a finding is sorted by its effect, and has a learning rate in front of fixes that
    pay no more than that learning rate alone. A finding to act on becomes one to watch if none of
    its tried fixes pays, unless it is certain without a trial, or comes before such a finding: then
    the run suffers for a known reason that the fixes did not reach. A fact that may be harmless
    becomes a finding to act on if one of its fixes helps. A trial overrules a finding's statement
    of what would not help.

    Args:
        findings: findings of the rules, strongest first.
        setup: training setup.
        record: record of the unchanged run, with `rates` if learning rates were tried.
        cap: time by which the trials end.
        progress: called with ("fixes", fixes done, fixes).

    Returns:
        The findings, strongest first.
    """
    rates = record.rates.values()
    steps = next((trial.steps for trial in rates), min(FEWEST, setup.steps))
    shorter = None if rates else within(setup, record, FIRST[0], FOR_FIXES)
    left = max(affordable(record, FOR_FIXES), steps)  # the very first is tried whatever it costs
    bench = Bench(shorter or replace(setup, steps=steps), record, cap, left)
    outcomes = _outcomes(findings, bench, progress)
    plain = [i for i, f in enumerate(findings) if f.strength == "act" and fault_of(f).certain]
    certain = max(plain, default=-1)
    judged = [
        _judged(finding, _told(finding, outcomes), record, certain=i <= certain)
        for i, finding in enumerate(findings)
    ]
    trials = [each.trial for finding in judged for each in finding.advice if each.trial is not None]
    said = [unrefuted(finding, (*rates, *trials)) for finding in judged]
    pairs = zip(findings, judged, strict=True)
    raised = [f for was, f in pairs if (was.strength, f.strength) == ("watch", "act")]
    causes = {finding.name for finding in raised if fault_of(finding).explains}
    has_cause = any(f.strength == "act" and is_cause(f) for f in said)
    if causes or (raised and not has_cause):  # consequences come after their cause
        said = explained(sorted(said, key=lambda finding: finding.name not in causes))
    return tuple(sorted(said, key=lambda finding: STRENGTHS.index(finding.strength)))


def untried(findings: Sequence[Finding], why: str) -> tuple[Finding, ...]:
    """Return the findings with the reason why no fix was tried."""

    def said(advice: Advice) -> Advice:
        return advice if advice.fix is None else replace(advice, untried=why)

    return tuple(replace(f, advice=tuple(map(said, f.advice))) for f in findings)


def _outcomes(findings: Sequence[Finding], bench: Bench, progress: Progress) -> Outcomes:
    """Return what came of the learning rates that were tried, and of the first fixes."""
    outcomes: Outcomes = {(t.fix, ()): t for t in bench.record.rates.values()}
    wanted = []
    for i, finding in enumerate(findings):
        keys = [(a.fix, finding.layers_for(a)) for a in finding.advice if a.fix in FIXES]
        rank = STRENGTHS.index(finding.strength)
        first = [key for key in keys if key not in outcomes][: FIRST[rank]]
        wanted += [(rank, number, i, key) for number, key in enumerate(first)]
    otherwise = NO_STEPS
    for done, (*_, key) in enumerate(sorted(wanted)):
        try:
            if otherwise == NO_STEPS and key not in outcomes and bench.may_run:
                outcomes[key] = _outcome(bench, *key)
            progress("fixes", done + 1, len(wanted))
        except KeyboardInterrupt:
            otherwise = "interrupted"
        outcomes.setdefault(key, otherwise)
    return outcomes


def _told(finding: Finding, outcomes: Outcomes) -> list[Advice]:
    """Return the finding's advice with the trials, or the reasons why there are none."""
    told = []
    for advice in finding.advice:
        is_open = advice.fix in FIXES and finding.strength != "note"
        why = NOT_AMONG_THE_FIRST if is_open else advice.untried
        outcome = outcomes.get((advice.fix or "", finding.layers_for(advice)), why)
        trial, why = (outcome, "") if isinstance(outcome, Trial) else (None, outcome)
        told.append(replace(advice, trial=trial, untried=why))
    return told


def _outcome(bench: Bench, name: str, layers: Sequence[str]) -> Trial | str:
    """Return the trial of a fix, or the reason why there is none."""
    try:
        return bench.trial(FIXES[name], layers)
    except CapReached:
        return NO_TIME
    except DoesNotApply as error:
        return str(error)
    except Exception as error:  # the model does not run with this fix
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _judged(finding: Finding, advice: list[Advice], record: Record, *, certain: bool) -> Finding:
    """Return the finding after the trials of its advice, its best advice first."""
    trials = [each.trial for each in advice if each.trial is not None]
    if not fault_of(finding).certain:
        advice = sorted(_with_rate(advice, record), key=_place)
    advice = [a for a in advice if a.fix != "reinitialise" or a.trial is None or a.trial.pays]
    pays = any(trial.pays for trial in trials)
    lower = finding.name == "uneven-rates" and best_rate(record.rates) < 1
    if lower or finding.name == "input-mean":  # else the learning rate explains the gain
        pays = any(trial.helps for trial in trials)
    strength = finding.strength
    if strength == "act" and trials and not pays and not certain:
        strength = "watch"
    elif strength == "watch" and any(_promotes(trial, finding) for trial in trials):
        strength = "act"
    elif fault_of(finding).often_meant and (trials or _does_not_apply(advice)):
        strength = "note"
    return replace(finding, advice=tuple(advice), strength=strength)


def _promotes(trial: Trial, finding: Finding) -> bool:
    """Return whether a trial makes a fact that may be harmless one to act on."""
    left = fault_of(finding).acts_below
    if left is None or not trial.helps:
        return False
    # A share of a loss means something only above zero.
    return left == 1 or (trial.loss_without > 0 and trial.loss < left * trial.loss_without)


def _does_not_apply(advice: Sequence[Advice]) -> bool:
    return any(a.untried not in ("", NO_STEPS, NO_TIME, NOT_AMONG_THE_FIRST) for a in advice)


def _with_rate(advice: list[Advice], record: Record) -> list[Advice]:
    """Add a learning rate to the advice if a fix pays no more than that learning rate alone."""
    factor = best_rate(record.rates)
    (rate,) = other_rates((factor,))
    no_better = any(a.trial is not None and a.trial.pays and not a.trial.helps for a in advice)
    if factor == 1 or not record.rates[factor].helps or not no_better:
        return advice
    added = replace(rate, trial=record.rates[factor])
    return advice if any(a.fix == rate.fix for a in advice) else [*advice, added]


def _place(advice: Advice) -> tuple[int, float]:
    """Return what sorts advice: what pays by its loss, what was not tried, what does not pay."""
    trial = advice.trial
    if trial is None:
        return 2, 0.0
    return (0 if trial.helps else 1, trial.loss) if trial.pays else (3, 0.0)
