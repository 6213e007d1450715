"""The cost of reading alignments: a reading's time over a training step's, interleaved.

With a reading every 25 steps, the share of the training time is a twenty-fifth of the ratio. On a
CPU, times are the process's own, so other processes do not count; on a GPU they include the wait
for the device.

    python tests/benchmarks/alignment.py [--device cuda] [--samples 16] [--rounds 12]
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torchvision
from models import GPT
from torch import Tensor, nn
from torch.nn import functional

from adiv_monitor.alignment import Alignment, Probe

INTERVAL = 25


def resnet18(device: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Return ResNet-18 with ImageNet's batch shape."""
    rows = 32 if device == "cpu" else 256
    x = torch.randn(rows, 3, 224, 224, device=device)
    return torchvision.models.resnet18(num_classes=10), x, torch.randint(10, (rows,))


def gpt(device: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a GPT with blocks of the width that is usual on this device."""
    width, depth, rows, length = (256, 4, 8, 256) if device == "cpu" else (1024, 8, 16, 1024)
    tokens = torch.randint(1000, (rows, length + 1))
    model = GPT(1000, length, width, depth, width // 64)
    return model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def seconds(function: Callable[[], object], device: str) -> float:
    """Return processor time; on a GPU the time until the device is done."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    start = clock()
    function()
    if device != "cpu":
        torch.cuda.synchronize()
    return clock() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--samples", type=int, default=0, help="of the probe; 0: per model")
    parser.add_argument("--rounds", type=int, default=8)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("model     step, s   reading, s   ratio   at every 25 steps")
    for build, samples in ((resnet18, 16), (gpt, 2)):
        model, x, y = build(given.device)
        model, x, y = model.to(given.device), x.to(given.device), y.to(given.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        alignment = Alignment(model, Probe(x[: given.samples or samples]))

        def step(
            model: nn.Module = model,
            optimizer: torch.optim.Optimizer = optimizer,
            x: Tensor = x,
            y: Tensor = y,
        ) -> None:
            optimizer.zero_grad()
            functional.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
            optimizer.step()

        times = []
        for _ in range(given.rounds + 2):
            times.append([seconds(f, given.device) for f in (step, alignment.read)])
        steps, reads = zip(*times[2:], strict=True)
        ratio = statistics.median(r / s for s, r in times[2:])
        plain, read = map(statistics.median, (steps, reads))
        share = 100 * ratio / INTERVAL
        row = f"{build.__name__:8}  {plain:7.4f}   {read:10.4f}   {ratio:5.3f}   {share:.2f} %"
        print(row, flush=True)


if __name__ == "__main__":
    main()
