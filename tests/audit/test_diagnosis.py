"""Each rule: a run that it is about, one that just is not, and one within the readings' errors."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from loop_runs import HITS as LOOP
from made_records import (
    FACTS,
    INPUTS,
    RISING,
    STEPS,
    STILL,
    WELL,
    adam,
    by_reports,
    decayed,
    reading,
    record,
    trials,
)

from adiv_monitor.diagnosis import diagnose
from adiv_monitor.diagnosis.diagnose import FIRST_THAT
from adiv_monitor.diagnosis.diagnosis import Diagnosis
from adiv_monitor.diagnosis.faults import FAULTS
from adiv_monitor.diagnosis.faults import found as found_in
from adiv_monitor.diagnosis.faults.inputs import HIDDEN
from adiv_monitor.diagnosis.faults.rates import rates_per_layer, suffers
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

PAGES = Path(__file__).parents[2] / "docs" / "findings"


def found(of: Record) -> dict[str, Finding]:
    return {finding.name: finding for finding in diagnose(of)}


def test_a_healthy_run_has_no_findings() -> None:
    assert diagnose(record()) == ()
    assert found_in(Record(FACTS, (), (), ())) == []


def probed(
    name: str,
    losses: tuple[float, ...] = STILL,
    words: Mapping[str, str] | None = None,
    **numbers: float,
) -> Record:
    """A run of which an experiment found one thing."""
    usual = {"dtype": "bfloat16", "of": "(64, 1)", "and": "(64,)", "function": "softmax"}
    usual |= {"shape": "(64, 1)", "low": "0", "high": "inf", "to": "(1, 64)", "class": "LayerNorm"}
    fact = Fact("a", numbers, {**usual, **(words or {})})
    return record(probed={name: Probed((fact,))}, losses=losses)


def units(function: str = "relu", dead: int = 0, share: float = 0.1, batches: int = 20) -> Record:
    of = {"5": UnitStatistics(function, 64, dead, share, batches)}
    return record(units=of, losses=STILL)


def penalty(pull: float) -> Record:
    return probed("decay-fights", WELL, pull=pull, value=1.0, loss=3.0)


def grouped(rate: float, move: float = 30.0) -> Record:
    """A run whose last layer has a learning rate of its own, and moves far in the first step."""
    layers = {name: reading() for name in "abc"}
    first = StepReport(0, layers | {"c": reading(update_ratio=move)}, {}, 1.0,
                       learning_rates=(0.1, rate), groups={"a": 0, "b": 0, "c": 1})  # fmt: skip
    return record(reports=(first, *(StepReport(10 * i, layers, {}, 1.0) for i in (1, 2, 3))))


def explained(reference: float, model: float, per_class: float = 40.0) -> Record:
    numbers = {"per class": per_class, "held out": 200.0, "error": 0.05}
    return probed("behind-reference", WELL, reference=reference, model=model, **numbers)


def counted(most: float) -> Record:
    return probed("row-spread", WELL, most=most, middle=3.0)


def outgrown(after: float) -> Record:
    return probed("penalty-dominates", WELL, before=0.5, after=after, falls=9.0)


def penalised(learnt: float) -> Record:
    numbers = {"with": learnt, "penalty after": 0.5, "penalty": 30.0}
    return probed("penalty-dominates", without=2.0, others=1.0, **numbers)


ZERO = Wiring(zero_gradient=("a.weight",))
VANISHES = {"a": reading(descent=1e-9, scale_mean=17.0)}
HITS = {
    "not-held": record(wiring=Wiring(not_held=("c.weight",))),
    "unreached": record(wiring=Wiring(unreached=("a.weight",))),
    "input-ignored": record(wiring=Wiring(input_matters=0.0)),
    "non-finite": record(losses=(2.3, 2.2, math.nan), first_non_finite="gradient of a"),
    "input-scale": record(inputs={"0": replace(INPUTS, std=160.0)}),
    "input-mean": record({"a": reading(common_share=0.9)}, inputs={"0": replace(INPUTS, mean=9.0)}),
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
    "vanishing": record(VANISHES, losses=STILL),
    "exploding": record({"a": reading(descent=1e6, scale_mean=17.0)}, losses=STILL),
    "dead-units": units(dead=40),
    "saturated-units": units("tanh", share=0.8),
    "clipping-always": record(facts=replace(FACTS, clip_norm=0.01), losses=STILL),
    "uneven-rates": record({"a": reading(update_ratio=1e-6)}),
    "bad-initialisation": record(losses=tuple(40 * 0.9**s for s in range(STEPS))),
    "optimizer-turns": record(
        dict.fromkeys("abc", reading(parameter_cosine=-0.3, descent=-0.01)), losses=RISING
    ),
    "cannot-overfit": record(overfit=Trial("overfit", 100, 2.2, 2.3, None, 0.01)),
    "double-softmax": record(activated_output=ActivatedOutput("softmax", "a")),
    "activated-logits": record(activated_output=ActivatedOutput("relu", "head.1")),
    "target-scale": record(chance=1e6, losses=(1e6, math.inf)),
    "unbounded-loss": record(losses=tuple(2 - 1e6 * (i / 39) ** 3 for i in range(STEPS))),
    "hidden-parameters": probed("hidden-parameters", share=0.5),
    "targets-misplaced": probed("targets-misplaced", share=0.1),
    "dropout-on-outputs": probed("dropout-on-outputs", rate=0.3),
    "rate-zero": replace(LOOP["rate-zero of one group"], facts=FACTS, losses=STILL),
    "rounded-away": record(dict.fromkeys("abc", reading(unchanged_share=0.8)), losses=STILL),
    "samples-mixed": probed("samples-mixed", share=0.9, independent=0.1),
    "state-carried": probed("state-carried", words={"of": "sample", "goes on": "no"}, outputs=0.1),
    "reshape-scrambles": probed("reshape-scrambles"),
    "constant-data": probed("constant-data", WELL, {"of": "labels"}, samples=64.0, value=0.0),
    "no-activation": probed("no-activation", words={"by": "affine"}, layers=3.0),
    "same-batch": probed("same-batch", WELL, {"of": "batches"}, different=1.0, batches=60.0),
    "class-weights": probed("class-weights", words={"common": "0", "rare": "1"}, slope=1.0,
                            correlation=1.0, times=9.0, more=9.0),
    "class-untaught": probed("class-untaught", samples=96.0, length=256.0, label=0.0),
    "penalty-dominates": penalised(0.1),
    "targets-moved": probed(
        "targets-moved", WELL, {"move": "reversed", "order": "wrong"}, own=0.1, best=0.5
    ),
    "unshuffled": probed("unshuffled", WELL, ratio=0.1, z=-20.0),
    "input-partly-ignored": probed("input-partly-ignored", share=0.5),
    "bounded-logits": probed("bounded-logits", share=1.0, classes=10.0, floor=0.8),
    "broadcast-loss": probed("broadcast-loss", times=64.0),
    "no-log": probed("no-log", words={"given": "probabilities"}),
    "loss-reversed": probed("loss-reversed", words={"outputs": "signed"}, right=0.9, wrong=0.1),
    "logits-as-probabilities": probed("logits-as-probabilities", at=0.0, beyond=-1.0, outside=0.5),
    "softmax-of-one": probed("softmax-of-one"),
    "target-attached": probed("target-attached", share=0.97),
    "softmax-over-samples": probed("softmax-over-samples"),
    "targets-out-of-range": probed("targets-out-of-range", share=0.4),
    "target-is-input": probed("target-is-input", places=0.0),
    "future-leak": probed("future-leak", change=0.5),
    "left-in-eval": probed("left-in-eval"),
    "batch-norm-starved": probed("batch-norm-starved", values=3.0),
    "dropout-too-high": probed("dropout-too-high", rate=0.9),
    "outputs-constant": probed("outputs-constant", words={"by": "norm"}, share=0.0),
    "collapsed": probed("collapsed", WELL, before=0.5, after=0.05, loss=-1.0),
    "term-without-graph": probed("term-without-graph", value=9.0, loss=8.8),
    "weighs-itself": probed("weighs-itself", share=0.01, first=2.0, lowest=0.02),
    "pairs-reversed": probed("pairs-reversed", share=0.2, errors=-6.0, drawn=50.0, pushed=50.0),
    "terms-opposed": probed(
        "terms-opposed", WELL, {"other": "b"}, cosine=-0.99, largest=-0.98, ratio=0.9
    ),
    "arguments-exchanged": probed("arguments-exchanged", WELL),
    "outputs-forced": probed("outputs-forced", share=0.5),
    "outputs-in-vain": probed("outputs-in-vain", share=0.97, first=2.0, zeros=2.1, lowest=1.94),
    "seed-again": probed("seed-again"),
    "added-to-itself": probed("added-to-itself"),
    "label-is-blank": probed("label-is-blank", WELL, share=0.2, blank=0.0),
    "zero-slope": replace(probed("zero-slope"), wiring=ZERO),
    "zero-gradient": record(dict.fromkeys("abc", reading(idle_share=1.0)), losses=STILL),
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


LAYERS = dict.fromkeys("abc", reading())
STANDS = dict.fromkeys("abc", reading(update_ratio=0.01)) | {"a": reading(update_ratio=2.5e-4)}
LITTLE = LAYERS | {"a": reading(update_ratio=0.004)}
NOISY = (2.3, 0.9, 2.1, 0.9, 2.2, 1.0, 2.1, 0.9, 2.0, 1.0, 2.2, 0.8)
# What is at most to be watched: name and strength, and a record of it.
MILDER = [
    ("settings-off watch", record(
        facts=replace(FACTS, optimizer="Adam", settings={"lr": 0.1, "eps": 1.0}))),
    ("gradient-cut watch", probed("gradient-cut", cosine=0.5)),
    ("unreached watch", record(wiring=Wiring(unreached=("a",), unused=("a",)))),
    ("frozen watch", record(wiring=Wiring(frozen=("a.weight",)))),
    ("hidden-parameters act", probed("hidden-parameters", words={"made": "anew"}, share=0.1)),
    ("samples-mixed watch", probed("samples-mixed", WELL, {"by": "place"}, share=1.0)),
    ("no-activation watch", probed("no-activation", WELL, {"by": "lost"})),
    ("softmax-of-one watch", probed("softmax-of-one", WELL, {"scores": "True"})),
    ("targets-moved watch",
     probed("targets-moved", words={"move": "shifted", "order": "meant"}, own=0.1, best=0.5)),
    ("targets-moved act",
     probed("targets-moved", words={"move": "shifted", "order": "unclear"}, own=0.1, best=0.5)),
    ("labels-unrelated act", probed("labels-unrelated", share=0.9, held=0.0)),
    ("labels-unrelated watch", probed("labels-unrelated", share=0.9, held=0.04)),
    ("class-untaught watch",
     probed("class-untaught", WELL, unread=3.0, length=4.0, first=1.0)),
    ("padding-counts watch", probed("padding-counts", share=0.76)),
    ("padding-counts act", probed("padding-counts", WELL, share=1.0)),
    ("seed-again watch", probed("seed-again", WELL)),
    ("added-to-itself watch", probed("added-to-itself", WELL)),
    ("outputs-in-vain watch",
     probed("outputs-in-vain", WELL, share=0.97, first=2.0, zeros=2.1, lowest=1.94)),
    ("target-is-input watch", probed("target-is-input", places=2.0)),
    ("targets-out-of-range act", probed("targets-out-of-range", WELL, {"farthest": "9"}, share=1)),
    ("targets-out-of-range watch",
     probed("targets-out-of-range", WELL, {"sum": "1", "function": "cross_entropy"}, share=0.4)),
    ("loss-reversed watch",
     probed("loss-reversed", words={"outputs": "positive"}, right=0.9, wrong=0.1)),
    ("no-log act", probed("no-log", words={"given": "logits"})),
    ("no-log act", probed("no-log", words={"given": "another axis"})),
    ("same-batch note", probed("same-batch", words={"of": "one"}, different=1.0, batches=60.0)),
    ("same-batch watch", probed("same-batch", words={"of": "samples"}, share=0.1)),
    ("zero-gradient act", probed("zero-gradient")),
    ("zero-gradient watch", record(wiring=ZERO)),
    ("zero-gradient watch", record({"a": reading(idle_share=1.0, scale_mean=17.0)}, wiring=ZERO)),
    ("zero-slope watch", probed("zero-slope")),
    ("decay-fights watch", penalty(2.0)),
    ("decay-fights act", replace(penalty(2.0), losses=STILL)),
    ("group-rates watch", grouped(10.0)),
    ("attention-axis act",
     probed("attention-axis", words={"product": "matmul", "axis": "2", "over": "3"})),
    ("penalty-dominates watch", outgrown(9.0)),
    ("row-spread act", replace(counted(20.0), losses=STILL)),
    ("order-ignored watch", probed("order-ignored", places=8.0)),
    ("dropout-in-eval watch", probed("dropout-in-eval", rate=0.5)),
    ("running-statistics watch", probed("running-statistics", momentum=0.99)),
    ("target-leak watch", probed("target-leak", WELL, entry=3.0, samples=64.0)),
    ("collapsed watch",
     probed("collapsed", WELL, {"zero": "True"}, before=0.5, after=1e-5, loss=0.0)),
    ("batch-part-unread act", probed("batch-part-unread", WELL, {"drawn": "sample"}, unread=1.0)),
    ("batch-part-unread watch", probed("batch-part-unread", unread=1.0, read=0.0)),
    ("state-carried note",
     probed("state-carried", WELL, {"of": "batch", "goes on": "no"}, outputs=0.1)),
    ("behind-reference watch", explained(0.66, 0.1)),
    ("labels-unrelated watch", explained(0.01, 0.02)),
    ("interference note", record({"a": reading(gradient_cosine=0.05)})),
    ("loss-stuck watch", record(losses=STILL)),
    ("loss-stuck note", record(losses=NOISY)),
    ("stands-still watch", by_reports(*[STANDS] * 4)),
    ("stands-still watch", by_reports(*[LITTLE] * 4, losses=STILL)),
    ("stands-still watch", by_reports(*[LAYERS] * 9, *[LITTLE] * 4, losses=STILL)),
    ("stands-still note", by_reports(*[STANDS] * 4, losses=WELL)),
    ("stands-still note", by_reports(*[STANDS] * 3, rates=(0.01, 0.02, 0.03))),
    ("stands-still watch", by_reports(*[LAYERS | {"a": reading(update_ratio=0.0)}] * 4)),
    ("non-finite act", by_reports(LAYERS, LAYERS | {"b": reading(non_finite=("update",))})),
    ("non-finite note", by_reports(LAYERS, losses=(1.0, math.inf, 0.9))),
]  # fmt: skip


NEAR_MISSES = {
    "settings-off": record(
        facts=replace(FACTS, optimizer="Adam", settings={"lr": 0.1, "eps": 0.009}), losses=STILL
    ),
    "targets-misplaced": probed("targets-misplaced", share=0.6),
    "dropout-on-outputs": probed("dropout-on-outputs", rate=0.0),
    "labels-unrelated of much noise": probed("labels-unrelated", share=0.9, held=0.2),
    "outputs-constant": replace(
        probed("outputs-constant", words={"by": "zeros"}, share=0.0), units=units(dead=64).units
    ),
    "input-scale": record(inputs={"0": replace(INPUTS, std=0.3)}),
    "input-mean": record({"a": reading(common_share=0.4)}, inputs={"0": replace(INPUTS, mean=9.0)}),
    "row-spread": record({"a": reading(scale_cv=0.9)}),
    "projection-fights": record({"b": reading(projection_cosine=0.99)}),
    "decay-fights": record(facts=decayed(0.01), losses=STILL),
    "rate-too-high": record(rates=trials(own=0.6, x01=1.0, x03=0.5, x3=9.0, x10=math.inf)),
    "rate-too-low": record(rates=trials(own=0.6, x01=1.5, x03=1.0, x3=0.5, x10=0.4)),
    "vanishing": record({"a": reading(descent=1e-4)}, losses=STILL),
    "exploding": record({"a": reading(descent=1.0)}, losses=STILL),
    "dead-units": units(dead=10),
    "saturated-units": units("relu", share=0.8),
    "clipping-always": record(facts=replace(FACTS, clip_norm=2.0)),
    "uneven-rates": record({"a": reading(update_ratio=1e-3), "b": reading(update_ratio=0.3)}),
    "uneven-rates of one learning rate": grouped(0.1),
    "decay-fights by a small penalty": penalty(0.2),
    "bad-initialisation": record(losses=tuple(4 * 0.9**s for s in range(STEPS))),
    "optimizer-turns": record({"a": reading(parameter_cosine=-0.1)}),
    "cannot-overfit": record(overfit=Trial("overfit", 100, 0.1, 2.3, None, 0.01)),
    "input-ignored": record(wiring=Wiring(input_matters=0.01)),
    "activated-logits": record(activated_output=ActivatedOutput("softmax", "head.1")),
    "target-scale": record(chance=11.0),
    "unbounded-loss": record(losses=tuple(2 - 1e3 * (i / 39) ** 0.5 for i in range(STEPS))),
    "rounded-away": record(dict.fromkeys("abc", reading(unchanged_share=0.45)), losses=STILL),
    "targets-out-of-range": probed("targets-out-of-range", share=0.005),
    "gradient-cut": probed("gradient-cut", cosine=0.995),
    "unshuffled": probed("unshuffled", ratio=0.85, z=-20.0),
    "weighs-itself": probed("weighs-itself", share=0.5, first=2.0, lowest=1.0),
    "pairs-reversed": probed("pairs-reversed", share=0.2, errors=-4.9, drawn=9.0, pushed=9.0),
    "terms-opposed": probed(
        "terms-opposed", WELL, {"other": "b"}, cosine=-0.99, largest=-0.9, ratio=0.9
    ),
    "outputs-forced": probed("outputs-forced", share=0.05),
    "outputs-in-vain": probed("outputs-in-vain", share=0.3, first=2.0, zeros=2.1, lowest=0.6),
    "zero-slope": record(),
    "zero-gradient": record(dict.fromkeys("ab", reading(idle_share=1.0)), losses=STILL),
    "class-weights": probed("class-weights", slope=0.45, correlation=1.0),
    "padding-counts": probed("padding-counts", share=0.04),
    "penalty-dominates": penalised(0.25),
    "state-carried": probed("state-carried", words={"of": "sample", "goes on": "yes"}, outputs=1),
    "targets-moved": probed("targets-moved", words={"order": "wrong"}, own=0.3, best=0.5),
    "behind-reference": explained(0.66, 0.2),
    "labels-unrelated": explained(0.01, 0.02, per_class=5.0),
    "interference": record({"a": reading(gradient_cosine=0.05, attainable_cosine=0.1)}),
    "stands-still": by_reports(*[LITTLE] * 4, losses=WELL),
    "row-spread within errors": record(
        {"a": reading(scale_cv=1.5, standard_error={"scale_cv": 0.3})}
    ),
    "projection-fights within errors": record(
        {"b": reading(projection_cosine=0.9, standard_error={"projection_cosine": 0.1})}
    ),
    "uneven-rates within errors": record(
        {"a": reading(update_ratio=1e-4, standard_error={"update_ratio": 2e-4})}
    ),
    "rate-too-high within errors": record(rates=trials(own=1.5, x01=0.5, error=0.6)),
    "rate-too-low within errors": record(rates=trials(own=2.29, x10=2.0, error=0.2)),
    "interference within errors": record(
        {"a": reading(gradient_cosine=0.05, standard_error={"gradient_cosine": 0.05})}
    ),
    "dead-units within errors": units(dead=60, batches=1),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_what_is_near_is_no_hit(name: str) -> None:
    assert name.split()[0] not in found(NEAR_MISSES[name])


def test_every_fault_has_a_run_that_shows_it_and_a_page() -> None:
    shown = {name.split()[0] for name in (*HITS, *LOOP, *(name for name, _ in MILDER))}
    pages = {path.stem for path in PAGES.glob("*.md")} - {"README"}
    assert shown == pages == set(FAULTS)
    index = (PAGES / "README.md").read_text(encoding="utf-8")
    assert all(f"[{name}]({name}.md)" in index for name in pages)


def test_what_a_fault_explains_is_a_fault_and_explains_it_not_in_turn() -> None:
    explains = {name: set(of.explains) for name, of in FAULTS.items()}
    assert set().union(*explains.values()) <= set(FAULTS)
    for name in explains:
        follows: set[str] = set()
        while added := set().union(*(explains[x] for x in {name, *follows})) - follows:
            follows |= added
        assert name not in follows


# Causes, and what follows


def test_causes_come_before_what_follows_from_them() -> None:
    faulty = record(
        inputs={"0": replace(INPUTS, std=160.0)},
        rates=trials(own=2.3, x01=0.5),
        units=units(dead=60).units,
        losses=STILL,
        wiring=Wiring(not_held=("c.weight",)),
    )
    names = [f.name for f in diagnose(faulty) if f.strength == "act"]
    assert names == ["not-held", "input-scale"]
    follows = {f.name: f for f in diagnose(faulty) if f.strength == "watch"}
    assert list(follows) == ["rate-too-high", "dead-units", "loss-stuck"]
    assert {f.advice for f in follows.values()} == {FIRST_THAT}
    said = Diagnosis(diagnose(faulty), faulty).verdict
    assert " This would explain: rate-too-high, dead-units, loss-stuck. And" in said
    bare = diagnose(replace(faulty, wiring=Wiring(input_matters=0.5)))
    acts = [f.name for f in bare if f.strength == "act"]
    assert acts == ["input-scale", "rate-too-high", "dead-units"]


def seen(*names: str, of: Record) -> list[tuple[str, str]]:
    """Findings of a run in which questions found each one thing."""
    facts = {n: HITS[n].probed[n] for n in names}
    return [(f.name, f.strength) for f in diagnose(replace(of, probed=facts))]


def test_the_first_cause_is_one_that_no_other_explains() -> None:
    place = f"result of softmax (a.py:1){HIDDEN}"
    of = record(first_non_finite=place, losses=(*STILL, math.nan))
    assert seen("input-partly-ignored", of=of) == [
        ("non-finite", "act"),
        ("input-partly-ignored", "watch"),
    ]


def test_what_is_to_be_watched_is_the_cause_of_what_it_explains() -> None:
    dead = record(units=units(dead=63).units)  # of a loss that falls
    assert seen(of=dead) == [("dead-units", "act")]
    assert seen("samples-mixed", of=dead) == [("samples-mixed", "act"), ("dead-units", "watch")]
    assert seen("input-partly-ignored", of=dead)[0] == ("dead-units", "act")  # no cause of it
    assert seen("no-activation", of=dead)[0] == ("dead-units", "act")  # its fix is tried instead
    unused = Wiring(unreached=("a.weight",), unused=("a.weight",))
    high = replace(record(rates=trials(own=1.5, x01=0.5)), wiring=unused)
    assert seen(of=high) == [("rate-too-high", "act"), ("unreached", "watch")]  # a trial shows it
    stuck = record(overfit=Trial("overfit", 100, 2.2, 2.3, None, 0.01), wiring=unused)
    assert seen(of=stuck) == [("unreached", "watch"), ("cannot-overfit", "watch")]


def test_values_that_stop_being_finite_are_a_cause_only_from_the_start() -> None:
    rates = trials(own=math.inf, x01=0.5)
    later = record(losses=(2.3, 9.0, math.nan), first_non_finite="loss", rates=rates)
    at_once = record(losses=(math.nan,), first_non_finite="loss")
    assert diagnose(later)[0].name == "rate-too-high"
    assert diagnose(replace(later, first_non_finite="data"))[0].name == "non-finite"
    assert diagnose(at_once)[0].name == "non-finite"


def test_the_fall_of_a_loss_whose_parts_oppose_each_other_is_not_judged() -> None:
    stuck = Trial("overfit", 100, 2.2, 2.3, None, 0.01)
    faulty = {"losses": RISING, "rates": trials(own=2.3, x10=0.1), "overfit": stuck}
    assert set(found(record(**faulty, descent_share=0.99))) >= {"rate-too-low", "cannot-overfit"}
    assert diagnose(record(**faulty, descent_share=0.3)) == ()
    unused = Wiring(unreached=("a.weight",))
    assert list(found(record(**faulty, descent_share=0.3, wiring=unused))) == ["unreached"]


def test_what_one_finding_says_of_all_layers_is_not_said_again_of_each() -> None:
    slow = dict.fromkeys("abc", reading(update_ratio=1e-3))
    names = [finding.name for finding in diagnose(by_reports(*[slow] * 8, losses=STILL))]
    assert names == ["rate-too-low", "loss-stuck"]


# Learning rates


@pytest.mark.parametrize(
    ("rates", "strength"),
    [({"x01": 1.35}, "act"), ({"x01": 1.5}, "watch"), ({"x03": 1.35, "x01": 2.0}, "watch")],
)
def test_from_a_high_first_loss_what_a_tenth_of_the_rate_leaves_decides(
    rates: dict[str, float], strength: str
) -> None:
    """Of a thousand outputs for ten classes, each learning rate finds out which ones occur."""
    of = record(losses=(8.0, *(2.1,) * 39), chance=6.9, rates=trials(own=2.1, **rates))
    assert found(of)["rate-too-high"].strength == strength


def test_a_trial_that_the_run_itself_overtakes_shows_only_a_rough_beginning() -> None:
    """As of a ResNet-20 at its best learning rate, with trials of 13 of 60 steps."""
    shorter = {f: replace(t, steps=13) for f, t in trials(own=2.6, x01=2.1, x10=2.56).items()}
    losses = (2.3, *(2.9 - 0.025 * step for step in range(STEPS - 1)))
    recovers, stays = (record(losses=of, chance=2.3, rates=shorter) for of in (losses, RISING))
    assert found(recovers)["rate-too-high"].strength == "watch" and not suffers(recovers)
    assert [a.fix for a in found(recovers)["rate-too-high"].advice] == [None, None]
    assert found(stays)["rate-too-high"].strength == "act" and suffers(stays)
    whole = replace(recovers, rates={f: replace(t, steps=STEPS) for f, t in shorter.items()})
    assert found(whole)["rate-too-high"].strength == "act"  # not overtaken in as many steps


def test_a_rate_is_low_only_where_next_to_nothing_is_learnt() -> None:
    def strength(own: float, moves: float = 0.006, steps: int = STEPS) -> str | None:
        rates = trials(own=own, x01=2.29, x03=2.28, x3=1.6, x10=1.3)  # falls by 1 at the best
        rates = {factor: replace(trial, steps=steps) for factor, trial in rates.items()}
        of = record(dict.fromkeys("abc", reading(update_ratio=moves)), rates=rates)
        low = found(of).get("rate-too-low")
        return None if low is None else low.strength

    assert strength(2.25) == strength(2.299) == "act"  # 0.05 of the fall
    assert strength(2.25, moves=0.02) == "watch", "layers move: it is only slow to begin"
    assert strength(2.25, steps=12) == "watch", "so few steps are the beginning of any run"
    assert strength(2.0) == "watch"  # 0.3: ten times the steps get there, too
    assert strength(1.6) == "note"
    assert strength(1.4) is None


@pytest.mark.parametrize(
    ("losses", "chance", "rates", "named"),
    [
        (STILL, 2.3, {"own": 2.295, "x3": 2.29, "x10": 2.27, "error": 0.001}, ""),  # next to none
        (STILL, 2.3, {"own": 2.295, "x01": 2.27, "error": 0.001}, ""),
        (STILL, 2.3, {"own": 2.36, "x01": 2.32, "x10": 40.0}, ""),
        (RISING, 2.3, {"own": 3.0, "x01": 2.35, "x10": 40.0}, "rate-too-high"),
        ((*WELL, math.nan), 2.3, {"own": math.inf, "x03": 0.3, "x3": 1.6}, "rate-too-high"),
        (WELL, 2.3, {"own": 9.0, "x01": 0.5, "x10": 3.0}, "rate-too-high"),
        (WELL, 2.3, {"own": 9.0, "x01": 3.0, "x10": 0.5}, "rate-too-low"),
        ((9.0,) * STEPS, 2.3, {"own": 9.0, "x10": 2.4}, ""),  # no better than a constant
        ((2.4, *[3.0] * 39), 2.3, {"own": 3.6, "x01": 3.1, "x3": 2.49}, "rate-too-high"),
        (STILL, None, {"own": 2.3, "x10": 2.2}, "rate-too-low"),
        ((2.3, *[4.0] * 39), None, {"own": 4.0, "x10": 2.4}, ""),  # above the first loss
    ],
)
def test_no_rate_is_both_too_high_and_too_low(
    losses: tuple[float, ...], chance: float | None, rates: dict[str, float], named: str
) -> None:
    names = found(record(losses=losses, chance=chance, rates=trials(**rates)))
    assert names.keys() & {"rate-too-high", "rate-too-low"} == {named} - {""}


@pytest.mark.parametrize("steps", [1, 2, 5, 11])
def test_a_few_steps_tell_nothing_of_the_loss(steps: int) -> None:
    rates = {f: Trial(f"rate*{f:g}", steps, 1.0, 2.2, None, 0.01) for f in (10.0, 0.1)}
    short = replace(units(dead=40), losses=STILL[:steps], rates=rates)
    assert [(f.name, f.strength) for f in diagnose(short)] == [("dead-units", "watch")]


def test_without_trials_of_rates_what_steps_do_decides() -> None:
    def moves(ratio: float, **values: object) -> Record:
        return record(dict.fromkeys("abc", reading(update_ratio=ratio)), **values)

    assert found(moves(3.0, losses=STILL))["rate-too-high"].strength == "act"
    assert "rate-too-high" not in found(moves(3.0))  # RMSprop's first step is long, and well
    far = dict.fromkeys("abc", reading(update_ratio=3.0))
    little = tuple(StepReport(step, far, {}, 0.06) for step in range(0, STEPS, 10))
    assert "rate-too-high" not in found(record(reports=little, losses=STILL)), "most is unseen"
    assert found(moves(1e-3, losses=STILL))["rate-too-low"].strength == "act"
    by_reports = moves(1e-3, losses=STILL, facts=replace(FACTS, model=""))
    assert found(by_reports)["rate-too-low"].strength == "watch", "or it is at its end"
    assert found(moves(1e-3, losses=()))["rate-too-low"].strength == "watch"
    assert found(moves(1e-3)) == {}  # layers that learn may move little
    assert "rate-too-low" not in found(moves(3.2e-3, losses=STILL))


def at_steps(*moves: dict[str, float], rates: tuple[float, ...] = ()) -> tuple[StepReport, ...]:
    """Return reports of every tenth step with these moves of layers."""
    layers = [{path: reading(update_ratio=move) for path, move in step.items()} for step in moves]
    return tuple(
        StepReport(10 * i, of, {}, 1.0, learning_rates=rates) for i, of in enumerate(layers)
    )


FAR = {"a": 20.0, "b": 0.3, "c": 0.4}
AFTERWARDS = {"a": 1e-3, "b": 2e-3, "c": 2e-3}


def test_a_step_far_beyond_the_range_makes_a_rate_too_high_though_layers_then_stand_still() -> None:
    reports = at_steps(FAR, *[AFTERWARDS] * 3)
    said = found(record(reports=reports, losses=RISING))
    assert said["rate-too-high"].strength == "act" and "rate-too-low" not in said
    assert said["rate-too-high"].evidence[0].layer == "a"
    begins = {"a": reading(update_ratio=20.0, activation_rms=0.05, features=64)}
    zero = (StepReport(0, LAYERS | begins, {}, 1.0), *at_steps(FAR, *[AFTERWARDS] * 3)[1:])
    assert "rate-too-high" not in found(record(reports=zero, losses=RISING)), "begins near zero"
    assert "rate-too-high" not in found(record(reports=reports)), "the loss falls"
    nearly = at_steps({**FAR, "a": 6.9}, *[AFTERWARDS] * 3)
    assert "rate-too-high" not in found(record(reports=nearly, losses=RISING))


@pytest.mark.parametrize(
    ("moves", "factors"),
    [
        ({"a": 20.0, "b": 0.3, "c": 0.4}, {"a": 0.7 / 20}),
        ({"a": 1e-4, "b": 0.3, "c": 0.4}, {"a": 0.009 / 1e-4}),
        ({"a": 31 * 0.4, "b": 0.4, "c": 0.4}, {"a": 0.7 / (31 * 0.4)}),
        ({"a": 31.0, "b": 1.0, "c": 1.0}, {"a": 1 / 31}),  # not below the median layer
        ({"a": 0.2, "b": 0.3, "c": 0.4}, {}),
    ],
)
def test_a_layer_gets_a_rate_at_which_it_moves_as_far_as_is_healthy(
    moves: dict[str, float], factors: dict[str, float]
) -> None:
    of = record(reports=at_steps(moves, *[moves] * 3), losses=STILL)
    assert rates_per_layer(of) == pytest.approx(factors)
    advice = [a for f in diagnose(of) if f.name == "uneven-rates" for a in f.advice]
    for path, factor in factors.items():
        assert advice[0].text.endswith(f"× {factor:.3g} for {path!r}")


def test_layers_that_move_unlike_the_others() -> None:
    far = {"c": reading(update_ratio=9.0)}
    once = record(far)
    assert found(once)["uneven-rates"].strength == "act"
    assert found(replace(once, reports=once.reports[:1]))["uneven-rates"].strength == "note"
    decays = {"mixer.A_log": reading(kind="module", update_ratio=1e-7)}
    assert "uneven-rates" not in found(record(decays, losses=STILL)), "a part of its module"
    still = {f"frozen{i}": reading(update_ratio=0.0) for i in range(9)}
    finding = found(record({**still, **far}))["uneven-rates"]
    assert finding.layers == ("c",), "compared with those that move"
    zero = {"a": reading(descent=0.0), "b": reading(descent=0.0), **far}
    begins = (StepReport(0, zero, {}, 1.0), *record().reports[1:])
    assert diagnose(record(reports=begins)) == (), "a last layer that begins at zero"
    assert diagnose(record(reports=begins, losses=STILL))[0].name == "uneven-rates"


# The optimizer, the course of the loss, and the beginning


def moved(**values: float) -> dict[str, LayerReading]:
    return dict.fromkeys("abc", reading(**values))


def weighed(**values: float | bool) -> Record:
    weights = record().weights
    return record(weights={**weights, "a": replace(weights["a"], **values)}, losses=STILL)


def alone(layers: dict[str, LayerReading], **values: object) -> Record:
    reports = tuple(StepReport(step, layers, {}, 1.0) for step in range(0, STEPS, 10))
    return record(reports=reports, **values)


def between_players(removed: float) -> Record:
    cut = probed("gradient-cut", WELL, cosine=0.0, removed=removed)
    return replace(cut, descent_share=-1.0)


def first_layer(**values: float) -> Record:
    return record({"a": reading(features=64, **values)}, inputs={})


TURNED, LONG = moved(parameter_cosine=0.05), replace(FACTS, settings={"lr": 0.1, "momentum": 0.99})
BURST = (1.3, *(180.0 - 3 * i for i in range(39)))
STUCK = Trial("overfit", 100, 2.0, 2.3, None, 0.01)
ON = tuple(1 - 0.1 * i for i in range(STEPS))
HIGH = (30.0, *WELL[1:])
WIDE = {"0": replace(INPUTS, std=160.0)}
NARROW = {"0": replace(INPUTS, std=0.05)}
LONGER = {"0": replace(INPUTS, std=6.0)}
NORMED = {"a": reading(), "n": reading(kind="gain", update_ratio=1e-4), "b": reading()}
QUIET = reading(descent=1e-9, scale_mean=33.0)
ATTENDS = {"q": QUIET, "k": QUIET, "v": reading(scale_mean=33.0), "o": reading(), "h": reading()}
TOKENS = {"tokens": reading(kind="embedding"), **VANISHES, "b": reading(), "c": reading()}
IDLE = LAYERS | {"a": reading(idle_share=1.0)}
LEAKS = record(probed=dict(HITS["future-leak"].probed, **HITS["reshape-scrambles"].probed))
FURTHER = [  # a finding and its strength, or "no" where it is not made, and a record
    ("projection-fights act", record(TURNED, losses=STILL)),
    ("projection-fights note", record(TURNED, facts=adam())),  # a few large entries do it, too
    ("projection-fights watch", record(TURNED, facts=adam(), losses=STILL)),
    ("projection-fights no", record(TURNED, facts=replace(FACTS, resumed=True), losses=STILL)),
    ("projection-fights no", record(TURNED, facts=decayed(5.0))),
    ("optimizer-turns act", record(facts=LONG, losses=RISING)),
    ("optimizer-turns act", record(facts=adam(betas=(0.999, 0.999)))),  # type: ignore[arg-type]
    ("optimizer-turns no", record(facts=adam(betas=(0.99, 0.999)))),  # type: ignore[arg-type]
    ("loss-stuck watch", record(losses=BURST)),
    ("cannot-overfit act", record(overfit=STUCK)),
    ("cannot-overfit watch", record(overfit=replace(STUCK, falls=True))),
    ("cannot-overfit no", record(overfit=replace(STUCK, steps=20))),
    ("unbounded-loss act", probed("unbounded-loss", ON, loss=-90.0, times=64.0, negative=0)),
    ("unbounded-loss watch", probed("unbounded-loss", ON, loss=-90.0, times=64.0, negative=5)),
    ("unbounded-loss no", probed("unbounded-loss", WELL, loss=-90.0, times=64.0)),
    ("unbounded-loss no",
     replace(probed("unbounded-loss", ON, loss=-90.0, times=64.0), descent_share=0.5)),
    ("bad-initialisation act", weighed(gain=30.0)),
    ("bad-initialisation no", replace(weighed(gain=30.0), trained=True)),
    ("bad-initialisation act", weighed(gain=0.01)),
    ("bad-initialisation watch", weighed(bias=5.0)),
    ("bad-initialisation no", weighed(gain=0.01, normalised=True)),
    ("bad-initialisation no", weighed(gain=0.01, last=True)),
    ("bad-initialisation no", weighed(gain=0.028, rms=0.02)),  # as transformers draw them
    ("bad-initialisation no", weighed(gain=7.0, gradient_gain=1.4)),  # scaled by the fan-out
    ("bad-initialisation act", weighed(gain=7.0, gradient_gain=7.0)),
    ("bad-initialisation act", weighed(gain=17.0, bare=True)),  # that no layer holds
    ("bad-initialisation no", weighed(gain=0.01, bare=True)),
    ("bad-initialisation act",
     record(weights=dict.fromkeys("abc", WeightStatistics(0.6, 0.0, 1.0)))),
    ("input-partly-ignored watch",
     replace(HITS["input-partly-ignored"], probed={
         **HITS["input-partly-ignored"].probed,
         **probed("zero-slope").probed})),
    ("class-untaught no",  # since gradients cancel
     replace(HITS["class-untaught"], probed={
         **probed("class-untaught", words={"of": "samples", "first": "1"}, unread=3.0,
                  length=4.0).probed,
         **probed("zero-gradient").probed})),
    ("bad-initialisation act", record(losses=HIGH)),
    ("bad-initialisation no", record(losses=(*HIGH[:-1], -0.1))),  # as PPO's
    ("bad-initialisation no",
     record(losses=HIGH, rates={10.0: Trial("rate", STEPS, -0.03, 0.03, None, 0.01)})),
    ("bad-initialisation no", record(losses=HIGH, inputs=WIDE)),
    ("input-scale watch", record(inputs=WIDE, facts=adam())),
    ("input-scale note", record(inputs=NARROW, facts=adam())),
    ("input-scale watch", record(inputs=NARROW, facts=adam(), losses=())),
    ("input-scale act", record(inputs=NARROW)),
    ("input-scale watch", alone(NORMED, inputs=WIDE)),
    ("input-scale no", record({"a": reading(scale_mean=65.0, scale_p50=2.0)}, inputs=LONGER)),
    ("input-scale act", record({"a": reading(scale_p50=60.0)}, inputs=LONGER)),
    ("input-scale act", first_layer(scale_mean=1e6)),
    ("input-scale no", first_layer(scale_mean=65.0)),
    ("input-scale watch",
     replace(units(dead=40), inputs={"0": replace(INPUTS, std=6.0)}, facts=adam(), losses=WELL)),
    ("input-scale act", replace(units(dead=40), inputs=WIDE, facts=adam(), losses=WELL)),
    ("input-mean note", first_layer(common_share=0.95)),
    ("input-mean note", record({"a": reading(common_share=0.6)},
                               inputs={"0": replace(INPUTS, mean=1.2)})),
    ("input-mean watch", record({"a": reading(common_share=0.6)}, losses=STILL,
                                inputs={"0": replace(INPUTS, mean=1.2)})),
    ("input-mean no", first_layer(common_share=0.8)),
    # Queries and keys hear little of the loss while attention is even, if the values hear more.
    ("vanishing no", alone(ATTENDS, losses=STILL)),
    ("vanishing act", alone(ATTENDS | {"v": QUIET}, losses=STILL)),
    ("vanishing act", alone(ATTENDS | {"v": reading(scale_mean=34.0)}, losses=STILL)),
    ("vanishing no", alone(TOKENS, losses=STILL)),  # a table in front hears
    ("penalty-dominates no", outgrown(2.0)),  # below a constant prediction's loss
    ("row-spread no", counted(20.0)),
    ("row-spread no", replace(counted(4.0), losses=STILL)),
    # The leak lowers the loss, so that no run suffers, and no trial of the fix pays.
    ("reshape-scrambles act", LEAKS),
    ("future-leak watch", LEAKS),
    ("gradient-cut no", between_players(removed=-1.0)),
    ("gradient-cut watch", between_players(removed=-0.1)),
    ("dead-units act", by_reports(*[IDLE] * 6)),
    ("dead-units no", by_reports(*[IDLE] * 3, *[LAYERS] * 3)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("losses", "place", "is_first"),
    [((2.3, 2.0, 1.8, math.nan), "loss", True), ((2.3, 9.0, 300.0, math.nan), "loss", False),
     ((2.3, 2.0, 1.8, math.nan), "output of a", False)],
)  # fmt: skip
def test_what_the_loss_alone_makes_is_no_consequence_of_the_inputs(
    losses: tuple[float, ...], place: str, is_first: bool
) -> None:
    of = record(losses=losses, first_non_finite=place, inputs=WIDE)
    assert (diagnose(of)[0].name == "non-finite") is is_first
    if place == "loss":  # as a monitor says it
        of = replace(by_reports(*[LAYERS] * 6), losses=(2.4, *losses), first_non_finite="the loss")
        assert found(of)["non-finite"].advice[0].text.startswith("look for NaN") is is_first
    assert ("no larger than usual" in found(of)["non-finite"].summary) is is_first


def test_a_strength_is_that_of_the_facts_that_count() -> None:
    words = {"sum": "1", "function": "cross_entropy"}, {"farthest": "3", "function": "bce"}
    facts = [Fact("loss", {"share": 0.5}, of) for of in words]
    for order in (facts, facts[::-1]):
        of = record(losses=STILL, probed={"targets-out-of-range": Probed(tuple(order))})
        assert {f.strength for f in diagnose(of) if "sum to more" in f.summary} == {"watch"}


@pytest.mark.parametrize("name, of", [*MILDER, *FURTHER])
def test_what_else_decides(name: str, of: Record) -> None:
    finding, _, strength = name.partition(" ")
    said = found(of).get(finding)
    assert (said.strength if said else "no") == strength
    assert said is None or said.summary


def test_a_loss_no_lower_than_that_of_knowing_nothing_is_stuck_wherever_it_began() -> None:
    fallen = (4.0, 3.0, 2.5, *STILL[3:])
    learnt = Trial("overfit", 100, 0.1, 2.3, None, 0.01)
    stuck = found(record(losses=fallen, overfit=learnt))["loss-stuck"]
    assert stuck.strength == "watch" and "a constant prediction" in stuck.summary
    assert "the model overfits one small batch" in stuck.summary
    assert "loss-stuck" not in found(record(losses=tuple(0.5 * x for x in fallen)))


def test_against_interference_of_tokens_no_batch_normalisation_is_advised() -> None:
    """It would let later tokens reach the predictions of earlier ones."""
    low = {"a": reading(gradient_cosine=0.05)}
    assert [advice.fix for advice in found(record(low))["interference"].advice] == ["batch-norm"]
    tokens = record({**low, "table": reading(kind="embedding")})
    assert found(tokens)["interference"].advice == ()


def test_of_several_places_the_worst_is_told_and_the_others_are_named() -> None:
    facts = tuple(Fact(f"x{i}", {"rate": 0.25 * i}) for i in range(4))
    said = found(record(probed={"dropout-in-eval": Probed(facts)}))["dropout-in-eval"]
    assert said.summary.startswith("x3 drops 75%") and said.evidence[0].value == 0.75
    assert said.summary.endswith("It is alike at 'x2', 'x1'.")


def together(*runs: Record) -> Record:
    """A run in which the experiments of all these runs found what they did."""
    every = {name: answer for of in runs for name, answer in of.probed.items()}
    return replace(runs[0], probed=every)


@pytest.mark.parametrize(
    ("cause", "symptom"),
    [
        (probed("attention-axis", WELL, {"product": "matmul", "axis": "2", "over": "3"}),
         HITS["future-leak"]),
        (HITS["class-untaught"], HITS["collapsed"]),
        (probed("reshape-scrambles"), HITS["future-leak"]),
    ],
)  # fmt: skip
def test_an_exact_cause_comes_before_its_symptom(cause: Record, symptom: Record) -> None:
    of = replace(together(cause, symptom), wiring=symptom.wiring,
                 gradient_norms=symptom.gradient_norms)  # fmt: skip
    first, *_ = [f for f in diagnose(of) if f.name in (*cause.probed, *symptom.probed)]
    assert first.name in cause.probed and first.strength == "act"


def test_what_has_a_place_comes_before_what_has_none() -> None:
    vain = HITS["outputs-in-vain"]
    for name, hit in HITS.items():
        if "outputs-in-vain" in FAULTS[name].explains and found(hit)[name].strength == "act":
            both = replace(hit, losses=STILL, probed={**hit.probed, **vain.probed})
            after = found(both)["outputs-in-vain"]
            assert (after.strength, after.advice) == ("watch", FIRST_THAT), name
    dead = replace(HITS["zero-gradient"], units=units(dead=64).units, losses=STILL)
    assert next(f.name for f in diagnose(dead)) == "dead-units"
    assert found(dead)["zero-gradient"].advice == FIRST_THAT


def test_targets_that_are_of_the_outputs_samples_are_not_transposed() -> None:
    """A model may return time first, where its last layer has samples first."""
    moved = probed("targets-moved", WELL, {"move": "axes 0 and 1 transposed", "order": "wrong"},
                   own=0.0, best=0.6)  # fmt: skip
    assert "targets-moved" in found(moved)
    assert "targets-moved" not in found(together(moved, probed("targets-misplaced", share=1.0)))


@pytest.mark.parametrize(("lower", "first"), [(1.8, "unreached"), (1.5, "rate-too-high")])
def test_structure_comes_before_a_rate_that_gains_little(lower: float, first: str) -> None:
    of = record(
        losses=STILL, rates=trials(own=2.31, x01=lower), wiring=Wiring(unused=("a.weight",))
    )
    cause, other, *_ = diagnose(of)
    assert cause.name == first and {cause.name, other.name} == {"unreached", "rate-too-high"}


@pytest.mark.parametrize(("layers", "first"), [(12, "skip"), (3, "layer normalisation")])
def test_deep_networks_are_told_of_skip_connections_first(layers: int, first: str) -> None:
    deep = {f"{i}": reading(scale_mean=65.0 + i) for i in range(layers - 1)}
    of = alone({"first": reading(descent=1e-9, scale_mean=17.0), **deep}, losses=STILL)
    assert first in found(of)["vanishing"].advice[0].text


def test_traits_of_healthy_runs_come_behind_exact_causes() -> None:
    inputs = {"0": replace(INPUTS, mean=1.2)}
    of = record({"a": reading(common_share=0.6, descent=1e-9, scale_mean=17.0)}, inputs=inputs,
                losses=STILL)  # fmt: skip
    assert [f.name for f in diagnose(of)][:2] == ["vanishing", "input-mean"]


def test_what_is_frozen_comes_behind_what_names_a_place() -> None:
    """Both are to be watched; many healthy runs freeze parameters."""
    unread = probed("batch-part-unread", WELL, unread=1.0)
    both = replace(unread, wiring=Wiring(frozen=("a.weight",)))
    assert [f.name for f in diagnose(both)] == ["batch-part-unread", "frozen"]
