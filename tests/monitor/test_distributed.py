"""Several ranks that train together: one report covers the rows of all of them.

They measure the same steps, and none waits for a rank without a monitor.
"""

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import FoundBy, assert_same, make, meet, patient, written
from rank_steps import Case, alone, small, take, train
from setups import trained
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.modules.module import _global_forward_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm

from adiv_monitor import AlarmError, Monitor
from adiv_monitor.report import StepReport
from adiv_monitor.sinks import MemorySink
from adiv_monitor.step import ranks, schedule

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs the gloo backend")


CASES = {
    "halves": Case(((4,), (4,))),
    "uneven, clipped": Case(((5,), (3,)), clip=0.1),
    "one has none": Case(((8,), (0,))),
    "micro-batches, each averaged": Case(((2, 2), (1, 3)), sync=True),
    "a branch of its own, in turn": Case(((4,), (4,)), branches=True, turn=1),
    "four, in turn": Case(((3,), (2,), (0,), (3,)), turn=1),
}


Found = dict[str, Any]
Ranks = dict[int, list[Found]]  # by world size and rank


def work(rank: int, world: int, folder: str) -> None:
    """Do all tests' work of one rank: starting a process takes longer than the work."""
    meet(rank, world, folder)
    found = take_steps(world)
    if world == 2:
        found |= {task.__name__: task(rank) for task in TASKS}
        found["group_that_is_gone"] = group_that_is_gone(rank)
    torch.save(found, Path(folder) / f"{rank}.pt")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return FoundBy(work, tmp_path_factory.mktemp("processes"))


def take_steps(world: int) -> Found:
    return {
        name: (monitor.latest, written(monitor))
        for name, case in CASES.items()
        if len(case.parts) == world
        for monitor, _ in [take(case, dist.get_rank())]
    }


@pytest.mark.parametrize(
    "name", [*list(CASES)[:-1], pytest.param("four, in turn", marks=pytest.mark.slow)]
)
def test_the_report_is_that_of_one_process_with_all_rows(name: str, found: Ranks) -> None:
    reports, counts = zip(*(own[name] for own in found[len(CASES[name].parts)]), strict=True)
    assert all(report == reports[0] for report in reports), "all processes have it"
    assert counts == (1, *(0 for _ in reports[1:])), "the first writes it"
    expected = take(CASES[name], None)[0].latest
    assert_same(reports[0].to_dict(), expected.to_dict())
    assert not any(reading.standard_error for reading in expected.layers.values())


# No rank waits long for another


@patient()
def optimizer_in_parts(rank: int) -> list[StepReport]:
    """Train with `ZeroRedundancyOptimizer`: each rank steps a part and broadcasts the result."""
    own = partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW, lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning from within torch
        return list(train(rank, steps=2, optimizer=own).reports)


@patient()
def averaged_by_hand(rank: int | None, noises: Sequence[float] = (0.0, 1.0)) -> list[StepReport]:
    """Average the gradients after the backward pass, without DDP, and clip them; then edit them."""

    def average(noise: float, step: int, model: nn.Module, monitor: Monitor) -> None:
        torch.manual_seed(1)
        for p in model.parameters() if rank is not None else ():
            dist.all_reduce(p.grad)
            p.grad /= 2
            p.grad += noise * torch.randn_like(p) * p.grad.norm()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    ways = [partial(average, noise) for noise in noises]
    return [train(rank, alone, between=way).latest for way in ways]


def on_its_probe(rank: int | None) -> StepReport | None:
    """Take a step with what is measured on a probe; the ranks' probes together are the batch."""
    model, tokens, _ = make()
    net = model if rank is None else DistributedDataParallel(model)
    given: Any = {"realised": mean_sine, "attention": True, "max_rows": None}
    own = tokens if rank is None else tokens[4 * rank :][:4]
    return trained(net, lambda net: mean_sine(net(own)).mean(), **given)[0]


def mean_sine(output: Tensor) -> Tensor:
    return output.sin().flatten(1).mean(1)


def module_as_a_whole(rank: int | None) -> StepReport | None:
    """Take a step with a layer that is run again, to be measured as a whole."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), weight_norm(nn.Linear(6, 3))).double()
    x = torch.randn(8, 5, dtype=torch.float64)
    net = model if rank is None else DistributedDataParallel(model)
    own = x if rank is None else x[4 * rank :][:4]
    return trained(net, lambda net: net(own).square().mean(), max_rows=None)[0]


def all_rows_in_one(rank: int) -> StepReport | None:
    """Rank 0 takes three of its rows, rank 1 all four."""
    return train(rank, max_rows=None if rank else 3).latest


def evaluation_by_the_first_alone(rank: int) -> tuple[list[tuple[str, ...]], float]:
    """Evaluate on rank 0 only, whose report completes while rank 1 waits at a barrier."""

    @torch.no_grad()
    def evaluate(step: int, net: nn.Module, monitor: Monitor) -> None:
        if rank == 0:
            net.module(small(rank)[1])
        dist.barrier()

    begin = time.monotonic()
    monitor = train(rank, steps=3, after=evaluate)
    return [report.notes for report in monitor.reports], time.monotonic() - begin


def monitor_that_leaves(rank: int) -> list[tuple[str, ...]]:
    def leave(step: int, net: nn.Module, monitor: Monitor) -> None:
        if (rank, step) == (1, 0):
            monitor.close()

    return [report.notes for report in train(rank, steps=3, after=leave).reports]


def turns_that_differ(rank: int) -> list[StepReport]:
    """Train on two ranks whose monitors are at different turns."""
    return list(train(rank, steps=2, layers_per_step=1, turn=rank).reports)


def monitor_that_falls_silent(rank: int) -> list[tuple[str, ...]]:
    """Train with a monitor that announced itself on rank 1, but contributes no more."""

    def fall_silent(step: int, net: nn.Module, monitor: Monitor) -> None:
        if step == 0:
            monitor.complete_report()
            patch.setattr(ranks, "PATIENCE", 0.5)
            if rank == 1:
                for hook in monitor._hooks:
                    hook.remove()
                monitor._controller.disarm()
        if step == 2 and rank == 0:
            monitor.close()
        if step == 2:
            dist.barrier()  # rank 1 does not announce that it leaves

    with pytest.MonkeyPatch.context() as patch:
        monitor = train(rank, steps=3, after=fall_silent)
    return [report.notes for report in monitor.reports]


@patient()
def layer_that_fails_in_one(rank: int) -> StepReport | None:
    return train(rank, off=["0"] * rank, on_error="warn").latest


def training_of_its_own(rank: int) -> tuple[StepReport | None, int]:
    monitor = train(rank, alone, sinks=[MemorySink()])
    return monitor.latest, written(monitor)


def stage_of_a_pipeline(rank: int) -> StepReport | None:
    """Take a step of a pipeline: each rank has its own layers, for the same rows."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh()) if rank == 0 else nn.Linear(6, 3)
    model.double()
    x = torch.ones(4, 6, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, on_error="raise") as monitor:
        if rank == 0:
            made = model(small(0)[1])
            dist.send(made.detach(), 1)
            dist.recv(x, 1)
            made.backward(x)
        else:
            dist.recv(x, 0)
            x.requires_grad_()
            model(x).square().mean().backward()
            dist.send(x.grad, 0)
        optimizer.step()
    return monitor.latest


def tensor_parallel(rank: int) -> tuple[bool, Any, Any, float]:
    """Train a network of which each rank has a part; the normalisation is whole in both."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import parallel

    plan = {"1": parallel.ColwiseParallel(), "3": parallel.RowwiseParallel()}
    runs = []
    for monitored in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        model = parallel.parallelize_module(net, init_device_mesh("cpu", (2,)), plan)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        monitor = Monitor(model, optimizer, every_n_steps=1, on_error="raise")
        monitor.attach() if monitored else monitor.close()
        for step in range(3):
            optimizer.zero_grad()
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step()
        monitor.close()
        runs.append([getattr(p, "_local_tensor", p).detach().clone() for p in model.parameters()])
    report = monitor.latest
    return all(map(torch.equal, *runs)), report.layers, report.unsupported, report.coverage


FIRST = [(0, 20), (20, 20), (40, 50)]  # a cost of 4 plain steps at a bound of 1/10: 36
# (ranks with a monitor, the steps that each rank measures, with the interval)
MONITORED = [([1], [[], [*FIRST[:2], (40, 100)]]), ([0], [FIRST, []]), ([0, 1], [FIRST, FIRST])]


def within_a_bound(rank: int) -> list[list[tuple[int, int | None]]]:
    return [measured_steps(rank if rank in those else None) for those, _ in MONITORED]


def measured_steps(rank: int | None) -> list[tuple[int, int | None]]:
    """Train with clocks that differ: a measured step seems more expensive to rank 1."""
    model, x = small(0)
    net, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(net, optimizer, every_n_steps=20, max_overhead=0.1, on_error="raise")
    seconds = 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            *(schedule, "step_times"),
            lambda _: schedule.StepTimes(lambda: seconds, lambda a, b: b - a),
        )
        if rank is not None:
            monitor.attach()
        for _ in range(100):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            seconds += 1 + 4 * bool(_global_forward_hooks) * (1 + (rank or 0))
            optimizer.step()
        if rank is not None:
            monitor.close()
    return [(report.step, report.interval) for report in monitor.reports]


def group_that_is_gone(rank: int) -> StepReport | None:
    """Destroy the process group before the monitor closes."""
    return train(rank, after=lambda *_: dist.destroy_process_group()).latest


@patient()
def losses_of_ranks(rank: int) -> tuple[list[float], list[StepReport]]:
    """Log each rank's own losses; rank 0 does not log that of step 2."""
    collected: list[float] = []

    def log(step: int, loss: Tensor, monitor: Monitor) -> None:
        collected.append(loss.item())
        if step != 2 or rank:
            monitor.log_loss(loss)

    return collected, list(train(rank, steps=4, see=log, every_n_steps=3).reports)


@patient()
def nan_in_one(rank: int) -> list[StepReport]:
    """Train with a loss of rank 1 that is NaN, in a step that is not measured."""

    def log(step: int, loss: Tensor, monitor: Monitor) -> None:
        if step == 2 and rank:
            loss.data *= math.nan
            loss.register_hook(lambda g: g * math.nan)
        monitor.log_loss(loss)

    return list(train(rank, steps=4, see=log, every_n_steps=3, on_error="warn").reports)


Stopped = tuple[str, int, int, list[Tensor]]


@patient()
def alarm_that_stops_all(rank: int) -> Stopped:
    """Train with an alarm at step 2; return its message, steps taken, reports and weights."""
    steps: list[int] = []
    monitors: list[Monitor] = []
    weights: list[Tensor] = []

    def late(step: int, net: nn.Module, monitor: Monitor) -> None:
        time.sleep(0.05 * rank)  # one rank is always late
        steps.append(step)
        monitors[:], weights[:] = [monitor], net.parameters()

    rules = [lambda path, reading: monitors and len(monitors[0].reports) == 2]
    with pytest.raises(AlarmError) as caught:
        train(rank, steps=5, after=late, alarms=rules, on_alarm="stop", on_error="warn")
    return str(caught.value), len(steps), len(monitors[0].reports), [p.detach() for p in weights]


@patient()
def tell_of_the_whole_model(rank: int) -> Found:
    """Train a head behind a trunk without gradients, and remove its gradients before some steps."""
    torch.manual_seed(0)
    trunk, head = nn.Linear(3, 4), nn.Linear(4, 2)
    model = nn.ModuleDict({"trunk": trunk, "head": head})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    net, x = DistributedDataParallel(head), torch.full((2, 3), 1.0 + rank)
    with Monitor(model, optimizer, every_n_steps=1, on_error="raise") as monitor:
        for to_none in (None, True, False):
            with torch.no_grad():
                h = trunk(x)
            net(h).square().sum().backward()
            if to_none is not None:
                optimizer.zero_grad(set_to_none=to_none)
            optimizer.step()
            optimizer.zero_grad()
    told = "trainable", "not_held", "cut_off", "removed", "weights_returned"
    return {name: [getattr(report, name) for report in monitor.reports] for name in told}


def test_several_ranks_tell_of_the_whole_model(found: Ranks) -> None:
    for rank in found[2]:
        told = rank["tell_of_the_whole_model"]
        assert told["trainable"] == [26] * 3
        assert told["not_held"] == [{}] * 3
        assert told["cut_off"] == [{"trunk": 16}] * 3
        assert told["removed"] == [{}, {"head": 10}, {"head": 10}]
        assert told["weights_returned"] == [None, None, 0.0]


TASKS = (
    tell_of_the_whole_model,
    alarm_that_stops_all,
    losses_of_ranks,
    nan_in_one,
    optimizer_in_parts,
    averaged_by_hand,
    on_its_probe,
    module_as_a_whole,
    all_rows_in_one,
    evaluation_by_the_first_alone,
    monitor_that_leaves,
    turns_that_differ,
    monitor_that_falls_silent,
    layer_that_fails_in_one,
    training_of_its_own,
    within_a_bound,
    stage_of_a_pipeline,
    tensor_parallel,
)
ALONE = ("This report has only the rows of rank 0, of 2 ranks.",)


def test_losses_are_the_mean_over_the_ranks_that_know_one(found: Ranks) -> None:
    (first, reports), (second, others) = (own["losses_of_ranks"] for own in found[2])
    assert reports == others
    mean = {step: (a + b) / 2 for step, (a, b) in enumerate(zip(first, second, strict=True))}
    assert first[0] != pytest.approx(second[0])
    assert reports[0].losses == pytest.approx({0: mean[0]})
    assert reports[1].losses == pytest.approx({1: mean[1], 2: second[2], 3: mean[3]})
    assert [report.learning_rates for report in reports] == [(0.1,), (0.1,)]


def test_the_rank_whose_loss_was_not_finite_first_is_named(found: Ranks) -> None:
    reports, others = (own["nan_in_one"] for own in found[2])
    said = "First not finite, at step 2: the loss or the rows of rank 1 alone."
    assert said in reports[1].notes
    assert [report.notes for report in reports] == [report.notes for report in others]
    (spike,) = reports[1].spikes
    assert (spike.step, math.isnan(spike.loss)) == (2, True)


def test_an_alarm_stops_all_ranks_in_the_same_step(found: Ranks) -> None:
    first, second = (own["alarm_that_stops_all"] for own in found[2])
    assert first[0].startswith("step 2: 0: ")
    assert first[:3] == second[:3] == (first[0], 3, 3)
    assert all(map(torch.equal, first[3], second[3]))


def test_an_optimizer_in_parts(found: Ranks) -> None:
    expected = train(None, steps=2, optimizer=partial(torch.optim.AdamW, lr=0.1)).reports
    for own in found[2]:
        for report, whole in zip(own["optimizer_in_parts"], expected, strict=True):
            assert report.optimizer == "ZeroRedundancyOptimizer"
            like_whole = replace(report, optimizer=whole.optimizer, new_state=whole.new_state)
            assert_same(like_whole.to_dict(), whole.to_dict())


def test_a_gradient_that_is_averaged_by_hand(found: Ranks) -> None:
    """Averaging after the backward pass is not told from averaging within it; an edit is."""
    (whole,) = averaged_by_hand(None, [0.0])
    for own in found[2]:
        averaged, edited = own["averaged_by_hand"]
        # Random numbers are those of another process.
        expected = replace(whole, random_states=averaged.random_states)
        assert_same(averaged.to_dict(), expected.to_dict())
        assert any("holds more than these rows" in note for note in edited.notes)


def test_probes_of_the_ranks_together_are_one(found: Ranks) -> None:
    reports = [own["on_its_probe"].to_dict() for own in found[2]]
    assert reports[0] == reports[1]
    expected = on_its_probe(None)
    assert expected is not None and expected.realised_loss_change
    assert all(reading.attention_cosine for reading in expected.attention.values())
    assert_same(reports[0], expected.to_dict())


def test_a_module_as_a_whole_has_the_rows_of_all_ranks(found: Ranks) -> None:
    expected = module_as_a_whole(None)
    assert expected is not None and expected.layers["2"].kind == "module"
    for own in found[2]:
        assert_same(own["module_as_a_whole"].to_dict(), expected.to_dict())


def test_a_rank_that_takes_all_of_its_rows_is_sampled_as_the_others_are(found: Ranks) -> None:
    for own in found[2]:
        report = own["all_rows_in_one"]
        for reading in report.layers.values():
            assert (reading.rows_seen, reading.rows_total) == (3, 8)
            assert not math.isnan(reading.update_cosine)


def test_an_evaluation_by_the_first_process_delays_none(found: Ranks) -> None:
    for own in found[2]:
        notes, seconds = own["evaluation_by_the_first_alone"]
        assert notes == [(), (), ()], "both speak in every report"
        assert seconds < ranks.PATIENCE / 2


def test_a_monitor_that_leaves_is_not_waited_for(found: Ranks) -> None:
    first, second = (own["monitor_that_leaves"] for own in found[2])
    assert [notes[:1] for notes in first] == [(), ALONE, ALONE]
    assert [notes[0] for notes in second] == [
        "This report has only the rows of rank 1, of 2 ranks."
    ]


def test_a_monitor_that_falls_silent_is_done_without(found: Ranks) -> None:
    notes = found[2][0]["monitor_that_falls_silent"]
    assert [own[:1] for own in notes] == [(), ALONE, ALONE]


def test_without_the_group_each_process_has_a_report_of_its_own(found: Ranks) -> None:
    for rank, own in enumerate(found[2]):
        report = own["group_that_is_gone"]
        assert report.notes[0] == ALONE[0].replace("0", str(rank))
        assert report.layers["0"].rows_seen == 4


def test_a_layer_that_fails_in_one_process_rests_on_the_rows_of_the_others(found: Ranks) -> None:
    first, second = (own["layer_that_fails_in_one"] for own in found[2])
    assert first == second
    assert first.notes == (
        "Rows of '0' are missing from other ranks. Their readings are estimated from rows alone.",
    )
    assert [reading.rows_seen for reading in first.layers.values()] == [4, 8]
    assert first.unsupported == {}


def test_processes_that_train_on_their_own_speak_for_themselves(found: Ranks) -> None:
    for rank, own in enumerate(found[2]):
        report, count = own["training_of_its_own"]
        assert count == 1
        for path, reading in train(rank, alone).latest.layers.items():
            assert_same(report.layers[path].to_dict(), reading.to_dict())


def test_whose_rows_are_all_there_is_not_told_that_some_are_missing(found: Ranks) -> None:
    """Other ranks that train something else add no rows, so none are missing."""
    for own in found[2]:
        report = own["stage_of_a_pipeline"]
        assert report.notes == ()
        assert len(report.layers) == 1
        assert [reading.rows_seen for reading in report.layers.values()] == [4]
        assert own["training_of_its_own"][0].notes == ()


def test_tensor_parallelism_is_refused_and_the_training_is_the_same(found: Ranks) -> None:
    for own in found[2]:
        same, layers, unsupported, coverage = own["tensor_parallel"]
        assert same and not layers and coverage == 0
        assert list(unsupported) == ["0", "1", "3"]
        assert all("tensor parallelism, which is not measured" in x for x in unsupported.values())


def test_processes_agree_on_the_interval_and_wait_for_none(found: Ranks) -> None:
    for rank, own in enumerate(found[2]):
        assert own["within_a_bound"] == [expected[rank] for _, expected in MONITORED]


def test_processes_whose_turns_differ_each_speak_for_themselves(found: Ranks) -> None:
    for rank, own in enumerate(found[2]):
        for step, report in enumerate(own["turns_that_differ"]):
            assert report.turn is not None
            assert report.turn.first == (step + rank) % 2 + 1
            assert f"This report has only the rows of rank {rank}, of 2 ranks." in report.notes
            assert len(report.layers) == 1
