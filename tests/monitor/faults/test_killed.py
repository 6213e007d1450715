"""If one of two ranks is killed during a step, the other's monitor does not wait for it.

Nor does it hide the error that the training itself raises.
"""

import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults.scenarios import dense_loss, mlp
from faults.trial import changed
from faults.world import result, surroundings
from processes import meet
from torch import multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

from adiv_monitor import Monitor
from adiv_monitor.sinks import MemorySink
from adiv_monitor.step import ranks

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs the gloo backend")
STEPS, LAST = 5, 1  # the step in which a rank is killed


def work(rank: int, victim: int, folder: str) -> None:
    meet(rank, 2, folder)
    ranks.PATIENCE = 0.5
    torch.manual_seed(0)
    shared = DistributedDataParallel(mlp().double())
    found = {"alone": goes_on(rank == victim, shared), "plain": goes_on(False, None)}
    torch.save(found, Path(folder) / "found.pt")
    os._exit(0)  # the group's threads wait for the other rank


def goes_on(is_victim: bool, shared: nn.Module | None) -> dict[str, Any]:
    """Train alone, and jointly until that fails; monitored if a shared model is given."""
    torch.manual_seed(1)
    model = mlp().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = surroundings(model, optimizer)
    monitor = Monitor(model, optimizer, every_n_steps=1, sinks=[MemorySink()])
    monitor.attach() if shared is not None else monitor.close()
    losses, found = [], {}
    begun = time.monotonic()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = dense_loss(model)
            loss.backward()
            if step == LAST and is_victim:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            losses.append(loss.detach())
            if step == LAST and shared is not None:
                with torch.random.fork_rng():
                    found |= together(shared)
        monitor.close()
    found["seconds"] = time.monotonic() - begun
    found["result"] = result(model, optimizer, losses)
    found["left"] = sorted(changed(before, surroundings(model, optimizer)))
    found["reports"] = [(r.step, sorted(r.layers), r.notes) for r in monitor.reports]
    found["warned"] = [str(w.message) for w in warned if "adiv_monitor" in str(w.message)]
    return found


def together(shared: nn.Module) -> dict[str, Any]:
    """Train jointly without the other rank; return the error raised and the hooks left."""
    optimizer = torch.optim.SGD(shared.parameters(), lr=0.1)
    before = surroundings(shared, optimizer)
    raised = ""
    try:
        with Monitor(shared, optimizer, every_n_steps=1):
            for _ in range(3):
                dense_loss(shared).backward()
                optimizer.step()
    except RuntimeError as error:
        raised = str(error)
    left = changed(before, surroundings(shared, optimizer))
    return {"raised": raised, "left together": sorted(left)}


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_killed(victim: int, tmp_path: Path) -> None:
    """Either rank may be killed; rank 0 hosts the store through which both communicate."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["faults.trial"])
    processes = [
        context.Process(target=work, args=(rank, victim, str(tmp_path))) for rank in (0, 1)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(90)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] == 0
    found = torch.load(tmp_path / "found.pt", weights_only=False)
    alone, plain = found["alone"], found["plain"]
    assert alone["raised"], "the training's own error was masked"
    assert alone["left"] == alone["left together"] == []
    assert alone["result"] == plain["result"]
    assert [step for step, _, _ in alone["reports"]] == list(range(STEPS))
    assert all(layers == ["0", "2", "3"] for _, layers, _ in alone["reports"])
    assert not any(notes for _, _, notes in alone["reports"]), "each has all rows of its own model"
    assert alone["seconds"] < 20
