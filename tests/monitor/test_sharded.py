"""Sharded parameters (FSDP2): several ranks report what one unsharded process reports."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from adiv_layers import AffineLikeLinear
from cases import Tied
from processes import OF_ONE_RANK, WAIT, FoundBy, assert_same, by_processes, meet, patient, written
from rank_steps import Case, sharded, small, take, train
from setups import trained
from torch import Tensor, nn

from adiv_monitor import Monitor
from adiv_monitor.report import StepReport
from adiv_monitor.step import ranks
from adiv_monitor.step.unsharded import WHY_NOT

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs the gloo backend")


ADAMW, SGD = (partial(kind, lr=0.01) for kind in (torch.optim.AdamW, torch.optim.SGD))
Sharded = partial(Case, optimizer=ADAMW, shards=True)
CASES = {
    "halves, AdamW": Sharded(((4,), (4,))),
    "uneven, one unit, clipped": Sharded(((5,), (3,)), clip=0.1, nested=False),
    "micro-batches": Sharded(((2, 2), (1, 3))),
    "micro-batches, each averaged": Sharded(((2, 2), (1, 3)), sync=True),
    "micro-batches, replicas at the end": Sharded(
        ((2, 2), (1, 3)), sync=True, replicas=2, together=False
    ),
    "halves, the second of three turns": Sharded(((4,), (4,)), turn=1),
    "halves, the third": Sharded(((4,), (4,)), optimizer=SGD, turn=2),
    "four": Sharded(((3,), (2,), (1,), (2,))),
    "four, two replicas": Sharded(((3,), (2,), (1,), (2,)), replicas=2),
}


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().full_tensor() for p in model.parameters()]


Found = dict[str, Any]
Ranks = dict[int, list[Found]]  # by world size and rank


def work(rank: int, world: int, folder: str) -> None:
    meet(rank, world, folder)
    found: Found = {}
    for name, case in CASES.items():
        if len(case.parts) == world:
            monitor, model = take(case, rank)
            _, other = take(case, rank, monitored=False)
            pairs = zip(weights(model), weights(other), strict=True)
            same = all(torch.equal(a, b) for a, b in pairs)
            found[name] = monitor.latest, written(monitor), same
    for task in TASKS if world == 2 else ():
        found[task.__name__] = task(rank)
        dist.barrier()  # else a monitor of the next case could join this one
    torch.save(found, Path(folder) / f"{rank}.pt")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return FoundBy(work, tmp_path_factory.mktemp("processes"))


@pytest.mark.parametrize("name", by_processes({name: len(c.parts) for name, c in CASES.items()}))
def test_the_report_is_that_of_one_process_with_all_of_it(name: str, found: Ranks) -> None:
    reports, counts, same = zip(*(own[name] for own in found[len(CASES[name].parts)]), strict=True)
    assert all(same), "the training is bit-identical"
    assert all(report == reports[0] for report in reports), "all processes have it"
    assert counts == (1, *(0 for _ in reports[1:])), "the first writes it"
    expected = take(CASES[name], None)[0].latest
    assert reports[0].coverage == 1
    assert_same(reports[0].to_dict(), expected.to_dict())


# A single rank


adamw = partial(train, wrap=sharded, steps=3, optimizer=ADAMW)
sgd = partial(train, wrap=sharded, optimizer=SGD)


def weights_of_one_part_that_change(rank: int | None) -> list[StepReport]:
    return list(adamw(rank, after=lambda step, model, _: shorten(model)).reports)


@torch.no_grad()
def shorten(model: nn.Module) -> None:
    """Shrink the first row of the weight, which rank 0 holds."""
    weight = model[0].weight
    if not hasattr(weight, "to_local"):
        weight[0] *= 0.9
    elif dist.get_rank() == 0:
        weight.to_local()[0] *= 0.9


def evaluation_before(rank: int) -> StepReport | None:
    """Evaluate before the step, which leaves the outermost module unsharded."""
    from torch.distributed.fsdp import fully_shard

    model, x = small(rank)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with torch.no_grad():
        model(x)
    assert not any(hasattr(p, "full_tensor") for p in model.parameters())
    return trained(model, lambda model: model(x).square().mean(), optimizer=optimizer)[0]


def half_precision(rank: int) -> list[StepReport]:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wrap = partial(sharded, mp_policy=policy)
    return list(adamw(rank, wrap=wrap, dtype=torch.float32).reports)


def attention_and_passes_again(rank: int) -> StepReport | None:
    return adamw(rank, realised=True, attention=True).latest


@patient()
def one_without_a_monitor(rank: int) -> tuple[StepReport | None, float]:
    begin = time.monotonic()
    return adamw(rank, monitored=rank == 0).latest, time.monotonic() - begin


def one_that_skips_a_step(rank: int) -> list[StepReport]:
    model, x = small(rank)
    sharded(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with (
        pytest.MonkeyPatch.context() as patch,
        Monitor(model, optimizer, every_n_steps=1, on_error="raise") as monitor,
    ):
        patch.setattr(ranks, "PATIENCE", 1.0)
        for number in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            if rank == 0 or number < 2:
                optimizer.step()
    return list(monitor.reports)


def hooks_that_fail_in_one(rank: int) -> list[StepReport]:
    """Train with hooks that fail on one rank, so that its second step has no readings."""

    def breaks(step: int, model: nn.Module, monitor: Monitor) -> None:
        if (rank, step) == (1, 1):
            monitor._controller._armed.guard.broken = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "PATIENCE", 1.0)
        return list(sgd(rank, steps=4, between=breaks).reports)


def layer_that_fails_in_one(rank: int) -> list[StepReport]:
    return without(rank, 1, "0")


def all_layers_fail_in_one(rank: int) -> list[list[StepReport]]:
    return [without(rank, failing, "0", "2") for failing in (0, 1)]


def without(rank: int, failing: int, *paths: str) -> list[StepReport]:
    off = paths if rank == failing else ()
    return list(sgd(rank, steps=2, off=off, on_error="warn").reports)


@patient()
def layer_in_turn_that_is_off_in_one(rank: int) -> tuple[list[StepReport], float]:
    """Train in turns with a layer switched off on one rank: merging must not depend on it."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = Tied(5, 4)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer, every_n_steps=1, layers_per_step=1)
    if rank == 1:
        monitor._failures.switched_off["head"] = "it failed here"
    begin = time.monotonic()
    with monitor:
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.arange(5)).square().sum().backward()
            optimizer.step()
    return list(monitor.reports), time.monotonic() - begin


@patient()
def corrected(rank: int | None) -> StepReport | None:
    """Train layers that have a rule for their class; the last one is sharded separately."""
    from torch.distributed.fsdp import fully_shard

    _, x = small(rank)  # seeds
    first = nn.Sequential(AffineLikeLinear(5, 6))
    model = nn.Sequential(first, nn.Tanh(), AffineLikeLinear(6, 3)).double()
    if rank is not None:
        fully_shard(model[0])
        sharded(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return trained(model, lambda model: model(x).square().mean(), optimizer=optimizer)[0]


TASKS: tuple[Callable[[int], Any], ...] = (
    weights_of_one_part_that_change,
    evaluation_before,
    half_precision,
    attention_and_passes_again,
    one_without_a_monitor,
    one_that_skips_a_step,
    hooks_that_fail_in_one,
    layer_that_fails_in_one,
    all_layers_fail_in_one,
    layer_in_turn_that_is_off_in_one,
    corrected,
)


def test_weights_that_change_after_the_step(found: Ranks) -> None:
    expected = weights_of_one_part_that_change(None)
    for own in found[2]:
        for report, whole in zip(own["weights_of_one_part_that_change"], expected, strict=True):
            assert_same(report.to_dict(), whole.to_dict())


def test_an_evaluation_before(found: Ranks) -> None:
    expected = adamw(None).reports[0]
    for own in found[2]:
        report = own["evaluation_before"]
        assert report.coverage == 1
        for path, reading in report.layers.items():
            assert_same(reading.to_dict(), expected.layers[path].to_dict())


def test_half_precision(found: Ranks) -> None:
    expected = adamw(None, dtype=torch.float32).reports
    reports = found[2][0]["half_precision"]
    for report, whole in zip(reports, expected, strict=True):
        assert report.notes == ()
        for path, reading in report.layers.items():
            measures = whole.layers[path].measures().items()
            exact = {name: value for name, value in measures if name not in OF_ONE_RANK}
            assert reading.measures() == pytest.approx(exact, rel=0.05, abs=0.02)


def test_what_would_run_whole_modules_again_is_refused(found: Ranks) -> None:
    report = found[2][0]["attention_and_passes_again"]
    assert any("sharded?" in note for note in report.notes)
    assert report.coverage == 1


def test_without_one_of_the_processes_nobody_waits(found: Ranks) -> None:
    last, seconds = found[2][0]["one_without_a_monitor"]
    assert seconds < WAIT, "one waited for the other"
    for report in (last, found[2][0]["one_that_skips_a_step"][-1]):
        assert report.layers == {}
        assert report.coverage == 0
        assert report.unsupported == dict.fromkeys(("0", "2"), WHY_NOT)


def test_before_a_step_is_skipped_all_is_measured(found: Ranks) -> None:
    reports = found[2][0]["one_that_skips_a_step"]
    assert [len(report.layers) for report in reports] == [2, 2, 0]


NOTE = "Rows of {} are missing from other ranks. Their readings are estimated from rows alone."


def test_hooks_that_fail_in_one_process_leave_the_others_their_reports(found: Ranks) -> None:
    first, second = (own["hooks_that_fail_in_one"] for own in found[2])
    assert [len(report.layers) for report in first][:2] == [2, 0]
    assert first[0] == second[0] and first[3] == second[-1]


def test_a_layer_that_fails_in_one_process_rests_on_the_rows_of_the_others(found: Ranks) -> None:
    first, second = (own["layer_that_fails_in_one"] for own in found[2])
    assert first == second
    assert len(first) == 2
    for report in first:
        assert report.notes == (NOTE.format("'0'"),)
        assert report.layers["0"].parameter_cosine is None, "a part of the parameters is missing"
        assert report.layers["0"].applied_cosine is None
        assert report.layers["2"].parameter_cosine == pytest.approx(1.0)


@pytest.mark.parametrize("failing", [0, 1])
def test_where_all_layers_fail_in_one_process_the_others_have_reports(
    failing: int, found: Ranks
) -> None:
    first, second = (own["all_layers_fail_in_one"][failing] for own in found[2])
    assert repr(first) == repr(second), "units are not known: NaN"
    assert len(first) == 2
    for report in first:
        assert report.notes == (NOTE.format("'0', '2'"),)
        assert report.layers.keys() == {"0", "2"}
        assert all(reading.applied_cosine is None for reading in report.layers.values())
        assert all(reading.update_cosine is not None for reading in report.layers.values())


def test_layers_that_a_rule_of_their_class_measures(found: Ranks) -> None:
    expected = corrected(None)
    for own in found[2]:
        assert own["corrected"].coverage == 1
        assert_same(own["corrected"].to_dict(), expected.to_dict())


def test_a_layer_in_turn_that_is_off_in_one_process_delays_none(found: Ranks) -> None:
    for own in found[2]:
        reports, seconds = own["layer_in_turn_that_is_off_in_one"]
        assert seconds < WAIT, "one waited for the other"
        assert [sorted(report.layers) for report in reports] == [
            *(["embed", "head"], ["middle"], ["embed", "head"], ["middle"])
        ]
