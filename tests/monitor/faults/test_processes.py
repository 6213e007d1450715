"""A fault on one of two ranks, in any function through which the ranks communicate."""

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults.injection import Boundary, Raising, Watched
from faults.scenarios import dense_loss, mlp
from faults.trial import REASON, Fault, changed
from faults.world import surroundings
from processes import meet, run_in
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from adiv_monitor import Monitor
from adiv_monitor.step import ranks
from adiv_monitor.step.ranks import Ranks

pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="needs the gloo backend"),
    pytest.mark.slow,
]
STEPS, WORLD = 3, 2
TALKING = ("step/ranks.py",)
# These merge tensors of the ranks of one group, or of all ranks.
JOINING = ("step/unsharded.py", "capture/weights/shards.py")
# Functions that only compute fail alike everywhere, so every eighth of them is tried.
COMPUTING = ("step/merge_ranks.py", "step/merge_sums.py")
# Two kinds of errors are handled differently: RuntimeError, which the store raises when it is gone,
# and all others. Without `--whole` one fault in `ONE_IN` is tried, a number coprime to that of the
# kinds.
ONE_IN = 15
# Always tried: what a rank calls at a point after which the others may count on it.
AGREEING = ("present", "_value")
ERRORS: tuple[Callable[[], Exception], ...] = (lambda: Fault(REASON), lambda: RuntimeError(REASON))


def replicas(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def shards(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model[3])
    fully_shard(model)
    return model


WAYS = {"replicas": replicas, "shards": shards}


def train(way: str, fault: Any, *, monitored: bool) -> dict[str, Any]:
    """Run all steps of one rank, each measured."""
    torch.manual_seed(0)
    inner = mlp().double()
    model = WAYS[way](inner)
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    dense_loss(model).backward()  # wrappers install permanent hooks at their first step
    optimizer.step()
    before = surroundings(inner, optimizer)
    monitor = Monitor(model, optimizer, every_n_steps=1)
    found: dict[str, Any] = {"raised": ""}
    begun = time.monotonic()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            with fault:
                monitor.attach() if monitored else monitor.close()
                for _ in range(STEPS):
                    optimizer.zero_grad()
                    dense_loss(model).backward()
                    optimizer.step()
                monitor.close()
        except Exception as error:
            found["raised"] = repr(error)
    found["seconds"] = time.monotonic() - begun
    found["weights"] = [whole(p) for p in model.parameters()]
    found["left"] = sorted(changed(before, surroundings(inner, optimizer)))
    found["reports"] = [
        (r.step, sorted(r.layers), r.notes, tuple(r.unsupported.values())) for r in monitor.reports
    ]
    found["warned"] = [str(w.message) for w in warned if "adiv_monitor" in str(w.message)]
    return found


def whole(parameter: Tensor) -> Tensor:
    own: Tensor = getattr(parameter, "_local_tensor", parameter)
    return own.detach().clone()


def work(rank: int, folder: str, every: bool) -> None:
    """Train with each fault on each rank that may have it, or with a sample of them on one."""
    meet(rank, WORLD, folder)
    ranks._SHORT = 0.1
    torch.set_num_threads(1)
    found: dict[Any, Any] = {}
    for way in WAYS:
        Ranks._attached.clear()
        dist.barrier()
        ranks.PATIENCE = 20.0  # first uses are slow
        plain = train(way, Watched(), monitored=False)
        own = Watched()
        found[way] = plain, train(way, own, monitored=True)
        boundaries = []
        if way != "replicas":  # which merge nothing
            boundaries += [b for b in own.boundaries if b.file in JOINING]
        boundaries += [b for b in own.boundaries if b.file in TALKING]
        boundaries += [b for b in own.boundaries if b.file in COMPUTING][::8]
        ranks.PATIENCE = 0.4
        several: list[Any] = [None] * WORLD
        dist.all_gather_object(several, boundaries)
        places = {boundary: i for i, boundary in enumerate(sorted({*several[0], *several[1]}))}
        for victim in range(WORLD):
            for boundary in several[victim]:
                turn, number = places[boundary] % WORLD, places[boundary] // WORLD
                sampled = number % ONE_IN == 0 or boundary.name in AGREEING
                if not (every or sampled):
                    continue
                if boundary in several[1 - victim] and not every and turn != victim:
                    continue
                Ranks._attached.clear()  # left by a fault that prevented leaving
                dist.barrier()
                fault = Raising(ERRORS[number % len(ERRORS)](), boundary)
                trial = train(way, fault if rank == victim else Watched(), monitored=True)
                trial["came"] = rank != victim or fault.raised
                same = zip(trial.pop("weights"), plain["weights"], strict=True)
                trial["same"] = all(torch.equal(a, b) for a, b in same)
                found[way, victim, boundary] = trial
    torch.save(found, Path(folder) / f"{rank}.pt")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, whole: bool) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("processes")
    run_in(WORLD, work, str(folder), whole)
    return [torch.load(folder / f"{r}.pt", weights_only=False) for r in range(WORLD)]


def trials(
    found: list[dict[Any, Any]], way: str, victim: int, rank: int
) -> dict[Boundary, dict[str, Any]]:
    """Return one rank's view of the faults on the victim that did occur."""
    keys = [key for key in found[0] if len(key) == 3 and key[:2] == (way, victim)]
    return {key[2]: found[rank][key] for key in keys if found[victim][key]["came"]}


@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("victim", range(WORLD))
@pytest.mark.parametrize("way", WAYS)
def test_the_training_is_the_unmonitored_one_and_what_is_lost_is_said_once(
    way: str, victim: int, rank: int, found: list[dict[Any, Any]]
) -> None:
    for boundary, trial in trials(found, way, victim, rank).items():
        assert trial["same"], boundary
        assert trial["raised"] == "", boundary
        assert trial["left"] == [], boundary
        assert trial["seconds"] < 20, boundary
        steps = [step for step, *_ in trial["reports"]]
        if rank != victim:
            assert steps == list(range(STEPS)), f"a report is missing in the other one: {boundary}"
            assert trial["warned"] == [], boundary
            continue
        assert len(trial["warned"]) <= 1, boundary
        told = [note for *_, notes, _ in trial["reports"] for note in notes]
        told += {why for *_, unsupported in trial["reports"] for why in unsupported}
        if steps != list(range(STEPS)):
            assert REASON in "".join(trial["warned"]), boundary
        assert sum(REASON in note for note in told) <= 1, boundary
        for _, layers, notes, unsupported in trial["reports"]:
            assert layers == ["0", "2", "3"] or notes or unsupported, boundary


def test_there_are_many_functions_to_fail(found: list[dict[Any, Any]], whole: bool) -> None:
    came = {(way, victim): len(trials(found, way, victim, victim)) for way in WAYS
            for victim in range(WORLD)}  # fmt: skip
    assert all(came.values()), came
    assert sum(came.values()) > (40 if whole else 10), came
    for rank in range(WORLD):
        for way in WAYS:
            plain, monitored = found[rank][way]
            assert all(map(torch.equal, plain["weights"], monitored["weights"]))
            assert [(step, layers) for step, layers, *_ in monitored["reports"]] == [
                (step, ["0", "2", "3"]) for step in range(STEPS)
            ]
