"""Every sentence of a finding is printed where its number says so, and not on the other side."""

import ast
import inspect
import math
import re
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from loop_runs import CREEPING
from loop_runs import HITS as LOOP
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

from adiv_monitor.audit.trials.fixes import FIXES
from adiv_monitor.diagnosis import diagnose, diagnosis, faults, own_run
from adiv_monitor.diagnosis.diagnosis import Diagnosis
from adiv_monitor.diagnosis.finding import RATES, Advice, Finding, Trial, unrefuted
from adiv_monitor.diagnosis.record import (
    ActivatedOutput,
    Fact,
    Facts,
    Probed,
    Record,
    UnitStatistics,
    WeightStatistics,
    Wiring,
)
from adiv_monitor.diagnosis.running import Running
from adiv_monitor.report import LayerReading, StepReport

FAMILIES = Path(faults.__file__).parent
LOOKED_AT = ("course.py", "phases.py", "readings.py")  # by rules, beside them
NAMES = "abc"
SILENT = ("Evidence", "fault", "describe")  # what these are given is no sentence


class Row(NamedTuple):
    """A sentence, or a part of one, of a finding; a run that says it, and one that does not."""

    finding: str
    sentence: str
    by: Record
    but_not_by: Record


def layers(**values: object) -> dict[str, LayerReading]:
    return {name: reading(**values) for name in NAMES}


def by_steps(*steps: dict[str, LayerReading], **values: object) -> Record:
    """A run whose measured steps read differently."""
    reports = tuple(StepReport(10 * i, step, {}, 1.0) for i, step in enumerate(steps))
    return record(reports=reports, **values)


def settings(**values: object) -> Facts:
    return replace(FACTS, settings={**FACTS.settings, **values})


def units(function: str = "relu", dead: int = 40, share: float = 0.1, path: str = "5") -> Record:
    return record(units={path: UnitStatistics(function, 64, dead, share, 20)}, losses=STILL)


def first_weight(**values: float) -> Record:
    weights = record().weights
    return record(weights={**weights, "a": replace(weights["a"], **values)}, losses=STILL)


def high_first_loss(gain: float) -> Record:
    weights = dict.fromkeys(NAMES, WeightStatistics(gain, 0, 0))
    return record(losses=tuple(40 * 0.9**s for s in range(STEPS)), weights=weights)


def inputs(**values: float) -> Record:
    return record(inputs={"0": replace(INPUTS, **values)})


def clipped(length: float, facts: Facts = FACTS) -> Record:
    return record(facts=replace(facts, clip_norm=0.5), gradient_norms=(length,) * STEPS)


def overfit(loss: float, losses: tuple[float, ...] = WELL, falls: bool = False) -> Record:
    trial = Trial("overfit", 100, loss, 2.3, None, 0.01, falls=falls)
    return record(overfit=trial, losses=losses)


PLAIN = settings(momentum=0.0)
UP = {"parameter_cosine": -0.3, "descent": -0.01}
FIRST_WELL = layers()
# Over many steps they go uphill, but not at the first, which has no past.
LATER_UP = by_steps(FIRST_WELL, *[layers(**UP)] * 3, losses=RISING)
TURNED = by_steps(*[layers(parameter_cosine=-0.3)] * 4)  # by layers; their batch's loss falls
LONG = settings(momentum=0.99)
NOISY = tuple(2.3 - 0.02 * i + 0.6 * (-1) ** i for i in range(STEPS))
FEW_AND_NOISY = (2.3, 0.9, 2.1, 0.9, 2.2, 1.0, 2.1, 0.9, 2.0, 1.0, 2.2, 0.8)
PARTS = dict.fromkeys(["a", "b"], reading()) | {"c": reading(kind="gain")}
DEAD = record(
    units={}, reports=tuple(
        StepReport(10 * i, {**layers(), "a": reading(idle_share=1.0, module="Linear")}, {}, 1.0)
        for i in range(6)
    ),
)  # fmt: skip
SEVEN_OFF = record(
    {str(i): reading(update_ratio=9.0 if i < 7 else 0.02, effective_lr=1.0) for i in range(20)}
)
UNSEEN = {"inputs": {}}
FAR = layers(update_ratio=3.0)
SLOW = layers(update_ratio=1e-3)
SHRUNK = (*(10.0,) * (STEPS - 1), 2.0)
LOW = trials(own=2.28, x01=2.3, x10=1.0)  # act
LOWISH = trials(own=2.0, x01=2.29, x10=1.3)  # watch
HIGH = trials(own=2.2, x01=0.5)
AT_FIRST = {factor: replace(trial, steps=13) for factor, trial in HIGH.items()}


def probed(name: str, *facts: Fact, **values: object) -> Record:
    """A run of which a probe found something."""
    return record(probed={name: Probed(facts)}, **values)


def zero(initial: float) -> Record:
    return probed("rate-zero", Fact("a.weight", {"share": 0.3, "initial_lr": initial}))


def coarse(share: float) -> Record:
    return probed("rounded-away", Fact("", {"share": share}, {"dtype": "bfloat16"}))


def hooked(ratio: float, cosine: float) -> Record:
    return probed("gradient-hooks", Fact("", {"ratio": ratio, "cosine": cosine}))


def differs(ratio: float, place: str = "Round") -> Record:
    return probed("gradient-differs", Fact(place, {"ratio": ratio}))


def dropped(loss: float, **values: object) -> Record:
    fact = Fact("dropout in 'a'", {"rate": 0.9, "with": loss, "without": 1.0})
    return probed("dropout-too-high", fact, **values)


def in_eval(times: int) -> Record:
    return probed("dropout-in-eval", *[Fact("dropout in 'a'", {"rate": 0.5})] * times)


def running(momentum: float) -> Record:
    return probed("running-statistics", Fact("a", {"momentum": momentum}))


def of_one(function: str) -> Record:
    words = {"shape": "(64, 1)", "function": function}
    return probed("softmax-of-one", Fact(function, {}, words))


def out_of_range(share: float) -> Record:
    fact = Fact("relu", {"share": share}, {"low": "0", "high": "inf"})
    return probed("targets-out-of-range", fact)


def no_probability(share: float) -> Record:
    words = {"function": "binary_cross_entropy", "farthest": "255"}
    return probed("targets-out-of-range", Fact("bce (net.py:7)", {"share": share}, words))


def of_several(share: float, function: str = "softmax") -> Record:
    fact = Fact(f"{function} (net.py:7)", {"share": share}, {"function": function, "sum": "1"})
    return probed("targets-out-of-range", fact)


def mixed(**words: str) -> Record:
    fact = Fact("gru in 'a'", {"share": 0.9, "independent": 0.1}, words)
    return probed("samples-mixed", fact)


def carried(of: str, goes_on: str = "no") -> Record:
    return probed("state-carried", Fact("", {"outputs": 0.1}, {"of": of, "goes on": goes_on}))


UNREAD = probed("batch-part-unread", Fact("", {"unread": 1.0, "read": 0.0}, {"shape": "(8, 4)"}))


def scrambled(permutes: float, times: int = 1) -> Record:
    words = {"of": "(8, 4, 4, 3)", "to": "(8, 3, 4, 4)"}
    return probed("reshape-scrambles", *[Fact("view", {"permutes": permutes}, words)] * times)


LEAK = probed("future-leak", Fact("", {"change": 0.5}))


def ignored(parts: int, **words: str) -> Record:
    words |= {"shape": "(64, 8)"}
    fact = Fact("places 1 to 7 of the input", {"share": 0.9, "parts": 1.0}, words)
    return probed("input-partly-ignored", *[fact] * parts)


BOTH_MIXED = replace(mixed(), probed={**mixed().probed, **ignored(1).probed}, losses=STILL)
UNORDERED = probed("order-ignored", Fact("", {"places": 8.0}))


def cut(cosine: float) -> Record:
    return probed("gradient-cut", Fact("detach in 'a'", {"cosine": cosine}))


CUT_OFF = replace(cut(0.0), wiring=Wiring(unreached=("a.weight",)))


def in_order(ratio: float, z: float) -> Record:
    return probed("unshuffled", Fact("", {"ratio": ratio, "z": z}))


PLACED = probed("samples-mixed", Fact("", {"share": 1.0}, {"by": "place"}))


def constant(of: str) -> Record:
    numbers = {"samples": 256.0, "share": 0.9, "index": 0.0, "value": 1.0}
    return probed("constant-data", Fact("", numbers, {"of": of}))


def constant_part(of: str, kind: str = "float") -> Record:
    numbers = {"samples": 256.0, "value": 0.0, "features": 9.0, "still": 2.0}
    words = {"of": of, "input": "x", "type": kind, "at": "3, 7"}
    return probed("constant-data", Fact("", numbers, words))


def smoothed(share: float) -> Record:
    return probed("label-smoothing", Fact("cross_entropy", {"share": share, "classes": 10.0}))


def weighted(slope: float) -> Record:
    numbers = {"slope": slope, "correlation": 1.0, "times": 9.0, "more": 10.0}
    return probed("class-weights", Fact("nll_loss", numbers, {"common": "0", "rare": "1"}))


def padded(share: float) -> Record:
    return probed("padding-counts", Fact("", {"share": share}, {"shape": "(32, 16)"}))


def penalised(learnt: float) -> Record:
    numbers = {"with": learnt, "without": 2.0, "others": 1.0}
    return probed("penalty-dominates", Fact("", {**numbers, "penalty": 30.0, "penalty after": 0.5}))


def divided(times: float) -> Record:
    return probed("unsafe-division", Fact("div in 'a'", {"close": 0.09, "times": times}))


def leaked(share: float) -> Record:
    numbers = {"feature": 7.0, "share": share, "samples": 512.0}
    return probed("target-leak", Fact("input 'x'", numbers))


def moved(own: float) -> Record:
    return probed("targets-moved", Fact("", {"own": own, "best": 0.5}, {"move": "transposed"}))


def at_places(count: float) -> Record:
    return probed("target-is-input", Fact("", {"places": count}))


CHOSEN = probed("target-is-input", Fact("", {"places": 0.0}, {"of": "chosen places"}))
UNTAUGHT = probed("class-untaught", Fact("", {"class": 0.0, "samples": 96.0, "of": 256.0}))
UNCENTRED = record({"a": reading(common_share=0.9)}, inputs={"0": replace(INPUTS, mean=10.0)})
ALIKE = probed("collapsed", Fact("", {"before": 0.5, "after": 0.05, "loss": -1.0}))
LOST = Fact("relu in 'a'", {}, {"by": "lost"})
AFFINE = Fact("", {"layers": 3.0}, {"by": "affine"})
ANEW = Fact("linear (net.py:7)", {"share": 0.1}, {"made": "anew"})
SAME = probed("same-batch", Fact("", {"different": 1.0, "batches": 60.0}, {"of": "batches"}))
ONE = probed("same-batch", Fact("", {"different": 1.0, "batches": 60.0}, {"of": "one"}))
REPEATED = probed("same-batch", Fact("", {"share": 0.125}, {"of": "samples"}))
BOUNDED = probed(
    "bounded-logits", Fact("cross_entropy", {"share": 1.0, "classes": 10.0, "floor": 0.8})
)


def no_log(given: str, name: str = "nll_loss") -> Record:
    return probed("no-log", Fact(name, {}, {"function": name, "given": given}))


SHARES, LOGITS, ASTRAY = no_log("probabilities"), no_log("logits"), no_log("another axis")
BROADCAST = probed(
    "broadcast-loss", Fact("sub (loss.py:3)", {"times": 64.0}, {"of": "(64, 1)", "and": "(64,)"})
)
MULTIPLIED = probed(
    "broadcast-loss",
    Fact("mul (loss.py:3)", {"times": 64.0},
         {"of": "(64, 1)", "and": "(64,)", "by": "another function"}),
)  # fmt: skip
AS_PROBABILITIES = probed(
    "logits-as-probabilities", Fact("", {"at": 0.0, "beyond": -1 / 3, "outside": 0.48})
)


def misplaced(share: float) -> Record:
    words = {"of": "(10, 32, 4)", "to": "(32, 10)"}
    return probed("targets-misplaced", Fact("", {"share": share}, words))


REVERSED, OF_DISTANCES = (
    probed("loss-reversed", Fact("", {"right": 0.9, "wrong": 0.1}, {"outputs": outputs}))
    for outputs in ("signed", "positive")
)
PAIRS = probed(
    "pairs-reversed", Fact("", {"share": 0.2, "errors": -6.0, "drawn": 50, "pushed": 60})
)
BESIDE = record(probed={"zero-gradient": Probed((Fact("kl_div (loss.py:3)"),))})
OVER_SAMPLES = probed("softmax-over-samples", Fact("softmax", {}, {"shape": "(64, 10)"}))
HIDDEN = probed("hidden-parameters", Fact("a[0].weight", {"share": 0.5}))
UNBOUNDED = tuple(2 - 1e6 * (i / (STEPS - 1)) ** 3 for i in range(STEPS))
DENSITY = tuple(2 - 1e3 * (i / (STEPS - 1)) ** 0.5 for i in range(STEPS))  # ever slower


def epsilon(share: float) -> Record:
    numbers = {"share": share, "epsilon": 1.0, "root": 0.0015}
    return probed("epsilon-dominates", Fact("", numbers))


def unvarying(by: str, kind: str = "LayerNorm") -> Record:
    return probed("outputs-constant", Fact("a", {"share": 0.0}, {"class": kind, "by": by}))


OVER_QUERIES = Fact(
    "softmax in 'a'", {"sums": 1.0},
    {"product": "matmul in 'a'", "shape": "(8, 4, 16, 16)", "axis": "2", "over": "3"},
)  # fmt: skip


def sharp(size: float) -> Record:
    fact = Fact("softmax in 'a'", {"spread": size, "largest": 0.84})
    return probed("attention-saturated", fact)


DROPPED = probed(
    "dropout-on-outputs", Fact("dropout in 'a'", {"rate": 0.3, "with": 2.0, "without": 1.0})
)


def normalised(mean: float, std: float) -> Record:
    numbers = {"mean": 0.0, "std": 1.0, "target mean": mean, "target std": std}
    return probed("outputs-normalised", Fact("batch_norm in 'a'", numbers))


FLAT = record(gradient_norms=(0.0,) * STEPS, wiring=Wiring(zero_gradient=("a.weight",)))
NO_SLOPE = record({"a": reading(idle_share=1.0, scale_mean=17.0)}, losses=STILL,
                 wiring=Wiring(zero_gradient=("a.weight",)))  # fmt: skip
ITSELF = replace(FLAT, probed={"zero-gradient": Probed((Fact("mse_loss (loss.py:3)"),))})


def of_slope(share: float | None = None) -> Record:
    """A step, or a clip of this share of the outputs."""
    numbers, kind = ({}, "step") if share is None else ({"share": share}, "clip")
    return probed("zero-slope", Fact("round (loss.py:3)", numbers, {"kind": kind}))


ADDED = probed(
    "term-without-graph", Fact("add (loss.py:3)", {"value": 8.78, "moved": 8.82, "loss": 8.76}),
)  # fmt: skip


def opposed(largest: float, other: str = "mean (loss.py:4)") -> Record:
    numbers = {"cosine": -0.999, "largest": largest, "ratio": 0.86}
    return probed("terms-opposed", Fact("mean (loss.py:3)", numbers, {"other": other}))


def explained(reference: float, model: float, per_class: float = 40.0) -> Record:
    numbers = {"reference": reference, "model": model, "error": 0.05, "per class": per_class}
    return probed("behind-reference", Fact("", {**numbers, "held out": 200.0}))


BELOW = tuple(1 - 0.1 * i for i in range(STEPS))
GOES_ON = probed("unbounded-loss", Fact("", {"loss": -90.0, "times": 64.0}), losses=BELOW)


def negatively(negative: int) -> Record:
    numbers = {"loss": -90.0, "times": 64.0, "negative": negative}
    return probed("unbounded-loss", Fact("", numbers), losses=BELOW)


def by_reports(
    *steps: dict[str, LayerReading],
    rates: tuple[float, ...] = (),
    losses: tuple[float, ...] = (),
) -> Record:
    """A run that is known by its reports alone: one of every tenth step."""
    running = Running()
    for i, read in enumerate(steps):
        rate = rates[i : i + 1]
        running.add(StepReport(10 * i, read, {}, 1.0, learning_rates=rate))
    running.add_losses(dict(enumerate(losses)))
    return running.record()


def grouped(rate: float, move: float, optimizer: str = "SGD", like: float = 0.1) -> Record:
    """A run whose layer 'a' is in a parameter group of its own."""
    read = {"a": reading(update_ratio=move), "b": reading(), "c": reading()}
    reports = tuple(
        StepReport(10 * i, read, {}, 1.0, learning_rates=(like, rate),
                   groups={"a": 1, "b": 0, "c": 0}, optimizer=optimizer)
        for i in range(4)
    )  # fmt: skip
    return record(reports=reports, facts=replace(FACTS, optimizer=""))


def broken(*what: str) -> dict[str, LayerReading]:
    return layers() | {"b": reading(non_finite=what, module="Linear")}


def players(**values: object) -> Record:
    """A run known from its reports, in which another optimizer steps, too."""
    of = by_reports(*[layers()] * 4, **values)
    return replace(of, reports=tuple(replace(r, other_optimizers=("Adam",)) for r in of.reports))


HEALTHY = by_reports(*[layers()] * 4)
STANDS = layers(update_ratio=0.01) | {"a": reading(update_ratio=2.5e-4)}
LITTLE = layers() | {"a": reading(update_ratio=0.004)}
ROWS: list[Row] = [
    # non-finite
    Row("non-finite", "Some values are not finite after 3 steps. The first one is in: loss",
        record(losses=(2.3, 2.2, 2.1, math.nan)), record()),
    Row("non-finite", "before the first step", record(losses=(math.nan,)),
        record(losses=(2.3, math.nan))),
    Row("non-finite", "look for NaN and infinite entries in the data, and",
        record(losses=(math.nan,)), record(losses=(2.3, math.nan))),
    Row("non-finite", "for log(0), x/0 and sqrt(0) in the code of the place named here",
        by_reports(broken("inputs")), HEALTHY),
    Row("non-finite", "lower the learning rate", by_reports(broken("update")),
        by_reports(broken("inputs"))),
    Row("non-finite", "clip the gradient's norm", record(losses=(2.3, math.nan)),
        record(losses=(math.nan,))),
    Row("non-finite", "look for log(0), x/0, sqrt(0) and half precision in the code of the place "
        "named here",
        record(losses=(2.3, math.nan)), record(losses=(math.nan,))),
    Row("non-finite", "Replacing NaN by 0 (nan_to_num) hides where they come from",
        record(losses=(2.3, math.nan)), record()),
    Row("non-finite", "Step 10 is the first with values that are not finite (NaN, infinite or too "
        "large to square); at step 0 all were finite. The first one is in: the outputs of Linear "
        "'b'",
        by_reports(layers(), broken("gradient", "outputs")),
        by_reports(layers(), broken("gradient"))),
    Row("non-finite", "Step 1 is the first with values that are not finite. The first one is in: "
        "the loss",
        by_reports(layers(), losses=(1.0, math.nan)),
        by_reports(layers(), losses=(1.0, 0.5))),
    Row("non-finite", "The loss was not finite in 1 step, first at step 1, and was finite again "
        "later: these steps were skipped, as a gradient scaler does in half precision",
        by_reports(layers(), losses=(1.0, math.inf, 0.9)),
        by_reports(layers(), losses=(1.0, 0.9, math.inf))),
    Row("non-finite", "The loss was not finite in 2 steps, first at step 0",
        by_reports(layers(), losses=(math.inf, 0.9, math.nan, 0.8)),
        by_reports(layers(), losses=(1.0, math.inf, 0.9))),
    Row("non-finite", "look at the batches of these steps, unless a gradient scaler skips them",
        by_reports(layers(), losses=(1.0, math.inf, 0.9)),
        by_reports(layers(), losses=(1.0, 0.9, math.inf))),
    # What a small network tells
    Row("behind-reference", "A small network explains 66% of the labels of samples that it was not "
        "trained on. This model explains 10% of them, although it was trained on them. So the "
        "fault is in the model, the loss or the optimizer, not in the data; the audit can't tell "
        "in which of them",
        explained(0.66, 0.1), explained(0.66, 0.2)),
    Row("behind-reference", "This model explains 0% of them", explained(0.66, -0.11),
        explained(0.66, 0.1)),
    Row("behind-reference", "A small network explains", explained(0.4, 0.05), explained(0.2, 0.0)),
    Row("behind-reference", "start from a model, a loss and an optimizer that work on these data, "
        "and exchange one of them at a time", explained(0.66, 0.1),
        explained(0.66, 0.2)),
    Row("behind-reference", "More data do not help: a small network learns from these",
        explained(0.66, 0.1), explained(0.66, 0.2)),
    Row("behind-reference", "fix the findings above first, because they may cause this one",
        replace(explained(0.66, 0.1), probed={**HIDDEN.probed, **explained(0.66, 0.1).probed}),
        explained(0.66, 0.1)),
    Row("labels-unrelated", "Neither a small network nor this model predicts the labels of 200 "
        "samples better than a constant prediction does. Check whether the labels belong to their "
        "inputs. If they do, the task is too hard to learn from so few samples",
        explained(0.01, 0.02), explained(0.1, 0.02)),
    Row("labels-unrelated", "look at ten samples and their labels", explained(0.01, 0.1),
        explained(0.01, 0.3)),
    Row("labels-unrelated", "Neither a small network", explained(0.01, 0.02),
        explained(0.01, 0.02, per_class=5.0)),
    Row("unbounded-loss", "The loss has no lower bound: 1 at first, -2.9 at the end, and -90 "
        "if the weights of a copy move 64 times as far in the same direction. A lower loss does "
        "not show that the model learns", GOES_ON, replace(GOES_ON, losses=WELL)),
    Row("unbounded-loss", "The loss has no lower bound", GOES_ON,
        replace(GOES_ON, descent_share=0.5)),
    Row("unbounded-loss", "5 samples of the first batch have a negative weight: the lower what it "
        "multiplies, the lower the loss, without end", negatively(5), negatively(0)),
    Row("unbounded-loss", "1 sample of the first batch has a negative weight", negatively(1),
        negatively(0)),
    Row("unbounded-loss", "if the weights are rewards or advantages, judge the training by the "
        "mean reward, and draw new samples from the policy after each step or bound its change "
        "(PPO); else look where the signs come from", negatively(5), negatively(0)),
    # stands-still, outside-healthy, rate-decayed
    Row("stands-still", "In a typical step, the activations of layer 'a' move by 0.00025 times "
        "their length. Healthy layers that train from scratch move by at least 0.009",
        by_reports(*[STANDS] * 4), by_reports(*[LITTLE] * 4)),
    Row("stands-still", "In a typical step, the activations of layer 'a' move by 0.004 times their "
        "length", by_reports(*[LITTLE] * 4, losses=STILL), by_reports(*[LITTLE] * 4, losses=WELL)),
    Row("stands-still", "In a typical step of the last quarter, the activations of layer 'a' move "
        "by 0.004", by_reports(*[layers()] * 9, *[LITTLE] * 4, losses=STILL),
        by_reports(*[layers()] * 9, layers(), LITTLE, layers(), LITTLE, losses=STILL)),
    Row("stands-still", "In a typical step", by_reports(*[LITTLE] * 4, losses=STILL),
        by_reports(layers(), layers(), LITTLE, losses=STILL)),
    Row("stands-still", "all 4 layers",
        by_reports({n: reading(update_ratio=0.004) for n in "abcd"}, losses=STILL),
        by_reports({n: reading(update_ratio=0.004) for n in "abc"}, losses=STILL)),
    Row("stands-still", "use a learning rate 100 times as high, for these layers or for all "
        "(adiv-audit tries higher ones)",
        by_reports(*[STANDS] * 4), by_reports(*[LITTLE] * 4, losses=STILL)),
    Row("stands-still", "use a learning rate 3 times as high",
        by_reports(*[LITTLE] * 4, losses=STILL), by_reports(*[STANDS] * 4)),
    Row("stands-still", "change nothing, if pretrained weights should stay close to their values",
        by_reports(*[STANDS] * 4), HEALTHY),
    Row("stands-still", "The loss still falls: in fine-tuning, layers need not move far",
        by_reports(*[STANDS] * 4, losses=WELL),
        by_reports(*[STANDS] * 4, losses=STILL)),
    Row("settled", "The activations of layer 'a' first moved as far as in healthy layers, and "
        "later by less than 0.009 times their length in a typical step. That is usual as a loss "
        "falls", by_reports(layers(), *[STANDS] * 3), by_reports(*[STANDS] * 4)),
    Row("settled", "The activations of layer 'a' first moved as far as in healthy layers",
        by_reports(layers(), *[STANDS] * 3, losses=WELL),
        by_reports(layers(), *[STANDS] * 3, losses=STILL)),
    Row("settled", "The activations of layer 'a' first moved as far as in healthy layers",
        by_reports(*[layers()] * 9, *[STANDS] * 3), by_reports(*[layers()] * 9, STANDS)),
    Row("stands-still", "The move of the activations of layer 'a' is not known: in no measured "
        "step were both their gradients and their outputs nonzero",
        by_reports(layers() | {"a": reading(update_ratio=math.nan)}), HEALTHY),
    Row("stands-still", "check whether gradients are zero, or are cleared before the step",
        by_reports(layers() | {"a": reading(update_ratio=math.nan)}), HEALTHY),
    Row("loss-stuck", "That is no fault of generative adversarial networks, of reinforcement "
        "learning, or of a run that was resumed.",
        players(losses=STILL), by_reports(*[layers()] * 4, losses=STILL)),
    Row("loss-stuck", "The loss falls by less than 5%: 552 at first, 536 at the end.",
        by_reports(*[layers()] * 4, losses=CREEPING), by_reports(*[layers()] * 4, losses=STILL)),
    Row("loss-stuck", "run adiv-audit: it looks for the cause, and tries learning rates",
        by_reports(*[layers()] * 4, losses=STILL), record(losses=STILL)),
    Row("stands-still", "The steps do not move the activations of layer 'a' at all: the learning "
        "rate is zero, or other code resets the weights",
        by_reports(*[layers() | {"a": reading(update_ratio=0.0)}] * 4), by_reports(*[STANDS] * 4)),
    Row("stands-still", "give these layers' parameters a learning rate above zero, unless they "
        "should not be trained", by_reports(*[layers() | {"a": reading(update_ratio=0.0)}] * 4),
        by_reports(*[STANDS] * 4)),
    Row("stands-still", "fix the findings above first, because they may cause this one",
        by_reports(STANDS | {"b": broken("inputs")["b"]}), by_reports(*[STANDS] * 4)),
    Row("non-finite", "look for NaN and infinite entries in the batches up to step 10",
        by_reports(layers(), broken("outputs")), record(losses=(2.3, math.nan))),
    Row("stands-still", "look again when the learning rate has reached its peak",
        by_reports(*[STANDS] * 3, rates=(0.01, 0.02, 0.03)),
        by_reports(*[STANDS] * 3, rates=(0.03, 0.03, 0.03))),
    Row("stands-still", "The learning rate still rises: measurements at its peak will be clearer",
        by_reports(*[STANDS] * 3, rates=(0.01, 0.02, 0.03)),
        by_reports(*[STANDS] * 3, rates=(0.03, 0.03, 0.03))),
    Row("outside-healthy", "the activations of layer 'a' move by more than 0.7 times their length",
        by_reports(*[layers(update_ratio=0.05) | {"a": reading(update_ratio=1.0)}] * 3),
        HEALTHY),
    Row("outside-healthy", "the gradient at layer 'a' is less than 0.03 times that at the last "
        "layer",
        by_reports(*[layers() | {"a": reading(effective_lr=400.0, scale_mean=9.0)}] * 3),
        by_reports(*[layers() | {"a": reading(effective_lr=400.0)}] * 3)),  # as 'b': a query
    Row("outside-healthy", "the gradient at layer 'c' is more than 70 times that at the last layer",
        by_reports(
            *[layers() | {"c": reading(descent=100.0, scale_mean=9.0), "d": reading()}] * 3
        ), HEALTHY),
    Row("outside-healthy", "the gradient is zero for a share of more than 0.15 of the rows of "
        "layer 'a' (padding, masked tokens, dead units)",
        by_reports(layers() | {"a": reading(idle_share=0.5)}, losses=STILL),
        by_reports(layers() | {"a": reading(idle_share=0.5)}, losses=WELL)),
    Row("outside-healthy", "the row scales of layer 'b' have a standard deviation of more than 0.8 "
        "times their mean",
        by_reports(layers() | {"b": reading(scale_cv=0.9)}, losses=STILL),
        by_reports(layers() | {"b": reading(scale_cv=0.9)}, losses=WELL)),
    Row("outside-healthy", "the row scales of layer 'b' have a standard deviation of more than 2 "
        "times their mean",
        by_reports(*[layers() | {"b": reading(scale_cv=2.5, kind="gain")}] * 3),
        by_reports(*[layers() | {"b": reading(scale_cv=0.9, kind="gain")}] * 3)),
    Row("outside-healthy", "the change of the weights of layer 'a' has a cosine below 0.98 with "
        "the optimizer's update",
        by_reports(*[layers() | {"a": reading(kind="gain", projection_cosine=0.5)}] * 3),
        by_reports(*[layers() | {"a": reading(kind="gain", projection_cosine=0.5)}] * 2)),
    Row("outside-healthy", "run adiv-audit: it looks for the cause, and tries fixes",
        by_reports(layers() | {"b": reading(scale_cv=0.9)}, losses=STILL), HEALTHY),
    Row("outside-healthy", "Some readings typically lie outside the healthy range",
        by_reports(layers() | {"b": reading(scale_cv=0.9)}, losses=STILL),
        record(layers() | {"b": reading(scale_cv=0.9)}, rates=HIGH)),
    Row("rate-decayed", "Since step 20, the learning rate is below half of its peak (at step 30 it "
        "is 0.01 times the peak), so the layers move less. The findings use the steps near the "
        "peak", by_reports(*[layers()] * 2, *[STANDS] * 2, rates=(1.0, 1.0, 0.01, 0.01)),
        by_reports(*[layers()] * 2, *[STANDS] * 2, rates=(1.0,) * 4)),
    # not-held, unreached, frozen, input-ignored
    Row("not-held", "The optimizer does not hold the parameter 'c.weight'. The loss has a gradient "
        "for it, but the optimizer never changes it", record(wiring=Wiring(not_held=("c.weight",))),
        record()),
    Row("not-held", "the parameters 'a', 'b', 'c' and 1 more",
        record(wiring=Wiring(not_held=tuple("abcd"))), record(wiring=Wiring(not_held=("a",)))),
    Row("not-held", "Another learning rate does not train",
        record(wiring=Wiring(not_held=("c.weight",))),
        record(wiring=Wiring(not_held=("c.weight",)), rates=LOW)),
    Row("unreached", "The loss depends on the parameter 'a.weight', but no gradient comes back",
        record(wiring=Wiring(unreached=("a.weight",))),
        record(wiring=Wiring(unreached=("a.weight",), unused=("a.weight",)))),
    Row("unreached", "The loss does not depend on the parameter 'a.weight': no step trains it",
        record(wiring=Wiring(unreached=("a.weight",), unused=("a.weight",))),
        record(wiring=Wiring(unreached=("a.weight",)))),
    Row("unreached", "no gradient comes back: the graph is cut at detach in 'a'.",
        CUT_OFF, record(wiring=Wiring(unreached=("a.weight",)))),
    Row("unreached", "remove the detach(), .data or torch.no_grad() at detach in 'a'",
        CUT_OFF, record(wiring=Wiring(unreached=("a.weight",)))),
    Row("unreached", "look for .detach(), .data, .item(), torch.no_grad() or argmax between",
        record(wiring=Wiring(unreached=("a.weight",))), CUT_OFF),
    Row("unreached", "No optimizer and no learning rate can train parameters without a gradient",
        record(wiring=Wiring(unreached=("a.weight",))),
        record(wiring=Wiring(unreached=("a.weight",)), rates=HIGH)),
    Row("frozen", "No step trains the parameter 'a.weight'",
        record(wiring=Wiring(frozen=("a.weight",))), record()),
    Row("frozen", "look like torch's initialisation, so they were probably never trained",
        record(wiring=Wiring(frozen=("a.weight",)), weights={"a": WeightStatistics(0.58, 0, 0)}),
        record(wiring=Wiring(frozen=("a.weight",)), weights={"a": WeightStatistics(0.9, 0, 0)})),
    Row("frozen", "look like torch's initialisation, so they were probably never trained",
        record(wiring=Wiring(frozen=("a.weight",)),
               weights={"a": WeightStatistics(0.58, 0, 0, largest=1.001)}),
        record(wiring=Wiring(frozen=("a.weight",)),
               weights={"a": WeightStatistics(0.58, 0, 0, largest=1.3)})),
    Row("input-ignored", "The outputs hardly change when inputs are exchanged",
        record(wiring=Wiring(input_matters=0.0)), record(wiring=Wiring(input_matters=0.01))),
    Row("input-ignored", "With more steps or another learning rate, the model can only learn",
        record(wiring=Wiring(input_matters=0.0)),
        record(wiring=Wiring(input_matters=0.0), rates=LOW)),
    # What copies of the model tell
    Row("hidden-parameters", "forward() uses 'a[0].weight', 'a[1].weight', 'a[2].weight' and 1 "
        "more, but the model does not register them as parameters: torch finds no parameters in "
        "plain lists",
        probed("hidden-parameters", *(Fact(f"a[{i}].weight", {"share": 0.1}) for i in range(4))),
        record(probed={"hidden-parameters": Probed()})),
    Row("hidden-parameters", "linear (net.py:7) uses a parameter that forward() makes anew in each "
        "step: its values are random each time, and no step trains them. Number of further such "
        "places: 1.", probed("hidden-parameters", ANEW, ANEW), probed("hidden-parameters", ANEW)),
    Row("hidden-parameters", "uses a parameter that forward() makes anew in each step: its values "
        "are random each time, and no step trains them.", probed("hidden-parameters", ANEW),
        HIDDEN),
    Row("hidden-parameters", "make the module or the parameter once, in __init__(), then the "
        "optimizer", probed("hidden-parameters", ANEW), HIDDEN),
    Row("hidden-parameters", "No learning rate trains a parameter that lives for one step",
        probed("hidden-parameters", ANEW), replace(probed("hidden-parameters", ANEW), rates=LOW)),
    Row("hidden-parameters", "Another learning rate does not train", HIDDEN,
        replace(HIDDEN, rates=LOW)),
    Row("hidden-parameters", "put modules into nn.ModuleList or nn.ModuleDict and tensors into "
        "nn.Parameter, then make the optimizer", HIDDEN, record()),
    Row("loss-stuck", "fix the findings above first", replace(HIDDEN, losses=STILL), HIDDEN),
    Row("rate-zero", "The learning rate is 0 for 30% of the parameters (the first is 'a.weight'). "
        "They receive a gradient, but no step changes them", zero(0.0),
        record(probed={"rate-zero": Probed()})),
    Row("rate-zero", "A scheduler set it to 0 and does not raise it within the steps of the audit: "
        "look for an integer division", zero(0.1), zero(0.0)),
    Row("rate-zero", "give this parameter group a learning rate, or set requires_grad=False",
        zero(0.0), record()),
    Row("rate-zero", "Any multiple of a learning rate of zero is zero", zero(0.0),
        replace(zero(0.0), rates=LOW)),
    Row("rounded-away", "A step leaves 80% of the entries that have a gradient unchanged to the "
        "last bit: the weights are bfloat16, and the step is smaller than their last digit",
        coarse(0.8), coarse(0.4)),
    Row("rounded-away", "keep the weights in float32, and compute in 16 bits under torch.autocast",
        coarse(0.8), coarse(0.4)),
    Row("rounded-away", "With a lower learning rate, even more steps are smaller than the weights' "
        "last digit",
        coarse(0.8), replace(coarse(0.8), rates=HIGH)),
    Row("gradient-hooks", "Hooks change the gradient between backward() and the optimizer's step: "
        "its length becomes 0.001 times as large, and its cosine with the original gradient is 1",
        hooked(0.001, 1.0), hooked(0.2, 0.95)),
    Row("gradient-hooks", "Hooks change the gradient between backward() and the optimizer's step",
        hooked(20.0, 1.0), hooked(9.0, 1.0)),
    Row("gradient-hooks", "its cosine with the original gradient is 0.5",
        hooked(1.0, 0.5), hooked(1.0, 0.95)),
    Row("gradient-hooks", "remove the hooks that change gradients", hooked(0.001, 1.0),
        hooked(1.0, 1.0)),
    Row("gradient-differs", "The gradient that the backward pass returns is not that of the loss: "
        "along it, the loss of the first batch falls by -0.5 times what the gradient predicts. The "
        "step goes uphill", differs(-0.5), differs(0.5)),
    Row("gradient-differs", "is not that of the loss: along it, the loss of the first batch falls "
        "by 1.5 times what the gradient predicts", differs(1.5), differs(1.05)),
    Row("gradient-differs", "check the backward() of 'Round' with torch.autograd.gradcheck, unless "
        "another gradient is meant", differs(0.5), differs(0.5, "")),
    Row("gradient-differs", "look for hooks on tensors (register_hook) and for values that leave "
        "the graph, unless another gradient is meant", differs(0.5, ""), differs(0.5)),
    Row("left-in-eval", "These normalisations are in evaluation mode while the model trains: 'a'. "
        "Their running mean is still 0 and their running variance 1, so they normalise nothing",
        probed("left-in-eval", Fact("a", {"given": 0.0})),
        probed("left-in-eval", Fact("a", {"given": 1.0}))),
    Row("left-in-eval", "call train() on these modules before training",
        probed("left-in-eval", Fact("a", {"given": 0.0})),
        probed("left-in-eval", Fact("a", {"given": 1.0}))),
    Row("left-in-eval", "The audit received the model in evaluation mode, and the running mean and "
        "variance of its normalisations are still 0 and 1. The audit trained it in training mode; "
        "in a training loop that does not call train(), these layers normalise nothing",
        probed("left-in-eval", Fact("a", {"given": 1.0})),
        probed("left-in-eval", Fact("a", {"given": 0.0}))),
    Row("left-in-eval", "call model.train() at the beginning of the training loop",
        probed("left-in-eval", Fact("a", {"given": 1.0})), record()),
    Row("batch-norm-starved", "These batch normalisations compute mean and variance from 2 values "
        "in each channel: 'a'. From so few values, both change strongly from batch to batch",
        probed("batch-norm-starved", Fact("a", {"values": 2.0})), record()),
    Row("batch-norm-starved", "use LayerNorm or GroupNorm instead",
        probed("batch-norm-starved", Fact("a", {"values": 2.0})), record()),
    Row("batch-norm-starved", "larger batches",
        probed("batch-norm-starved", Fact("a", {"values": 2.0})), record()),
    Row("dropout-too-high", "dropout in 'a' drops 90% of its input. The loss of the trained model "
        "is 2 with dropout and 1 without", dropped(2.0), record()),
    Row("dropout-too-high", "use a dropout rate of 0.1: the argument is the share to drop, not to "
        "keep",
        dropped(2.0), record()),
    Row("dropout-in-eval", "dropout in 'a' drops 50% in evaluation mode, too: two evaluations of "
        "the same batch differ", in_eval(2), record()),
    Row("dropout-in-eval", "Number of further such places: 1.", in_eval(2), in_eval(1)),
    Row("running-statistics", "consist to 99% of the last batch's", running(0.99), running(0.0)),
    Row("running-statistics", "have a momentum of 0.99: 'a'", running(0.99), record()),
    Row("running-statistics", "stay 0 and 1, whatever the data are", running(0.0), running(0.99)),
    Row("epsilon-dominates", "The optimizer divides the gradient by √v + ε. For 90% of the "
        "entries, its ε (1) is larger than √v (typically 0.0015): ε shortens their steps, which "
        "are no longer adapted to the size of their gradients", epsilon(0.9), epsilon(0.4)),
    Row("epsilon-dominates", "use the default eps of 1e-8", epsilon(0.9), epsilon(0.4)),
    Row("outputs-constant", "At the start, the outputs of LayerNorm 'a' are the same for all "
        "samples, although its inputs are not. The model's outputs are the same, too: what follows "
        "this module can only learn a constant.", unvarying("norm"), record()),
    Row("outputs-constant", "initialise its weight with other values than 0; that of a "
        "normalisation with 1", unvarying("weight"), unvarying("norm")),
    Row("outputs-constant", "normalise over more than one number, or remove the normalisation: one "
        "number minus its own mean is 0", unvarying("norm"), unvarying("weight")),
    Row("outputs-constant", "initialise the layer in front of it again, or make it wider: no input "
        "of any sample passes", unvarying("zeros", "ReLU"), unvarying("norm")),
    Row("outputs-constant", "look at what reaches this layer: next to its bias, it is too small to "
        "make a difference", unvarying("", "Linear"), unvarying("norm")),
    Row("attention-axis", "softmax in 'a' makes weights of shape (8, 4, 16, 16) that sum to 1 "
        "along axis 2, but matmul in 'a' sums over axis 3: the weights of a query do not sum to 1, "
        "so its result is no mean of the values.", probed("attention-axis", OVER_QUERIES),
        record()),
    Row("attention-axis", "Number of further such softmaxes: 1.",
        probed("attention-axis", OVER_QUERIES, OVER_QUERIES),
        probed("attention-axis", OVER_QUERIES)),
    Row("attention-axis", "take the softmax over the keys, the axis that the product with the "
        "values sums over, usually dim=-1", probed("attention-axis", OVER_QUERIES), record()),
    Row("attention-axis", "Another learning rate does not change the axis",
        probed("attention-axis", OVER_QUERIES),
        replace(probed("attention-axis", OVER_QUERIES), rates=LOW)),
    Row("attention-saturated", "Before training, the scores of a query at softmax in 'a' have a "
        "standard deviation of 10, and the softmax gives 84% of the weight to one key: so hard a "
        "choice passes little gradient to queries and keys", sharp(10.0), sharp(2.4)),
    Row("attention-saturated", "divide the scores by the square root of the width of the queries, "
        "and normalise the inputs of the attention", sharp(10.0), sharp(2.4)),
    Row("dropout-on-outputs", "dropout in 'a' sets 30% of the outputs to 0 in each step, and "
        "multiplies the others by 1/(1 − p), before the loss compares them with their targets",
        DROPPED, record()),
    Row("dropout-on-outputs", "remove the dropout behind the last layer", DROPPED, record()),
    Row("dropout-on-outputs", "Another learning rate does not remove this noise", DROPPED,
        replace(DROPPED, rates=LOW)),
    Row("outputs-normalised", "batch_norm in 'a' normalises the outputs: whatever the layers "
        "before it compute, they begin with a mean of 0 and a standard deviation of 1. The targets "
        "have 100 and 3",
        normalised(100.0, 3.0), normalised(0.5, 2.0)),
    Row("outputs-normalised", "remove the normalisation of the outputs", normalised(0.0, 10.0),
        normalised(0.0, 1.0)),
    Row("outputs-normalised", "standardise the targets", normalised(3.0, 1.0),
        normalised(0.9, 1.0)),
    Row("term-without-graph", "add (loss.py:3) adds 8.78 to the loss, 8.76 in all. This term "
        "depends on the parameters, but has no gradient: it changes the loss, and no step",
        ADDED, probed("term-without-graph")),
    Row("term-without-graph", "compute the term with a graph: no detach(), item() or no_grad() on "
        "its way, and create_graph=True in the torch.autograd.grad() of a gradient penalty; if "
        "only its value is wanted, log it and leave it out of the loss",
        ADDED, probed("term-without-graph")),
    Row("term-without-graph", "No learning rate makes a term count that has no gradient", ADDED,
        replace(ADDED, rates=LOW)),
    Row("terms-opposed", "Two terms of the loss are opposed, from mean (loss.py:3) and mean "
        "(loss.py:4): the cosine of their gradients is -0.999, and the shorter one has 86% of the "
        "other's length. They cancel each other", opposed(-0.98), opposed(-0.9)),
    Row("terms-opposed", "Two terms of the loss are opposed, from mean (loss.py:3): the cosine",
        opposed(-0.98, "mean (loss.py:3)"), opposed(-0.98)),
    Row("terms-opposed", "give each player its own loss: detach the generated samples in the "
        "discriminator's loss, and let the generator's loss train the generator only; else look "
        "for a term that is added with both signs", opposed(-0.98), opposed(-0.9)),
    Row("terms-opposed", "Another learning rate does not change what is left of two opposed "
        "gradients", opposed(-0.98), replace(opposed(-0.98), rates=LOW)),
    Row("zero-slope", "The slope of round (loss.py:3) is zero everywhere: no gradient passes it",
        of_slope(), of_slope(0.3)),
    Row("zero-slope", "use a smooth function in training, such as a sigmoid in place of rounding, "
        "or pass the gradient through: x + (f(x) - x).detach()", of_slope(), of_slope(0.3)),
    Row("zero-slope", "No learning rate trains layers that receive no gradient", of_slope(),
        replace(of_slope(), rates=LOW)),
    Row("zero-slope", "round (loss.py:3) clips the outputs, and its slope is zero where it does: "
        "after training, 30% of the outputs with a gradient are clipped although the loss would "
        "pull them back into the range", of_slope(0.3), of_slope(0.1)),
    Row("zero-slope", "give the loss the outputs as they are, or those of a smooth function, such "
        "as a sigmoid for values from 0 to 1; clip them only where they are used", of_slope(0.3),
        of_slope(0.1)),
    Row("zero-slope", "No learning rate moves an output that receives no gradient", of_slope(0.3),
        replace(of_slope(0.3), rates=LOW)),
    Row("zero-gradient", "The gradient of the loss is exactly 0 for all parameters in all "
        f"{STEPS} steps, so no step has a direction.", FLAT, record()),
    Row("zero-gradient", "mse_loss (loss.py:3) compares a tensor with itself: its loss is 0 "
        "whatever the model computes.", ITSELF, FLAT),
    Row("zero-gradient", "compare the outputs with the targets of the batch", ITSELF, FLAT),
    Row("zero-gradient", "kl_div (loss.py:3) compares a tensor with itself: both sides are equal "
        "to the last digit, also after training. This term of the loss is a constant and teaches "
        "nothing.", BESIDE, ITSELF),
    Row("zero-gradient", "compare the model's outputs with the targets, such as a teacher's "
        "outputs", BESIDE, ITSELF),
    Row("zero-gradient", "No learning rate makes a constant teach",
        BESIDE, replace(BESIDE, rates=LOW)),
    Row("zero-gradient", "look in the loss for a comparison of the outputs with themselves, for "
        "rounding and clamps, and for a margin that every sample already satisfies", FLAT, ITSELF),
    Row("zero-gradient", "The gradient at layer 'a' is exactly 0 in all steps, and that at layer "
        "'b' is not: a function between them has a derivative of 0, so what comes before it learns "
        "nothing", NO_SLOPE, replace(NO_SLOPE, wiring=Wiring())),
    Row("zero-gradient", "look between these layers for rounding, sign, argmax, comparisons and "
        "clamps, whose derivative is 0, and for units that are flat for all rows", NO_SLOPE, FLAT),
    Row("zero-gradient", "No learning rate moves weights without a gradient", FLAT,
        replace(FLAT, rates=LOW)),
    Row("collapsed", "The outputs of different samples become alike: 0.5 of their mean square "
        "varies between samples at the start, 0.05 after training. If all samples had the same "
        "outputs, whichever these are, the loss would be -1, as low as after training: it does "
        "not keep samples apart", ALIKE, record(probed={"collapsed": Probed()})),
    Row("collapsed", "add what keeps the outputs of different samples apart: negative pairs, a "
        "term for their variance, or a stop-gradient on one of two views behind a predictor",
        ALIKE, record()),
    Row("collapsed", "Another learning rate leads to the same outputs, sooner or later", ALIKE,
        replace(ALIKE, rates=LOW)),
    Row("samples-mixed", "The predictions for one sample change if the input of another sample "
        "changes (90% of the outputs do). The first function that mixes samples is gru in 'a'",
        mixed(), record()),
    Row("samples-mixed", "set batch_first=True, or put the samples along the second axis",
        mixed(batch_first="False"), mixed()),
    Row("samples-mixed", "look in this function for a mean, a softmax, attention or a reshape over "
        "axis 0",
        mixed(), record()),
    Row("samples-mixed", "Another learning rate does not separate the samples", mixed(),
        replace(mixed(), rates=LOW)),
    Row("samples-mixed", "The predictions for a sample change if the batch is put in another order "
        "(100% of the outputs do): they depend on the sample's place in the batch", PLACED,
        mixed()),
    Row("samples-mixed", "look in forward() for positions, an arange or a table that is indexed "
        "along axis 0, the axis of the samples", PLACED, mixed()),
    Row("samples-mixed", "Another learning rate does not make the samples' order irrelevant",
        PLACED, replace(PLACED, rates=LOW)),
    Row("state-carried", "The outputs for a batch depend on the batch before it, with the same "
        "weights: the model carries a state from call to call.", carried("batch"), record()),
    Row("state-carried", "Each sample takes over the state of "
        "the sample at its place in the batch before, which is another series", carried("sample"),
        carried("sample", "unknown")),
    Row("state-carried", "begin each batch with a fresh state, or let each batch go on where the "
        "one before ended", carried("sample"), carried("batch")),
    Row("state-carried", "look for what the model keeps from one call to the next, unless it is "
        "meant to, as a queue or running statistics are", carried("batch"), carried("sample")),
    Row("batch-part-unread", "The loss never reads tensor 1 of the batch, of the same shape as "
        "tensor 0, which it reads (shape (8, 4)): changing it changes no loss", UNREAD, record()),
    Row("batch-part-unread", "look for a place in the loss that uses one of the two twice, where "
        "it should use both, unless it is left out on purpose", UNREAD, record()),
    Row("reshape-scrambles", "view reshapes (8, 4, 4, 3) to (8, 3, 4, 4) across the axes: one "
        "position of the result holds entries of several positions and channels. Number of "
        "further such reshapes: 1.",
        scrambled(1.0, 2), scrambled(1.0)),
    Row("reshape-scrambles", "of several positions. If a shift is intended, this is no fault",
        scrambled(0.0), scrambled(1.0)),
    Row("reshape-scrambles", "Later positions may reach earlier ones this way",
        replace(scrambled(0.0), probed=scrambled(0.0).probed | LEAK.probed), scrambled(0.0)),
    Row("reshape-scrambles", "exchange axes with permute or transpose: view and reshape can only "
        "split axes and join neighbouring ones", scrambled(1.0), record()),
    Row("gradient-cut", "The gradient is cut at detach in 'a', in front of parameters that the "
        "loss depends on. The layers before the cut receive no gradient on this path",
        cut(0.5), cut(0.995)),
    Row("gradient-cut", "remove the detach(), .data or torch.no_grad() there, unless it is "
        "intended",
        cut(0.5), cut(0.995)),
    Row("constant-data", "All inputs of 256 samples are equal: no model can tell the samples apart",
        constant("inputs"), constant("labels")),
    Row("constant-data", "print two samples as the model receives them, and look for the step of "
        "the preparation after which they are equal", constant("inputs"), constant("labels")),
    Row("constant-data", "All labels of 256 samples are 1: a constant prediction is right, and "
        "nothing else is learned", constant("labels"), constant("inputs")),
    Row("constant-data", "print the labels where they are read, and look for the step of the "
        "preparation after which they are equal", constant("labels"), constant("inputs")),
    Row("constant-data", "In 90% of the batches, the loss ignores all targets: they equal "
        "ignore_index (0). Its mean over none is NaN", constant("ignored"), constant("rest")),
    Row("constant-data", "check the mask that chooses the targets to ignore: it may be inverted",
        constant("ignored"), constant("rest")),
    Row("constant-data", "The loss ignores 90% of the targets (ignore_index is 0), and all others "
        "are 1: a constant prediction is right, and nothing else is learned", constant("rest"),
        constant("labels")),
    Row("constant-data", "choose an ignore_index that is no class of the data, such as the default "
        "of -100", constant("rest"), constant("labels")),
    Row("constant-data", "Another learning rate or model does not help: there is nothing to learn",
        constant("rest"), replace(constant("rest"), rates=LOW)),
    Row("constant-data", "All entries of input 'x' are 0 in 256 samples: it tells nothing",
        constant_part("input"), constant_part("features")),
    Row("constant-data", "The features of input 'x' with index 3, 7 are the same in 256 samples, "
        "while the others vary: they tell nothing",
        constant_part("features"), constant_part("input")),
    Row("constant-data", "unless it is meant to be constant, look for the step of the preparation "
        "after which it is: a column that was never filled, or a division of whole numbers",
        constant_part("input"), constant("inputs")),
    Row("same-batch", "At most 12% of the samples of a batch differ from each other; the rest "
        "repeat them", REPEATED, SAME),
    Row("same-batch", "check whether the dataset uses its index, and what the sampler returns, "
        "unless samples are repeated on purpose", REPEATED, SAME),
    Row("same-batch", "Larger batches of the same samples teach no more", REPEATED, SAME),
    Row("same-batch", "All 60 batches are the same one", ONE, SAME),
    Row("same-batch", "if this is no test of overfitting, take a new batch for each step: "
        "next(iter(loader)) begins the loader again each time", ONE, SAME),
    Row("label-smoothing", "cross_entropy uses a label smoothing of 0.9: of 10 classes, the right "
        "one gets 19% of the target's weight", smoothed(0.9), smoothed(0.1)),
    Row("label-smoothing", "use label_smoothing=0.1 or less", smoothed(0.9), smoothed(0.1)),
    Row("label-smoothing", "Another learning rate does not make the targets clearer",
        smoothed(0.9), replace(smoothed(0.9), rates=LOW)),
    Row("class-weights", "nll_loss weights class 0 9 times as much as class 1, of which there are "
        "fewer samples already, by 10 times: the weights grow with the counts",
        weighted(1.0), weighted(-1.0)),
    Row("class-weights", "weight each class by the inverse of its count: counts.sum() / counts; "
        "for pos_weight, the number of negative targets over that of positive ones",
        weighted(1.0), weighted(0.4)),
    Row("class-untaught", "No sample with label 0 has a gradient at the outputs, neither before "
        "nor after training: 96 of 256 samples teach nothing", UNTAUGHT, record()),
    Row("class-untaught", "check what the loss expects as labels, such as −1 and 1 instead of 0 "
        "and 1, and whether a weight, a mask or an ignore_index leaves these samples out",
        UNTAUGHT, record()),
    Row("class-untaught", "More samples of these labels would teach nothing either",
        UNTAUGHT, record()),
    Row("padding-counts", "76% of the places that count in the loss are padding, whose targets are "
        "all the same: the loss is lower than that of the real places",
        padded(0.76), padded(0.04)),
    Row("padding-counts", "leave padding out of the loss: ignore_index, or the sum over real "
        "places divided by their number", padded(0.76), padded(0.04)),
    Row("padding-counts", "A lower loss does not show that the real places are predicted better",
        padded(0.76), padded(0.04)),
    Row("penalty-dominates", "The terms of the loss that do not depend on which input belongs to "
        "which target, 30 at first and 0.5 at the end, keep the others from learning it: if inputs "
        "are exchanged between samples, the others rise by 0.01, but by 2 in a copy that was "
        "trained without these terms", penalised(0.01), penalised(1.9)),
    Row("penalty-dominates", "give these terms far smaller weights, or raise them from zero over "
        "the first steps; check whether they are sums where the others are means",
        penalised(0.01), penalised(0.3)),
    Row("penalty-dominates", "Another learning rate does not change the weights of the terms",
        penalised(0.01), replace(penalised(0.01), rates=LOW)),
    Row("unsafe-division", "div in 'a' divides by numbers of both signs, some of them close to "
        "zero: the largest result is 132 times the median one, and changes its sign with the least "
        "change of the divisor", divided(132.0), divided(20.0)),
    Row("unsafe-division", "divide by something positive: a norm, a standard deviation, or "
        "softplus(x) + 0.1", divided(132.0), divided(20.0)),
    Row("unsafe-division", "A small constant added to the divisors only moves the zero",
        divided(132.0), divided(20.0)),
    Row("target-leak", "Feature 7 of input 'x' determines the target of all 512 samples: the model "
        "can copy it. A low loss does not show that it predicts well", leaked(1.0), leaked(0.99)),
    Row("target-leak", "leave the target's column out of the inputs, and what was made of it",
        leaked(1.0), leaked(0.99)),
    Row("targets-moved", "The targets of pixels fit the images better transposed: their "
        "correlation is then 0.5 instead of 0.1", moved(0.1), moved(0.3)),
    Row("targets-moved", "look at an image with its target over it, and compare the order of their "
        "axes, and the transforms that each gets", moved(0.1), moved(0.3)),
    Row("targets-moved", "More steps only teach the model to move its outputs", moved(0.1),
        moved(0.3)),
    Row("no-activation", "Nothing uses the result of relu in 'a'.", probed("no-activation", LOST),
        probed("no-activation", AFFINE)),
    Row("no-activation", "assign the result: x = relu(x), not relu(x)",
        probed("no-activation", LOST), probed("no-activation", AFFINE)),
    Row("no-activation", "The outputs are an affine function of the inputs, though 3 layers "
        "compute them: one linear layer can do the same", probed("no-activation", AFFINE),
        probed("no-activation", LOST)),
    Row("no-activation", "put an activation function between the layers, unless the model should "
        "be linear", probed("no-activation", AFFINE), probed("no-activation", LOST)),
    Row("no-activation", "More linear layers do not help: together they stay one",
        probed("no-activation", AFFINE), probed("no-activation", LOST)),
    Row("same-batch", "The number of different batches is 1, out of 60: the model never sees the "
        "rest of the data. What it would learn from the rest is not known", SAME, record()),
    Row("same-batch", "check which samples the loader returns: it returns the same ones each time; "
        "set shuffle=True", SAME, record()),
    Row("same-batch", "More steps repeat the same samples", SAME, record()),
    Row("unshuffled", "The labels within a batch vary 0.1 times as much as in shuffled batches: "
        "the data are sorted. Each step learns the labels of its batch and forgets the others",
        in_order(0.1, -20.0), in_order(0.8, -20.0)),
    Row("unshuffled", "shuffle the samples before they are split into batches (shuffle=True), "
        "unless the model should learn their order", in_order(0.5, -20.0),
        in_order(0.5, -3.0)),
    Row("unshuffled", "Larger batches of sorted data are sorted too", in_order(0.1, -20.0),
        in_order(0.8, -20.0)),
    Row("input-partly-ignored", "No output depends on places 1 to 7 of the input (shape (64, 8)), "
        "neither before nor after training: exchanging these parts between samples changes no "
        "output",
        ignored(1), record(probed={"input-partly-ignored": Probed()})),
    Row("input-partly-ignored", "fix the findings above first", BOTH_MIXED, ignored(1)),
    Row("input-partly-ignored", "places 1 to 7 of the input and 1 more (shape (64, 8))",
        ignored(4), ignored(3)),
    Row("input-partly-ignored", "check the mask: does True mark the positions to keep",
        ignored(1, masked="True"), ignored(1)),
    Row("input-partly-ignored", "follow these parts through forward(): look for masks, slices such "
        "as [:, -1], overwritten tensors, and divisions of whole numbers", ignored(1), record()),
    Row("order-ignored", "The outputs do not depend on the order of the 8 positions of an input",
        UNORDERED, record(probed={"order-ignored": Probed()})),
    Row("order-ignored", "add position embeddings (sinusoids, or a learnt table) to the outputs of "
        "the first layer, unless the inputs are sets", UNORDERED, record()),
    Row("one-sided-weights", "Nearly all initial values of 'a', 'a', 'a' and 1 more have the same "
        "sign (abs(mean) / rms is 0.87): all units of such a layer return nearly the same value",
        probed("one-sided-weights", *[Fact("a", {"share": 0.87})] * 4), record()),
    Row("one-sided-weights", "The initial values of 'a', 'a' are all equal: all units of such a "
        "layer return the same value, and learn the same",
        probed("one-sided-weights", *[Fact("a", {"share": 1.0})] * 2),
        probed("one-sided-weights", Fact("a", {"share": 1.0}), Fact("b", {"share": 0.5}))),
    Row("one-sided-weights", "draw the weights around zero: torch.randn times 1/√(fan-in), or "
        "nn.init, instead of torch.rand",
        probed("one-sided-weights", Fact("a", {"share": 0.87})), record()),
    Row("bounded-logits", "The logits of cross_entropy stay between −1 and 1 even if all weights "
        "are ten times as large. With 10 classes, its loss can't fall below 0.8",
        BOUNDED, record()),
    Row("bounded-logits", "multiply the logits by a factor of 10 to 30, or by a learnt one",
        BOUNDED, replace(BOUNDED, activated_output=ActivatedOutput("softmax", None))),
    Row("bounded-logits", "A higher learning rate does not widen the range of the logits", BOUNDED,
        replace(BOUNDED, rates=LOW)),
    Row("broadcast-loss", "sub (loss.py:3) broadcasts the shapes (64, 1) and (64,): the loss "
        "compares each output with the targets of all samples, and is lowest where every output "
        "is their mean", BROADCAST, record()),
    Row("broadcast-loss", "mul (loss.py:3) broadcasts the shapes (64, 1) and (64,): the loss "
        "combines each sample with the values of all samples, not only with its own",
        MULTIPLIED, BROADCAST),
    Row("broadcast-loss", "squeeze the one, or unsqueeze the other, so that both have the same "
        "shape", MULTIPLIED, BROADCAST),
    Row("broadcast-loss", "squeeze the outputs, or unsqueeze the targets, so that both have the "
        "same shape", BROADCAST, record()),
    Row("broadcast-loss", "Another learning rate leads to the same mean", BROADCAST,
        replace(BROADCAST, rates=LOW)),
    Row("no-log", "nll_loss expects log-probabilities, but receives probabilities: they sum to 1. "
        "The gradient of this loss is weakest where the model is wrong",
        SHARES, record(probed={"no-log": Probed()})),
    Row("no-log", "use log_softmax instead of softmax, or pass the inputs of the softmax to "
        "cross_entropy", SHARES, no_log("probabilities", "ctc_loss")),
    Row("no-log", "nll_loss expects log-probabilities, but receives logits: their exponentials do "
        "not sum to 1. This loss has no lower bound: it falls as the outputs grow, whatever the "
        "model learns", LOGITS, SHARES),
    Row("no-log", "use cross_entropy instead of nll_loss, or log_softmax before nll_loss", LOGITS,
        no_log("logits", "ctc_loss")),
    Row("no-log", "use log_softmax over the classes before ctc_loss", no_log("logits", "ctc_loss"),
        LOGITS),
    Row("no-log", "With a higher learning rate, the outputs only grow faster", LOGITS, SHARES),
    Row("no-log", "nll_loss expects log-probabilities, whose exponentials sum to 1 over the "
        "classes. Those of its input sum to 1 over another axis: the probabilities of one class "
        "compete with each other", ASTRAY, LOGITS),
    Row("no-log", "take the log_softmax over the classes: they are axis 1 of the input of "
        "nll_loss, and the last axis of that of ctc_loss", ASTRAY, LOGITS),
    Row("logits-as-probabilities", "The loss is 0 if the outputs equal their targets of 0 and 1, "
        "and -0.33 if they are twice as large: it expects probabilities. But 48% of the outputs "
        "are below 0 or above 1 after training. A lower loss does not show that the predictions "
        "are better", AS_PROBABILITIES, record(probed={"logits-as-probabilities": Probed()})),
    Row("logits-as-probabilities", "apply a sigmoid to the outputs before this loss, or a softmax "
        "over the classes if each sample has one", AS_PROBABILITIES, record()),
    Row("targets-misplaced", "The outputs of a sample are compared with the targets of other "
        "samples: a change of the first sample's targets changes the gradient at outputs that do "
        "not depend on its inputs (outputs of shape (10, 32, 4), targets of (32, 10))",
        misplaced(0.1), misplaced(1.0)),
    Row("targets-misplaced", "look at the axes of outputs and targets where the loss compares "
        "them: transpose one of them before both are flattened, and reorder both or none",
        misplaced(0.1), misplaced(0.6)),
    Row("targets-misplaced", "Another learning rate does not bring outputs and targets together",
        misplaced(0.1), replace(misplaced(0.1), rates=LOW)),
    Row("pairs-reversed", "The loss draws 50 pairs together and pushes 60 apart, the wrong way "
        "round: those that it pushes apart are nearer in the inputs in 80% of the comparisons",
        PAIRS, record()),
    Row("pairs-reversed", "exchange the labels 0 and 1 of the pairs, or the two terms of the loss: "
        "it should draw together pairs that are alike", PAIRS, record()),
    Row("pairs-reversed", "Another learning rate learns the reverse faster", PAIRS,
        replace(PAIRS, rates=LOW)),
    Row("loss-reversed", "The loss is 0.1 if the outputs contradict all targets, and 0.9 if they "
        "agree with all: training makes the predictions worse", REVERSED, OF_DISTANCES),
    Row("loss-reversed", "unless they are distances or energies, training makes them worse",
        OF_DISTANCES, REVERSED),
    Row("loss-reversed", "look for a wrong sign: an overlap or a likelihood that is minimised, "
        "where 1 minus the overlap, or the negative, should be; labels that are read the wrong way "
        "round",
        REVERSED, record(probed={"loss-reversed": Probed()})),
    Row("loss-reversed", "Another learning rate does not turn the loss round", REVERSED,
        replace(REVERSED, rates=LOW)),
    Row("logits-as-probabilities", "Another learning rate does not keep the outputs between 0 and "
        "1", AS_PROBABILITIES, replace(AS_PROBABILITIES, rates=LOW)),
    Row("softmax-of-one", "softmax of shape (64, 1) has only one class: its result is the same "
        "whatever the model computes, so no gradient reaches the model",
        of_one("softmax"), record()),
    Row("softmax-of-one", "remove the softmax, or replace it by a sigmoid", of_one("softmax"),
        of_one("cross_entropy")),
    Row("softmax-of-one", "give the model one output per class, or use "
        "binary_cross_entropy_with_logits", of_one("cross_entropy"), of_one("softmax")),
    Row("softmax-of-one", "No learning rate trains a model that receives no gradient",
        of_one("softmax"),
        replace(of_one("softmax"), rates=LOW)),
    Row("softmax-over-samples", "softmax of shape (64, 10) normalises over the samples instead of "
        "the classes: the result for one sample depends on the other samples of its batch",
        OVER_SAMPLES, record()),
    Row("softmax-over-samples", "use the axis of the classes: dim=1", OVER_SAMPLES, record()),
    Row("targets-out-of-range", "40% of the targets lie outside the range of the outputs: "
        "because of relu, all outputs lie between 0 and inf", out_of_range(0.4),
        out_of_range(0.005)),
    Row("targets-out-of-range", "remove that function from the outputs, or scale the targets into "
        "its range", out_of_range(0.4), out_of_range(0.005)),
    Row("targets-out-of-range", "Another learning rate does not widen the range", out_of_range(0.4),
        replace(out_of_range(0.4), rates=LOW)),
    Row("targets-out-of-range", "40% of the targets of bce (net.py:7) are below 0 or above 1 (such "
        "as 255): its loss then falls without bound", no_probability(0.4), no_probability(0.005)),
    Row("targets-out-of-range", "scale the targets into 0 to 1 (masks of 0 and 255: divide by 255, "
        "or compare with 0); for targets that are no probabilities use another loss, such as "
        "mse_loss", no_probability(0.4), out_of_range(0.4)),
    Row("targets-out-of-range", "Another learning rate does not give the loss a lower bound",
        no_probability(0.4), replace(no_probability(0.4), rates=LOW)),
    Row("targets-out-of-range", "The targets of 40% of the samples sum to more than 1.5, as where "
        "a sample has several classes, but the results of softmax (net.py:7) sum to 1: they can't "
        "be close to 1 for two classes at once", of_several(0.4), of_several(0.005)),
    Row("targets-out-of-range", "the results of the softmax in cross_entropy (net.py:7) sum to 1",
        of_several(0.4, "cross_entropy"), of_several(0.4)),
    Row("targets-out-of-range", "use a sigmoid for each class in place of the softmax",
        of_several(0.4), of_several(0.4, "cross_entropy")),
    Row("targets-out-of-range", "use binary_cross_entropy_with_logits, which has a sigmoid for "
        "each class", of_several(0.4, "cross_entropy"), of_several(0.4)),
    Row("target-is-input", "The target at each position is the last input token that the output "
        "depends on: the model learns to copy its input, not to predict the next token",
        at_places(0), record(probed={"target-is-input": Probed()})),
    Row("target-is-input", "The target at each position is an input token before the last one that "
        "the output depends on", at_places(-1), at_places(0)),
    Row("target-is-input", "The loss counts chosen places only, as that of a masked language "
        "model, and the model sees their tokens, which are the targets: it learns to copy them, "
        "not to fill in masked ones", CHOSEN, at_places(0)),
    Row("target-is-input", "mask the tokens whose targets count, and set the targets of the other "
        "places to -100", CHOSEN, at_places(0)),
    Row("target-is-input", "shift the labels by one: compare outputs[:, :-1] with tokens[:, 1:]",
        at_places(0), at_places(2)),
    Row("target-is-input", "The target at each position is the input token 2 places after the last "
        "one that the output depends on: the labels are shifted twice, and the model never learns "
        "to predict the next token", at_places(2), at_places(0)),
    Row("target-is-input", "shift the labels once: the data set, the model and the loss may each "
        "shift them", at_places(2), at_places(0)),
    Row("future-leak", "The targets are the next tokens of the input, and the outputs depend on "
        "later input tokens: the model sees the tokens that it should predict. A low loss does "
        "not show that it predicts well", probed("future-leak", Fact("", {"change": 0.5})),
        record(probed={"future-leak": Probed()})),
    Row("future-leak", "use a causal mask in attention (is_causal=True), and a single direction in "
        "recurrent layers", probed("future-leak", Fact("", {"change": 0.5})), record()),
    # The loss
    Row("unbounded-loss", "The loss falls without bound, ever faster: 2 at first, -1e+06 at the "
        "end. A lower loss does not show that the model learns",
        record(losses=UNBOUNDED), record(losses=DENSITY)),
    Row("unbounded-loss", "The loss has no lowest value: 2 at first, 1 at the end, and -1e+06 at "
        "10 times the learning rate",
        record(losses=(2.0, 1.0) * (STEPS // 2), rates={10.0: Trial("rate*10", STEPS, -1e6, 1.5,
                                                                    None, 0.1)}),
        record(losses=(2.0, 1.0) * (STEPS // 2), rates={10.0: Trial("rate*10", STEPS, -1.0, 1.5,
                                                                    None, 0.1)})),
    Row("unbounded-loss", "look for a term with the wrong sign (an error or a penalty that is "
        "subtracted instead of added), and for a learnt variance or temperature without a lower "
        "limit", record(losses=UNBOUNDED), record(losses=DENSITY)),
    Row("unbounded-loss", "Another learning rate only changes how fast the loss falls",
        record(losses=UNBOUNDED), record(losses=DENSITY)),
    Row("double-softmax", "The model's outputs are already probabilities",
        record(double_softmax=True), record(double_softmax=False)),
    Row("double-softmax", "The loss function takes a softmax of the outputs, and the loss applies "
        "a second softmax to them", record(activated_output=ActivatedOutput("softmax", None)),
        record(double_softmax=True)),
    Row("double-softmax", "A higher learning rate only saturates the first softmax",
        record(double_softmax=True), record(double_softmax=True, rates=LOW)),
    Row("activated-logits", "outputs of the relu of 'head.1' as logits. Such logits are never "
        "negative",
        record(activated_output=ActivatedOutput("relu", "head.1")),
        record(activated_output=ActivatedOutput("tanh", "head.1"))),
    Row("activated-logits", "outputs of the tanh of the model itself as logits. Such logits lie "
        "between −1",
        record(activated_output=ActivatedOutput("tanh", None)),
        record(activated_output=ActivatedOutput("relu", None))),
    Row("activated-logits", "are bounded on one side",
        record(activated_output=ActivatedOutput("gelu", None)),
        record(activated_output=ActivatedOutput("relu", None))),
    *(Row("activated-logits", words, record(activated_output=ActivatedOutput(name, None)),
          record(activated_output=ActivatedOutput("gelu", None)))
      for name, words in (("relu6", "lie between 0 and 6, and receive no gradient at 0 and at 6"),
                          ("sigmoid", "lie between 0 and 1"),
                          ("hardsigmoid", "lie between 0 and 1"),
                          ("hardtanh",
                           "lie between two bounds, and receive no gradient at the bounds"),
                          ("softsign", "lie between −1 and 1"))),
    Row("activated-logits", "remove that function from the outputs: the loss already contains a "
        "softmax (or sigmoid)", record(activated_output=ActivatedOutput("relu", None)),
        record(activated_output=ActivatedOutput("softmax", None))),
    Row("activated-logits", "Another learning rate does not widen the range of the logits",
        record(activated_output=ActivatedOutput("relu", None)),
        record(activated_output=ActivatedOutput("relu", None), rates=LOW)),
    Row("cannot-overfit", "the loss of this batch is still 2.2: the model does not overfit it.",
        overfit(2.2),
        overfit(1.0)),
    Row("cannot-overfit", "and falling: the model overfits it only slowly",
        overfit(2.2, falls=True),
        overfit(2.2)),
    Row("cannot-overfit", "More data do not help a model that can't learn a few samples",
        overfit(2.2),
        overfit(2.2, falls=True)),
    Row("loss-stuck", "The loss does not fall: 2.31 at first, 2.3 at the end.",
        record(losses=STILL), record()),
    Row("loss-stuck", "The loss rises", record(losses=RISING), record(losses=STILL)),
    Row("loss-stuck", "ends no lower than 2.3, the loss of a constant prediction: 4 at first",
        record(losses=(4.0, 3.0, 2.5, *STILL[3:])), record(losses=(4.0, 3.0, 2.5, *WELL[3:]))),
    Row("loss-stuck", "ends no lower than it began",
        record(losses=(1.0, *(3.0 - 0.06 * i for i in range(STEPS - 1)))),
        record(losses=(1.0, *(3.0 - 0.07 * i for i in range(STEPS - 1))))),
    Row("loss-stuck", "However, the model overfits one small batch", overfit(0.1, STILL),
        overfit(2.0, STILL)),
    Row("loss-stuck", "12 steps do not show whether the loss falls: it is 2.3 at first",
        record(losses=FEW_AND_NOISY), record(losses=STILL)),
    Row("loss-stuck", "learning rate × 10", record(losses=STILL), record(losses=RISING)),
    Row("loss-stuck", "learning rate × 0.1", record(losses=RISING), record()),
    Row("loss-stuck", "train for more steps: the mean over more batches has less noise",
        record(losses=FEW_AND_NOISY),
        record(losses=STILL)),
    Row("loss-stuck", "The learning rate still rises: measurements at its peak will be clearer",
        by_reports(*[layers()] * 3, rates=(0.01, 0.02, 0.03), losses=STILL),
        by_reports(*[layers()] * 3, rates=(0.03, 0.03, 0.03), losses=STILL)),
    Row("loss-stuck", "look again when the learning rate has reached its peak",
        by_reports(*[layers()] * 3, rates=(0.01, 0.02, 0.03), losses=STILL),
        by_reports(*[layers()] * 3, rates=(0.03, 0.03, 0.03), losses=STILL)),
    Row("target-scale", "A model whose outputs are all zero has a loss of 1e+06: the targets are "
        "in large units",
        record(chance=1e6, losses=(1e6, math.inf)), record(chance=11.0)),
    Row("target-scale", "use AdamW with learning rate 0.001: its steps do not depend on",
        record(chance=1e6), record(chance=1e6, facts=adam())),
    Row("target-scale", "Clipping the gradient's norm makes all steps equally long",
        record(chance=1e6), record(chance=11.0)),
    # Inputs
    Row("input-scale", "The entries of input '0' have a standard deviation of 160; initialisations "
        "and learning rates expect about 1", inputs(std=160.0),
        inputs(feature_std_ratio=40.0)),
    Row("input-scale", "One feature of input '0' has a standard deviation 40 times as large as "
        "that of",
        inputs(feature_std_ratio=40.0), inputs(std=160.0)),
    Row("input-scale", "A lower learning rate suits the first layer, and slows down all others",
        inputs(std=160.0), inputs(std=0.01)),
    Row("input-scale", "The inputs of the first layer have an rms of",
        record({"a": reading(scale_mean=1e5, features=64)}, **UNSEEN),
        record({"a": reading(scale_mean=65.0, features=64)}, **UNSEEN)),
    Row("input-mean", "of the mean square of input '0' is due to the mean, which all samples share",
        UNCENTRED, inputs(mean=0.5)),
    Row("input-mean", "of the mean square of the first layer's inputs is due to the mean",
        record({"a": reading(common_share=0.95, features=64)}, **UNSEEN),
        record({"a": reading(common_share=0.8, features=64)}, **UNSEEN)),
    Row("input-mean", "Dividing by a constant or by each row's length does not remove the mean",
        UNCENTRED, inputs(mean=0.5)),
    Row("row-spread", "The standard deviation of the row scale ‖φ‖² is 3 times its mean",
        record({"a": reading(scale_cv=3.0)}), record({"a": reading(scale_cv=0.9)})),
    Row("row-spread", "a few long rows determine each step, and the others hardly count",
        record({"a": reading(scale_cv=3.0)}), record({"a": reading(scale_cv=1.5)})),
    Row("row-spread", "Neither one constant scale nor another learning rate makes the rows more "
        "alike",
        record({"a": reading(scale_cv=3.0)}), record({"a": reading(scale_cv=3.0)}, rates=LOW)),
    # Initialisation and depth
    Row("bad-initialisation", "the first loss is 40, but a constant prediction has a loss of 2.3",
        record(losses=tuple(40 * 0.9**s for s in range(STEPS))), first_weight(gain=30.0)),
    Row("bad-initialisation", "layer 'a' multiplies the length of signals by 30",
        first_weight(gain=30.0),
        first_weight(bias=5.0)),
    Row("bad-initialisation", "the biases of layer 'a' have an rms of 5", first_weight(bias=5.0),
        first_weight(gain=30.0)),
    Row("bad-initialisation", "75% of the units of layer 'a' equal another",
        record(weights=dict.fromkeys(NAMES, WeightStatistics(0.6, 0, 0.75))),
        record(weights=dict.fromkeys(NAMES, WeightStatistics(0.6, 0, 0.4)))),
    Row("bad-initialisation", "initialise the weights again, scaled by their fan-in (He for ReLU, "
        "Xavier for tanh)", high_first_loss(0.58), high_first_loss(1.4)),
    Row("bad-initialisation", "With a lower learning rate, training needs longer to undo a bad "
        "start",
        first_weight(gain=30.0), replace(first_weight(gain=30.0), rates=HIGH)),
    Row("vanishing", "The gradient at layer 'a' is 0.000316 times as large as that at layer 'c': "
        "the first layers receive almost no gradient",
        record({"a": reading(descent=1e-9, scale_mean=17.0)}),
        record({"a": reading(descent=1e-4)})),
    Row("vanishing", "With a higher learning rate for all layers, the last layers move too far",
        record({"a": reading(descent=1e-9, scale_mean=17.0)}),
        record({"a": reading(descent=1e-9, scale_mean=17.0)}, rates=LOW)),
    Row("exploding", "The gradient at layer 'a' is 1e+04 times as large as that at layer 'c'",
        record({"a": reading(descent=1e6, scale_mean=17.0)}), record({"a": reading(descent=1.0)})),
    Row("exploding", "Clipping alone does not change the ratio of the layers' gradients",
        record({"a": reading(descent=1e6, scale_mean=17.0)}), record({"a": reading(descent=1.0)})),
    # Learning rates
    Row("rate-too-high", "Step 0 moved the activations of layer 'a' by 20 times their length, and "
        "the loss rose after it",
        record({"a": reading(update_ratio=20.0)}, losses=RISING),
        record({"a": reading(update_ratio=6.9)}, losses=RISING)),
    Row("rate-too-high", "At 0.1 times the learning rate, the loss after 40 steps is 0.5 instead "
        "of 2.2",
        record(rates=HIGH), record(rates=trials(own=0.6, x01=0.5, error=0.2))),
    Row("rate-too-high", "is 0.5; at the current one it diverges",
        record(rates=trials(own=math.inf, x01=0.5)), record(rates=HIGH)),
    Row("rate-too-high", "The run itself goes on, and reaches 0.396 in 40 steps: only its "
        "beginning is known to be rough.",
        record(rates=AT_FIRST), record(rates=AT_FIRST, losses=STILL)),
    Row("rate-too-high", "compare lower learning rates in runs as long as this one or longer",
        record(rates=AT_FIRST), record(rates=AT_FIRST, losses=STILL)),
    Row("rate-too-high", "More steps at this learning rate", record(rates=HIGH, losses=STILL),
        record(rates=HIGH)),
    Row("rate-too-high", "4 of 4 measured steps raised the loss of their own batch",
        record(realised=dict.fromkeys(range(0, STEPS, 10), 0.5)),
        record(FAR, losses=STILL)),
    Row("rate-too-high", "The first step moved the activations of the median layer by 3 times "
        "their length",
        record(FAR, losses=STILL), record(FAR)),
    Row("rate-too-low", "At 10 times the learning rate, the loss after 40 steps is 1 instead of "
        "2.28",
        record(rates=LOW), record(rates=HIGH)),
    Row("rate-too-low", "So short a run favours high learning rates: compare them in a longer one",
        record(rates=LOWISH), record(layers(update_ratio=0.006), rates=LOW)),
    Row("rate-too-low", "More layers or units do not help: the present ones have not learnt yet",
        record(layers(update_ratio=0.006), rates=LOW), record(rates=LOWISH)),
    Row("rate-too-low", "In a typical step, no layer's activations move by more than 0.001 times "
        "their length (median over the measured steps, limit 0.003). Such moves are proportional "
        "to the learning rate: at 10 times this one, the largest would be about 0.01",
        record(SLOW, losses=STILL), record({**SLOW, "a": reading()}, losses=STILL)),
    Row("rate-too-low", "at 10000 times this one, the largest would be about 0.021",
        by_reports(*[layers(update_ratio=2.1e-6)] * 4), by_reports(*[SLOW] * 4)),
    Row("rate-too-low", "learning rate × 10000",
        by_reports(*[layers(update_ratio=2.1e-6)] * 4), by_reports(*[SLOW] * 4)),
    Row("loss-stuck", "learning rate × 10000",
        by_reports(*[layers(update_ratio=2.1e-6)] * 4, losses=STILL),
        by_reports(*[SLOW] * 4, losses=STILL)),
    Row("rate-too-low", "too little at the beginning of a training, and usual at its end",
        by_reports(*[SLOW] * 4), by_reports(layers(), *[SLOW] * 3)),  # they moved at first
    Row("rate-too-low", "too little at the beginning of a training, and usual at its end",
        by_reports(*[SLOW] * 4, losses=STILL), record(SLOW, losses=STILL)),
    Row("uneven-rates", "In one step, the activations of layer 'a' hardly move: 5e-05 times as "
        "far, relative to their length, as those of the median layer. The limits are 1/50 and 30 "
        "times the median, here 0.0004 and 0.6", record({"a": reading(update_ratio=1e-6)}),
        record({"a": reading(update_ratio=9.0)})),
    Row("uneven-rates", "In one step, the activations of layer 'a' hardly move: 5e-05 times as "
        "far, relative to their length, as those of the median layer.",
        record({"a": reading(update_ratio=1e-6)}), record()),
    Row("uneven-rates", "The cause is the learning rate of a parameter group: 0.0001 in "
        "the optimizer's param_groups[1], and 0.1 for the other layers",
        grouped(1e-4, 2e-5), grouped(1e-4, 2e-7)),  # it does not explain all of that
    Row("uneven-rates", "The cause is the learning rate of a parameter group",
        grouped(1e-4, 2e-5), grouped(1e-1, 2e-5)),  # the same as that of the others
    Row("uneven-rates", "give param_groups[1] the learning rate of the other layers, 0.1 instead "
        "of 0.0001", grouped(1e-4, 2e-5), grouped(1e-2, 2e-5)),
    Row("uneven-rates", "No single learning rate suits both kinds of layers",
        grouped(1e-1, 2e-5), grouped(1e-4, 2e-5)),
    Row("uneven-rates", "use AdamW with learning rate 0.001: it scales each parameter's step",
        grouped(1e-1, 2e-5, "SGD"), grouped(1e-1, 2e-5, "AdamW")),
    Row("uneven-rates", "use AdamW with learning rate 0.001: it scales each parameter's step",
        record({"a": reading(update_ratio=1e-6)}), record()),
    Row("uneven-rates", "give these layers their own learning rates",
        record({"a": reading(update_ratio=1e-6)}), record()),
    Row("uneven-rates", "move unlike those of the other layers",
        record({"a": reading(update_ratio=9.0)}),
        record({"a": reading(update_ratio=1e-6)})),
    Row("uneven-rates", "No single learning rate suits both kinds of layers",
        record({"a": reading(update_ratio=9.0)}),
        record({"a": reading(update_ratio=9.0)}, rates=HIGH)),
    Row("uneven-rates", " and 1 more, each by the ratio of its limit to its move",
        SEVEN_OFF,
        record({"a": reading(update_ratio=9.0, effective_lr=9.0)})),
    Row("uneven-rates", "× 0.0667 for 'a'",
        record({"a": reading(update_ratio=9.0, effective_lr=9.0)}), SEVEN_OFF),
    # The user's own loop
    *(Row(name.split()[0], sentence, LOOP[name], HEALTHY) for name, sentence in (
        ("not-zeroed", "are not zeroed between optimizer steps: before the first backward pass of "
         "a step through these layers, `.grad` holds a gradient, of earlier steps or of another "
         "loss. Its norm is 0.9 times that of the gradient that the optimizer used"),
        ("not-zeroed", "call optimizer.zero_grad() once for every optimizer step, before the "
         "step's first backward pass, even if several backward passes are added up for a step; if "
         "you do, and another loss, such as a penalty, goes backward before the forward pass, all "
         "is well"),
        ("not-zeroed", "At a lower learning rate, the optimizer still follows the sum of all "
         "gradients so far"),
        ("not-held", "The optimizer does not hold the parameters of layer 'a', 90.0% of the "
         "trainable ones: they have a gradient, and nothing changes them."),
        ("not-held", "pass these parameters to the optimizer: create it after the model is "
         "complete, or add a parameter group"),
        ("not-held", "set requires_grad=False, if these parameters should not be trained"),
        ("not-held", "Another learning rate does not train them."),
        ("unreached", "No gradient reaches layer 'a', layer 'b', with 42.0% of the trainable "
         "parameters: they run in each measured step, but what the next layer gets has no "
         "gradient."),
        ("unreached", "look for .detach(), .data, .item(), torch.no_grad() or argmax behind the "
         "last of these layers"),
        ("unreached", "No optimizer and no learning rate can train parameters without a gradient."),
        ("zeroed-early", "`zero_grad()`, or other code, removes the gradients between the backward "
         "pass and the optimizer's step: nothing of it is left for layer 'a', layer 'b'."),
        ("zeroed-early", "call optimizer.zero_grad() before the backward pass, or after the step"),
        ("zeroed-early", "Another learning rate does not bring these gradients back."),
        ("zeroed-early by micro-batches", "Gradients are zeroed between the micro-batches of a "
         "step: of 8 backward passes, the optimizer uses the last one alone."),
        ("zeroed-early by micro-batches", "call optimizer.zero_grad() once for every optimizer "
         "step, not for each backward"),
        ("left-in-eval", "The whole model is in eval mode as it trains: dropouts drop nothing, and "
         "normalisations use their running statistics, which no step updates."),
        ("left-in-eval", "call model.train() before the training, and again after each evaluation"),
        ("same-batch", "Every measured step saw the same batch. That is meant, if these are all "
         "your data."),
        ("same-batch", "check that the data loader is asked for a new batch in each step"),
        ("clipping-always", "Clipping takes the step: the optimizer gets 0.001 times the gradient, "
         "and its steps are as much shorter."),
        ("clipping-always", "clip at a higher norm, or not at all"),
        ("clipping-always", "A higher learning rate makes up for it only while the gradients "
         "keep their length."),
        ("clipping-always by a scaler", "call scaler.unscale_(optimizer) before the gradients are "
         "clipped"),
        ("clipping-always by a scaler", "The gradients are clipped while they are still multiplied "
         "by the scale 65536 of the mixed-precision scaler."),
        ("rate-zero", "The learning rate is zero in all measured steps."),
        ("rate-zero", "give the optimizer, or its scheduler, a learning rate above zero"),
        ("rate-gone", "The schedule brings the learning rate below a millionth of its peak by step "
         "14: from then on nothing is learnt."),
        ("rate-gone", "make the schedule as long as the training: is it stepped once per batch, "
         "and counted in epochs?"),
        ("rate-gone", "A higher base learning rate decays as soon."),
        ("rate-rises", "The learning rate rises, and so does the loss: since the lowest loss, near "
         "step 10, it has grown 100 times."),
        ("rate-rises", "end the schedule's rise before the loss rises, near step 10, or lower its "
         "peak"),
        ("weights-set-back", "The weights are set back between the optimizer's steps: measured "
         "steps begin with those of an earlier one."),
        ("weights-set-back", "look for load_state_dict, copy_ or a moving average that writes to "
         "the weights of the model in training, and is not undone"),
        ("weights-set-back", "No learning rate helps while other code undoes the steps."),
        ("weights-set-back by half", "measured steps begin after 65.0% of the way since an earlier "
         "one is undone."),
        ("gradients-summed", "The gradients of 4 micro-batches are summed, not averaged: the steps "
         "are 4 times as long as those of their mean, and too long for this loss."),
        ("gradients-summed", "divide the loss of each micro-batch by 4"),
        ("gradients-summed", "learning rate × 0.25, if the sum is meant"),
        ("unbounded-loss", "The steps raise the loss, since backward() begins at its negative: it "
         "has no bound in that direction."),
        ("unbounded-loss", "call backward() on the loss itself, not on its negative"),
        ("unbounded-loss", "A lower learning rate only goes up more slowly."),
    )),
    # Units
    Row("dead-units", "62% of the units of ReLU '5' are dead: their values lie where the function "
        "is flat, for every row of 20 batches",
        units(), units(dead=10)),
    Row("dead-units", "of the units of the model itself are dead", units(path=""), units()),
    Row("dead-units", "No row sends a gradient to Linear 'a', but layer 'b' receives one", DEAD,
        units()),
    Row("dead-units", "With a higher learning rate, still no gradient passes a dead unit", units(),
        replace(units(), rates=LOW)),
    Row("saturated-units", "80% of the entries of Tanh '5' are saturated: they lie where the "
        "function is flat",
        units("tanh", share=0.8), units("tanh", share=0.3)),
    Row("saturated-units", "A higher learning rate drives the entries further into the flat parts",
        units("tanh", share=0.8), replace(units("tanh", share=0.8), rates=LOW)),
    Row("interference", "In layer 'a', the rows of a batch disturb each other: a gradient step "
        "moves the activations with a cosine of 0.05 to straight downhill, but the best possible "
        "step reaches 0.9",
        record({"a": reading(gradient_cosine=0.05)}), record({"a": reading(gradient_cosine=0.2)})),
    Row("interference", "Corrected layers remove differences in scale, not interference",
        record({"a": reading(gradient_cosine=0.05)}), record()),
    # The optimizer
    Row("optimizer-turns", "100% of the measured steps go uphill: by the gradient of their own "
        "batch, they raise the loss",
        LATER_UP, TURNED),
    Row("optimizer-turns", "In 3 of 3 layers, the optimizer's step typically points uphill", TURNED,
        LATER_UP),
    Row("optimizer-turns", "A momentum of 0.99 keeps each gradient for 100 steps",
        record(facts=LONG, losses=STILL), replace(LATER_UP, facts=LONG)),
    Row("optimizer-turns", "steps (the run has 40)",
        record(facts=settings(momentum=0.999)), record(facts=LONG, losses=STILL)),
    Row("optimizer-turns", "look for maximize=True", record(layers(**UP), losses=RISING), LATER_UP),
    Row("optimizer-turns", "look for maximize=True",
        replace(LATER_UP, facts=settings(maximize=True)), LATER_UP),
    Row("optimizer-turns", "look for maximize=True, or for code that changes the gradient's sign",
        record(layers(descent=-0.01), losses=RISING), record(facts=LONG, losses=STILL)),
    Row("optimizer-turns", "less momentum: 0.9",
        replace(LATER_UP, facts=LONG), replace(LATER_UP, facts=PLAIN)),
    Row("optimizer-turns", "use a momentum of 0.9 at the same learning rate",
        replace(LATER_UP, facts=LONG), replace(LATER_UP, facts=PLAIN)),
    Row("optimizer-turns", "use less momentum (a smaller β₁)",
        replace(LATER_UP, facts=adam()), LATER_UP),
    Row("optimizer-turns", "less momentum: β₁ = 0.9",
        record(facts=adam(betas=(0.999, 0.999))), LATER_UP),  # type: ignore[arg-type]
    Row("optimizer-turns", "use plain gradient descent with learning rate 0.1",
        replace(LATER_UP, facts=adam()), LATER_UP),
    Row("optimizer-turns", "plain gradient descent", LATER_UP, replace(LATER_UP, facts=PLAIN)),
    Row("optimizer-turns", "look for code that changes gradients or weights between backward() and",
        replace(LATER_UP, facts=PLAIN), LATER_UP),
    Row("decay-fights", "At the first step, weight decay (0.5) pulls 5 times as hard as the "
        "gradient, and the norm of the parameters ends at 1 times its first value",
        record(facts=decayed(0.5)),
        record(facts=decayed(0.01), parameter_norms=SHRUNK)),
    Row("decay-fights", "With a weight decay of 0.01, the norm of the parameters ends at 0.2 times "
        "its first value.", record(facts=decayed(0.01), parameter_norms=SHRUNK),
        record(facts=decayed(0.5))),
    Row("decay-fights", "the norm of the parameters ends at 1 times its first value",
        record(facts=decayed(0.5)), record()),
    Row("decay-fights", "Without weight decay, the norm of the parameters ends at 0.2 times its "
        "first value: a penalty in the loss may shrink them",
        record(parameter_norms=SHRUNK), record(facts=decayed(0.01), parameter_norms=SHRUNK)),
    Row("decay-fights", "no weight decay", record(facts=decayed(0.5)),
        record(parameter_norms=SHRUNK)),
    Row("decay-fights", "if the loss contains a penalty on the weights, use a tenth of it, or none",
        record(parameter_norms=SHRUNK), record(facts=decayed(0.5))),
    Row("decay-fights", "A lower learning rate weakens gradient and decay alike: their ratio stays "
        "the same",
        record(facts=decayed(0.5)), record(parameter_norms=SHRUNK)),
    Row("projection-fights", "Code that runs after the optimizer's step changes the weights of "
        "layer 'b' again: the change that remains has a cosine of 0.1 with the optimizer's step",
        record({"b": reading(projection_cosine=0.1)}),
        record({"b": reading(projection_cosine=0.99)})),
    Row("projection-fights", "Code that runs within the step changes the weights of layer 'a': the "
        "first step, which depends on no earlier gradient, has a cosine of 0.05 with its gradient",
        record(layers(parameter_cosine=0.05)), record(layers(parameter_cosine=0.3))),
    Row("projection-fights", "within the step", record(layers(parameter_cosine=0.05)),
        record(layers(parameter_cosine=0.05), facts=decayed(5.0))),  # the decay does
    Row("projection-fights", "code within the step changes the weights, or AdamW itself turns the "
        "step because a few entries",
        record(layers(parameter_cosine=0.05), facts=adam()), record(layers(parameter_cosine=0.05))),
    Row("projection-fights", "With a higher learning rate, the other code undoes more of each step",
        record({"b": reading(projection_cosine=0.1)}), record(layers(parameter_cosine=0.05))),
    Row("clipping-always", "100% of the gradients are clipped. Their typical norm is 2 times the "
        "limit",
        clipped(1.0), clipped(0.4)),
    Row("clipping-always", "Another limit changes little: the steps of this optimizer do not "
        "depend on a constant",
        clipped(1.0, adam()), clipped(1.0)),
]  # fmt: skip


def texts(finding: Finding) -> Iterator[str]:
    """What a reader sees of it."""
    yield finding.summary
    yield from (advice.text for advice in finding.advice)
    yield finding.not_advised


def printed(of: Record, name: str) -> list[str]:
    return [text for finding in diagnose(of) if finding.name == name for text in texts(finding)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.finding}: {row.sentence[:40]}")
def test_a_sentence_is_printed_only_where_its_number_says_so(row: Row) -> None:
    said = printed(row.by, row.finding)
    assert any(row.sentence in text for text in said), said
    assert not any(row.sentence in text for text in printed(row.but_not_by, row.finding))


def sentences(path: Path) -> set[str]:
    """What a file of rules can print: its texts, but no docstrings, titles and evidence."""
    return phrases(ast.parse(path.read_text(encoding="utf-8")))


def phrases(tree: ast.AST) -> set[str]:
    silent = set()
    for node in ast.walk(tree):
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_docstring or getattr(getattr(node, "func", None), "id", "") in SILENT:
            silent |= {id(inner) for inner in ast.walk(node)}
    texts = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in silent
    ]
    parts = (part for text in texts for part in re.split(r"\{\d?\}", text))  # around numbers
    return {part for part in parts if len(part.split()) > 3}


def test_every_sentence_of_the_rules_has_a_run_that_says_it_and_one_that_does_not() -> None:
    """Of the same row, so that what makes the difference is next to it."""
    said = [
        (" ".join(printed(row.by, row.finding)), " ".join(printed(row.but_not_by, row.finding)))
        for row in ROWS
    ]
    for path in (
        *sorted({*FAMILIES.glob("*.py")} - {FAMILIES / "fault.py"}),
        *(FAMILIES.parent / name for name in LOOKED_AT),
    ):
        lacking = {
            sentence for sentence in sentences(path)
            if not any(sentence.strip() in by and sentence.strip() not in other
                       for by, other in said)
        }  # fmt: skip
        assert lacking == set(), path.name


# The verdict


class Said(NamedTuple):
    """A sentence of the verdict; a diagnosis that says it, and one that does not."""

    sentence: str
    by: Diagnosis
    but_not_by: Diagnosis


def told(*findings: Finding, of: Record | None = None) -> Diagnosis:
    return Diagnosis(findings, record(rates=HIGH) if of is None else of)


def fault(*trials_of: Trial | None, name: str = "rate-too-high", strength: Any = "act") -> Finding:
    advice = tuple(Advice("Do", "clip", trial) for trial in trials_of)
    return Finding(name, strength, "It is so.", (), advice)


EXPLAINED = replace(HIDDEN, losses=STILL)

PAYS = Trial("clip", 50, 0.5, 1.0, None, 0.01)
LOSES = Trial("clip", 50, 1.5, 1.0, None, 0.01)
NOT_PAID = fault(LOSES)
OWN = record(rates=HIGH, own_losses=dict.fromkeys(range(STEPS), 9.0))
VERDICTS = [
    Said("The audit found nothing that hinders this training.", told(), told(NOT_PAID)),
    Said("The audit found nothing to act on, but a fix that it tried lowers the loss: Do",
         told(fault(PAYS, strength="watch")), told(fault(LOSES, strength="watch"))),
    Said("steps 0.5 instead of 1 (± 0.01); so short a run favours high learning rates.",
         told(fault(replace(PAYS, fix="rate*100"), strength="watch")),
         told(fault(replace(PAYS, fix="rate*0.1"), strength="watch"))),
    Said("Other learning rates were not tried.", told(of=record()), told()),
    Said("2 weaker findings below.", told(fault(strength="note"), fault(strength="note")), told()),
    Said("It is so. The audit did not find the cause.",
         told(fault(name="loss-stuck", strength="watch")),
         told(fault(name="loss-stuck", strength="note"))),
    Said("It is so. The audit found nothing else that hinders this training.",
         told(fault(name="loss-stuck", strength="note")),
         told(fault(name="loss-stuck", strength="watch"))),
    Said("The time for trials (try_seconds) ended before all of them had run, so this result "
         "depends on the clock.", told(of=record(rates=HIGH, hurried=True)), told()),
    Said("And 1 more finding to act on.", told(NOT_PAID, NOT_PAID), told(NOT_PAID)),
    Said("To fix it: Do: loss after 50 steps 0.5", told(fault(PAYS)), told(NOT_PAID)),
    Said("What to do: Do.", told(fault(LOSES, name="not-held")), told(NOT_PAID)),
    Said("To try first: Do (not tried)", told(fault(None)), told(NOT_PAID)),
    Said("None of its fixes helped in a trial; a fix of another finding did: Do: loss after 50 "
         "steps 0.5",
         told(NOT_PAID, fault(PAYS)), told(NOT_PAID)),
    Said("None of its fixes helped in a trial.", told(NOT_PAID), told(fault(PAYS))),
    Said("None of its fixes helped in a trial; to try next: Do (not tried)",
         told(fault(None, LOSES)), told(NOT_PAID)),
    Said("The copy does not train as your run did: over the steps 0 to 19, its "
         "mean loss is",
         told(of=OWN), told(of=replace(OWN, own_losses=dict(enumerate(OWN.losses))))),
    Said(", and yours was 9. The copy lacks the cause of this difference, which may be the fault "
         "of your run. About the copy: ", told(of=OWN), told()),
    Said("This would explain: loss-stuck.", Diagnosis(diagnose(EXPLAINED), EXPLAINED), told()),
    Said("The copy differs from your run: no scheduler runs.",
         told(of=record(rates=HIGH, lost=("no scheduler runs",))), told()),
]  # fmt: skip


@pytest.mark.parametrize("row", VERDICTS, ids=lambda row: row.sentence[:50])
def test_a_sentence_of_the_verdict_is_printed_only_where_it_is_so(row: Said) -> None:
    assert row.sentence in row.by.verdict and row.sentence not in row.but_not_by.verdict


def test_every_sentence_of_the_verdict_has_a_diagnosis_that_says_it() -> None:
    parts: set[str] = set()
    of_diagnosis = (vars(Diagnosis)["verdict"].fget, Diagnosis._nothing)
    for of in (*of_diagnosis, diagnosis._cause, diagnosis._fixed, own_run.said):
        parts |= phrases(ast.parse(textwrap.dedent(inspect.getsource(of))))
    for part in parts:
        assert any(part.strip() in row.by.verdict and part.strip() not in row.but_not_by.verdict
                   for row in VERDICTS), part  # fmt: skip


# What is tried, and what overrules

SPOKEN_OF = {
    "igher learning rate": ("rate*3", "rate*10", "rate*100"),
    "ower learning rate": ("rate*0.01", "rate*0.1", "rate*0.3"),
    "nother learning rate": RATES,
    "other learning rate": RATES,
    "no learning rate": RATES,
    "lipping": ("clip",),
    "constant scale": ("scale-inputs",),
    "by a constant": ("scale-inputs",),
    "each row's length": ("affine-like", "norm-like"),
    "Corrected layers": ("affine-like", "norm-like"),
    "Another limit": ("clip", "no-clip"),
    "Weight decay": ("no-decay", "less-decay"),
    "omentum": ("less-momentum",),
    "ormalisation": ("layer-norm", "batch-norm"),
}


def test_what_was_tried_overrules_what_would_not_help() -> None:
    """All findings × all fixes: no finding speaks against what a trial says pays."""
    refuted = 0
    for finding in {f.not_advised: f for row in ROWS for f in diagnose(row.by)}.values():
        for fix in FIXES:
            paid, lost = (Trial(fix, 50, loss, 1.0, None, 0.01) for loss in (0.5, 1.5))
            assert unrefuted(finding, [lost]) == finding
            after = unrefuted(finding, [paid])
            spoken = {
                m for words, m_ in SPOKEN_OF.items() if words in after.not_advised for m in m_
            }
            assert fix not in spoken, after.not_advised
            refuted += after != finding
    assert refuted > 50


def test_what_a_finding_speaks_against_is_a_fix_that_can_be_tried() -> None:
    for row in ROWS:
        for finding in diagnose(row.by):
            assert set(finding.against) <= set(FIXES)
            assert bool(finding.not_advised) >= bool(finding.against)


def test_a_finding_speaks_against_learning_rates_unless_it_names_others() -> None:
    assert Finding("a", "act").against == ()
    assert Finding("a", "act", not_advised="No.").against == RATES
    assert Finding("a", "act", not_advised="No.", against=("clip",)).against == ("clip",)


def test_what_one_finding_says_of_all_layers_is_not_said_again_of_each() -> None:
    names = [finding.name for finding in diagnose(by_reports(*[SLOW] * 8, losses=STILL))]
    assert names == ["rate-too-low", "loss-stuck"]
