"""The monitor's cost: medians of ratios to the plain step, all in one run.

Each round times one step of every variant, in shuffled order, between two plain steps, and divides
by their mean. Each variant has its own equal model. "not measured": a monitor is attached, the step
lies between two measured ones. "measured": every measure (but the optional ceiling), default
max_rows. "64 rows": measured with max_rows=64. "least work" has no monitor: it shows which part of
the cost is inevitable (`least_work.py`), in four stages: the two matrix products for e and d; with
the copy and subtraction of the weights; with the dot products; with one pass over inputs and output
gradients. "its operations alone" are those that a measured step dispatches, the model's and the
optimizer's included, called once more, one after the other: the step as if nothing ran in between.
Memory is counted exactly: the peak of the bytes in live tensor storages during a step, over plain
(on a GPU: the allocator's). gpu.py runs large models on a GPU, compiled ones too.

A model is measured for `--rounds` rounds, or, if at least three are done, until `--seconds` have
passed. Results are written after every model, so that an interrupted run keeps them.

Before, with numerator and norms from 1,024 rows (two threads): ResNet-18 at 16×3×64×64 1.98, the
MLP 2.69, MobileNetV3-small 3.1. The bounds in the table were set then.

    python tests/benchmarks/monitor.py [--models resnet18 mlp] [--device cuda] [--rounds 60]
        [--seconds 300] [--least-rows 128] [--threads 2] [--write FILE]
"""

import gc
import random
import statistics
import time
import weakref
from typing import Any, Protocol

import torch
from least_work import LeastWork
from models import TASKS, Task, Trainer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from visible import visible
from write_up import heading, parser, table, write

# Goals set beforehand.
EXPECTED = {
    ("resnet18", "measured"): 1.5,
    ("resnet18-224", "measured"): 1.12,
    ("mlp", "measured"): 2.0,
    ("mobilenet", "measured"): 1.7,
    ("gpt", "measured"): 1.3,
    **{(name, "not measured"): 1.005 for name in TASKS},
}
TIMES = ("model", "step", "ratio to plain: median [quartiles]", "rounds", "goal")
MEMORY = ("model", "parameters, MiB", "extra peak memory of a measured step, MiB")
STAGES = ("products", "with weights", "with dot products", "with passes")


class PeakMemory(TorchDispatchMode):
    """Peak of the bytes in storages made inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if _dense(t)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if _dense(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in known and storage._cdata not in self._seen:
                    self._seen.add(storage._cdata)
                    self.live += storage.nbytes()
                    weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


def _dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided


class Operations(TorchDispatchMode):
    """A mode that records the dispatched operations, to repeat them."""

    def __init__(self) -> None:
        super().__init__()
        self._noted: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._noted.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    @torch.no_grad()
    def step(self) -> None:
        """Repeat all operations on the recorded tensors."""
        for func, args, kwargs in self._noted:
            func(*args, **kwargs)

    def close(self) -> None:
        """Release the tensors."""
        self._noted.clear()


def operations_of(task: Task, device: str) -> Operations:
    """Return the operations of the fifth step of a run in which each step is measured."""
    trainer = Trainer(task, {"every_n_steps": 1}, device)
    for _ in range(4):
        trainer.step()
    with visible(), Operations() as operations:
        trainer.step()
    trainer.close()
    return operations


class Subject(Protocol):
    """An object that takes steps."""

    def step(self) -> None:
        """Take one step."""

    def close(self) -> None:
        """End the steps."""


def timed(trainer: Subject, device: str) -> float:
    """Return the seconds of one step, the device's work included."""
    wait(device)
    start = time.perf_counter()
    trainer.step()
    wait(device)
    return time.perf_counter() - start


def wait(device: str) -> None:
    """Wait until the device has done all its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def variants(task: Task, least_rows: int, device: str) -> dict[str, Subject]:
    """Return the variants that are compared with the plain step."""
    found: dict[str, Subject] = {
        "plain again": Trainer(task, None, device),
        "not measured": Trainer(task, {"every_n_steps": 10**9}, device),
        "measured": Trainer(task, {"every_n_steps": 1}, device),
        "measured, 64 rows": Trainer(task, {"every_n_steps": 1, "max_rows": 64}, device),
        "measured: its operations alone": operations_of(task, device),
    }
    for stage, name in enumerate(STAGES):
        found[f"least work: {name}"] = trainer = Trainer(task, None, device)
        LeastWork(trainer.model, trainer.optimizer, max_rows=least_rows, stage=stage)
    return found


def ratios(
    plain: Subject, variants: dict[str, Subject], rounds: int, seconds: float, device: str
) -> dict[str, list[float]]:
    """Return, by variant, step times over those of the plain steps around them; close all subjects.

    Args:
        plain: the subject that the variants are compared with.
        variants: by name.
        rounds: number of rounds; fewer, but at least three, if the time is up.
        seconds: the time limit.
        device: of all subjects.
    """
    for trainer in (plain, *variants.values()):
        for _ in range(3):
            trainer.step()
    found: dict[str, list[float]] = {name: [] for name in variants}
    shuffle = random.Random(0)
    end = time.perf_counter() + seconds
    for done in range(rounds):
        if done >= 3 and time.perf_counter() > end:
            break
        before = timed(plain, device)
        for name in shuffle.sample(list(variants), len(variants)):
            taken = timed(variants[name], device)
            after = timed(plain, device)
            found[name].append(taken / ((before + after) / 2))
            before = after
    for trainer in variants.values():
        trainer.close()
    return found


def spread(values: list[float]) -> str:
    """Return the median and the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"


def peak(task: Task, monitor: dict[str, object] | None, device: str = "cpu") -> int:
    """Return the peak bytes of the fourth and fifth step.

    On a GPU these are the allocator's, model and optimizer included; on a CPU those of tensors that
    the steps made.
    """
    gc.collect()
    held = torch.cuda.memory_allocated() if device == "cuda" else 0
    trainer = Trainer(task, monitor, device)
    for _ in range(3):
        trainer.step()
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            trainer.step()
        found = torch.cuda.max_memory_allocated() - held
    else:
        with visible(), PeakMemory() as memory:
            trainer.step()
            trainer.step()
        found = memory.peak
    trainer.close()
    return found


def memory_row(task: Task, device: str) -> tuple[str, str, str]:
    size = sum(p.numel() * p.element_size() for p in task.model().parameters())
    extra = peak(task, {"every_n_steps": 1}, device) - peak(task, None, device)
    return task.title, f"{size / 2**20:.1f}", f"{extra / 2**20:.1f}"


def main(given: list[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--models", nargs="+", choices=TASKS)
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    made.add_argument("--rounds", type=int, default=60)
    made.add_argument("--seconds", type=float, default=300, help="for each model")
    made.add_argument("--least-rows", type=int, default=128, help="rows of the least work")
    arguments = made.parse_args(given)
    torch.set_num_threads(arguments.threads)
    if arguments.quick:
        arguments.rounds = 2
    chosen = arguments.models or (["mlp"] if arguments.quick else list(TASKS))
    lines = heading("Cost of a measured step", __file__, arguments)
    times: list[tuple[object, ...]] = []
    memory: list[tuple[str, str, str]] = []
    text = ""
    for name in chosen:
        task = TASKS[name]
        device = arguments.device
        compared = variants(task, arguments.least_rows, device)
        found = ratios(
            Trainer(task, None, device), compared, arguments.rounds, arguments.seconds, device
        )
        for variant, values in found.items():
            goal = EXPECTED.get((name, variant), "")
            times.append((task.title, variant, spread(values), len(values), goal))
        memory.append(memory_row(task, device))
        text = write([*lines, *table(TIMES, times), *table(MEMORY, memory)], arguments.write)
    print(text)


if __name__ == "__main__":
    main()
