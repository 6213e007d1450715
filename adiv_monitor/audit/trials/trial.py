"""Trials of fixes and of learning rates: forks are trained and compared with the run as it is.

Other learning rates are tried so that no fix gets the credit for their effect.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise, takewhile
from typing import Any

import numpy as np
from torch import Tensor, nn

from adiv_monitor.audit.training.batches import first
from adiv_monitor.audit.training.setup import Fork, Setup, seeded
from adiv_monitor.audit.training.train import Progress, silent, train
from adiv_monitor.audit.trials.fixes import FAR_FACTORS, FIXES, DoesNotApply, rate_name, scale_rate
from adiv_monitor.diagnosis.course import FEWEST, course, is_opposed, peaked
from adiv_monitor.diagnosis.diagnose import explained, fault_of, is_cause
from adiv_monitor.diagnosis.faults.rates import usual_factor
from adiv_monitor.diagnosis.finding import NO_STEPS, STRENGTHS, Advice, Finding, Trial, unrefuted
from adiv_monitor.diagnosis.readings import by_layer
from adiv_monitor.diagnosis.record import Record

Losses = tuple[float, ...]

# Largest costs of the trials of learning rates, of one batch and of fixes, in the unit of
# `Facts.step_cost`: together some 90 steps of a ResNet-18 on 16 images of 64 × 64.
FOR_RATES, FOR_ONE_BATCH, FOR_FIXES = 23.0, 8.0, 9.0
_DIVERGED = 1e3
_FACTORS = (0.1, 0.3, 3.0, 10.0)  # tried where the loss does not fall
_LOWER = (0.1, 0.01, 0.001)  # tried first where the loss rises, until one helps
_WAYS = (1.0, 3.0, 10.0, 100.0, 1000.0), (1.0, 0.3, 0.1, 0.01)  # followed while it gets better
SAMPLES, ONE_BATCH_STEPS = 16, 100  # of the attempt to overfit
_FEWEST_OF_ONE_BATCH = 50  # of fewer steps, nothing would follow
_LEARNT = 0.5  # of the first loss: below it, nothing else is tried
_LEARNT_ONCE = 0.125  # of the first loss of a small batch: a later rise is none of the model's
_STANDS = 0.01  # of the first loss: a smaller fall between the last two quarters is none


class StepsUsedUp(Exception):
    """Raised if a run would have more steps than are left for trials of its kind."""


@dataclass
class Budget:
    """The number of steps that further runs of one kind may have in all."""

    left: float = math.inf

    def take(self, steps: int) -> None:
        """Take the steps of a run; raise StepsUsedUp if fewer are left."""
        if steps > self.left:
            raise StepsUsedUp(NO_STEPS)
        self.left -= steps


@dataclass
class Runs:
    """Runs at several learning rates, each of which is made when its end is first requested.

    Attributes:
        setup: the training setup, with as many steps as each run has.
        record: record of the unchanged run.
        budget: the steps that the runs may take.
        fix: the name of a change that all of them have; "": none.
        layers: the layers that it changes.
        losses: factor on the learning rate → losses of its run.
    """

    setup: Setup
    record: Record
    budget: Budget = field(default_factory=Budget)
    fix: str = ""
    layers: Sequence[str] = ()
    losses: dict[float, Losses] = field(default_factory=dict)

    @property
    def without(self) -> Losses:
        """The losses of the unchanged run with the steps of `setup`.

        The observed run is that run: forks begin with the same weights, and the monitor does not
        change them.
        """
        return self.record.losses[: self.setup.steps]

    def end(self, factor: float) -> float:
        """Return the loss at the end of the run at this factor.

        Raises:
            StepsUsedUp: too few steps are left for the run.
            DoesNotApply: the fix has nothing to change, or the optimizer has no learning rate.
            KeyboardInterrupt: the user interrupted the run.
        """
        if factor not in self.losses:
            is_plain = factor == 1 and not self.fix
            self.losses[factor] = self.without if is_plain else self._run(factor)
        return at_the_end(self.losses[factor], self.setup.steps)

    def _run(self, factor: float) -> Losses:
        self.budget.take(self.setup.steps)
        fork = self.setup.fork()
        if self.fix:
            FIXES[self.fix].apply(fork, self.layers, self.record)
        if factor != 1:
            scale_rate(fork.optimizer, factor)
        return losses_of(fork)

    @property
    def best(self) -> float:
        """The factor whose run ends lowest."""
        return min(self.losses, key=self.end)

    def trial(self) -> Trial:
        """Return the trial of the fix, at the run's learning rate, and at others if it rescales.

        It raises as `end` does.
        """
        self.end(1.0)
        if FIXES[self.fix].rescales:
            with suppress(StepsUsedUp):
                self.follow_best()
        found = beside(self._compared(self.fix, self.best), self.record.rates)
        return replace(found, rate=self.best, runs=len(self.losses))

    def rate_trial(self, factor: float) -> Trial:
        """Return the trial of this learning rate alone; raises as `end` does."""
        self.end(factor)
        return self._compared(rate_name(factor), factor)

    def _compared(self, name: str, factor: float) -> Trial:
        found = trial_of(name, self.losses[factor], self.without, self.setup.steps)
        return replace(found, constant=None if is_opposed(self.record) else self.record.chance)

    def follow(self, factors: Sequence[float]) -> bool:
        """Try one factor after another while the loss gets lower; return whether it ever did."""
        lower = takewhile(lambda pair: self.end(pair[1]) < self.end(pair[0]), pairwise(factors))
        return bool([*lower])

    def follow_best(self) -> None:
        """Follow higher factors than the best one, and lower ones."""
        best = self.best
        for way in _WAYS:
            if best in way:
                self.follow(way[way.index(best) :])


def losses_of(fork: Fork) -> Losses:
    """Train a fork and return the loss of each step's batch before the step.

    Raises:
        KeyboardInterrupt: the user interrupted the run.
    """
    trained = train(fork)
    if trained.interrupted:
        raise KeyboardInterrupt
    return tuple(trained.losses)


def at_the_end(losses: Sequence[float], steps: int) -> float:
    """Return the mean loss of the last quarter of the steps; infinite if the run diverged.

    A run diverged if it stopped early, or if it ends a thousand times above its start: the standard
    error of losses that grow without bound is not informative.
    """
    if len(losses) < steps or not np.isfinite(losses).all():
        return math.inf
    mean = float(np.mean(losses[-quarter(steps) :]))
    return mean if mean <= _DIVERGED * max(abs(losses[0]), 1.0) else math.inf


def trial_of(fix: str, losses: Sequence[float], without: Sequence[float], steps: int) -> Trial:
    """Return the trial of a fix from its run and the plain run.

    The standard error of n numbers, the losses of the last quarter or their paired differences, is
    std/√n; NaN if one of the runs diverged, or if there is only one step.
    """
    loss, loss_without, n = at_the_end(losses, steps), at_the_end(without, steps), quarter(steps)

    def error(of: Any) -> float:
        return float(np.std(of, ddof=1) / math.sqrt(n)) if n > 1 else math.nan

    own = error(losses[-n:]) if math.isfinite(loss) else math.nan
    both = math.isfinite(loss + loss_without)
    paired = error(np.subtract(without[-n:], losses[-n:])) if both else math.nan
    return Trial(fix, steps, loss, loss_without, None, paired, loss_error=own)


def beside(trial: Trial, rates: Mapping[float, Trial]) -> Trial:
    """Return the trial of a fix beside that of the best learning rate, if any was tried."""
    by_rate = min(rates.values(), key=lambda rate: rate.loss, default=None)
    if by_rate is None:
        return trial
    error = math.hypot(trial.loss_error, by_rate.loss_error)
    return replace(trial, loss_by_rate=by_rate.loss, error_by_rate=error)


def quarter(steps: int) -> int:
    """Return the number of steps of a quarter, at least two to judge their difference."""
    return min(steps, max(2, math.ceil(steps / 4)))


def affordable(record: Record, cost: float) -> float:
    """Return the number of steps that a cost allows; infinite if that of a step is unknown."""
    each = record.facts.step_cost
    return cost / each if each > 0 else math.inf


def within(setup: Setup, record: Record, runs: int, cost: float) -> Setup | None:
    """Return the setup with as many steps as `cost` allows for all runs; None: too few.

    Number and length of runs follow from the cost of a step, not from a clock.
    """
    fitting = int(min(setup.steps, affordable(record, cost) / runs))
    return None if fitting < min(FEWEST, setup.steps) else replace(setup, steps=fitting)


def rate_trials(setup: Setup, record: Record, *, progress: Progress = silent) -> dict[float, Trial]:
    """Return runs at other learning rates: as few as it takes to see which is better.

    Where the loss falls, these are × 3 and 0.3, and from there on 10, 100 and 1000, or 0.1 and
    0.01, as long as the loss gets lower. Where it does not, × 0.1, 0.3, 3 and 10 are tried before.
    A run whose loss rises is first tried at × 0.1, 0.01 and 0.001: if one of them helps, it is the
    last. One whose loss peaked is tried there as long as the loss gets
    lower. If layers hardly move, further runs use the power of ten at which activations would move
    by a hundredth of their length, and then ten times that, or a tenth of it, as long as the loss
    gets lower.

    If steps are costly, runs are shorter than those of the setup; if they would be too short to
    show an effect, nothing is tried.

    Args:
        setup: training setup.
        record: record of the unchanged run.
        progress: called with ("learning rates", 0 or 1, 1).

    Returns:
        Factor → trial, smallest factor first; empty if nothing was tried, or if the optimizer has
        no learning rate.

    Raises:
        KeyboardInterrupt: the user interrupted a run.
    """
    shorter = within(setup, record, 5, FOR_RATES) or within(setup, record, 3, FOR_RATES)
    if shorter is None:
        return {}
    progress("learning rates", 0, 1)
    runs = Runs(shorter, record, Budget(affordable(record, FOR_RATES)))
    with suppress(StepsUsedUp, DoesNotApply):
        _try(runs)
    progress("learning rates", 1, 1)
    return {factor: runs.rate_trial(factor) for factor in sorted(runs.losses) if factor != 1}


def _try(runs: Runs) -> None:
    """Try the learning rates that `rate_trials` names."""
    record = runs.record
    constant = -math.inf if record.chance is None else record.chance
    rises = runs.end(1.0) > max(record.losses[0], constant)
    if rises and any(runs.rate_trial(factor).helps for factor in _LOWER):
        return
    if peaked(record):
        runs.follow((1.0, *_LOWER))
    if course(record) != "falls":
        for factor in _FACTORS:
            runs.end(factor)
    runs.follow_best()
    far = usual_factor(move.value for move in by_layer(record, "update_ratio").values())
    if far in FAR_FACTORS:
        here = FAR_FACTORS.index(far)
        if not runs.follow(FAR_FACTORS[here:]):  # in the direction that gets better
            runs.follow(FAR_FACTORS[here::-1])


def best_rate(rates: Mapping[float, Trial]) -> float:
    """Return the factor with the lowest loss; 1 if none is below that of the unchanged run."""
    best = min(sorted(rates), key=lambda factor: rates[factor].loss, default=1.0)
    return best if rates and rates[best].loss < rates[best].loss_without else 1.0


def overfit(setup: Setup, record: Record) -> Trial | None:
    """Train a fork on one small batch, without dropout, at the best learning rate that was tried.

    If it fails, something is broken (A. Karpathy 2019).

    Every step draws the same random numbers: noise that is drawn anew can't be learned. The batch
    is the first 16 samples of the first batch. If the fork does not overfit it, it gets the whole
    batch, because a loss that couples samples, as one of their covariance does, may leave a rest
    of few samples; then 3 and 0.3 times that learning rate, because the best one for many batches
    may be wrong for one.

    Args:
        setup: training setup.
        record: record of the unchanged run, with `rates` if learning rates were tried.

    Returns:
        The best trial, whose `loss_without` is the first loss, and whose error is that of the mean
        of the last quarter; None if steps are too costly.

    Raises:
        KeyboardInterrupt: the user interrupted a run.
    """
    left = affordable(record, FOR_ONE_BATCH)
    steps = int(min(ONE_BATCH_STEPS, left))
    if steps < _FEWEST_OF_ONE_BATCH:
        return None
    whole = setup.batches[0]
    small = first(whole, SAMPLES)
    attempts = [(small, 1.0), *[(whole, 1.0)] * (small is not whole), (small, 3.0), (small, 0.3)]
    trials: list[Trial] = []
    for batch, factor in attempts[: int(min(len(attempts), left / steps))]:
        try:
            rate = factor * best_rate(record.rates)
            trials.append(_of_one_batch(replace(setup, batches=(batch,), steps=steps), rate))
        except DoesNotApply:  # there is no learning rate
            break
        except Exception:
            if batch is whole:
                raise
            continue  # this batch can't be cut
        if trials[-1].loss < _LEARNT * trials[-1].loss_without:
            break
    best = min(trials, key=lambda trial: trial.loss, default=None)
    return None if best is None else replace(best, runs=len(trials))


def _of_one_batch(setup: Setup, rate: float) -> Trial:
    fork = setup.fork()
    if rate != 1:
        scale_rate(fork.optimizer, rate)
    for module in fork.model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    loss = fork.loss

    def as_first(model: nn.Module, batch: Any) -> Tensor:
        with seeded(setup.seed):
            return loss(model, batch)

    fork.loss = as_first
    losses, n = losses_of(fork), quarter(setup.steps)
    found = trial_of("overfit", losses, losses[:1] * setup.steps, setup.steps)
    fell = float(np.mean(losses[-2 * n : -n])) - found.loss if math.isfinite(found.loss) else 0.0
    falls = fell > max(2 * found.error, _STANDS * abs(losses[0]))
    lowest = min(filter(math.isfinite, losses), default=math.inf)
    end = min(found.loss, lowest) if lowest < _LEARNT_ONCE * losses[0] else found.loss
    return replace(found, loss=end, loss_without=losses[0], rate=rate, falls=falls)


# Fixes of findings

FIRST = (3, 1, 0)  # number of fixes of a finding that are tried, by its strength
Outcomes = dict[tuple[str, tuple[str, ...]], Trial | str]  # of fix and layers: why it is not tried

NOT_AMONG_THE_FIRST = "only the first fixes of a finding are tried"
OPEN = ("", NO_STEPS, NOT_AMONG_THE_FIRST)  # reasons that say nothing of the fix


def tried(
    findings: Sequence[Finding], setup: Setup, record: Record, *, progress: Progress = silent
) -> tuple[Finding, ...]:
    """Return the findings with their first fixes tried from the same weights and batches.

    Of findings to act on, the first three fixes are tried, all first ones before the second ones;
    then the first fix of those to watch. The very first is tried whatever it costs, in the fewest
    possible steps. Fixes beyond the cost of all trials say that they were not tried.

    The advice of a finding is sorted by its effect. A finding to act on becomes one to watch if
    none of its tried fixes pays, unless it is certain without a trial, or comes before such a
    finding: then the run suffers for a known reason that the fixes did not reach. A fact that may
    be harmless becomes a finding to act on if one of its fixes helps. A trial overrules a finding's
    statement of what would not help.

    Args:
        findings: findings of the rules, strongest first.
        setup: training setup.
        record: record of the unchanged run, with `rates` if learning rates were tried.
        progress: called with ("fixes", fixes done, fixes).

    Returns:
        The findings, strongest first.

    Raises:
        KeyboardInterrupt: the user interrupted a run.
    """
    rates = record.rates.values()
    steps = next((trial.steps for trial in rates), min(FEWEST, setup.steps))
    shorter = None if rates else within(setup, record, FIRST[0], FOR_FIXES)
    budget = Budget(max(affordable(record, FOR_FIXES), steps))  # the first is tried in any case
    runs = Runs(shorter or replace(setup, steps=steps), record, budget)
    outcomes = _outcomes(findings, runs, progress)
    certain = [f.strength == "act" and fault_of(f).certain for f in findings]
    judged = [
        _judged(finding, _told(finding, outcomes), record, certain=any(certain[i:]))
        for i, finding in enumerate(findings)
    ]
    trials = [each.trial for finding in judged for each in finding.advice if each.trial is not None]
    said = [unrefuted(finding, (*rates, *trials)) for finding in judged]
    pairs = zip(findings, judged, strict=True)
    raised = [f for was, f in pairs if (was.strength, f.strength) == ("watch", "act")]
    causes = {finding.name for finding in raised if fault_of(finding).explains}
    has_cause = any(f.strength == "act" and is_cause(f) for f in said)
    if causes or (raised and not has_cause):  # consequences come after their cause
        said = explained(sorted(said, key=lambda finding: finding.name not in causes), record)
    return tuple(sorted(said, key=lambda finding: STRENGTHS.index(finding.strength)))


def untried(findings: Sequence[Finding], why: str) -> tuple[Finding, ...]:
    """Return the findings with the reason why no fix was tried."""
    said = [[replace(a, untried=why if a.fix else a.untried) for a in f.advice] for f in findings]
    return tuple(replace(f, advice=tuple(a)) for f, a in zip(findings, said, strict=True))


def _outcomes(findings: Sequence[Finding], runs: Runs, progress: Progress) -> Outcomes:
    """Return what came of the learning rates that were tried, and of the first fixes."""
    outcomes: Outcomes = {(t.fix, ()): t for t in runs.record.rates.values()}
    wanted = []
    for i, finding in enumerate(findings):
        keys = [(a.fix, finding.layers_for(a)) for a in finding.advice if a.fix in FIXES]
        rank = STRENGTHS.index(finding.strength)
        first = [key for key in keys if key not in outcomes][: FIRST[rank]]
        wanted += [(rank, number, i, key) for number, key in enumerate(first)]
    for done, (*_, key) in enumerate(sorted(wanted)):
        if key not in outcomes:
            outcomes[key] = _outcome(runs, *key)
        progress("fixes", done + 1, len(wanted))
    return outcomes


def _told(finding: Finding, outcomes: Outcomes) -> list[Advice]:
    """Return the finding's advice with the trials, or the reasons why there are none."""

    def told(advice: Advice) -> Advice:
        outcome = outcomes.get((advice.fix or "", finding.layers_for(advice)), "")
        if isinstance(outcome, Trial):
            return replace(advice, trial=outcome)
        is_open = advice.fix in FIXES and finding.strength != "note"
        return replace(advice, untried=outcome or NOT_AMONG_THE_FIRST * is_open or advice.untried)

    return [*map(told, finding.advice)]


def _outcome(runs: Runs, name: str, layers: Sequence[str]) -> Trial | str:
    """Return the trial of a fix, or the reason why there is none."""
    try:
        return replace(runs, fix=name, layers=layers, losses={}).trial()
    except (StepsUsedUp, DoesNotApply) as error:
        return str(error)
    except Exception as error:  # the model does not run with this fix
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _judged(finding: Finding, advice: list[Advice], record: Record, *, certain: bool) -> Finding:
    """Return the finding after the trials of its advice, its best advice first."""
    trials = [each.trial for each in advice if each.trial is not None]
    if not fault_of(finding).certain:
        advice = sorted(advice, key=_place)
    advice = [a for a in advice if a.fix != "reinitialise" or a.trial is None or a.trial.pays]
    pays = any(trial.pays for trial in trials)
    lower = finding.name == "uneven-rates" and best_rate(record.rates) < 1
    small = finding.name == "input-scale" and finding.evidence[0].value < 1
    if lower or small or finding.name == "input-mean":  # else the rate explains the gain
        pays = any(trial.helps for trial in trials)
    strength = finding.strength
    if strength == "act" and trials and not pays and not certain:
        strength = "watch"
    elif strength == "watch" and any(_promotes(trial, finding) for trial in trials):
        strength = "act"
    elif fault_of(finding).often_meant and (trials or any(a.untried not in OPEN for a in advice)):
        strength = "note" if course(record) == "falls" else strength
    return replace(finding, advice=tuple(advice), strength=strength)


def _promotes(trial: Trial, finding: Finding) -> bool:
    """Return whether a trial makes a fact that may be harmless one to act on."""
    left = fault_of(finding).acts_below
    if left is None or not trial.helps:
        return False
    # A share of a loss means something only above zero.
    return left == 1 or (trial.loss_without > 0 and trial.loss < left * trial.loss_without)


def _place(advice: Advice) -> tuple[int, float]:
    """Return what sorts advice: what pays by its loss, what was not tried, what does not pay."""
    trial = advice.trial
    if trial is None:
        return 2, 0.0
    return (0 if trial.helps else 1, trial.loss) if trial.pays else (3, 0.0)
