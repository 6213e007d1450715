"""What the monitor costs: medians of ratios to the plain step, all in one run.

Each round times one step of every variant in shuffled order between two plain steps and divides by
their mean. Each variant owns an equal model. "not measured": a monitor is attached, the step lies
between two measured ones. "measured": every measure (but the optional ceiling), default max_rows.
"64 rows": measured with max_rows=64.
"least work" is no monitor: it shows what of that is inevitable (`least_work.py`), in three stages:
the two matrix products that e and d are; with the copy and subtraction of the weights; with the
dot products of the cosines.
Memory is counted exactly: the peak of the bytes in live tensor storages during a step, over plain.

    python tests/benchmarks/monitor.py [--rounds 60] [--threads 2] [--write FILE]
"""

import argparse
import gc
import platform
import random
import statistics
import time
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torchvision
from least_work import LeastWork
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import adiv_monitor
from adiv_monitor import Monitor

EXPECTED = {
    ("ResNet-18, 16×3×64×64", "not measured"): 1.005,
    ("ResNet-18, 16×3×64×64", "measured"): 1.25,
    ("MLP 3072-512-512-512-10, batch 128", "not measured"): 1.005,
    ("MLP 3072-512-512-512-10, batch 128", "measured"): 1.9,
}


def resnet() -> tuple[nn.Module, Tensor]:
    return torchvision.models.resnet18(num_classes=10), torch.randn(16, 3, 64, 64)


def mlp() -> tuple[nn.Module, Tensor]:
    widths = (3072, 512, 512, 512, 10)
    layers = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1]), torch.randn(128, 3072)


MODELS = {
    "ResNet-18, 16×3×64×64": resnet,
    "MLP 3072-512-512-512-10, batch 128": mlp,
}


class Trainer:
    """A model with its optimizer, its data and perhaps a monitor."""

    def __init__(
        self,
        build: Callable[[], tuple[nn.Module, Tensor]],
        every: int | None,
        max_rows: int = 1024,
    ) -> None:
        torch.manual_seed(0)
        self.model, self.x = build()
        self.y = torch.randint(10, (len(self.x),))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.monitor = None
        if every is not None:
            self.monitor = Monitor(
                self.model, self.optimizer, every_n_steps=every, max_rows=max_rows
            )
            self.monitor.attach()

    def step(self) -> None:
        self.optimizer.zero_grad()
        functional.cross_entropy(self.model(self.x), self.y).backward()
        self.optimizer.step()

    def timed(self) -> float:
        start = time.perf_counter()
        self.step()
        return time.perf_counter() - start


class PeakMemory(TorchDispatchMode):
    """Peak of the bytes in the storages that were made since it was entered."""

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


def ratios(build: Callable[[], tuple[nn.Module, Tensor]], rounds: int) -> dict[str, list[float]]:
    plain = Trainer(build, None)
    variants = {
        "plain again": Trainer(build, None),
        "not measured": Trainer(build, 10**9),
        "measured": Trainer(build, 1),
        "measured, 64 rows": Trainer(build, 1, max_rows=64),
    }
    for name, steps in (("products", 0), ("with weights", 1), ("with dot products", 2)):
        trainer = variants[f"least work: {name}"] = Trainer(build, None)
        LeastWork(trainer.model, trainer.optimizer, max_rows=1024, steps=steps)
    for trainer in (plain, *variants.values()):
        for _ in range(4):
            trainer.step()
    found: dict[str, list[float]] = {name: [] for name in variants}
    shuffle = random.Random(0)
    for _ in range(rounds):
        for name in shuffle.sample(list(variants), len(variants)):
            before = plain.timed()
            taken = variants[name].timed()
            found[name].append(taken / ((before + plain.timed()) / 2))
    for trainer in variants.values():
        if trainer.monitor is not None:
            trainer.monitor.close()
    return found


def peak(build: Callable[[], tuple[nn.Module, Tensor]], every: int | None) -> int:
    """Peak bytes of the fourth step."""
    trainer = Trainer(build, every)
    for _ in range(3):
        trainer.step()
    gc.collect()
    with PeakMemory() as memory:
        trainer.step()
        trainer.step()
    return memory.peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--write", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    lines = [
        f"`python tests/benchmarks/monitor.py --rounds {arguments.rounds} "
        f"--threads {arguments.threads}`",
        f"adiv-monitor {adiv_monitor.__version__}, torch {torch.__version__}, Python "
        f"{platform.python_version()}, {platform.machine()} CPU, {arguments.threads} thread(s)",
        "",
        "| model | step | ratio to plain: median [quartiles] | bound set beforehand |",
        "| --- | --- | --- | --- |",
    ]
    for name, build in MODELS.items():
        for variant, values in ratios(build, arguments.rounds).items():
            low, middle, high = statistics.quantiles(values, n=4)
            bound = EXPECTED.get((name, variant), "")
            lines.append(f"| {name} | {variant} | {middle:.3f} [{low:.3f}, {high:.3f}] | {bound} |")
    lines += [
        "",
        "| model | parameters, MiB | extra peak memory of a measured step, MiB |",
        "| --- | --- | --- |",
    ]
    for name, build in MODELS.items():
        size = sum(p.numel() * p.element_size() for p in build()[0].parameters())
        extra = peak(build, 1) - peak(build, None)
        lines.append(f"| {name} | {size / 2**20:.1f} | {extra / 2**20:.1f} |")
    print("\n".join(lines))
    if arguments.write:
        arguments.write.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
