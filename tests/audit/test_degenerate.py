"""No rule fails, and none states a number that there is not, whatever values a record holds."""

import random
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any

import pytest
from made_records import FACTS, INPUTS, STEPS, WELL, reading, record

from adiv_monitor.diagnosis import diagnose, faults
from adiv_monitor.diagnosis.diagnose import looked_for, running_headline, untold
from adiv_monitor.diagnosis.faults import FAULTS
from adiv_monitor.diagnosis.finding import Trial
from adiv_monitor.diagnosis.record import Fact, Probed, Record, UnitStatistics, WeightStatistics
from adiv_monitor.report import LayerReading, StepReport

ODD = (0.0, 1.0, -1.0, 1e-320, 1e300, -1e300, nan, inf, -inf)
MEASURES = tuple(field.name for field in fields(LayerReading) if "float | None" in str(field.type))
SIGNED = ("descent", "effective_lr")
COSINES = tuple(name for name in MEASURES if "cosine" in name)
# By words that only their questions give.
READ_BY_A_TABLE = {"targets-moved", "constant-data", "no-activation"}
SHARES = ("idle_share", "common_share", "harmed_fraction", "bias_share")


FILES = Path(faults.__file__).parent.glob("*.py")
ASKED = {word for file in FILES for word in re.findall(r"\{(\w+)[:}]", file.read_text())}


class Word(str):
    """A word, or a number that a sentence gives in whatever form."""

    def __format__(self, form: str) -> str:
        return str(self)


class Words(Mapping[str, str]):
    """Whatever words a sentence asks for, besides its numbers."""

    def __init__(self, numbers: Mapping[str, float]) -> None:
        self.numbers = numbers

    def __getitem__(self, name: str) -> str:
        return Word("x")

    def __iter__(self) -> Iterator[str]:
        return iter(ASKED - {"place", "all_places", *self.numbers})

    def __len__(self) -> int:
        return len(list(self))


def of_kind(measure: str, value: float) -> float:
    """Return a value that the measure can have: NaN for a share or a cosine out of its range."""
    if measure in SIGNED:
        return value
    value = value if measure in COSINES else abs(value)
    return nan if measure in (*COSINES, *SHARES) and abs(value) > 1 else value


def to_the_end(losses: tuple[float, ...]) -> tuple[float, ...]:
    """Return the losses as a run records them, up to the first that is not finite."""
    bad = next((i for i, loss in enumerate(losses) if not isfinite(loss)), len(losses))
    return losses[: bad + 1]


def drawn(chance: random.Random) -> Record:
    """Draw a record in which any part may be missing, empty, constant, huge or no number."""

    def some(usual: float) -> float:
        return chance.choice((usual, *ODD)) if chance.random() < 0.5 else usual

    def several(usual: float, count: int) -> tuple[float, ...]:
        if chance.random() < 0.5:
            return (some(usual),) * count
        return tuple(some(usual) for _ in range(count))

    kinds = ("linear", "convolution", "gain", "embedding")
    odd = chance.sample(MEASURES, 4)
    every = chance.choice(ODD)

    def layer() -> LayerReading:
        values: dict[str, Any] = {
            name: of_kind(name, chance.choice((every, some(0.1)))) for name in odd
        }
        return reading(kind=chance.choice(kinds), **values)

    paths = [f"layer{i}" for i in range(chance.choice((0, 1, 2, 3, 9)))]
    steps = range(0, STEPS, 10)[: chance.randrange(5)]
    reports = tuple(
        StepReport(
            step,
            {path: layer() for path in paths if chance.random() < 0.9},
            {},
            1.0,
            learning_rates=(some(0.1),) * chance.randrange(2),
        )
        for step in steps
    )
    losses = chance.choice((WELL, several(2.3, chance.choice((0, 1, 2, 12, STEPS)))))
    settings = {"lr": some(0.1), "momentum": some(0.9), "weight_decay": some(0.01)}
    facts = replace(
        FACTS,
        model=chance.choice(("", "Net")),
        optimizer=chance.choice(("SGD", "AdamW", "Own")),
        settings=settings,
        trainable=chance.choice((0, 100)),
        clip_norm=chance.choice((None, 1e-320, 1.0, 1e300)),  # others are refused
        resumed=chance.random() < 0.2,
    )

    def fact() -> Fact:
        """Return a fact with whatever numbers and words a rule asks it for."""
        numbers = defaultdict(lambda: chance.choice((0.0, 0.5, 1e-300, 1.0, 1e300)))
        numbers.update({name: some(1.0) for name in ("with", "without", "model")})
        return Fact("a", numbers, Words(numbers))

    def trial(name: str) -> Trial:
        numbers = (some(1.0), some(2.0), chance.choice((None, some(1.5))), some(0.01))
        return Trial(name, chance.choice((2, STEPS, 100)), *numbers, constant=some(2.3))

    return record(
        facts=facts,
        losses=to_the_end(losses),
        reports=reports,
        gradient_norms=several(1.0, chance.choice((0, STEPS))),
        parameter_norms=several(10.0, chance.choice((0, STEPS))),
        realised={step: some(-0.01) for step in steps},
        inputs={"0": replace(INPUTS, **{f.name: some(1.0) for f in fields(INPUTS)})}
        if chance.random() < 0.7
        else {},
        units={"relu": UnitStatistics("tanh", chance.choice((0, 8)), 4, some(0.5), 20)},
        weights={
            path: WeightStatistics(some(0.6), some(0.1), some(0.0)) for path in (*paths, "head")
        },
        chance=chance.choice((None, some(2.3))),
        descent_share=chance.choice((None, some(1.0))),
        overfit=chance.choice((None, trial("overfit"))),
        rates={
            factor: trial(f"rate*{factor:g}") for factor in (0.1, 10.0) if chance.random() < 0.7
        },
        probed={
            name: Probed((fact(),))
            for name in chance.sample(sorted(FAULTS.keys() - READ_BY_A_TABLE), 9)
        },
    )


def degenerate() -> Iterator[Record]:
    """Yield records of runs in which nothing moves, all is zero, or nothing is a number."""
    for value in ODD:
        every = {name: of_kind(name, value) for name in MEASURES}
        for count in (1, 3, 60):
            layers = {f"layer{i}": reading(**every) for i in range(count)}
            reports = tuple(StepReport(step, layers, {}, 1.0) for step in range(0, STEPS, 10))
            yield record(reports=reports)
            yield record(reports=reports, losses=to_the_end((value,) * STEPS), chance=value)
            yield record(reports=(StepReport(0, {}, {}, 1.0), *reports), losses=())
        yield record(gradient_norms=(value,) * STEPS, parameter_norms=(value,) * STEPS)
    still = {f"layer{i}": reading(update_ratio=0.0) for i in range(59)}
    yield record({**still, "last": reading(update_ratio=9.0)})


def check(made: Record) -> None:
    """Check that the rules judge a record, and that their sentences hold numbers."""
    found = diagnose(made)
    for finding in found:
        assert "nan" not in f"{finding.summary} {finding.not_advised}".split(), finding
        assert all("nan" not in advice.text.split() for advice in finding.advice), finding
    running_headline(found, made)
    looked_for(made, found)
    untold(made)


def test_runs_in_which_nothing_or_everything_moves_are_judged() -> None:
    for made in degenerate():
        check(made)


@pytest.mark.parametrize("seed", range(4))
def test_records_of_any_values_are_judged(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(25):
        check(drawn(chance))
