"""What is asked of copies: each bug is named where it is planted, and not in its fixed twin."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from audit import test_probes_of_data, test_probes_of_losses, test_probes_of_models
from audit.fault_benchmark.reported import HELD_OUT, REPORTED, SET_BY, TWINS
from audit.fault_benchmark.run import Case, Healthy
from computes import Computes
from made_records import record as made_record
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from trial_setups import batches, mlp, setup, told

from adiv_monitor.audit.experiments.observe import observe
from adiv_monitor.audit.experiments.questions import ASKS, LOOKS, asked
from adiv_monitor.audit.training.setup import Setup, lifted
from adiv_monitor.diagnosis import diagnose
from adiv_monitor.diagnosis.record import Record

STEPS = 16
QUESTIONS = {*ASKS, *LOOKS}
SETS = ("padded-lines-adamw",)  # of words, whose order is ignored on purpose
TOLD = QUESTIONS - {"row-spread"}  # which readings tell, too
ASKED_OF = [case for case in (*SET_BY, *HELD_OUT) if case.expected[0] in TOLD]
OF_THEIR_OWN = {
    "behind-reference",
    "collapsed",
    "dropout-on-outputs",
    "pairs-reversed",
}  # have tests
ROWS = [*test_probes_of_data.ROWS, *test_probes_of_losses.ROWS, *test_probes_of_models.ROWS]


def looked_at(bed: Case | Healthy) -> Record:
    """A short run, of which nothing is tried."""
    return observe(bed.build(0).setup(STEPS, 0), every_n_steps=8)


def found(of: Record) -> set[str]:
    return {finding.name for finding in diagnose(of)}


@pytest.mark.slow
@pytest.mark.parametrize("case", ASKED_OF, ids=lambda case: case.name)
def test_a_planted_bug_is_named(case: Case) -> None:
    assert case.expected[0] in found(looked_at(case))


@pytest.mark.slow(one_in=64)
@pytest.mark.parametrize("twin", TWINS.values(), ids=lambda twin: twin.name)
def test_no_probe_finds_a_fault_in_a_fixed_twin(twin: Healthy) -> None:
    record = looked_at(twin)
    assert found(record) & TOLD == ({"order-ignored"} if twin.name in SETS else set())
    assert set(record.probed) == QUESTIONS


def test_every_question_has_a_planted_bug_on_each_side() -> None:
    """Their healthy kin are in the tables, too, and the twins, of which all questions are asked."""
    named = {question for question, _, _, part in ROWS if part and "untold" not in part}
    for half in (SET_BY, HELD_OUT):
        planted = {case.expected[0] for case in half}
        assert planted | named | OF_THEIR_OWN >= QUESTIONS
    assert {case.twin.name for case in REPORTED.values()} == TWINS.keys()


def test_probes_change_nothing_and_draw_nothing() -> None:
    model = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Dropout(0.9), nn.Linear(16, 3))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    of = setup(model=model)
    chance = torch.get_rng_state()
    answers = asked(of, of.fork())
    assert torch.equal(chance, torch.get_rng_state())
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert answers["dropout-too-high"].facts
    assert asked(of, of.fork()) == answers


def test_a_probe_that_fails_can_not_tell() -> None:
    def failing(model: nn.Module, batch: object) -> Tensor:
        raise RuntimeError("no such batch")

    of = setup(loss=failing)
    answers = asked(of, of.fork())
    assert answers["dropout-too-high"].untold == "RuntimeError: no such batch"
    facts = {name for name, probed in answers.items() if probed.facts}
    assert facts <= {"unshuffled"}, "which looks at the batches alone"


# Learning rates


def scheduled(factor: Any) -> SGD:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.scheduler = LambdaLR(optimizer, factor)  # type: ignore[attr-defined]
    return optimizer


def test_a_warm_up_from_zero_is_told_from_a_schedule_that_stays_there() -> None:
    rises, stays = scheduled(lambda step: step / 10), scheduled(lambda step: step // 1000)
    assert lifted(rises, 20) == {0: 0.1} and lifted(stays, 20) == {}
    assert rises.param_groups[0]["lr"] == 0 and rises.scheduler.last_epoch == 0  # type: ignore[attr-defined]


def sequential(optimizer: SGD) -> LRScheduler:
    parts: list[LRScheduler] = [LinearLR(optimizer, 0.01, 1, 50), CosineAnnealingLR(optimizer, 100)]
    return SequentialLR(optimizer, parts, [50])


@pytest.mark.parametrize(
    ("made", "peak"),
    [
        (lambda o: LinearLR(o, 1e-3, 1, 500), 0.1),
        (lambda o: LambdaLR(o, lambda step: min((step + 1) ** -0.5, (step + 1) / 8e3)), 0.1 / 20),
        (lambda o: LambdaLR(o, lambda step: (step + 1) / 1e5), 0.1),  # its end is not seen
        (lambda o: OneCycleLR(o, max_lr=2.5, total_steps=200), 2.5),
        (sequential, 0.1),
        (lambda o: CosineAnnealingLR(o, 40), None),  # torch's rises again after its end
        (lambda o: ExponentialLR(o, 1.2), None),  # a search for the largest rate, not a warm-up
        (ReduceLROnPlateau, None),
    ],
)
def test_what_a_scheduler_raises_is_trained_at_the_highest_rate_of_the_warm_up(
    made: Callable[[SGD], object], peak: float | None
) -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    kept = made(optimizer)
    before = optimizer.param_groups[0]["lr"]
    of = setup(model=model, optimizer=optimizer)
    (group,) = of.fork().optimizer.param_groups
    assert group["lr"] == pytest.approx(before if peak is None else peak, rel=1e-2)
    assert optimizer.param_groups[0]["lr"] == before
    del kept


@pytest.mark.parametrize("dropped", [True, False])
def test_a_factory_whose_warm_up_begins_at_zero_trains_at_its_peak(dropped: bool) -> None:
    def made(model: nn.Module) -> SGD:
        optimizer = SGD(model.parameters(), lr=0.1)
        scheduler = LambdaLR(optimizer, lambda step: min(1.0, step / 10))
        if not dropped:
            optimizer.kept = scheduler  # type: ignore[attr-defined]
        return optimizer

    of = setup(optimizer=made)
    assert of.fork().optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


# The data


def faint() -> nn.Module:
    """Return a model whose outputs hardly depend on the inputs, and hardly learn to."""
    return Computes(lambda m, x: m.body(1e-4 * x), body=mlp())


def apart(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Labels of other samples."""
    drawn = torch.Generator().manual_seed(3)
    y = torch.cat([labels for _, labels in given])
    y = y[torch.randperm(len(y), generator=drawn)].split(len(given[0][1]))
    return tuple((x, labels) for (x, _), labels in zip(given, y, strict=True))


def judged(of: Setup) -> set[str]:
    answered = told("behind-reference", of, trained=True)
    return found(made_record(probed={"behind-reference": answered}))


def test_a_small_network_tells_a_fault_of_the_model_from_one_of_the_data() -> None:
    healthy = setup(batches=batches(24))
    numbers = told("behind-reference", healthy, trained=True).facts[0].numbers
    assert min(numbers["reference"], numbers["model"]) > 0.8
    assert judged(replace(healthy, model=faint())) >= {"behind-reference"}
    unrelated = apart(healthy.batches)
    assert "labels-unrelated" in judged(replace(healthy, batches=unrelated))
    epochs = tuple((x.clone(), y) for x, y in 2 * unrelated)
    assert "labels-unrelated" in judged(replace(healthy, batches=epochs, steps=48))


@pytest.mark.parametrize("missing", [0.0, 0.1])
def test_labels_that_are_rare_or_beside_gaps_belong_to_their_inputs(
    missing: float,
) -> None:
    """A constant prediction is right in nine of ten, and numbers for missing values are far off."""
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(24, 64, 12, generator=drawn)
    y = (x[..., 0] > 1.28).long() if not missing else (x[..., 0] > 0).long()
    x = x.where(torch.rand(x.shape, generator=drawn) >= missing, -999.0)
    of = setup(batches=tuple(zip(x, y, strict=True)), model=faint())
    assert "labels-unrelated" not in judged(of)
    assert "labels-unrelated" in judged(replace(of, batches=apart(of.batches)))
