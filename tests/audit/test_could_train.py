"""Whether the user's loop can train at all: what reports say of it, and what is meant."""

import math
from dataclasses import replace
from typing import Any

import pytest
from loop_runs import (
    AVERAGED,
    CREEPING,
    FADING,
    FAR,
    HITS,
    LAYERS,
    LONG,
    MEANT,
    ONES,
    UP,
    rates,
    run,
)
from made_records import FACTS, RISING, STILL, WELL, reading, record

from adiv_monitor.diagnosis import diagnose
from adiv_monitor.diagnosis.course import course
from adiv_monitor.diagnosis.diagnose import running_headline
from adiv_monitor.diagnosis.finding import Finding
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.diagnosis.running import Running

CERTAIN = {name.split()[0] for name in HITS}


def found(of: Record) -> dict[str, Finding]:
    return {finding.name: finding for finding in diagnose(of)}


@pytest.mark.parametrize("name", HITS)
def test_what_keeps_a_loop_from_training_comes_first(name: str) -> None:
    first, *_ = diagnose(HITS[name])
    assert first.name == name.split()[0]
    assert first.evidence and first.advice and first.summary
    is_meant = name in (
        *("same-batch", "frozen", "loss-multiplied by its inverse", "state-lost now and then"),
        *("gradients-summed as the loss falls", "accumulation-cut for few batches"),
    )
    assert (first.strength == "note") == is_meant


@pytest.mark.parametrize("name", MEANT)
def test_what_is_done_on_purpose_is_no_fault(name: str) -> None:
    assert not CERTAIN & found(MEANT[name]).keys()


@pytest.mark.parametrize("name", HITS)
def test_an_audit_asks_by_its_own_probes(name: str) -> None:
    audited = replace(HITS[name], facts=FACTS)
    of_both = {"rate-too-high", "rate-gone", "group-rates", "rate-zero"}
    of_both |= {"broadcast-loss", "double-softmax", "seed-again"}
    assert not (CERTAIN - of_both) & found(audited).keys()


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


def test_a_rate_that_is_too_high_explains_what_follows_from_it() -> None:
    """Layers that overshoot at first may stand still, be dead or be infinite later."""
    broken = run(losses=(*UP[:20], math.nan), layers=FAR)
    first, *others = diagnose(replace(broken, first_non_finite="the loss", non_finite_since=20))
    assert (first.name, first.strength) == ("rate-too-high", "act")
    assert {f.name: f.strength for f in others}["non-finite"] == "watch"


@pytest.mark.parametrize("given", [{"layers": LONG}, {"losses": RISING}])
def test_a_sum_of_micro_batches_is_a_note_unless_it_harms(given: dict[str, Any]) -> None:
    finding = found(run(loss_gradients=ONES, **given))["gradients-summed"]
    assert finding.strength == "note" and "4 times as long" in finding.summary


def test_the_group_whose_rate_is_gone_is_named() -> None:
    fading = run(**FADING, groups={"a": 0, "b": 1, "c": 1})
    finding = found(fading)["rate-gone"]
    assert (finding.layers, finding.since, finding.strength) == (("a",), 14, "watch")
    assert "param_groups[0] is below 0.001 of its peak" in finding.summary


def test_groups_whose_rates_jump_are_named_together() -> None:
    jumps = [*[(0.1, 0.01, 0.02)] * 4, *[(0.1, 0.3, 0.2)] * 2]
    groups = {"a": 0, "b": 1, "c": 2}
    (jump,) = (f for f in diagnose(run(learning_rates=jumps, groups=groups)) if f.since == 28)
    assert (jump.name, jump.layers) == ("rate-rises", ("b", "c"))
    assert "param_groups[1], param_groups[2] jumps by a factor of up to 30" in jump.summary


def test_a_rate_below_zero_is_not_gone() -> None:
    finding, *others = diagnose(HITS["settings-off by a rate below zero"])
    assert "lr is -0.1; such steps climb the loss. It was 0.1 at first." in finding.summary
    assert finding.strength == "act" and "rate-gone" not in {f.name for f in others}


def test_a_group_without_a_rate_is_named_and_to_be_watched() -> None:
    finding = found(HITS["rate-zero of one group"])["rate-zero"]
    assert (finding.strength, finding.layers) == ("watch", ("c",))
    assert "of layer 'c' is zero" in finding.summary
    assert (
        found(replace(HITS["rate-zero of one group"], losses=STILL))["rate-zero"].strength == "act"
    )


def test_what_the_monitor_sees_of_the_loss_is_said_as_in_an_audit() -> None:
    assert (
        "MSELoss broadcasts the shapes (64, 1) and (64,)"
        in found(HITS["broadcast-loss"])["broadcast-loss"].summary
    )
    assert found(HITS["double-softmax"])["double-softmax"].strength == "watch"
    still = replace(HITS["double-softmax"], losses=STILL)
    assert found(still)["double-softmax"].strength == "act"
    two = Running()
    for report in HITS["broadcast-loss"].reports[:2]:
        two.add(report)
    assert not two.record().probed, "two steps tell nothing"
    two.add(HITS["broadcast-loss"].reports[2])
    assert [*two.record().probed] == ["broadcast-loss"]


def test_steps_are_lost_to_rounding_because_the_rate_is_gone() -> None:
    layers = dict.fromkeys("abc", reading(unchanged_share=0.9))
    gone = run(losses=STILL, layers=layers, learning_rates=rates(0.1, 1e-3, 5e-5, 1e-5, 3e-6, 1e-6))
    assert diagnose(gone)[0].name == "rate-gone"
    assert "rounded-away" not in found(gone)
    assert "rounded-away" in found(replace(gone, reports=run(losses=STILL, layers=layers).reports))


PEAK = (2.3, *(2.3 + 0.4 * step for step in range(10)), *(2.31,) * 29)


@pytest.mark.parametrize(
    ("move", "idle", "first", "losses"),
    [
        (1.5, 1.0, "rate-too-high", PEAK),
        (1.5, 1.0, "rate-too-high", STILL),
        (0.3, 1.0, "dead-units", PEAK),
        (1.5, 0.4, "uneven-rates", PEAK),
    ],
)
def test_a_step_that_kills_a_layer_is_too_long(
    move: float, idle: float, first: str, losses: tuple[float, ...]
) -> None:
    """Units that die after a step longer than their activations do not explain themselves."""
    layers = LAYERS | {"c": reading(update_ratio=move)}
    after = {"a": reading(update_ratio=1e-3, idle_share=idle)} | dict.fromkeys("bc", reading())
    of = run(losses=losses, layers=[layers, *[after] * 5])
    assert next(iter(found(of))) == first


@pytest.mark.parametrize(("before", "named"), [(2.3, True), (40.0, False)])
def test_a_loss_rose_after_a_batch_of_a_large_loss(before: float, named: bool) -> None:
    """The loss of the batch itself is not what the loss was before it."""
    losses = (*(before,) * 14, 9.0, 9.0, *(4.0,) * 24)
    of = run(losses=losses, layers=[LAYERS, LAYERS, FAR, *[LAYERS] * 3])
    assert ("rate-too-high" in found(of)) == named


@pytest.mark.parametrize(("losses", "first"), [(RISING, "rate-too-high"), (STILL, "input-scale")])
def test_of_a_loss_that_rises_the_learning_rate_is_asked_about_before_the_inputs(
    losses: tuple[float, ...], first: str
) -> None:
    far = {"kind": "linear", "features": 64, "scale_mean": 64 * 2500.0, "update_ratio": 50.0}
    of = run(losses=losses, layers=FAR | {"a": reading(**far)})
    names = list(found(of))
    assert {"rate-too-high", "input-scale"} <= set(names) and names[0] == first


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


@pytest.mark.parametrize(("descent", "said"), [(0.02, True), (1e-4, False)])
def test_steps_that_lower_the_loss_of_their_own_batch_alone(descent: float, said: bool) -> None:
    of = run(losses=STILL, layers={name: reading(descent=descent) for name in "abc"})
    assert ("which does not last" in running_headline(diagnose(of), of)) == said


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


def test_a_loss_that_falls_slowly_is_a_note() -> None:
    finding = found(run(losses=CREEPING))["loss-stuck"]
    assert finding.strength == "note"
    assert finding.summary == "The loss falls by less than 5%: 552 at first, 536 at the end."
    by_noise = tuple(x - 20 * (-1) ** step for step, x in enumerate(CREEPING))
    assert found(run(losses=by_noise))["loss-stuck"].strength == "watch"
    stays = (*CREEPING[:10], *(x + 6 for x in CREEPING[10:20]), *(537.0, 535.0) * 10)
    assert found(run(losses=stays))["loss-stuck"].strength == "watch"
    assert found(record(losses=CREEPING, chance=552.0))["loss-stuck"].strength == "watch"


def test_an_optimizer_that_maximizes_goes_uphill_on_purpose() -> None:
    up = {name: reading(parameter_cosine=-1.0, descent=-0.1) for name in "abc"}
    assert found(run(layers=up))["optimizer-turns"].strength == "watch"
    assert found(run(layers=up, losses=RISING))["optimizer-turns"].strength == "act"
    meant = found(run(layers=up, losses=tuple(-x for x in WELL), maximize=True))
    assert "optimizer-turns" not in meant
    assert {finding.strength for finding in meant.values()} <= {"note"}


def test_a_positive_loss_that_an_optimizer_raises_may_be_an_objective() -> None:
    """Only that of targets is none for certain."""
    unclear = run(losses=RISING, maximize=True)
    first, *others = diagnose(unclear)
    assert (first.name, first.strength) == ("gradient-reversed", "watch")
    assert {finding.strength for finding in others} <= {"note"}
    assert diagnose(HITS["gradient-reversed by an optimizer that maximizes"])[0].strength == "act"


@pytest.mark.parametrize(("undone", "strength"), [(0.7, "watch"), (0.1, "note")])
def test_averages_that_stay_in_the_model_after_a_few_steps(undone: float, strength: str) -> None:
    steps = [LAYERS, LAYERS, AVERAGED, LAYERS, AVERAGED, LAYERS]
    first, *others = diagnose(run(layers=steps, weights_returned=[None, None, 0.0, undone, 0, 0]))
    assert (first.name, first.strength, others) == ("projection-fights", strength, [])
    assert "After step 14, 28" in first.summary


def test_weights_that_come_back_once_are_a_note() -> None:
    first, *others = diagnose(run(weights_returned=[None, None, 0.0, 1.0, 0.1, 0.0]))
    assert (first.name, first.strength, others) == ("weights-set-back", "note", [])


def test_a_decay_is_named_and_not_the_code_that_would_set_weights_back() -> None:
    first, *others = diagnose(HITS["settings-off by a decay that takes weights back"])
    assert "weight_decay is 0.5: each step pulls the weights towards 0 by 5%" in first.summary
    assert not any(finding.strength == "act" for finding in others)
    small = run(settings={"weight_decay": (0.1,)}, learning_rates=(0.1,))
    assert not diagnose(small)


@pytest.mark.parametrize("losses", [STILL, RISING])
def test_the_headline_says_what_a_loss_does_that_may_be_meant(losses: tuple[float, ...]) -> None:
    of = run(losses=losses, other_optimizers=("Adam",))
    does = "rises" if losses is RISING else "does not fall"
    assert running_headline(diagnose(of), of).startswith(f"Good to know: the loss {does}: 2.3")


def test_a_reading_that_cannot_be_raises_nothing() -> None:
    found(run(layers={name: reading(projection_cosine=1.5, scale_cv=-1.0) for name in "abc"}))
