"""Audit of one run, and trials of its advice on other data and for more steps.

The first advice is that of the first finding that names a fix. It is compared with

- no change,
- the best of the learning rates that the audit tried,
- one random change: a fix drawn from all that apply, at the rate that the audit's method finds.

All choices are made with the audit's own seed. The reported results are runs with another seed and
three times as many steps. They are judged by the loss, or, where the fault changes what the loss
means, by the error on unseen batches of the run without the fault.

An advice in words is applied literally: the run without the fault stands for it, if the first
finding is the planted fault, and for no change otherwise.
"""

import math
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

from audit.fault_benchmark.course import at_the_end, losses_of
from audit.fault_benchmark.run import LONGER, STEPS, Case, Healthy, Run, errors

from adiv_monitor.audit.audit import audit
from adiv_monitor.audit.report import AuditReport
from adiv_monitor.audit.training.setup import Fork
from adiv_monitor.audit.trials.fixes import FAR_FACTORS, FIXES, DoesNotApply, rate_name, scale_rate
from adiv_monitor.audit.trials.trial import NOT_AMONG_THE_FIRST, Runs, best_rate, trial_of
from adiv_monitor.diagnosis.finding import NO_STEPS, Advice, Finding
from adiv_monitor.diagnosis.record import Record

ANOTHER = 1000  # added to a seed: other weights, other data


@dataclass(frozen=True)
class Change:
    """A fix, the layers that it changes, and a factor of the learning rate."""

    fix: str
    layers: tuple[str, ...] = ()
    rate: float = 1.0

    def __str__(self) -> str:
        return self.fix if self.rate == 1 else f"{self.fix}, rate × {self.rate:g}"


def diagnosed(bed: Case | Healthy, seed: int) -> dict[str, Any]:
    """Return the audit's findings, or the exception that it raised."""
    try:
        return _found(audited(bed.build(seed), seed))
    except Exception as error:
        return _raised(error)


def judge(bed: Case | Healthy, seed: int) -> dict[str, Any]:
    """Return the audit's findings, and the value of its advice."""
    run = bed.build(seed)
    try:
        report = audited(run, seed)
    except Exception as error:
        return _raised(error) | {"advice": {"change": None, "loss": math.inf, "pays": False}}
    if isinstance(bed, Healthy):
        return _found(report)
    setup, record = run.setup(STEPS, seed), report.record
    runs = Runs(setup, record)
    chance = random.Random(f"{bed.name} {seed}")
    changed = {
        "advice": advised(report.findings[0]) if report.findings else None,
        "rate": _best_rate(record),
        "random": random_change(runs, chance),
    }
    another = Another(bed, seed)
    row = _found(report) | outcomes(another, record, changed)
    if changed["advice"] is None and _says_what(report, bed):
        row["literally"] = another.outcome("in words", another.without_fault())
    return row


def _found(report: AuditReport) -> dict[str, Any]:
    first = report.findings[0] if report.findings else None
    return {
        "findings": [[finding.name, finding.strength] for finding in report.findings],
        "words": first is not None and advised(first) is None,
    }


def _raised(error: Exception) -> dict[str, Any]:
    return {"findings": [], "words": False, "raised": f"{type(error).__name__}: {error}"}


def audited(run: Run, seed: int) -> AuditReport:
    return audit(
        run.model,
        run.batches,
        loss=run.loss,
        optimizer=run.optimizer,
        clip_norm=run.clip_norm,
        steps=STEPS,
        seed=seed,
    )


def advised(finding: Finding) -> Change | None:
    """The finding's first advice that can be tried, as the audit tries it.

    Not what the audit has tried itself, and said that it does not pay, or could not try: what is
    advised is then in words.
    """
    for advice in finding.advice:
        if advice.fix in FIXES and _is_advised(advice):
            layers = finding.layers_for(advice)
            return Change(advice.fix, layers, 1.0 if advice.trial is None else advice.trial.rate)
    return None


def _is_advised(advice: Advice) -> bool:
    if advice.trial is not None:
        return advice.trial.pays
    return advice.untried in ("", NO_STEPS, NOT_AMONG_THE_FIRST)


def _best_rate(record: Record) -> Change | None:
    factor = best_rate(record.rates)
    return None if factor == 1 else Change(rate_name(factor))


def random_change(runs: Runs, chance: random.Random) -> Change | None:
    """Return a fix that applies, drawn from all, at the rate of its trial as the audit tries it."""
    names = sorted(FIXES.keys() - set(map(rate_name, FAR_FACTORS)))
    chance.shuffle(names)
    for name in names:
        with suppress(Exception):  # it does not apply, or the model can't be run so
            return Change(name, (), replace(runs, fix=name, losses={}).trial().rate)
    return None


class Another:
    """The run on another seed, with other weights and data, for more steps."""

    def __init__(self, case: Case, seed: int) -> None:
        self._case, self._seed = case, seed
        self._twin = case.twin.build(seed + ANOTHER)
        self._setup = case.build(seed + ANOTHER).setup(LONGER, seed)
        self.without = self._judged(self._setup.fork())

    def changed(self, change: Change, record: Record) -> Sequence[float]:
        """Return what the run with a change is judged by."""
        fork = self._setup.fork()
        try:
            FIXES[change.fix].apply(fork, change.layers, record)
        except DoesNotApply:
            return self.without
        if change.rate != 1:
            scale_rate(fork.optimizer, change.rate)
        return self._judged(fork)

    def without_fault(self) -> Sequence[float]:
        """Return what the run without the fault is judged by."""
        return self._judged(self._twin.setup(LONGER, self._seed).fork())

    def outcome(self, change: str, judged: Sequence[float]) -> dict[str, Any]:
        """Return the end of a run with a change, and whether it pays."""
        if self._case.judged_by == "loss":
            trial = trial_of(change, judged, self.without, LONGER)
            return {"change": change, "loss": trial.loss, "pays": trial.pays}
        loss = fmean(judged)
        if not math.isfinite(loss + fmean(self.without)):  # of a model that diverged
            return {"change": change, "loss": loss, "pays": math.isfinite(loss)}
        less = [a - b for a, b in zip(self.without, judged, strict=True)]
        limit = max(2 * stdev(less) / math.sqrt(len(less)), 0.02 * fmean(self.without))
        return {"change": change, "loss": loss, "pays": fmean(less) > limit}

    def end(self) -> float:
        """Return the loss, or the error, without a change."""
        if self._case.judged_by == "loss":
            return at_the_end(self.without, LONGER)
        return fmean(self.without)

    def _judged(self, fork: Fork) -> Sequence[float]:
        losses = losses_of(fork)
        if self._case.judged_by == "loss":
            return losses
        return errors(fork, self._twin.batches[LONGER:], self._case.padding)


def outcomes(another: Another, record: Record, changed: dict[str, Change | None]) -> dict[str, Any]:
    """Return the loss of a longer run without and with each change, and whether it pays."""
    row: dict[str, Any] = {"without": another.end()}
    known: dict[Change, Sequence[float]] = {}
    for name, change in changed.items():
        if change is None:
            row[name] = {"change": None, "loss": row["without"], "pays": False}
            continue
        if change not in known:
            known[change] = another.changed(change, record)
        row[name] = another.outcome(str(change), known[change])
    return row


def _says_what(report: AuditReport, case: Case) -> bool:
    """Return whether the first finding is the planted fault, with advice that was not refuted."""
    if not report.findings or report.findings[0].name not in case.expected:
        return False
    return any(advice.trial is None for advice in report.findings[0].advice)
