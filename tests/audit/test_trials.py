"""Trials: short runs of forks, compared with the run as it is."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from computes import Computes
from torch import Tensor, nn
from trial_setups import loss, mlp, ran, setup, sgd

from adiv_monitor.audit.training.batches import first
from adiv_monitor.audit.training.setup import Setup
from adiv_monitor.audit.training.train import train
from adiv_monitor.audit.trials import overfit, rate_trials, tried
from adiv_monitor.audit.trials.trial import FOR_RATES, Runs, beside, trial_of
from adiv_monitor.diagnosis.diagnose import FIRST_THAT
from adiv_monitor.diagnosis.finding import NO_STEPS, Advice, Finding, Trial
from adiv_monitor.diagnosis.record import Record

NO_GAIN = {10.0: Trial("rate*10", 24, 0.9, 0.5, None, 0.01)}  # of another learning rate


def finding(*fixes: str | None, name: str = "something", strength: Any = "act") -> Finding:
    advice = tuple(Advice(f"do {fix}", fix) for fix in fixes)
    return Finding(name, strength, advice=advice)


def healthy(**changes: Any) -> Setup:
    """Return a healthy run of a few steps."""
    return setup(steps=12, **changes)


def slow(**changes: Any) -> Setup:
    """Return a run whose learning rate is a hundred times too low."""
    return setup(optimizer=sgd(lr=1e-3), **changes)


def fixed_to(monkeypatch: pytest.MonkeyPatch, of: float = 1.0, **losses: float) -> None:
    """Let trials of fixes, by name with underscores, end at these losses; the run ends at `of`."""

    def trial(runs: Runs) -> Trial:
        return Trial(runs.fix, 20, losses[runs.fix.replace("-", "_")], of, None, 0.001)

    monkeypatch.setattr(Runs, "trial", trial)


# Comparisons


def test_the_observed_run_is_the_plain_run() -> None:
    of = healthy()
    assert Runs(of, ran(of)).without == tuple(train(of.fork()).losses)
    shorter = replace(of, steps=7)
    assert Runs(shorter, ran(of)).without == tuple(train(shorter.fork()).losses)


def test_the_error_is_that_of_the_paired_differences() -> None:
    generator = np.random.default_rng(0)
    noise = generator.normal(0, 5, 20)  # common to both runs, so that it is not in the error
    without, losses = noise + generator.normal(3, 0.1, 20), noise + generator.normal(1, 0.1, 20)
    found = trial_of("a", losses.tolist(), without.tolist(), 20)
    differences = [without[i] - losses[i] for i in range(15, 20)]
    mean = sum(differences) / 5
    error = math.sqrt(sum((d - mean) ** 2 for d in differences) / 4 / 5)
    assert found.error == pytest.approx(error, rel=1e-12)
    assert found.gain == pytest.approx(mean)
    assert found.loss == pytest.approx(losses[15:].mean())
    assert found.pays and found.error < 0.2


@pytest.mark.parametrize(
    "broken", [[2.0, math.nan], [2.0, math.inf], [2.0, 1e3, 1e6, 1e9]], ids=str
)
def test_what_does_not_get_to_the_end_or_grows_without_bound_has_diverged(
    broken: list[float],
) -> None:
    whole = [2.0, 1.0, 1.0, 1.0]
    assert trial_of("a", broken, whole, 4).loss == math.inf
    assert not trial_of("a", broken, whole, 4).pays
    fixed = trial_of("a", whole, broken, 4)
    assert fixed.pays and fixed.loss_without == math.inf and math.isnan(fixed.error)
    assert not trial_of("a", broken, broken, 4).pays


def test_beside_a_wild_run_a_fix_is_told_from_a_rate_by_errors_of_their_own() -> None:
    wild = [100.0, 300.0] * 10
    rate = trial_of("rate*0.1", [1.6, 1.7] * 10, wild, 20)
    fixed = beside(trial_of("a", [0.1, 0.2] * 10, wild, 20), {0.1: rate})
    assert fixed.loss_by_rate == rate.loss
    alone = float(np.std([0.2, 0.1, 0.2, 0.1, 0.2], ddof=1) / math.sqrt(5))
    assert fixed.loss_error == pytest.approx(alone)
    assert fixed.error_by_rate == pytest.approx(math.hypot(alone, rate.loss_error))
    assert fixed.error > 40 > 1 > fixed.error_by_rate
    assert fixed.beats_rate
    assert not replace(fixed, error_by_rate=math.nan).beats_rate


def test_a_loss_that_jumps_has_errors_that_hide_no_gain() -> None:
    """The mean of 37 is lowered to 0.01, but its standard error is 19."""
    jumps = Trial("rate*0.01", 60, 0.01, 37.0, None, 19.0, loss_error=0.002, constant=1.8)
    assert jumps.pays
    assert not replace(jumps, constant=None).pays
    assert not replace(jumps, constant=40.0).pays, "both are below"
    assert not replace(jumps, loss=1.79).pays, "hardly below a constant"


def test_a_loss_that_runs_away_below_zero_is_no_gain() -> None:
    runaway = Trial("batch-norm", 60, -792_000.0, 91.0, None, 1e3)
    assert not runaway.pays and not runaway.helps and "without bound" in runaway.objection
    assert not replace(runaway, loss_without=math.inf).pays
    assert replace(runaway, loss=-9.0, error=1.0).pays, "a likelihood may be above 1"


# Learning rates


def test_where_the_loss_falls_rates_are_tried_in_the_direction_that_gets_better() -> None:
    of = healthy(optimizer=sgd(lr=0.03))
    found = rate_trials(of, ran(of))
    assert list(found) == [0.3, 3, 10, 100]
    assert found[10].loss < min(found[3].loss, found[100].loss)
    assert [t.fix for t in found.values()] == [f"rate*{f:g}" for f in found]
    expected = train(replace(of, optimizer=sgd(lr=0.03 * 3)).fork()).losses
    assert found[3].loss == np.mean(expected[-3:])
    assert found[3].steps == 12 and found[3].loss_by_rate is None
    best = healthy(optimizer=sgd(lr=1.0))
    assert list(rate_trials(best, ran(best))) == [0.3, 3], "two runs suffice"
    first, _, *others = ran(best).losses
    peaked = replace(ran(best), losses=(first, 3.5 * first, *others))
    assert list(rate_trials(best, peaked)) == [0.1, 0.3, 3], "steps may be too long"


def test_where_the_loss_does_not_fall_rates_are_tried_in_both_directions() -> None:
    of = slow()
    still = ran(of)
    found = rate_trials(of, replace(still, chance=min(still.losses) / 2))
    assert list(found) == [0.1, 0.3, 3, 10, 100, 1000]


def test_a_loss_that_rises_is_tried_at_lower_rates_until_one_helps() -> None:
    fast = healthy(optimizer=sgd(lr=300.0))
    found = rate_trials(fast, ran(fast))
    assert list(found) == [0.01, 0.1]
    assert found[0.01].helps and not found[0.1].helps


def test_layers_that_hardly_move_are_tried_at_rates_at_which_they_would() -> None:
    of = healthy(optimizer=sgd(lr=1e-6))
    seen = ran(of)
    (report, *_) = seen.reports
    layers = {path: replace(r, update_ratio=1e-6) for path, r in report.layers.items()}
    found = rate_trials(of, replace(seen, reports=(replace(report, layers=layers),)))
    assert 1e4 in found and found[1e5].helps


def test_runs_are_shorter_where_steps_are_costly() -> None:
    of = setup()
    seen = ran(of)

    def costing(steps: float) -> Record:
        """Return the record of steps that are so costly that runs may have this many in all."""
        return replace(seen, facts=replace(seen.facts, step_cost=FOR_RATES / steps))

    assert {t.steps for t in rate_trials(of, costing(76)).values()} == {15}
    assert {t.steps for t in rate_trials(of, costing(37)).values()} == {12}, "7 would tell nothing"
    assert rate_trials(of, costing(35)) == {}


# Fixes


def test_trials_are_reproducible_bit_for_bit() -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(12, 16), nn.Dropout(0.3), nn.BatchNorm1d(16), nn.Linear(16, 3))
    noisy = healthy(model=model)
    seen = ran(noisy)
    seen = replace(seen, rates=rate_trials(noisy, seen))
    torch.rand(7)  # another state of the user's random numbers
    assert rate_trials(noisy, seen) == seen.rates
    (once,) = tried([finding("reinitialise", "affine-like")], noisy, seen)
    trials = {a.fix: a.trial for a in once.advice}
    assert trials["affine-like"] is not None and trials["affine-like"].runs > 2, "it rescales"
    for other in tried([finding("affine-like"), finding("reinitialise")], noisy, seen):
        for advice in other.advice:
            assert advice.trial == trials[advice.fix]


def test_a_cause_whose_fix_helps_is_one_to_act_on_and_stands_in_front(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fixed_to(monkeypatch, uncut=0.2, **{"rate*0.3": 0.9})
    seen = ran(healthy())
    rate = finding("rate*0.3", name="rate-too-high")
    cut = finding("uncut", name="gradient-cut", strength="watch")
    first, second = tried([rate, cut], healthy(), seen)
    assert (first.name, first.strength) == ("gradient-cut", "act")
    assert second.advice == FIRST_THAT
    assert (second.name, second.strength) == ("rate-too-high", "watch")
    dropped = finding("rate*0.3", name="dropout-too-high", strength="watch")
    (only,) = tried([dropped], healthy(), seen)
    assert only.strength == "watch"  # a tenth less is no merit of less dropout


def test_what_is_meant_as_often_as_not_is_a_note_where_no_fix_helps() -> None:
    of = healthy()

    def strength(*fixes: str) -> str:
        unordered = finding(*fixes, name="order-ignored", strength="watch")
        (found,) = tried([unordered], of, ran(of, rates=NO_GAIN))
        return found.strength

    assert strength("rate*10") == "note"
    assert strength("no-clip") == "note"  # nothing is clipped
    assert strength() == "watch"  # nothing was tried


@pytest.mark.slow
def test_positions_get_no_credit_for_the_learning_rate_beside_them() -> None:
    """The model counts words, whatever their order."""
    parts = {"table": nn.Embedding(9, 16), "head": nn.Linear(16, 16), "out": nn.Linear(16, 2)}
    bag = Computes(lambda m, x: m.out(m.head(m.table(x).sum(1)).relu()), **parts)
    chance = torch.Generator().manual_seed(0)
    texts = [torch.randint(9, (32, 12), generator=chance) for _ in range(60)]
    of = setup(model=bag, steps=60, optimizer=lambda m: torch.optim.Adam(m.parameters(), 3e-4),
               batches=tuple((x, ((x < 3).sum(1) > 4).long()) for x in texts))  # fmt: skip
    record = ran(of)
    unordered = finding("positions", name="order-ignored", strength="watch")
    (found,) = tried([unordered], of, replace(record, rates=rate_trials(of, record)))
    trial = found.advice[0].trial
    assert trial is not None and trial.rate == 1 and found.strength == "note"


def test_what_does_not_pay_is_something_to_watch() -> None:
    of = healthy()
    findings = [
        finding("rate*10", name="non-finite"),  # certain
        finding("rate*10"),
        finding(None),
        finding("no-decay"),
        finding("reinitialise", strength="note"),
        finding("rate*10", strength="note"),
    ]
    found = tried(findings, of, ran(of, rates=NO_GAIN))
    assert [f.strength for f in found] == ["act", "act", "act", "watch", "note", "note"]
    assert found[0].name == "non-finite" and found[0].advice[0].trial is not None
    assert found[1] == findings[2]
    assert found[2].advice[0].untried == "there is no weight decay"
    assert found[3].advice[0].trial is not None and not found[3].advice[0].trial.pays
    assert found[4] == findings[4]  # a note is not tried
    assert found[5].advice[0].trial == NO_GAIN[10]  # but says so where that was tried anyway


def test_a_cause_stays_one_to_act_on_where_what_follows_from_it_is_certain() -> None:
    seen = ran(healthy(), rates=NO_GAIN)
    cause, symptom = finding("rate*10"), finding(None, name="cannot-overfit")
    after = tried([cause, symptom], healthy(), seen)
    assert [(f.name, f.strength) for f in after] == [(f.name, "act") for f in (cause, symptom)]
    before = tried([symptom, cause], healthy(), seen)
    assert [f.strength for f in before] == ["act", "watch"]


@pytest.mark.parametrize(("factor", "strength"), [(0.1, "watch"), (10.0, "act")])
def test_layers_that_one_lower_rate_fixes_are_not_uneven(factor: float, strength: str) -> None:
    rates = {factor: Trial(f"rate*{factor:g}", 12, 0.0001, 10.0, None, 0.0)}
    seen = replace(ran(healthy(), rates=rates), losses=(10.0,) * 12)
    (found,) = tried([finding("layer-norm", name="uneven-rates")], healthy(), seen)
    assert found.strength == strength


def test_an_initialisation_that_does_not_end_lower_is_not_advised() -> None:
    learnt = setup().fork()
    train(learnt)
    of = healthy(model=learnt.model)
    (found,) = tried([finding("reinitialise", "layer-norm")], of, ran(of))
    assert [advice.fix for advice in found.advice] == ["layer-norm"]


def test_what_helps_comes_first_by_its_loss_then_what_was_not_tried() -> None:
    losses = {0.1: 1.05, 10.0: 0.6, 100.0: 0.5}
    rates = {f: Trial(f"rate*{f:g}", 24, value, 1.0, None, 0.0) for f, value in losses.items()}
    advised = [finding("rate*0.1", None, "rate*10", "rate*100")]
    (found,) = tried(advised, healthy(), ran(healthy(), rates=rates))
    assert [a.fix for a in found.advice] == ["rate*100", "rate*10", None, "rate*0.1"]


def test_only_the_first_fixes_are_tried_the_first_ones_first() -> None:
    of = healthy()
    findings = [
        finding("reinitialise", "adamw", strength="watch"),
        finding("clip", "less-momentum", "float32-weights", "batch-norm"),
        finding("no-decay", "no such"),
    ]
    told: list[tuple[str, int, int]] = []
    found = tried(findings, of, ran(of), progress=lambda *a: told.append(a))
    advice = {a.fix: a for f in found for a in f.advice}
    assert {fix for fix, a in advice.items() if a.trial is not None} <= {
        *("clip", "no-decay", "reinitialise", "less-momentum")
    }
    assert advice["float32-weights"].untried == "no weights are of 16 bits"
    assert advice["batch-norm"].untried == advice["adamw"].untried
    assert advice["adamw"].untried == "only the first fixes of a finding are tried"
    assert advice["no such"].untried == ""
    assert told == [("fixes", i, 5) for i in range(1, 6)]


# Costs, time and interrupts


def test_what_does_not_fit_into_the_steps_for_trials_says_so() -> None:
    of = healthy()
    seen = ran(of, rates=NO_GAIN)
    dear = replace(seen, facts=replace(seen.facts, step_cost=1e3))
    (found,) = tried([finding("clip", "less-momentum", "rate*10")], of, dear)
    advice = {each.fix: each for each in found.advice}
    assert advice["clip"].trial is not None  # the first is tried, whatever it costs
    assert advice["less-momentum"].trial is None and advice["less-momentum"].untried == NO_STEPS

    assert advice["rate*10"].trial == NO_GAIN[10]  # it was run already
    assert rate_trials(of, dear) == {}
    assert overfit(of, dear) is None


def test_a_fix_that_the_model_cannot_be_run_with_is_not_tried() -> None:
    class Pinned(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            if type(self[0]) is not nn.Linear:
                raise RuntimeError("linear layers only")
            return super().forward(x)

    pinned = healthy(model=Pinned(*mlp()))
    (found,) = tried([finding("affine-like")], pinned, ran(pinned))
    assert found.advice[0].untried == "RuntimeError: linear layers only"
    assert found.strength == "act"  # nothing was measured


# One small batch


def test_one_small_batch_is_overfitted_at_the_best_rate() -> None:
    seen: list[int] = []

    def counting(model: nn.Module, batch: Any) -> Tensor:
        seen.append(len(batch[0]))
        return loss(model, batch)

    of = setup(optimizer=sgd(lr=0.03), loss=counting)
    better = {10.0: Trial("rate*10", 24, 0.1, 0.5, None, 0.01)}
    record = ran(of, rates=better)
    seen.clear()
    trial = overfit(of, record)
    assert trial is not None
    assert set(seen) == {16} and len(seen) == trial.steps == 100
    assert (trial.rate, trial.runs) == (10, 1) and trial.loss < 0.1 * trial.loss_without
    assert trial.loss_without == pytest.approx(
        loss(of.model, first(of.batches[0], 16)).item(), rel=1e-6
    )


@pytest.mark.parametrize(("lowest", "proves"), [(0.1, False), (0.2, True)])
def test_a_loss_that_was_learnt_and_rose_again_is_no_proof(lowest: float, proves: bool) -> None:
    """A term may run away at this rate, such as weights of terms that have no bound."""

    class Falls(nn.Module):
        """Its loss falls to a share of the first one, and rises again, whatever is learnt."""

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.steps = nn.Linear(12, 3), 0

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            factor = lowest if 40 <= self.steps % 100 < 60 else 1.0
            return factor + 0 * self.inner(x)

    falls = setup(model=Falls(), loss=lambda model, batch: model(batch[0]).mean())
    trial = overfit(falls, replace(ran(falls), rates={}))
    assert trial is not None and trial.loss_without == 1
    assert (trial.loss > 0.5) is proves


@pytest.mark.slow
def test_what_is_not_overfitted_gets_all_samples_and_other_rates() -> None:
    blind = setup(model=Computes(lambda m, x: m.inner(torch.zeros_like(x)), inner=mlp()))
    trial = overfit(blind, ran(blind))
    assert trial is not None and trial.runs == 4
    assert trial.loss > 0.5 * trial.loss_without and not trial.falls
    late = overfit(slow(), ran(slow()))
    assert late is not None and late.falls, "the loss still falls at the end"
