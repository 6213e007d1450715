"""Whether the user's loop can train at all: what reports say of it, and what is meant."""

import math
from dataclasses import replace
from typing import Any

import pytest
from example_reports import running
from loop_runs import (
    AVERAGED,
    CREEPING,
    FADES,
    FADING,
    FAR,
    HITS,
    LAYERS,
    LONG,
    MEANT,
    OF_CLASSES,
    ONES,
    UP,
    run,
)
from made_records import FACTS, RISING, STILL, WELL, reading, record

from adiv_monitor.diagnosis import diagnose
from adiv_monitor.diagnosis.course import course
from adiv_monitor.diagnosis.diagnose import follows, running_headline
from adiv_monitor.diagnosis.finding import Finding
from adiv_monitor.diagnosis.record import Record

CERTAIN = {name.split()[0] for name in HITS}


def found(of: Record) -> dict[str, Finding]:
    return {finding.name: finding for finding in diagnose(of)}


@pytest.mark.parametrize("name", HITS)
def test_what_keeps_a_loop_from_training_comes_first(name: str) -> None:
    first, *_ = diagnose(HITS[name])
    assert first.name == name.split()[0]
    assert first.evidence and first.advice and first.summary and not follows(first)
    is_meant = name in (
        *("same-batch", "frozen", "loss-multiplied by its inverse", "state-lost now and then"),
        *("gradients-summed as the loss falls", "accumulation-cut for few batches"),
        "class-untaught",
    )
    assert (first.strength == "note") == is_meant


@pytest.mark.parametrize("name", MEANT)
def test_what_is_done_on_purpose_is_no_fault(name: str) -> None:
    assert not CERTAIN & found(MEANT[name]).keys()


@pytest.mark.parametrize("name", HITS)
def test_an_audit_asks_by_its_own_probes(name: str) -> None:
    audited = replace(HITS[name], facts=FACTS)
    of_both = {"rate-too-high", "rate-gone", "group-rates", "rate-zero"}
    of_both |= {"broadcast-loss", "double-softmax", "seed-again", "activated-logits"}
    of_both |= {"target-scale", "rounded-away", "zero-gradient", "softmax-over-samples"}
    of_both |= {"running-statistics", "class-untaught", "unshuffled", "softmax-of-one"}
    assert not (CERTAIN - of_both) & found(audited).keys()


CLIPPED, SOFT = HITS["clipping-always"], HITS["double-softmax"]
NO_RATE = HITS["rate-zero of one group"]
OF_FLOAT32 = dict.fromkeys("abc", reading(unchanged_share=0.9, weight_update_ratio=1e-8))
ROUNDED = {"losses": STILL, "layers": dict.fromkeys("abc", reading(unchanged_share=0.9))}
GONE = run(**ROUNDED, learning_rates=FADES)
BELOW_ZERO = HITS["settings-off by a rate below zero"]
BROADCAST = "MSELoss broadcasts the shapes (64, 1) and (64,)"
ADVERSARIAL = "no fault of generative adversarial networks"
STUCK = run(losses=STILL)
POSITIVES = {"loss_module": "BCEWithLogitsLoss", "loss_shapes": ((8, 1), (8, 1)), "labels": (18, 2)}
OF_EACH = {"loss_module": "BCELoss", "target_moments": [(0.5, 0.7), (0.5, -0.7)] * 3}
CONSTANT: list[tuple[str, tuple[float, ...], dict[str, Any]]] = [  # with losses of measured steps
    ("watch", (0.69, *[0.33, 0.32] * 3), {}),
    ("no", (0.69, *[0.318, 0.3135] * 3), {}),  # hardly better, but by many deviations
    ("no", (0.69, *[0.33, 0.32] * 3), {"loss_settings": ("weight",)}),
    ("no", (0.69, *[0.33, 0.32] * 3), {"loss_counts": [*[{1: 7}] * 5, {2: 7}]}),  # two heads
    ("no", (0.69, *[0.33, 0.32] * 3), {"other_optimizers": ("Adam",)}),
    ("no", (0.69, *[0.33, 0.32] * 3), {"labels": (10, 0)}),
    ("no", (0.69, *[0.33, 0.32] * 3), {"target_moments": (0.1, 0.1)}),  # soft labels
    ("watch", (0.69, *[0.55, 0.11] * 3), {**OF_EACH, "labels": [(10, 0), (8, 2)] * 3}),
    ("watch", (9.0, *[1.1, 0.98] * 3), {**OF_EACH, "loss_module": "MSELoss"}),
    ("no", (9.0, *[0.1, 1.6] * 3), {**OF_EACH, "loss_module": "MSELoss"}),
]


def after_a_batch(before: float) -> Record:
    """Return a run with a batch of a large loss, which is not what the loss was before it."""
    losses = (*(before,) * 14, 9.0, 9.0, *(4.0,) * 24)
    return run(losses=losses, layers=[LAYERS, LAYERS, FAR, *[LAYERS] * 3])


# Name and strength, or "no" where nothing is found; what is said; a run.
SAID: list[tuple[str, str, Record]] = [
    *((f"{name} {strength}", "", replace(HITS[name], losses=losses))
      for name in ("not-held", "unreached", "zeroed-early", "left-in-eval")
      for losses, strength in ((HITS[name].losses, "watch"), (STILL, "act"), ((), "watch"))),
    ("rate-too-low no", "", CLIPPED),
    ("rate-too-low watch", "",
     replace(CLIPPED, reports=tuple(replace(r, loss_gradients=()) for r in CLIPPED.reports))),
    ("gradients-summed note", "4 times as long", run(loss_gradients=ONES, layers=LONG)),
    ("gradients-summed note", "4 times as long", run(loss_gradients=ONES, losses=RISING)),
    ("rate-gone no", "", BELOW_ZERO),
    ("settings-off act", "lr is -0.1; such steps climb the loss. It was 0.1 at first.", BELOW_ZERO),
    ("rate-zero watch", "of layer 'c' is zero", NO_RATE),
    ("rate-zero act", "", replace(NO_RATE, losses=STILL)),
    ("broadcast-loss act", BROADCAST, HITS["broadcast-loss"]),
    ("double-softmax watch", "", SOFT),
    ("double-softmax act", "", replace(SOFT, losses=STILL)),
    ("activated-logits watch", "of the sigmoid as logits", HITS["activated-logits"]),
    ("activated-logits act", "", replace(HITS["activated-logits"], losses=STILL)),
    ("rounded-away act", "", run(**ROUNDED)),
    ("weights-set-back no", "", run(losses=UP, layers=FAR, weights_returned=0.6)),
    ("rounded-away no", "", GONE),
    ("rounded-away no", "", run(losses=STILL, layers=OF_FLOAT32)),
    ("rate-too-high act", "", after_a_batch(2.3)),
    ("rate-too-high no", "", after_a_batch(40.0)),
    ("loss-stuck watch", "", STUCK),
    ("loss-stuck watch", "falls by less than 5%: 2.14 at first, 2.07 at the end.",
     run(losses=(2.14, *[2.3] * 12, *[2.07] * 27))),
    ("loss-stuck note", ADVERSARIAL, run(losses=STILL, other_optimizers=("Adam",))),
    ("loss-stuck note", ADVERSARIAL, run(losses=tuple(-x for x in STILL))),
    ("loss-stuck note", ADVERSARIAL, replace(STUCK, reports=STUCK.reports[1:])),  # resumed
    ("loss-stuck note", "The loss falls by less than 5%: 552 at first, 536 at the end.",
     run(losses=CREEPING)),
    ("loss-stuck watch", "",
     run(losses=tuple(x - 20 * (-1) ** step for step, x in enumerate(CREEPING)))),
    ("loss-stuck watch", "", run(losses=(
        *CREEPING[:10], *(x + 6 for x in CREEPING[10:20]), *(537.0, 535.0) * 10))),
    ("loss-stuck watch", "", record(losses=CREEPING, chance=552.0)),
    ("class-weights watch", "class 0 10 times as much as class 1, which is 9 times as rare",
     run(**POSITIVES, loss_weights=(1.0, 0.1))),
    ("class-weights no", "", run(**POSITIVES, loss_weights=(1.0, 9.0))),
    ("class-weights watch", "belong to other classes",
     run(**OF_CLASSES, labels=(9, 90, 12), loss_weights=(1 / 90, 1 / 12, 1 / 9))),
    *((f"loss-stuck {strength}", "",
       run(loss_of=losses, **{**OF_CLASSES, "labels": (9, 1), "loss_counts": {1: 7}, **facts}))
      for strength, losses, facts in CONSTANT),
    *((finding, words, run(losses=(first, *[2.31] * 39), loss_module="CrossEntropyLoss",
                           loss_shapes=((64, classes), (64,))))
      for finding, words, first, classes in (
          ("loss-stuck watch", "ends at about 2.3", 3.5, 10), ("loss-stuck no", "", 3.5, 20),
          ("loss-stuck no", "", 150.0, 10), ("bad-initialisation act", "is 60", 60.0, 10),
          ("bad-initialisation no", "", 60.0, 20), ("loss-stuck no", "", 3.5, 5))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "words", "of"), SAID)
def test_what_is_said_and_how_strongly(name: str, words: str, of: Record) -> None:
    name, _, strength = name.partition(" ")
    finding = found(of).get(name)
    assert (finding.strength if finding else "no") == strength
    assert finding is None or words in finding.summary


def test_what_one_finding_says_the_others_do_not() -> None:
    assert diagnose(GONE)[0].name == "rate-gone", "which is why steps are lost to rounding"
    assert found(CLIPPED)["loss-stuck"].advice[0].fix is None
    assert found(NO_RATE)["rate-zero"].layers == ("c",)
    groups = run(learning_rates=(0.1, 0.2), norm_passes=[1, 8, 15, 22, 29, 36])
    twice = replace(groups, reports=(groups.reports[0], *groups.reports))  # as of two fits
    assert found(twice) == found(groups)
    of_module = run(losses=STILL, loss_module="CrossEntropyLoss")
    assert ADVERSARIAL in found(STUCK)["loss-stuck"].summary
    assert ADVERSARIAL not in found(of_module)["loss-stuck"].summary


def test_what_the_monitor_sees_of_the_loss_takes_three_steps() -> None:
    two = running(*HITS["broadcast-loss"].reports[:2])
    assert not two.record().probed, "two steps tell nothing"
    two.add(HITS["broadcast-loss"].reports[2])
    assert [*two.record().probed] == ["broadcast-loss"]


def test_a_rate_that_is_too_high_explains_what_follows_from_it() -> None:
    """Layers that overshoot at first may stand still, be dead or be infinite later."""
    broken = run(losses=(*UP[:20], math.nan), layers=FAR)
    first, *others = diagnose(replace(broken, first_non_finite="the loss", non_finite_since=20))
    assert (first.name, first.strength) == ("rate-too-high", "act")
    assert {f.name: f.strength for f in others}["non-finite"] == "watch"


def test_the_group_whose_rate_is_gone_is_named() -> None:
    fading = run(**FADING, groups={"a": 0, "b": 1, "c": 1})
    finding = found(fading)["rate-gone"]
    assert (finding.layers, finding.since, finding.strength) == (("a",), 14, "watch")
    assert "of param_groups[0], over that of the other groups, is below 0.001" in finding.summary


def test_groups_whose_rates_jump_are_named_together() -> None:
    jumps = [*[(0.1, 0.01, 0.02)] * 4, *[(0.1, 0.3, 0.2)] * 2]
    groups = {"a": 0, "b": 1, "c": 2}
    (jump,) = (f for f in diagnose(run(learning_rates=jumps, groups=groups)) if f.since == 28)
    assert (jump.name, jump.layers) == ("rate-rises", ("b", "c"))
    assert "param_groups[1], param_groups[2] jumps by a factor of up to 30" in jump.summary


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
    of = run(11, losses, layers=[layers, *[after] * 6, LAYERS, *[after] * 3])  # alive in one step
    assert next(iter(found(of))) == first


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


@pytest.mark.parametrize("few", [run(2, STILL), run(12, STILL[:12], every=1)])
def test_few_steps_may_be_the_beginning_of_any_run(few: Record) -> None:
    assert "loss-stuck" not in found(few)
    assert "loss-stuck" in found(run(losses=STILL))
