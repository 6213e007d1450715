"""Whether the user's loop can train at all: what reports say of it, and what is meant."""

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
from made_records import FACTS, RISING, STILL, WELL, reading, record

from adiv_monitor.diagnosis import diagnose
from adiv_monitor.diagnosis.course import course
from adiv_monitor.diagnosis.finding import Finding
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.diagnosis.verdict import running_headline
from adiv_monitor.report import LayerReading, StepReport

OWN = replace(FACTS, model="", optimizer="")  # known from reports alone
LAYERS = {name: reading() for name in "abc"}
SHORT = {name: reading(update_ratio=1e-4, gradient_factor=1e-3) for name in "abc"}
FAR = {name: reading(update_ratio=50.0) for name in "abc"}
UP = (2.3, *(2.3 + 3 * step for step in range(39)))


def run(
    count: int = 6, losses: tuple[float, ...] = WELL, *, every: int = 7, **facts: object
) -> Record:
    """A monitored run; a fact that is a list has one value for each report."""
    layers: Mapping[str, LayerReading] = facts.pop("layers", LAYERS)  # type: ignore[assignment]
    reports = tuple(
        StepReport(
            every * i,
            layers,
            {},
            1.0,
            **{
                name: value[i] if isinstance(value, list) else value
                for name, value in ({"optimizer": "SGD", "trainable": 1000} | facts).items()
            },  # type: ignore[arg-type]
        )
        for i in range(count)
    )
    return record(facts=OWN, reports=reports, losses=losses, inputs={}, units={}, chance=None)


def found(of: Record) -> dict[str, Finding]:
    return {finding.name: finding for finding in diagnose(of)}


def rates(*values: float) -> list[tuple[float, ...]]:
    return [(value,) for value in values]


ONES = (1.0,) * 4
HITS = {
    "not-held": run(not_held=[{}, *[{"a": 900}] * 5]),
    "unreached": run(cut_off={"a": 400, "b": 20}),
    "zeroed-early": run(removed={"a": 600, "b": 300}, layers={}),
    "zeroed-early by micro-batches": run(zeroed_passes=7),
    "left-in-eval": run(evaluated=("drop",)),
    "same-batch": run(batch=(3.5, 7.0), next_batch=(3.5, 7.0)),
    "clipping-always": run(losses=STILL, layers=SHORT, loss_gradients=(1.0,)),
    "rate-zero": run(learning_rates=(0.0,), losses=STILL),
    "rate-gone": run(learning_rates=rates(0.1, 1e-5, 1e-8, 1e-9, 1e-12, 0.0)),
    "rate-rises": run(losses=UP, learning_rates=rates(0.01, 0.03, 0.1, 0.3, 1, 3)),
    "weights-set-back": run(weights_returned=[None, None, 1.0, 1.0, 1.0, 1.0]),
    "weights-set-back by half": run(
        losses=STILL, weights_returned=[None, None, 0.6, 0.7, 0.1, 0.9]
    ),
    "gradients-summed": run(losses=RISING, loss_gradients=ONES),
    "unbounded-loss": run(losses=RISING, loss_gradients=(-1.0,)),
}
MEANT = {
    "a head that nobody uses": run(not_held=[{}, *[{"a": 9}] * 5]),
    "another network that is trained in turns": run(not_held=[{}, {"a": 900}, {}, *[{"a": 9}] * 3]),
    "idle experts": run(cut_off=[{"a": 400}, {"b": 400}, {}, {"a": 400}, {}, {"b": 400}]),
    "a part without a gradient": run(removed={"a": 400}),
    "one step zeroed, as by an AMP scaler": run(zeroed_passes=[1, 0, 0, 0, 0, 0]),
    "evaluated once": run(evaluated=[("drop",), (), (), (), (), ()]),
    "the same first batch of each epoch": run(batch=(3.5,), next_batch=(4.5,)),
    "batches that are not known": run(batch=(), next_batch=()),
    "clipping, as the loss falls": run(layers=SHORT, loss_gradients=(1.0,)),
    "clipping by Adam": run(
        losses=STILL, layers=SHORT, loss_gradients=(1.0,), optimizer="AdamW"
    ),
    "a mixed-precision scaler": run(
        losses=STILL, loss_gradients=(65536.0,),
        layers={"a": reading(update_ratio=1e-4, gradient_factor=1 / 65536)},
    ),
    "warm-up from zero": run(learning_rates=rates(0.0, 0.01, 0.1, 0.1, 0.1, 0.1)),
    "cosine to zero": run(learning_rates=rates(0.1, 0.09, 0.06, 0.03, 0.01, 0.0)),
    "a cycle": run(learning_rates=rates(0.1, 0.0, 0.1, 0.0, 0.1, 0.0)),
    "warm-up that the loss survives": run(learning_rates=rates(0.01, 0.03, 0.1, 0.3, 1, 3)),
    "averages that are swapped in and out": run(weights_returned=[None, None, 0.0, 0.1, 0.0, 0.0]),
    "weights near earlier ones, as the loss falls": run(
        weights_returned=[None, None, 0.6, 0.7, 0.1, 0.9]
    ),
    "a mean of micro-batches": run(losses=RISING, loss_gradients=(0.25,) * 4),
    "a sum of micro-batches that trains": run(loss_gradients=ONES),
    "two terms of a critic": run(losses=RISING, loss_gradients=(1.0, 1.0)),
    "two reports": run(2, evaluated=("drop",), cut_off={"a": 400}, zeroed_passes=1),
}  # fmt: skip
CERTAIN = {name.split()[0] for name in HITS}


@pytest.mark.parametrize("name", HITS)
def test_what_keeps_a_loop_from_training_comes_first(name: str) -> None:
    first, *_ = diagnose(HITS[name])
    assert first.name == name.split()[0]
    assert first.evidence and first.advice and first.summary
    is_meant = name == "same-batch"  # as often as not
    assert (first.strength == "note") == is_meant


@pytest.mark.parametrize("name", MEANT)
def test_what_is_done_on_purpose_is_no_fault(name: str) -> None:
    assert not CERTAIN & found(MEANT[name]).keys()


@pytest.mark.parametrize("name", HITS)
def test_an_audit_asks_by_its_own_probes(name: str) -> None:
    audited = replace(HITS[name], facts=FACTS)
    assert not (CERTAIN - {"rate-too-high"}) & found(audited).keys()


@pytest.mark.parametrize("name", ["not-held", "unreached", "zeroed-early", "left-in-eval"])
def test_it_is_to_be_watched_while_the_loss_falls(name: str) -> None:
    assert found(HITS[name])[name].strength == "watch"
    assert found(replace(HITS[name], losses=STILL))[name].strength == "act"
    assert found(replace(HITS[name], losses=()))[name].strength == "watch"


def test_nothing_is_said_of_a_learning_rate_that_is_too_low_if_clipping_takes_the_step() -> None:
    clipped = HITS["clipping-always"]
    assert "rate-too-low" not in found(clipped)
    without = replace(
        clipped, reports=tuple(replace(r, loss_gradients=()) for r in clipped.reports)
    )
    assert "rate-too-low" in found(without)
    assert found(clipped)["loss-stuck"].advice[0].fix is None


def test_clipping_before_unscaling_names_the_scaler() -> None:
    layers = {"a": reading(update_ratio=1e-9, gradient_factor=1e-9)}
    of = run(losses=STILL, layers=layers, loss_gradients=(65536.0,))
    finding = found(of)["clipping-always"]
    assert "scale 65536 of the mixed-precision scaler" in finding.summary
    assert "unscale_" in finding.advice[0].text


def test_a_rate_that_is_too_high_explains_what_follows_from_it() -> None:
    """Layers that overshoot at first may stand still, be dead or be infinite later."""
    broken = run(losses=(*UP[:20], math.nan), layers=FAR)
    first, *others = diagnose(replace(broken, first_non_finite="the loss", non_finite_since=20))
    assert (first.name, first.strength) == ("rate-too-high", "act")
    assert {f.name: f.strength for f in others}["non-finite"] == "watch"


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        (WELL, "falls"),
        (STILL, "does not fall"),
        (RISING, "rises"),
        ((28_204.0, *(2.31,) * 39), "falls"),  # chance is not known
        ((2.4, *(30.0,) * 20, *(2.0,) * 19), "does not fall"),
        ((2.4, *(30.0,) * 20, *(0.2,) * 19), "falls"),
        (WELL[:5], "unknown"),
        ((*WELL[:20], math.nan), "falls"),
        ((2.3, 2.3, math.nan), "does not fall"),
    ],
)
def test_the_course_of_a_loss(losses: tuple[float, ...], expected: str) -> None:
    assert course(replace(run(), losses=losses)) == expected
    if losses[0] == 28_204.0:
        assert course(replace(run(), losses=losses, chance=2.3)) == "does not fall"


@pytest.mark.parametrize("losses", [STILL, RISING], ids=["still", "rising"])
def test_nothing_to_fix_never_stands_above_a_loss_that_does_not_fall(
    losses: tuple[float, ...],
) -> None:
    of = run(losses=losses)
    headline = running_headline(diagnose(of), of)
    assert headline.startswith("Does not train; cause not found: the loss ")


@pytest.mark.parametrize(
    "of",
    [
        run(losses=STILL, other_optimizers=("Adam",)),
        run(losses=tuple(-x for x in STILL)),
        replace(run(losses=STILL), reports=run(losses=STILL).reports[1:]),
    ],
    ids=["two players", "a policy", "a resumed run"],
)
def test_a_loss_that_may_be_no_measure_is_a_note(of: Record) -> None:
    finding = found(of)["loss-stuck"]
    assert finding.strength == "note"
    assert "no fault of generative adversarial networks" in finding.summary
    alone = found(run(losses=STILL))["loss-stuck"]
    assert alone.strength == "watch" and "adversarial" not in alone.summary
