"""Trials: short runs of forks, compared with the run as it is."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry
from trial_setups import batches, loss, mlp, record, setup, sgd

from adiv_monitor.audit.experiments.step_cost import CPU, step_cost
from adiv_monitor.audit.training.batches import first, joined
from adiv_monitor.audit.training.setup import Setup
from adiv_monitor.audit.training.train import train
from adiv_monitor.audit.trials import overfit, rate_trials, tried
from adiv_monitor.audit.trials.by_heart import couples
from adiv_monitor.audit.trials.fixes import FIXES, Fix
from adiv_monitor.audit.trials.trial import FOR_RATES, Bench, Cap, compared
from adiv_monitor.diagnosis import diagnose
from adiv_monitor.diagnosis.diagnose import FIRST_THAT
from adiv_monitor.diagnosis.finding import NO_STEPS, NO_TIME, Advice, Finding, Trial


def finding(*fixes: str | None, name: str = "something", strength: Any = "act") -> Finding:
    advice = tuple(Advice(f"do {fix}", fix) for fix in fixes)
    return Finding(name, strength, advice=advice)


def with_rates(of: Setup) -> Any:
    seen = record(of)
    return replace(seen, rates=rate_trials(of, seen))


@pytest.fixture
def far_inputs() -> Setup:
    """Return a run with inputs × 160, which plain gradient descent cannot learn at a usual rate."""
    return setup(batches=batches(scale=160))


def test_the_observed_run_is_the_plain_run() -> None:
    healthy = setup()
    seen = record(healthy)
    plain = tuple(train(healthy.fork()).losses)
    assert Bench(healthy, seen).without == plain == seen.losses
    shorter = replace(healthy, steps=7)
    assert Bench(shorter, seen).without == tuple(train(shorter.fork()).losses)
    assert Bench(healthy, replace(seen, losses=plain[:9])).without == plain


def test_the_error_is_that_of_the_paired_differences() -> None:
    generator = np.random.default_rng(0)
    noise = generator.normal(0, 5, 20)  # common to both runs, so that it is not in the error
    without, losses = noise + generator.normal(3, 0.1, 20), noise + generator.normal(1, 0.1, 20)
    found = compared("a", losses.tolist(), without.tolist(), 20)
    differences = [without[i] - losses[i] for i in range(15, 20)]
    mean = sum(differences) / 5
    error = math.sqrt(sum((d - mean) ** 2 for d in differences) / 4 / 5)
    assert found.error == pytest.approx(error, rel=1e-12)
    assert found.gain == pytest.approx(mean)
    assert found.loss == pytest.approx(losses[15:].mean())
    assert found.pays and found.error < 0.2


@pytest.mark.parametrize("ending", [math.nan, math.inf])
def test_what_does_not_get_to_the_end_has_an_infinite_loss(ending: float) -> None:
    whole, broken = [2.0, 1.0, 1.0, 1.0], [2.0, ending]
    assert compared("a", broken, whole, 4).loss == math.inf
    assert not compared("a", broken, whole, 4).pays
    fixed = compared("a", whole, broken, 4)
    assert fixed.pays and fixed.loss_without == math.inf and math.isnan(fixed.error)
    assert not compared("a", broken, broken, 4).pays


def test_a_loss_that_grows_without_bound_has_diverged() -> None:
    grown = compared("a", [2.0, 1.0, 1.0, 1.0], [2.0, 1e3, 1e6, 1e9], 4)
    assert grown.loss_without == math.inf and grown.pays
    assert compared("a", [2.0, 1.0, 1.0, 1.0], [2.0, 9.0, 1e3, 1e3], 4).loss_without == 1e3


def test_one_step_has_no_standard_error_and_does_not_pay() -> None:
    assert math.isnan(compared("a", [1.0], [2.0], 1).error)
    assert not compared("a", [1.0], [2.0], 1).pays


def test_beside_a_wild_run_a_fix_is_told_from_a_rate_by_errors_of_their_own() -> None:
    wild = [100.0, 300.0] * 10
    rate = compared("rate*0.1", [1.6, 1.7] * 10, wild, 20)
    fixed = compared("a", [0.1, 0.2] * 10, wild, 20, by_rate=rate)
    assert fixed.loss_by_rate == rate.loss
    alone = float(np.std([0.2, 0.1, 0.2, 0.1, 0.2], ddof=1) / math.sqrt(5))
    assert fixed.loss_error == pytest.approx(alone)
    assert fixed.error_by_rate == pytest.approx(math.hypot(alone, rate.loss_error))
    assert fixed.error > 40 > 1 > fixed.error_by_rate
    assert fixed.beats_rate
    assert not replace(fixed, error_by_rate=math.nan).beats_rate


def test_what_is_for_all_layers_is_tried_in_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a rate is, wherever what is wrong shows."""
    seen: list[tuple[str, tuple[str, ...]]] = []

    def trial(bench: Bench, fix: Fix, layers: tuple[str, ...]) -> Trial:
        seen.append((fix.name, layers))
        return Trial(fix.name, 20, 1.0, 2.0, None, 0.1)

    monkeypatch.setattr(Bench, "trial", trial)
    advice = (
        Advice("in the layers", "layer-norm"),
        Advice("in all", "batch-norm", everywhere=True),
        Advice("a rate", "rate*0.1"),
    )
    here = replace(finding(), layers=("0",), advice=advice)
    healthy = setup()
    tried([here], healthy, record(healthy))
    assert seen == [("layer-norm", ("0",)), ("batch-norm", ()), ("rate*0.1", ())]


def test_trials_are_reproducible_bit_for_bit() -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(12, 16), nn.Dropout(0.3), nn.BatchNorm1d(16), nn.Linear(16, 3))
    noisy = setup(model=model)
    seen = with_rates(noisy)
    torch.rand(7)  # another state of the user's random numbers
    assert rate_trials(noisy, seen) == seen.rates
    advised = [finding("reinitialise", "affine-like", "larger-batch")]
    once = tried(advised, noisy, seen)
    trials = {a.fix: a.trial for f in once for a in f.advice}
    other_order = [finding("larger-batch"), finding("affine-like"), finding("reinitialise")]
    for found in tried(other_order, noisy, seen):
        for advice in found.advice:
            if advice.fix in trials:
                assert advice.trial == trials[advice.fix]


def test_a_cause_whose_fix_helps_is_one_to_act_on_and_stands_in_front() -> None:
    def trial(bench: Bench, fix: Fix, layers: tuple[str, ...]) -> Trial:
        loss = {"uncut": 0.5, "rate*0.3": 0.9}[fix.name]
        return Trial(fix.name, 20, loss, 1.0, 0.9, 0.001)

    healthy = setup()
    rate = finding("rate*0.3", name="rate-too-high")
    cut = finding("uncut", name="gradient-cut", strength="watch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bench, "trial", trial)
        first, second = tried([rate, cut], healthy, record(healthy))
        assert (first.name, first.strength) == ("gradient-cut", "act")
        assert second.advice == FIRST_THAT
        assert (second.name, second.strength) == ("rate-too-high", "watch")
        dropped = finding("rate*0.3", name="dropout-too-high", strength="watch")
        only = tried([dropped], healthy, record(healthy))
        assert only[0].strength == "watch"  # a tenth less is no merit of less dropout


@pytest.mark.parametrize(
    ("name", "without", "strength"),
    [
        ("rate-too-low", -1.0, "watch"),  # no fact that a fix may promote
        ("rate-too-low", 1.0, "watch"),
        ("dropout-too-high", -1.0, "watch"),  # half of a loss below zero is a higher one
        ("dropout-too-high", 5.0, "act"),
        ("input-scale", -1.0, "act"),
    ],
)
def test_a_share_of_a_loss_below_zero_promotes_nothing(
    name: str, without: float, strength: str
) -> None:
    def trial(bench: Bench, fix: Fix, layers: tuple[str, ...]) -> Trial:
        return Trial(fix.name, 20, without - 3, without, None, 0.001)

    healthy = setup()
    watched = finding("rate*10", name=name, strength="watch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bench, "trial", trial)
        (found,) = tried([watched], healthy, record(healthy))
    assert found.advice[0].trial is not None and found.advice[0].trial.helps
    assert found.strength == strength


@pytest.mark.parametrize("name", ["bounded-logits", "input-scale"])
def test_what_can_not_be_overfitted_stands_behind_a_fact_whose_fix_helps(name: str) -> None:
    slow = setup(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-3))
    symptom = finding("look", name="cannot-overfit")
    fact = finding("rate*100", name=name, strength="watch")
    first, second = tried([symptom, fact], slow, record(slow))
    assert (first.name, first.strength) == (name, "act")
    assert (second.name, second.strength) == ("cannot-overfit", "watch")


def test_what_is_meant_as_often_as_not_is_a_note_where_no_fix_helps() -> None:
    healthy = setup()
    seen = with_rates(healthy)

    def strength(*fixes: str, **given: Any) -> str:
        unordered = finding(*fixes, name="order-ignored", strength="watch")
        (found,) = tried([unordered], healthy, seen, **given)
        return found.strength

    assert strength("reinitialise") == "note"
    assert strength("no-clip") == "note"  # nothing is clipped
    assert strength("reinitialise", cap=Cap(0)) == "watch"
    slow = setup(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-3))
    (found,) = tried([finding("rate*100", name="order-ignored", strength="watch")], slow,
                     record(slow))  # fmt: skip
    assert found.strength == "act"


def test_rates_are_tried_and_once_further_at_the_better_end() -> None:
    slow = setup(optimizer=sgd(lr=1e-3))
    found = with_rates(slow).rates
    assert list(found) == [0.1, 0.3, 3, 10, 100, 1000]
    assert [t.fix for t in found.values()] == [f"rate*{f:g}" for f in found]
    fork = replace(slow, optimizer=sgd(lr=1e-3 * 3)).fork()
    expected = train(fork).losses
    assert found[3].loss == np.mean(expected[-6:])
    assert found[3].steps == 24 and found[3].loss_by_rate is None
    fast = setup(optimizer=sgd(lr=300.0))
    assert list(with_rates(fast).rates) == [0.01, 0.1], "the loss rises"
    assert list(with_rates(setup(optimizer=sgd(lr=1.0))).rates) == [0.1, 0.3, 3, 10]


def unstable(rate: float) -> Setup:
    """Return a run whose loss rises; only at a hundredth of the rate it is soon below chance."""
    chance, widths = torch.Generator().manual_seed(1), (12, 64, 64, 64, 64)
    centres = 0.7 * torch.randn(10, 12, generator=chance)
    labels = [torch.randint(10, (16,), generator=chance) for _ in range(48)]
    given = [(centres[y] + torch.randn(16, 12, generator=chance), y) for y in labels]
    torch.manual_seed(0)
    hidden = [
        layer
        for a, b in pairwise(widths)
        for layer in (nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU())
    ]
    model = nn.Sequential(*hidden, nn.Linear(64, 10))
    return setup(model=model, batches=tuple(given), optimizer=sgd(lr=rate, momentum=0.9), steps=48)


def test_a_loss_that_rises_is_tried_at_lower_rates_until_one_helps() -> None:
    of = unstable(10.0)
    seen = with_rates(of)
    assert list(seen.rates) == [0.01, 0.1]
    assert seen.rates[0.01].helps and not seen.rates[0.1].beats_constant
    first = diagnose(seen)[0]
    assert (first.name, first.strength) == ("rate-too-high", "act")
    assert first.advice[0].fix == "rate*0.01"


def test_an_initialisation_that_does_not_end_lower_is_not_advised() -> None:
    learnt = setup().fork()
    train(learnt)
    of = setup(model=learnt.model)
    (found,) = tried([finding("reinitialise", "layer-norm")], of, record(of))
    assert [advice.fix for advice in found.advice] == ["layer-norm"]


def test_a_rate_100_times_too_small_is_fixed_by_a_larger_one() -> None:
    slow = setup(optimizer=sgd(lr=1e-3))
    (found,) = tried([finding("no-clip", "rate*10")], slow, with_rates(slow))
    best = found.advice[0]
    assert best.fix == "rate*10" and best.trial is not None and best.trial.pays
    assert found.strength == "act"
    assert found.advice[1].untried == "gradients are not clipped"


def test_inputs_160_times_too_large_are_fixed_by_standardising_them(far_inputs: Setup) -> None:
    seen = with_rates(far_inputs)
    (found,) = tried([finding("standardise-inputs")], far_inputs, seen)
    trial = found.advice[0].trial
    assert found.strength == "act" and trial is not None
    assert trial.pays and trial.beats_rate
    assert trial.loss_by_rate == min(t.loss for t in seen.rates.values())
    assert trial.loss_without == math.inf and trial.loss < 0.6


def test_a_fix_that_rescales_is_tried_at_better_and_better_rates(far_inputs: Setup) -> None:
    ends = {}
    for factor in (0.3, 1, 3, 10, 100):
        fork = replace(far_inputs, optimizer=sgd(lr=0.1 * factor)).fork()
        FIXES["standardise-inputs"].apply(fork)
        ends[factor] = np.mean(train(fork).losses[-6:])
    assert min(ends, key=ends.__getitem__) == 10  # so that 100 is tried, too
    advised = [finding("standardise-inputs", "batch-norm")]
    (found,) = tried(advised, far_inputs, record(far_inputs))
    trial = next(a.trial for a in found.advice if a.fix == "standardise-inputs")
    assert (trial.rate, trial.runs) == (10, 5)
    assert trial.loss == pytest.approx(ends[10], rel=1e-6)


def test_a_fix_that_is_no_better_than_a_rate_stands_behind_it() -> None:
    """SGD with such a rate only lacks larger steps, which AdamW takes too."""
    slow = setup(optimizer=sgd(lr=1e-3))
    seen = with_rates(slow)
    best = min(seen.rates, key=lambda f: seen.rates[f].loss)
    (found,) = tried([finding("clip", "warm-up", "rate-per-layer")], slow, seen)
    sold = [a for a in found.advice if a.trial is not None and a.trial.pays]
    for advice in sold[1:]:
        assert advice.outcome.mark == "✗" and "another learning rate alone" in str(advice)
    if len(sold) > 1:
        assert sold[0].fix == f"rate*{best:g}"
        assert sold[0].trial == seen.rates[best]


def test_the_rate_is_put_in_front_of_what_it_does_as_well() -> None:
    """The fix pays on plain data, but a learning rate alone gives the same."""
    healthy = setup()
    seen = record(healthy)
    rate = Trial("rate*10", 24, 0.0001, seen.losses[0], None, 0.0)
    seen = replace(seen, rates={10.0: rate}, losses=tuple(10.0 for _ in range(24)))
    (found,) = tried([finding("reinitialise")], healthy, seen)
    front, behind = found.advice
    assert front == Advice("learning rate × 10", "rate*10", rate)
    assert behind.trial is not None and behind.trial.pays and not behind.trial.beats_rate
    assert behind.outcome.mark == "✗"
    assert behind.outcome.words.endswith("no better than another learning rate alone (0.0001)")


def test_what_does_not_pay_is_something_to_watch() -> None:
    healthy = setup()
    seen = with_rates(healthy)
    findings = [
        finding("rate*0.01", name="non-finite"),
        finding("rate*0.01"),
        finding(None),
        finding("no-decay"),
        finding("reinitialise", strength="note"),
        finding("rate*10", strength="note"),
    ]
    found = tried(findings, healthy, seen)
    assert [f.strength for f in found] == ["act", "act", "act", "watch", "note", "note"]
    assert found[0].name == "non-finite" and found[0].advice[0].trial is not None
    assert found[2].advice[0].untried == "there is no weight decay"
    assert found[3].advice[0].trial is not None and not found[3].advice[0].trial.pays
    assert found[4] == findings[4]  # a note is not tried
    assert found[5].advice[0].trial == seen.rates[10]  # but says so where that was tried anyway
    assert found[1] == findings[2]


def test_a_cause_stays_one_to_act_on_where_what_follows_from_it_is_certain() -> None:
    healthy = setup()
    seen = with_rates(healthy)
    cause, symptom = finding("rate*0.01"), finding(None, name="cannot-overfit")
    after = tried([cause, symptom], healthy, seen)
    assert [(f.name, f.strength) for f in after] == [(f.name, "act") for f in (cause, symptom)]
    before = tried([symptom, cause], healthy, seen)
    assert [f.strength for f in before] == ["act", "watch"]


@pytest.mark.parametrize(("factor", "strength"), [(0.1, "watch"), (10.0, "act")])
def test_layers_that_one_lower_rate_fixes_are_not_uneven(factor: float, strength: str) -> None:
    healthy = setup()
    seen = record(healthy)
    rate = Trial(f"rate*{factor:g}", 24, 0.0001, seen.losses[0], None, 0.0)
    seen = replace(seen, rates={factor: rate}, losses=tuple(10.0 for _ in range(24)))
    (found,) = tried([finding("reinitialise", name="uneven-rates")], healthy, seen)
    assert (found.advice[0].fix, found.strength) == (rate.fix, strength)


def test_a_loss_that_jumps_has_errors_that_hide_no_gain() -> None:
    """The mean of 37 is lowered to 0.01, but its standard error is 19."""
    jumps = Trial("rate*0.01", 60, 0.01, 37.0, None, 19.0, loss_error=0.002, constant=1.8)
    assert jumps.pays
    assert not replace(jumps, constant=None).pays
    assert not replace(jumps, constant=40.0).pays, "both are below"
    assert not replace(jumps, loss=1.79).pays, "hardly below a constant"


def test_what_pays_comes_first_then_what_was_not_tried() -> None:
    slow = setup(optimizer=sgd(lr=1e-3))
    advised = [finding("rate*0.1", None, "rate*10", "rate*100")]
    (found,) = tried(advised, slow, with_rates(slow))
    assert [a.fix for a in found.advice] == ["rate*100", "rate*10", None, "rate*0.1"]


def test_what_is_as_good_stays_in_the_rules_order() -> None:
    """Losses of 1.05, 1 and 2 at factors 0.1 and 0.3 of a rate far too high, set by hand."""
    healthy = setup()
    seen = record(healthy)
    losses = {0.1: 1.05, 0.3: 1.0, 3.0: 2.0}
    rates = {f: Trial(f"rate*{f:g}", 24, value, 9.0, None, 0.0) for f, value in losses.items()}
    seen = replace(seen, rates=rates)
    advised = [finding("rate*3", "rate*0.1", "rate*0.3")]
    (found,) = tried(advised, healthy, seen)
    assert [a.fix for a in found.advice] == ["rate*0.1", "rate*0.3", "rate*3"]


def test_only_the_first_fixes_are_tried_the_first_ones_first() -> None:
    healthy = setup()
    done = []
    findings = [
        finding("reinitialise", strength="watch"),
        finding("clip", "warm-up", "larger-batch", "batch-norm"),
        finding("plain-sgd"),
    ]
    told: list[tuple[str, int, int]] = []
    found = tried(findings, healthy, record(healthy), progress=lambda *a: told.append(a))
    done = [a.fix for f in found for a in f.advice if a.trial is not None]
    assert sorted(done) == ["clip", "larger-batch", "reinitialise", "warm-up"]
    (fourth,) = (a for f in found for a in f.advice if a.fix == "batch-norm")
    assert fourth.untried == "only the first 3 fixes of each finding are tried"
    assert told == [("fixes", i, 5) for i in range(1, 6)]


def test_what_does_not_fit_into_the_steps_for_trials_says_so() -> None:
    healthy = setup()
    seen = with_rates(healthy)
    slow = replace(seen, facts=replace(seen.facts, step_cost=1e3))
    (found,) = tried([finding("clip", "warm-up", "rate*0.1")], healthy, slow)
    advice = {each.fix: each for each in found.advice}
    assert advice["clip"].trial is not None  # the first is tried, whatever it costs
    assert advice["warm-up"].trial is None and advice["warm-up"].untried == NO_STEPS
    assert str(advice["warm-up"]) == "do warm-up (not tried: the steps for trials were used up)"
    assert advice["rate*0.1"].trial == seen.rates[0.1]  # it was run already
    assert rate_trials(healthy, slow) == {}
    assert overfit(healthy, slow) is None


def test_no_run_begins_that_would_end_later_than_the_cap() -> None:
    healthy = setup()
    seen = with_rates(healthy)
    slow = replace(seen, facts=replace(seen.facts, seconds_per_step=1e3))
    cap = Cap(5)
    (found,) = tried([finding("clip", "rate*0.1")], healthy, slow, cap=cap)
    advice = {each.fix: each for each in found.advice}
    assert cap.reached and advice["clip"].untried == NO_TIME
    assert advice["rate*0.1"].trial == seen.rates[0.1]
    assert rate_trials(healthy, slow, cap=cap) == {}
    assert overfit(healthy, slow, cap=cap) is None
    never = Cap()
    assert rate_trials(healthy, slow, cap=never) == seen.rates
    assert not never.reached


def test_what_a_step_costs_is_counted() -> None:
    healthy = setup()
    cost = step_cost(healthy)
    assert step_cost(healthy) == cost
    twice = replace(healthy, batches=tuple(tuple(torch.cat([x, x]) for x in b) for b in batches()))
    wide = replace(healthy, model=nn.Sequential(nn.Linear(12, 2**18), nn.Linear(2**18, 3)))
    assert cost < step_cost(twice) < 2 * cost  # calls of operators stay as many
    assert step_cost(wide) > 10 * cost


def test_an_operator_that_cannot_be_counted_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: object, **kwargs: object) -> int:
        raise NotImplementedError

    monkeypatch.setitem(flop_registry, torch.ops.aten.addmm, refuses)
    healthy = setup()
    size = sum(p.numel() for p in healthy.model.parameters())
    assert step_cost(healthy) == pytest.approx(CPU.seconds(6 * size * len(batches()[0][0]), 0))


def test_runs_are_shorter_where_steps_are_costly() -> None:
    healthy = setup()
    seen = record(healthy)

    def costing(steps: float) -> Any:
        """Return the record of steps that are so costly that runs may have this many in all."""
        return replace(seen, facts=replace(seen.facts, step_cost=FOR_RATES / steps))

    assert {t.steps for t in rate_trials(healthy, costing(76)).values()} == {15}
    few = rate_trials(healthy, costing(37))  # 7 steps of five runs would tell nothing
    assert {0.1, 10.0} <= few.keys() and {t.steps for t in few.values()} == {12}
    assert not few.keys() & {0.3, 3.0}


def interrupting(at: int) -> Any:
    """A loss that raises KeyboardInterrupt in its n-th call."""
    calls: Iterator[int] = iter(range(10**6))

    def pressed(model: nn.Module, batch: Any) -> Tensor:
        if next(calls) == at:
            raise KeyboardInterrupt
        return loss(model, batch)

    return pressed


def test_the_keyboard_stops_all_trials() -> None:
    healthy = setup()
    seen = record(healthy)
    stopped = replace(healthy, loss=interrupting(30))
    (found,) = tried([finding("warm-up", "rate*0.1", "clip")], stopped, seen)
    outcomes = {a.fix: (a.trial is not None, a.untried) for a in found.advice}
    assert outcomes["warm-up"] == (True, "")
    assert outcomes["rate*0.1"] == outcomes["clip"] == (False, "interrupted")
    with pytest.raises(KeyboardInterrupt):
        rate_trials(replace(healthy, loss=interrupting(3)), seen)
    with pytest.raises(KeyboardInterrupt):
        overfit(replace(healthy, loss=interrupting(3)), seen)


def test_a_fix_that_the_model_cannot_be_run_with_is_not_tried() -> None:
    class Fixed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) != 32:
                raise RuntimeError("32 samples only")
            return super().forward(x)

    fixed = setup(model=Fixed(*mlp()))
    (found,) = tried([finding("larger-batch", "no such")], fixed, record(fixed))
    assert found.advice[0].untried == "RuntimeError: 32 samples only"
    assert found.advice[1].untried == "no fix is called no such"
    assert found.strength == "act"  # nothing was measured


def test_forks_leave_the_users_model_alone(far_inputs: Setup) -> None:
    before = [p.clone() for p in far_inputs.model.parameters()]
    seen = with_rates(far_inputs)
    overfit(far_inputs, seen)
    tried([finding("affine-like", "batch-norm")], far_inputs, seen)
    for now, then in zip(far_inputs.model.parameters(), before, strict=True):
        assert torch.equal(now, then) and now.grad is None
    assert type(far_inputs.model[0]) is nn.Linear


def test_forks_have_hook_tables_of_their_own() -> None:
    own = setup(model=nn.Sequential(*mlp()))
    own.model[0].register_forward_hook(lambda *_: None)
    forks = own.fork(), own.fork()
    forks[0].model[-1].register_forward_hook(lambda *_: None)
    count = [[len(m._forward_hooks) for m in (of.model[0], of.model[-1])] for of in (own, *forks)]
    assert count == [[1, 0], [1, 1], [1, 0]]
    tables = [
        x for of in (own, *forks) for m in of.model.modules() for x in vars(m).values()
        if isinstance(x, dict)
    ]  # fmt: skip
    assert len(set(map(id, tables))) == len(tables) > 100


def test_one_small_batch_is_overfitted() -> None:
    seen: list[int] = []

    def counting(model: nn.Module, batch: Any) -> Tensor:
        seen.append(len(batch[0]))
        return loss(model, batch)

    slow = setup(optimizer=sgd(lr=0.01), loss=counting)
    of = with_rates(slow)
    seen.clear()
    trial = overfit(slow, of)
    assert set(seen) == {16} and len(seen) == trial.steps == 100
    assert trial.rate == min(of.rates, key=lambda f: of.rates[f].loss) > 1
    assert trial.loss < 0.1 * trial.loss_without
    assert trial.loss_without == pytest.approx(
        loss(slow.model, first(slow.batches[0], 16)).item(), rel=1e-6
    )


def test_what_cannot_learn_is_not_overfitted() -> None:
    class Blind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(torch.zeros_like(x))

    blind = setup(model=Blind())
    trial = overfit(blind, record(blind))
    assert trial.loss > 0.5 * trial.loss_without


@pytest.mark.slow
def test_another_rate_is_tried_before_a_batch_is_called_unlearnable() -> None:
    rates = {lr: overfit(setup(optimizer=sgd(lr=lr)), record(setup())) for lr in (0.01, 1, 20)}
    assert {lr: (trial.runs, trial.rate) for lr, trial in rates.items()} == {
        0.01: (2, 3.0),
        1: (1, 1.0),
        20: (3, 0.3),
    }


def test_a_loss_that_still_falls_at_the_end_is_told_from_one_that_stands() -> None:
    runs = [setup(optimizer=sgd(lr=lr)) for lr in (1e-3, 0)]
    slow, standing = (overfit(run, record(run)) for run in runs)
    assert slow.falls and not standing.falls


def test_dropout_does_not_hinder_overfitting() -> None:
    model = nn.Sequential(nn.Dropout(0.99), *mlp())
    dropping = setup(model=model)
    assert overfit(dropping, record(dropping)).loss < 0.1
    assert model[0].p == 0.99


def test_noise_that_each_step_draws_does_not_hinder_overfitting() -> None:
    """As in diffusion, where the model predicts noise that was added to its inputs."""

    def denoised(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        noise = torch.randn(len(batch[0]), 3)
        return (model(batch[0]) - noise).square().mean()

    of = setup(loss=denoised)
    assert overfit(of, record(of)).loss < 0.1


def test_a_batch_that_cannot_be_cut_is_learnt_whole() -> None:
    def pairs(model: nn.Module, batch: Any) -> Tensor:
        x, pairs = batch  # of 32 samples, 32 pairs by number
        return (model(x)[pairs[:, 0]] - model(x)[pairs[:, 1]] - 1).square().mean()

    data = ((torch.randn(32, 12), torch.randint(16, 32, (32, 2))),)
    odd = setup(batches=data, loss=pairs)
    assert overfit(odd, record(odd)).steps == 100


def whitened(model: nn.Module, batch: Any) -> Tensor:
    """As in VICReg: 16 samples have a covariance of rank 15 at most, so that a loss remains."""
    z = model(batch[0])
    z = z - z.mean(0)
    return (z.T @ z / len(z) - torch.eye(z.shape[1])).square().sum()


def test_a_loss_that_couples_samples_is_given_the_whole_batch_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 256), nn.Tanh(), nn.Linear(256, 32))
    coupled = setup(
        model=model,
        loss=whitened,
        batches=batches(scale=3),
        optimizer=lambda m: torch.optim.Adam(m.parameters(), lr=3e-3),
    )
    seen = record(coupled)
    trial = overfit(coupled, seen)
    assert trial.runs == 2 and trial.loss < 0.5 * trial.loss_without
    assert not any(f.name == "cannot-overfit" for f in diagnose(replace(seen, overfit=trial)))


def test_losses_that_couple_samples_are_told() -> None:
    def contrast(model: nn.Module, batch: Any) -> Tensor:
        z = model(batch[0])
        return nn.functional.cross_entropy(z @ z.T, torch.arange(len(z)).roll(1))

    def noisy(model: nn.Module, batch: Any) -> Tensor:
        return loss(model, (batch[0] + torch.randn(batch[0].shape), batch[1]))

    normed = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.Linear(16, 3))
    assert all(couples(of, of.batches[0]) for of in (setup(loss=whitened), setup(loss=contrast)))
    for of in (setup(), setup(loss=noisy), setup(model=normed), setup(model=normed, loss=noisy)):
        assert not couples(of, of.batches[0])


def test_batches_of_any_structure_are_cut_and_joined() -> None:
    batch = {"x": torch.arange(6).reshape(3, 2), "n": torch.tensor(2.0), "of": ["a", 1]}
    both = joined(batch, batch)
    assert torch.equal(both["x"], torch.cat([batch["x"]] * 2)) and both["n"] == 2
    assert torch.equal(first(both, 2)["x"], batch["x"][:2]) and first(both, 2)["of"] == ["a", 1]
    assert first(batch, 3) is batch
    with pytest.raises(ValueError, match="samples share"):
        joined(batch, {**batch, "n": torch.tensor(3.0)})
    with pytest.raises(ValueError, match="hold 2 and 1"):
        joined(batch, {"x": batch["x"]})


def test_an_optimizer_without_a_rate_has_no_rate_trials() -> None:
    class Fixed(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        def step(self, closure: Any = None) -> None:
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p -= 0.1 * p.grad

    fixed = setup(optimizer=lambda m: Fixed(m.parameters()))
    assert rate_trials(fixed, record(fixed)) == {}
