"""Where the processes of a test meet: at a port of the system's choice, that nobody took first."""

import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

PATIENCE = timedelta(seconds=120)


def meet(rank: int, world: int, folder: str | Path) -> None:
    """Make a gloo group of the processes that call this with the same folder."""
    torch.set_num_threads(1)
    told = Path(folder) / "port"
    port = 0 if rank == 0 else _read(told)
    store = dist.TCPStore(
        "127.0.0.1", port, world, rank == 0, timeout=PATIENCE, wait_for_workers=False
    )
    if rank == 0:
        new = told.with_suffix(".new")
        new.write_text(str(store.port))
        new.rename(told)  # what is there is whole
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=PATIENCE)


def _read(told: Path) -> int:
    end = time.monotonic() + PATIENCE.total_seconds()
    while not told.exists():
        assert time.monotonic() < end, "the first process never came"
        time.sleep(0.01)
    return int(told.read_text())
