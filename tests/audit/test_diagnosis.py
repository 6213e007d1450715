"""Each rule: a run that it is about, one that just is not, and one within the readings' errors."""

import ast
import math
from dataclasses import replace
from pathlib import Path

import pytest
from made_records import (
    FACTS,
    INPUTS,
    RISING,
    STEPS,
    STILL,
    WELL,
    adam,
    decayed,
    reading,
    record,
    trials,
)

from adiv_monitor.diagnosis import diagnose
from adiv_monitor.diagnosis.course import fell
from adiv_monitor.diagnosis.diagnose import FIRST_THAT
from adiv_monitor.diagnosis.diagnosis import Diagnosis
from adiv_monitor.diagnosis.faults import FAULTS
from adiv_monitor.diagnosis.faults import found as found_in
from adiv_monitor.diagnosis.faults.rates import suffers
from adiv_monitor.diagnosis.faults.remedies import rates_per_layer
from adiv_monitor.diagnosis.finding import Finding, Trial
from adiv_monitor.diagnosis.record import (
    ActivatedOutput,
    Fact,
    Probed,
    Record,
    UnitStatistics,
    WeightStatistics,
    Wiring,
)
from adiv_monitor.report import LayerReading, StepReport

ROOT = Path(__file__).parents[2]


def found(of: Record) -> dict[str, Finding]:
    return {finding.name: finding for finding in diagnose(of)}


def test_a_healthy_run_has_no_findings() -> None:
    assert diagnose(record()) == ()


def test_every_rule_bears_an_empty_record() -> None:
    empty = Record(FACTS, (), (), ())
    assert found_in(empty) == []


def probed(name: str, losses: tuple[float, ...] = WELL, **numbers: float) -> Record:
    """A run of which a probe found one thing."""
    words = {"dtype": "bfloat16", "of": "(64, 1)", "and": "(64,)", "function": "softmax"}
    words |= {"shape": "(64, 1)", "low": "0", "high": "inf", "to": "(1, 64)"}
    return record(probed={name: Probed((Fact("a", numbers, words),))}, losses=losses)


def opposed(largest: float, ratio: float) -> Record:
    """Two terms with a cosine of −0.99, and this one where it is largest."""
    numbers = {"cosine": -0.99, "largest": largest, "ratio": ratio}
    return record(probed={"terms-opposed": Probed((Fact("a", numbers, {"other": "b"}),))})


HITS = {
    "not-held": record(wiring=Wiring(not_held=("c.weight",))),
    "unreached": record(wiring=Wiring(unreached=("a.weight",))),
    "input-ignored": record(wiring=Wiring(input_matters=0.0)),
    "non-finite": record(losses=(2.3, 2.2, math.nan), first_non_finite="gradient of a"),
    "input-scale": record(inputs={"0": replace(INPUTS, std=160.0)}),
    "input-mean": record(
        {"a": reading(common_share=0.9)}, inputs={"0": replace(INPUTS, mean=10.0)}
    ),
    "row-spread": record({"a": reading(scale_cv=3.0, standard_error={"scale_cv": 0.1})}),
    "projection-fights": record({"b": reading(projection_cosine=0.1, applied_cosine=-0.2)}),
    "decay-fights": record(facts=decayed(0.5), losses=STILL),
    "rate-too-high": record(
        rates=trials(own=2.2, x01=0.5, x03=1.0, x3=9.0, x10=math.inf), losses=STILL
    ),
    "rate-too-low": record(
        dict.fromkeys("abc", reading(update_ratio=0.006)),
        rates=trials(own=2.28, x01=2.3, x03=2.29, x3=2.1, x10=1.0),
    ),
    "vanishing": record({"a": reading(descent=1e-9, scale_mean=17.0)}, losses=STILL),
    "exploding": record({"a": reading(descent=1e6, scale_mean=17.0)}, losses=STILL),
    "dead-units": record(units={"relu": UnitStatistics("relu", 64, 40, 0.9, 20)}, losses=STILL),
    "saturated-units": record(units={"tanh": UnitStatistics("tanh", 64, 0, 0.8, 20)}, losses=STILL),
    "clipping-always": record(
        facts=replace(FACTS, clip_norm=0.01), gradient_norms=(1.0,) * STEPS, losses=STILL
    ),
    "uneven-rates": record({"a": reading(update_ratio=1e-6)}),
    "bad-initialisation": record(losses=tuple(40 * 0.9**s for s in range(STEPS))),
    "optimizer-turns": record(
        {name: reading(parameter_cosine=-0.3, descent=-0.01) for name in "abc"}, losses=RISING
    ),
    "cannot-overfit": record(overfit=Trial("overfit", 100, 2.2, 2.3, None, 0.01)),
    "double-softmax": record(double_softmax=True),
    "activated-logits": record(activated_output=ActivatedOutput("relu", "head.1")),
    "target-scale": record(chance=1e6, losses=(1e6, math.inf)),
    "unbounded-loss": record(losses=tuple(2 - 1e6 * (i / 39) ** 3 for i in range(STEPS))),
    "hidden-parameters": probed("hidden-parameters", share=0.5),
    "rate-zero": probed("rate-zero", share=0.5, initial_lr=0.0),
    "rounded-away": probed("rounded-away", share=0.8, losses=STILL),
    "gradient-hooks": probed("gradient-hooks", ratio=0.001, cosine=1.0, losses=STILL),
    "gradient-differs": probed("gradient-differs", ratio=-1.0, losses=STILL),
    "samples-mixed": probed("samples-mixed", share=0.9, independent=0.1, losses=STILL),
    "state-carried": record(probed={"state-carried": Probed(
        (Fact("", {"outputs": 0.1}, {"of": "sample", "goes on": "no"}),))}, losses=STILL),
    "reshape-scrambles": probed("reshape-scrambles", permutes=1.0, losses=STILL),
    "constant-data": record(probed={"constant-data": Probed(
        (Fact("", {"samples": 64.0, "value": 0.0}, {"of": "labels"}),))}),
    "no-activation": record(probed={"no-activation": Probed(
        (Fact("", {"layers": 3.0}, {"by": "affine"}),))}, losses=STILL),
    "same-batch": record(probed={"same-batch": Probed(
        (Fact("", {"different": 1.0, "batches": 60.0}, {"of": "batches"}),))}),
    "label-smoothing": probed("label-smoothing", share=0.9, classes=10.0, losses=STILL),
    "class-weights": record(probed={"class-weights": Probed((Fact(
        "nll_loss", {"slope": 1.0, "correlation": 1.0, "times": 9.0, "more": 9.0},
        {"common": "0", "rare": "1"}),))}, losses=STILL),
    "penalty-dominates": probed("penalty-dominates", losses=STILL, without=2.0, others=1.0,
                                penalty=30.0, **{"with": 0.1, "penalty after": 0.5}),
    "unsafe-division": probed("unsafe-division", close=0.01, times=50.0, losses=STILL),
    "targets-moved": record(probed={"targets-moved": Probed(
        (Fact("", {"own": 0.1, "best": 0.5}, {"move": "transposed"}),))}, losses=STILL),
    "unshuffled": probed("unshuffled", ratio=0.1, z=-20.0),
    "one-sided-weights": probed("one-sided-weights", share=0.87, losses=STILL),
    "input-partly-ignored": probed("input-partly-ignored", share=0.5, losses=STILL),
    "bounded-logits": probed("bounded-logits", share=1.0, classes=10.0, floor=0.8, losses=STILL),
    "broadcast-loss": probed("broadcast-loss", times=64.0),
    "no-log": record(probed={"no-log": Probed(
        (Fact("nll_loss", {}, {"function": "nll_loss", "given": "probabilities"}),))}),
    "targets-misplaced": probed("targets-misplaced", share=0.1),
    "loss-reversed": record(
        probed={"loss-reversed": Probed((Fact("", {"right": 0.9, "wrong": 0.1},
                                              {"outputs": "signed"}),))}
    ),
    "pairs-reversed": probed("pairs-reversed", share=0.2, errors=-6.0, drawn=50.0, pushed=50.0),
    "logits-as-probabilities": probed(
        "logits-as-probabilities", at=0.0, beyond=-1.0, outside=0.5
    ),
    "softmax-of-one": probed("softmax-of-one"),
    "softmax-over-samples": probed("softmax-over-samples"),
    "targets-out-of-range": probed("targets-out-of-range", share=0.4, losses=STILL),
    "target-is-input": probed("target-is-input", places=0.0),
    "future-leak": probed("future-leak", change=0.5),
    "left-in-eval": probed("left-in-eval", given=0.0, losses=STILL),
    "batch-norm-starved": probed("batch-norm-starved", values=3.0, losses=STILL),
    "dropout-too-high": probed("dropout-too-high", rate=0.9, **{"with": 2.0, "without": 1.0}),
    "epsilon-dominates": probed(
        "epsilon-dominates", share=0.9, epsilon=1.0, root=0.01, losses=STILL
    ),
    "dropout-on-outputs": probed(
        "dropout-on-outputs", rate=0.3, **{"with": 2.0, "without": 1.0}, losses=STILL
    ),
    "outputs-normalised": probed(
        "outputs-normalised", mean=0.0, std=1.0, losses=STILL,
        **{"target mean": 100.0, "target std": 3.0},
    ),
    "outputs-constant": record(probed={"outputs-constant": Probed(
        (Fact("norm", {"share": 0.0}, {"class": "LayerNorm", "by": "norm"}),))}, losses=STILL),
    "collapsed": probed("collapsed", before=0.5, after=0.05, loss=-1.0),
    "term-without-graph": probed("term-without-graph", value=9.0, loss=8.8, losses=STILL),
    "terms-opposed": opposed(largest=-0.98, ratio=0.9),
    "zero-slope": record(probed={"zero-slope": Probed(
        (Fact("clamp", {"share": 0.9}, {"kind": "clip"}),))}, losses=STILL),
    "zero-gradient": record(gradient_norms=(0.0,) * STEPS, losses=STILL,
                            wiring=Wiring(zero_gradient=("a.weight",))),
    "frozen": record(wiring=Wiring(frozen=("a.weight",)), losses=STILL,
                     weights={"a": WeightStatistics(0.58, 0.05, 0.0)}),
}  # fmt: skip


@pytest.mark.parametrize("name", HITS)
def test_a_fault_is_named_first_and_to_be_acted_on(name: str) -> None:
    first = diagnose(HITS[name])[0]
    assert (first.name, first.strength) == (name, "act")
    assert first.evidence
    assert first.advice
    assert first.summary


SMALL = replace(INPUTS, std=0.3)
NEAR_MISSES = {
    "outputs-constant": record(
        probed={"outputs-constant": Probed(
            (Fact("1", {"share": 0.0}, {"class": "ReLU", "by": "zeros"}),))},
        units={"1": UnitStatistics("relu", 64, 64, 1.0, 20)},
    ),
    "collapsed": record(probed={"collapsed": Probed()}),
    "input-scale": record(inputs={"0": SMALL}),
    "input-mean": record(
        {"a": reading(common_share=0.4)}, inputs={"0": replace(INPUTS, mean=10.0)}
    ),
    "row-spread": record({"a": reading(scale_cv=0.9)}),
    "projection-fights": record({"b": reading(projection_cosine=0.99)}),
    "decay-fights": record(facts=decayed(0.01), losses=STILL),
    "rate-too-high": record(rates=trials(own=0.6, x01=1.0, x03=0.5, x3=9.0, x10=math.inf)),
    "rate-too-low": record(rates=trials(own=0.6, x01=1.5, x03=1.0, x3=0.5, x10=0.4)),
    "vanishing": record({"a": reading(descent=1e-4)}, losses=STILL),
    "exploding": record({"a": reading(descent=1.0)}, losses=STILL),
    "dead-units": record(units={"relu": UnitStatistics("relu", 64, 10, 0.9, 20)}),
    "saturated-units": record(units={"relu": UnitStatistics("relu", 64, 0, 0.8, 20)}),
    "clipping-always": record(facts=replace(FACTS, clip_norm=2.0)),
    "pairs-reversed": probed("pairs-reversed", share=0.2, errors=-4.9, drawn=9.0, pushed=9.0),
    "uneven-rates": record({"a": reading(update_ratio=1e-3), "b": reading(update_ratio=0.3)}),
    "bad-initialisation": record(losses=tuple(4 * 0.9**s for s in range(STEPS))),
    "optimizer-turns": record({"a": reading(parameter_cosine=-0.1)}),
    "cannot-overfit": record(overfit=Trial("overfit", 100, 0.1, 2.3, None, 0.01)),
    "input-ignored": record(wiring=Wiring(input_matters=0.01)),
    "double-softmax": record(double_softmax=False),
    "activated-logits": record(activated_output=ActivatedOutput("softmax", "head.1")),
    "target-scale": record(chance=11.0),
    "unbounded-loss": record(losses=tuple(2 - 1e3 * (i / 39) ** 0.5 for i in range(STEPS))),
    "rounded-away": probed("rounded-away", share=0.45),
    "targets-out-of-range": probed("targets-out-of-range", share=0.005),
    "gradient-cut": probed("gradient-cut", cosine=0.995),
    "unshuffled": probed("unshuffled", ratio=0.85, z=-20.0),
    "gradient-hooks": probed("gradient-hooks", ratio=0.2, cosine=0.95),
    "gradient-differs": probed("gradient-differs", ratio=0.95, losses=STILL),
    "epsilon-dominates": probed("epsilon-dominates", share=0.45, epsilon=1.0, root=2.0),
    "attention-saturated": probed("attention-saturated", spread=2.4, largest=0.6),
    "outputs-normalised": probed(
        "outputs-normalised", mean=0.0, std=1.0, **{"target mean": 1.9, "target std": 2.9}
    ),
    "term-without-graph": record(probed={"term-without-graph": Probed()}),
    "terms-opposed": opposed(largest=-0.9, ratio=0.9),
    "zero-slope": record(probed={"zero-slope": Probed(
        (Fact("clamp", {"share": 0.1}, {"kind": "clip"}),))}, losses=STILL),
    "zero-gradient": record(gradient_norms=(*(0.0,) * (STEPS - 1), 1e-9), losses=STILL,
                            wiring=Wiring(zero_gradient=("a.weight",))),
    "label-smoothing": probed("label-smoothing", share=0.5, classes=10.0, losses=STILL),
    "class-weights": probed("class-weights", slope=0.45, correlation=1.0, losses=STILL),
    "padding-counts": probed("padding-counts", share=0.04),
    "penalty-dominates": probed("penalty-dominates", without=2.0, others=1.0, **{"with": 0.25}),
    "unsafe-division": probed("unsafe-division", close=0.01, times=25.0, losses=STILL),
    "state-carried": record(probed={"state-carried": Probed(
        (Fact("", {"outputs": 0.1}, {"of": "sample", "goes on": "yes"}),))}, losses=STILL),
    "target-leak": probed("target-leak", share=0.999, feature=1.0, samples=64.0),
    "targets-moved": probed("targets-moved", own=0.3, best=0.5, losses=STILL),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_what_is_near_is_no_hit(name: str) -> None:
    assert name not in found(NEAR_MISSES[name])


WITHIN_ERRORS = {
    "row-spread": record({"a": reading(scale_cv=1.5, standard_error={"scale_cv": 0.3})}),
    "projection-fights": record(
        {"b": reading(projection_cosine=0.9, standard_error={"projection_cosine": 0.1})}
    ),
    "uneven-rates": record(
        {"a": reading(update_ratio=1e-4, standard_error={"update_ratio": 2e-4})}
    ),
    "rate-too-high": record(rates=trials(own=1.5, x01=0.5, error=0.6)),
    "rate-too-low": record(rates=trials(own=2.29, x10=2.0, error=0.2)),
    "interference": record(
        {"a": reading(gradient_cosine=0.05, standard_error={"gradient_cosine": 0.05})}
    ),
    "dead-units": record(units={"relu": UnitStatistics("relu", 64, 60, 0.9, 1)}),
}


@pytest.mark.parametrize("name", WITHIN_ERRORS)
def test_what_lies_within_errors_is_no_hit(name: str) -> None:
    assert name not in found(WITHIN_ERRORS[name])


@pytest.mark.parametrize(
    ("rates", "strength"),
    [({"x01": 1.35}, "act"), ({"x01": 1.5}, "watch"), ({"x03": 1.35, "x01": 2.0}, "watch")],
    ids=["far less", "less", "not by a tenth"],
)
def test_from_a_high_first_loss_what_a_tenth_of_the_rate_leaves_decides(
    rates: dict[str, float], strength: str
) -> None:
    """Of a thousand outputs for ten classes, each learning rate finds out which ones occur."""
    losses = (8.0, *(2.1,) * (STEPS - 1))
    of = record(losses=losses, chance=6.9, rates=trials(own=2.1, **rates))
    assert [f.strength for f in diagnose(of) if f.name == "rate-too-high"] == [strength]


def test_a_trial_that_the_run_itself_overtakes_shows_only_a_rough_beginning() -> None:
    """As of a ResNet-20 at its best learning rate, with trials of 13 of 60 steps."""
    shorter = {f: replace(t, steps=13) for f, t in trials(own=2.6, x01=2.1, x10=2.56).items()}
    losses = (2.3, *(2.9 - 0.025 * step for step in range(STEPS - 1)))
    recovers, stays = (record(losses=of, chance=2.3, rates=shorter) for of in (losses, RISING))
    rough, lasting = found(recovers)["rate-too-high"], found(stays)["rate-too-high"]
    assert (rough.strength, lasting.strength) == ("watch", "act")
    assert "reaches 2.06 in 40 steps: only its beginning is known to be rough" in rough.summary
    assert "goes on" not in lasting.summary
    assert [a.fix for a in rough.advice] == ["warm-up", None]
    assert not suffers(recovers) and suffers(stays)
    whole = replace(recovers, rates={f: replace(t, steps=STEPS) for f, t in shorter.items()})
    assert found(whole)["rate-too-high"].strength == "act"  # not overtaken in as many steps


def test_causes_come_before_what_follows_from_them() -> None:
    faulty = record(
        inputs={"0": replace(INPUTS, std=160.0)},
        rates=trials(own=2.3, x01=0.5),
        units={"relu": UnitStatistics("relu", 64, 60, 0.9, 20)},
        losses=STILL,
        wiring=Wiring(not_held=("c.weight",)),
    )
    names = [f.name for f in diagnose(faulty) if f.strength == "act"]
    assert names == ["not-held", "input-scale"]
    follows = {f.name: f for f in diagnose(faulty) if f.strength == "watch"}
    assert list(follows) == ["rate-too-high", "dead-units", "loss-stuck"]
    assert {f.advice for f in follows.values()} == {FIRST_THAT}
    said = Diagnosis(diagnose(faulty), faulty).verdict
    why, fix = diagnose(faulty)[0].summary, said.index(" What to do: ")
    follows_from_it = said.index(" This would explain: rate-too-high, dead-units, loss-stuck. And")
    assert said.startswith(why) and len(why) <= fix < follows_from_it
    bare = diagnose(replace(faulty, wiring=Wiring(input_matters=0.5)))
    assert [f.name for f in bare if f.strength == "act"] == [
        "input-scale",
        "rate-too-high",
        "dead-units",
    ]
    assert not any("explain" in f.summary for f in bare)


def test_what_the_optimizer_or_a_normalisation_takes_out_is_only_to_be_watched() -> None:
    large = {"0": replace(INPUTS, std=160.0)}
    assert found(record(inputs=large, facts=adam()))["input-scale"].strength == "watch"
    normed = {"a": reading(), "n": reading(kind="gain", update_ratio=1e-4)}
    layers = normed | {"b": reading(), "c": reading()}
    reports = tuple(StepReport(step, layers, {}, 1.0) for step in range(0, STEPS, 10))
    assert found(record(inputs=large, reports=reports))["input-scale"].strength == "watch"


def test_values_that_stop_being_finite_are_a_cause_only_from_the_start() -> None:
    rates = trials(own=math.inf, x01=0.5)
    later = record(losses=(2.3, 9.0, math.nan), first_non_finite="loss", rates=rates)
    at_once = record(losses=(math.nan,), first_non_finite="loss")
    assert diagnose(later)[0].name == "rate-too-high"
    assert diagnose(replace(later, first_non_finite="data"))[0].name == "non-finite"
    assert diagnose(at_once)[0].name == "non-finite"


def test_without_trials_of_rates_the_loss_that_steps_leave_behind_decides() -> None:
    worse = dict.fromkeys(range(0, STEPS, 10), 0.5)
    assert found(record(realised=worse, losses=RISING))["rate-too-high"].strength == "act"
    assert found(record(realised=worse))["rate-too-high"].strength == "watch"


def test_a_rate_is_low_only_where_next_to_nothing_is_learnt() -> None:
    def strength(own: float, moves: float = 0.006) -> str | None:
        rates = trials(own=own, x01=2.29, x03=2.28, x3=1.6, x10=1.3)  # falls by 1 at the best
        low = found(record(dict.fromkeys("abc", reading(update_ratio=moves)), rates=rates)).get(
            "rate-too-low"
        )
        return None if low is None else low.strength

    assert strength(2.25) == "act"  # 0.05 of the fall
    assert strength(2.25, moves=0.02) == "watch", "layers move: it is only slow to begin"
    assert strength(2.299) == "act"
    no_better = trials(own=9.0, x10=2.4)  # than a constant prediction
    few = record(
        dict.fromkeys("abc", reading(update_ratio=0.006)), rates=no_better, losses=(9.0,) * STEPS
    )
    assert "rate-too-low" not in found(few)
    assert strength(2.0) == "watch"  # 0.3: ten times the steps get there, too
    assert strength(1.6) == "note"
    assert strength(1.4) is None


def test_a_gain_that_is_next_to_nothing_makes_no_rate_too_low_or_too_high() -> None:
    low = record(losses=STILL, rates=trials(own=2.295, x3=2.29, x10=2.27, error=0.001))
    high = record(losses=STILL, rates=trials(own=2.295, x01=2.27, error=0.001))
    assert list(found(low)) == list(found(high)) == ["loss-stuck"]


def test_no_rate_is_both_too_high_and_too_low() -> None:
    burst = record(losses=(*WELL, math.nan), rates=trials(own=math.inf, x03=0.3, x3=1.6))
    names = list(found(burst))
    assert "rate-too-high" in names and "rate-too-low" not in names


@pytest.mark.parametrize("steps", [1, 2, 5, 11])
def test_a_few_steps_tell_nothing_of_the_loss(steps: int) -> None:
    rates = {
        10.0: Trial("rate*10", steps, 1.0, 2.2, None, 0.01),
        0.1: Trial("rate*0.1", steps, 1.5, 2.2, None, 0.01),
    }
    units = {"relu": UnitStatistics("relu", 64, 40, 0.9, 20)}
    short = record(losses=STILL[:steps], rates=rates, units=units)
    assert [(f.name, f.strength) for f in diagnose(short)] == [("dead-units", "watch")]


def test_a_first_step_that_does_not_follow_its_gradient_was_turned_by_other_code() -> None:
    turned = {name: reading(parameter_cosine=0.05) for name in "abc"}
    assert diagnose(record(turned, losses=STILL))[0].name == "projection-fights"
    resumed = record(turned, facts=replace(FACTS, resumed=True), losses=STILL)
    assert "projection-fights" not in found(resumed)  # it remembers steps before


def test_long_momentum_is_named_where_it_goes_on_regardless() -> None:
    long = replace(FACTS, settings={**FACTS.settings, "momentum": 0.99})
    assert diagnose(record(facts=long)) == ()
    late = {name: reading(parameter_cosine=0.05) for name in "abc"}
    well = record(facts=long)
    reports = (*well.reports[:2], *record(late).reports[2:])
    assert found(record(facts=long, reports=reports))["optimizer-turns"].strength == "watch"
    assert found(record(facts=long, losses=RISING))["optimizer-turns"].strength == "act"


def test_momentum_that_outlasts_the_run_is_to_be_acted_on() -> None:
    def betas(first: float) -> Record:
        return record(facts=adam(betas=(first, 0.999)))  # type: ignore[arg-type]

    assert found(betas(0.999))["optimizer-turns"].strength == "act"  # 1000 steps, of 40
    assert "β₁ = 0.9" in found(betas(0.999))["optimizer-turns"].advice[0].text
    assert diagnose(betas(0.99)) == ()
    short = replace(betas(0.99), losses=WELL[:8], facts=replace(betas(0.99).facts, steps=8))
    assert diagnose(short) == ()


def test_the_fall_of_a_loss_whose_parts_oppose_each_other_is_not_judged() -> None:
    faulty = {
        "losses": RISING,
        "rates": trials(own=2.3, x10=0.1),
        "overfit": Trial("overfit", 100, 2.2, 2.3, None, 0.01),
    }
    assert set(found(record(**faulty, descent_share=0.99))) >= {"rate-too-low", "cannot-overfit"}
    assert diagnose(record(**faulty, descent_share=0.3)) == ()
    unused = Wiring(unreached=("a.weight",))
    assert list(found(record(**faulty, descent_share=0.3, wiring=unused))) == ["unreached"]


def test_a_loss_no_lower_than_that_of_knowing_nothing_is_stuck_wherever_it_began() -> None:
    fallen = (4.0, 3.0, 2.5, *STILL[3:])
    stuck = found(record(losses=fallen))["loss-stuck"]
    assert stuck.strength == "watch" and "a constant prediction" in stuck.summary
    learnt = Trial("overfit", 100, 0.1, 2.3, None, 0.01)
    overfits = found(record(losses=fallen, overfit=learnt))["loss-stuck"]
    assert "the model overfits one small batch" in overfits.summary
    assert "overfitted" not in stuck.summary and "labels" not in overfits.summary
    assert "loss-stuck" not in found(record(losses=tuple(0.5 * x for x in fallen)))


def test_advice_prints_its_numbers() -> None:
    norms = tuple(range(1, STEPS + 1))
    burst = record({"a": reading(descent=1e6, scale_mean=17.0)}, gradient_norms=norms)
    said = [advice.text for advice in found(burst)["exploding"].advice]
    assert "clip the gradient's norm at 36.1" in said
    uneven = record({"a": reading(effective_lr=0.001, update_ratio=1e-6)})
    assert found(uneven)["uneven-rates"].advice[0].text.endswith(": × 100 for 'a'")


def test_weights_that_begin_badly() -> None:
    def first_layer(**values: float) -> Record:
        weights = record().weights
        odd = replace(weights["a"], **values)
        return record(weights={**weights, "a": odd}, losses=STILL)

    assert diagnose(first_layer(gain=30.0))[0].name == "bad-initialisation"
    assert diagnose(first_layer(gain=0.01))[0].name == "bad-initialisation"
    assert diagnose(first_layer(bias=5.0))[0].name == "bad-initialisation"
    assert "bad-initialisation" not in found(first_layer(gain=1.5, bias=0.3))
    alike = {name: WeightStatistics(0.6, 0.0, 1.0) for name in "abc"}
    assert diagnose(record(weights=alike, losses=STILL))[0].name == "bad-initialisation"


def test_few_inputs_have_a_small_gain_at_the_usual_standard_deviation() -> None:
    def drawn(rms: float) -> Record:
        weights = {**record().weights, "a": WeightStatistics(0.028, 0.0, 0.0, rms=rms)}
        return record(weights=weights, losses=STILL)

    assert "bad-initialisation" not in found(drawn(0.02))
    assert found(drawn(0.002))["bad-initialisation"].strength == "act"


def test_each_last_layer_may_begin_small() -> None:
    def head(last: bool) -> Record:
        policy = replace(record().weights["a"], gain=0.01, last=last)
        return record(weights={**record().weights, "a": policy}, losses=STILL)

    assert "bad-initialisation" not in found(head(last=True))
    assert "bad-initialisation" in found(head(last=False))


def test_weights_may_be_scaled_by_their_fan_out() -> None:
    def drawn(gradient_gain: float) -> Record:
        odd = WeightStatistics(7.0, 0.0, 0.0, gradient_gain=gradient_gain)
        return record(weights={**record().weights, "a": odd}, losses=STILL)

    assert "bad-initialisation" not in found(drawn(1.4))
    assert found(drawn(7.0))["bad-initialisation"].strength == "act"


def test_a_parameter_that_no_layer_holds_begins_badly_where_the_run_suffers() -> None:
    def bare(gain: float, losses: tuple[float, ...]) -> Record:
        odd = WeightStatistics(gain, 0.0, 1.0, bare=True)
        return record(weights={**record().weights, "mix": odd}, losses=losses)

    finding = diagnose(bare(17.0, STILL))[0]
    assert (finding.name, finding.strength, finding.layers) == (
        "bad-initialisation",
        "act",
        ("mix",),
    )
    for healthy in (bare(17.0, WELL), bare(0.01, STILL), bare(1.0, STILL)):
        assert "bad-initialisation" not in found(healthy)
    small = replace(record().weights["c"], gain=0.01)  # the one that runs last is still exempt
    weights = {**record().weights, "c": small, "mix": WeightStatistics(1.0, 0.0, 0.0, bare=True)}
    assert "bad-initialisation" not in found(record(weights=weights, losses=STILL))


def test_what_is_still_falling_or_was_cut_short_may_yet_be_overfitted() -> None:
    stuck = Trial("overfit", 100, 2.0, 2.3, None, 0.01)
    assert found(record(overfit=stuck))["cannot-overfit"].strength == "act"
    assert found(record(overfit=replace(stuck, falls=True)))["cannot-overfit"].strength == "watch"
    assert diagnose(record(overfit=replace(stuck, steps=20))) == ()


def test_gains_in_front_of_a_normalisation_do_not_matter() -> None:
    weights = record().weights
    odd = replace(weights["a"], gain=0.01, normalised=True)
    assert "bad-initialisation" not in found(record(weights={**weights, "a": odd}, losses=STILL))


def test_a_first_loss_is_a_multiple_of_nothing_where_losses_fall_below_zero() -> None:
    """As in PPO, whose policy's term has a mean of 0 at the start, and an entropy is subtracted."""
    high = (30.0, *WELL[1:])
    assert found(record(losses=high))["bad-initialisation"].strength == "act"
    assert "bad-initialisation" not in found(record(losses=(*high[:-1], -0.1)))
    faster = {10.0: Trial("rate", STEPS, -0.03, 0.03, None, 0.01)}
    assert "bad-initialisation" not in found(record(losses=high, rates=faster))


def test_weights_that_are_drawn_as_advised_are_not_to_be_drawn_again() -> None:
    def advised(gain: float, last: float, **layer: float) -> set[str | None]:
        gains = {"a": gain, "b": 1.38, "c": last}
        weights = {path: WeightStatistics(g, 0.0, 0.0) for path, g in gains.items()}
        weights["b"] = replace(weights["b"], **layer)  # type: ignore[arg-type]
        of = record(losses=(30.0, *WELL[1:]), weights=weights)
        return {advice.fix for advice in found(of)["bad-initialisation"].advice}

    assert advised(1.45, 1.0) == {"layer-norm"}
    drawn = {"layer-norm", "reinitialise"}
    assert advised(3.0, 1.0) == advised(0.58, 1.0) == advised(1.45, 4.0) == drawn
    assert advised(1.45, 1.0, bias=5.0) == drawn


def test_weights_that_were_trained_are_not_to_be_drawn_again() -> None:
    for of in HITS.values():
        advised = [a.fix for f in diagnose(replace(of, trained=True)) for a in f.advice]
        assert "reinitialise" not in advised


def test_a_first_loss_that_large_inputs_make_is_not_the_weights_doing() -> None:
    high = (16.0, *WELL[1:])
    assert "bad-initialisation" in found(record(losses=high))
    large = found(record(losses=high, inputs={"0": replace(INPUTS, std=70.0)}))
    assert "input-scale" in large and "bad-initialisation" not in large


def test_queries_that_hear_little_are_no_vanishing_where_a_table_in_front_hears() -> None:
    quiet = {"a": reading(descent=1e-10, effective_lr=1.0, scale_mean=17.0)}
    assert "vanishing" in found(record(quiet))
    tokens = reading(kind="embedding")
    layers = {"tokens": tokens, "a": quiet["a"], "b": reading(), "c": reading()}
    reports = tuple(StepReport(step, layers, {}, 1.0) for step in range(0, STEPS, 10))
    assert "vanishing" not in found(record(reports=reports))


def test_a_loss_that_rises_where_no_rate_learns_yet_has_too_high_a_rate() -> None:
    risen = found(record(losses=RISING, rates=trials(own=3.0, x01=2.35, x10=40.0)))
    assert risen["rate-too-high"].strength == "act"
    still = found(record(losses=STILL, rates=trials(own=2.36, x01=2.32, x10=40.0)))
    assert "rate-too-high" not in still


def test_a_rate_is_not_too_high_and_too_low_at_once() -> None:
    names = found(record(rates=trials(own=9.0, x01=0.5, x10=3.0)))
    assert "rate-too-high" in names and "rate-too-low" not in names
    names = found(record(rates=trials(own=9.0, x01=3.0, x10=0.5)))
    assert "rate-too-low" in names and "rate-too-high" not in names


def test_a_few_long_rows_are_no_common_scale() -> None:
    inputs = {"0": replace(INPUTS, std=6.0)}
    long_rows = {"a": reading(scale_mean=65.0, scale_p50=2.0, scale_cv=5.0)}
    assert list(found(record(long_rows, inputs=inputs))) == ["row-spread"]
    assert "input-scale" in found(record({"a": reading(scale_p50=60.0)}, inputs=inputs))


def test_a_last_layer_that_begins_at_zero_is_well() -> None:
    first = {"a": reading(descent=0.0), "b": reading(descent=0.0), "c": reading(update_ratio=9.0)}
    reports = list(record().reports)
    reports[0] = StepReport(0, first, {}, 1.0)
    assert diagnose(record(reports=tuple(reports))) == ()
    assert diagnose(record(reports=tuple(reports), losses=STILL))[0].name == "uneven-rates"


def test_queries_and_keys_hear_little_of_the_loss_and_nothing_vanishes() -> None:
    quiet = reading(descent=1e-9, scale_mean=33.0)
    layers = {"q": quiet, "k": quiet, "v": reading(scale_mean=33.0), "o": reading(), "h": reading()}

    def names(**changed: LayerReading) -> set[str]:
        reports = tuple(StepReport(s, {**layers, **changed}, {}, 1.0) for s in range(0, STEPS, 10))
        return set(found(record(reports=reports, losses=STILL)))

    assert "vanishing" not in names()
    assert "vanishing" in names(v=quiet)
    assert "vanishing" in names(v=reading(scale_mean=34.0))  # which reads something else
    unknown = reading(descent=1e-9, scale_mean=math.nan)
    assert "vanishing" in names(q=unknown, v=reading(scale_mean=math.nan))


def test_layers_that_move_unlike_the_others_in_the_only_step_are_noted() -> None:
    far = {"c": reading(update_ratio=9.0)}
    once = record(far)
    assert found(once)["uneven-rates"].strength == "act"
    assert found(replace(once, reports=once.reports[:1]))["uneven-rates"].strength == "note"


def test_layers_are_compared_with_those_that_move() -> None:
    still = {f"frozen{i}": reading(update_ratio=0.0) for i in range(9)}
    finding = found(record({**still, "c": reading(update_ratio=9.0)}))["uneven-rates"]
    assert finding.layers == ("c",) and "450 times as far" in finding.summary


def test_frozen_parameters_are_for_you_to_judge() -> None:
    frozen = found(record(wiring=Wiring(frozen=("a.weight",), input_matters=0.5)))
    assert frozen["frozen"].strength == "watch"


def test_a_loss_that_stands_still_is_a_symptom() -> None:
    assert [(f.name, f.strength) for f in diagnose(record(losses=STILL))] == [
        ("loss-stuck", "watch")
    ]


def test_interference_under_a_high_ceiling_is_noted() -> None:
    assert found(record({"a": reading(gradient_cosine=0.05)}))["interference"].strength == "note"
    low = {"a": reading(gradient_cosine=0.05, attainable_cosine=0.1)}
    assert diagnose(record(low)) == ()


def test_against_interference_of_tokens_no_batch_normalisation_is_advised() -> None:
    """It would let later tokens reach the predictions of earlier ones."""
    low = {"a": reading(gradient_cosine=0.05)}
    assert [advice.fix for advice in found(record(low))["interference"].advice] == ["batch-norm"]
    tokens = record({**low, "table": reading(kind="embedding")})
    assert found(tokens)["interference"].advice == ()


def test_without_trials_of_rates_activations_that_move_too_far_or_hardly_tell() -> None:
    far = {name: reading(update_ratio=3.0) for name in "abc"}
    assert found(record(far, losses=STILL))["rate-too-high"].strength == "act"
    assert "rate-too-high" not in found(record(far))  # RMSprop's first step is long, and well
    still = {name: reading(update_ratio=1e-3) for name in "abc"}
    assert found(record(still, losses=STILL))["rate-too-low"].strength == "act"
    by_reports = record(still, losses=STILL, facts=replace(FACTS, model=""))
    assert found(by_reports)["rate-too-low"].strength == "watch", "or it is at its end"
    assert found(record(still, losses=()))["rate-too-low"].strength == "watch"
    falls = found(record(still))
    assert falls == {}  # layers that learn may move little
    near = {name: reading(update_ratio=3.2e-3) for name in "abc"}
    assert "rate-too-low" not in found(record(near, losses=STILL))


def test_a_loss_that_comes_down_a_part_of_the_way_that_it_went_up_did_not_fall() -> None:
    burst = record(losses=(1.3, *(180.0 - 3 * i for i in range(39))))
    assert not fell(burst) and "The loss rises: 1.3" in found(burst)["loss-stuck"].summary
    assert fell(record(losses=(1.3, *(1.5 - 0.03 * i for i in range(39)))))


def test_modules_that_never_ran_are_worth_watching() -> None:
    unused = Wiring(unreached=("a.weight", "b.weight"), unused=("a.weight",), input_matters=0.5)
    strengths = [(f.layers, f.strength) for f in diagnose(record(wiring=unused))]
    assert strengths == [(("b.weight",), "act"), (("a.weight",), "watch")]


def test_every_finding_has_its_page() -> None:
    names = set()
    for path in (ROOT / "adiv_monitor" / "diagnosis" / "faults").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding":
                assert isinstance(node.args[0], ast.Constant)
                names.add(node.args[0].value)
    pages = {path.stem for path in (ROOT / "docs" / "findings").glob("*.md")} - {"README"}
    assert names == pages == set(FAULTS)
    assert names >= set(HITS)
    index = (ROOT / "docs" / "findings" / "README.md").read_text()
    assert all(f"[{name}]({name}.md)" in index for name in names)


def at_steps(*moves: dict[str, float], rates: tuple[float, ...] = ()) -> tuple[StepReport, ...]:
    """Return reports of every tenth step with these moves of layers."""
    return tuple(
        StepReport(
            10 * i,
            {path: reading(update_ratio=move) for path, move in step.items()},
            {},
            1.0,
            learning_rates=rates,
        )
        for i, step in enumerate(moves)
    )


FAR = {"a": 20.0, "b": 0.3, "c": 0.4}
AFTERWARDS = {"a": 1e-3, "b": 2e-3, "c": 2e-3}


def test_a_layer_that_moves_too_far_gets_a_lower_rate_whatever_it_does_later() -> None:
    uneven = found(record(reports=at_steps(FAR, *[AFTERWARDS] * 3), losses=RISING))["uneven-rates"]
    assert uneven.layers == ("a",)
    assert uneven.advice[0].text.endswith(f"× {0.7 / 20:.3g} for 'a'")
    assert {evidence.measure for evidence in uneven.evidence} == {"update_ratio"}


def test_a_layer_that_stands_still_gets_a_higher_rate_and_one_at_the_limit_none() -> None:
    starved = record(reports=at_steps(*[{"a": 1e-4, "b": 0.3, "c": 0.4}] * 4), losses=STILL)
    assert rates_per_layer(starved) == {"a": pytest.approx(0.009 / 1e-4)}
    near = record(reports=at_steps(*[{"a": 31 * 0.4, "b": 0.4, "c": 0.4}] * 4))
    assert rates_per_layer(near) == {"a": pytest.approx(0.7 / (31 * 0.4))}
    high = record(reports=at_steps(*[{"a": 31.0, "b": 1.0, "c": 1.0}] * 4), losses=STILL)
    assert rates_per_layer(high) == {"a": pytest.approx(1 / 31)}, "not below the median layer"
    low = record(reports=at_steps(*[{"a": 1.02e-3, "b": 5e-2 * 1.05, "c": 5e-2 * 1.05}] * 4))
    assert rates_per_layer(low)["a"] > 1
    even = record(reports=at_steps(*[{"a": 0.2, "b": 0.3, "c": 0.4}] * 4))
    assert rates_per_layer(even) == {}


def test_a_step_far_beyond_the_range_makes_a_rate_too_high_though_layers_then_stand_still() -> None:
    reports = at_steps(FAR, *[AFTERWARDS] * 3)
    said = found(record(reports=reports, losses=RISING))
    assert said["rate-too-high"].strength == "act" and "rate-too-low" not in said
    assert said["rate-too-high"].evidence[0].layer == "a"
    assert "rate-too-low" not in found(record(reports=reports, losses=RISING, realised={}))
    weights = {name: WeightStatistics(0.6, 0.05, 0.0) for name in "abc"}
    weights["a"] = replace(weights["a"], gain=0.0)
    zero = record(reports=reports, losses=RISING, weights=weights)
    assert "rate-too-high" not in found(zero), "a weight that begins at zero"
    assert "rate-too-high" not in found(record(reports=reports)), "the loss falls"
    nearly = at_steps({**FAR, "a": 6.9}, *[AFTERWARDS] * 3)
    assert "rate-too-high" not in found(record(reports=nearly, losses=RISING))


def test_a_rate_that_is_no_better_than_a_constant_prediction_is_not_advised() -> None:
    collapses = trials(own=3.6, x01=3.1, x3=2.49)
    said = found(record(losses=(2.4, *[3.0] * (STEPS - 1)), rates=collapses))
    assert "rate-too-low" not in said
    unknown = record(losses=STILL, chance=None, rates=trials(own=2.3, x10=2.2))
    assert "rate-too-low" in found(unknown)
    above = record(losses=(2.3, *[4.0] * (STEPS - 1)), chance=None, rates=trials(own=4.0, x10=2.4))
    assert "rate-too-low" not in found(above), "it ends above the first loss"


def test_a_warm_up_from_zero_is_no_rate_of_zero() -> None:
    of = probed("rate-zero", share=0.5, initial_lr=0.0, group=0)
    steps = [{"a": 0.1}] * 3
    still = replace(of, reports=at_steps(*steps, rates=(0.0,)))
    assert found(still)["rate-zero"].strength == "act"
    rises = (*still.reports[:1], *at_steps(*steps, rates=(0.1,))[1:])
    assert "rate-zero" not in found(replace(still, reports=rises))


def test_trained_weights_are_no_initialisation() -> None:
    weights = {name: WeightStatistics(9.0, 0.05, 0.0, gradient_gain=9.0) for name in "abc"}
    drawn = record(weights=weights, losses=STILL)
    assert "bad-initialisation" in found(drawn)
    assert "bad-initialisation" not in found(replace(drawn, trained=True))


def test_what_a_fault_explains_is_a_fault_and_explains_it_not_in_turn() -> None:
    explains = {name: set(of.explains) for name, of in FAULTS.items()}
    assert set().union(*explains.values()) <= set(FAULTS)
    for name in explains:
        follows: set[str] = set()
        while added := set().union(*(explains[x] for x in {name, *follows})) - follows:
            follows |= added
        assert name not in follows
