"""Depth × width on images: does it help if learning rates follow measured alignment?

ReLU MLPs learn handwritten digits, or the outputs of a random network for Gaussian inputs (`--data
teacher`, which is harder in so few steps). Parametrizations, optimizers and arms are combined, and
the base rate is tuned for each arm, because an arm that raises rates needs a lower one:

- full: rates n^(−c) under full alignment;
- dynamic: these rates times the factors of `MaxLRScheduler` with the objective "pareto";
- sum: the same with the objective "sum", which may slow one layer so that others can be faster;
- static: constant factors, the last ones of a dynamic run at the same rate;
- tuned: constant factors of hidden layers and readout, the best of nine at full's best rate.

The method has to beat the last arm, which needs no measurement. The result is the mean training
loss of the last tenth of the steps, with its range over seeds, at the best rate of each arm.

    python examples/alignment/grid.py --out OUT           small: one depth and width
    python examples/alignment/grid.py --out OUT --full    depths 3, 5 × widths 64, 256, all rates
"""

import argparse
import itertools
import json
import math
import platform
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from adiv_monitor.alignment import Probe
from adiv_monitor.max_lr import (
    PARAMETRIZATIONS,
    MaxLRScheduler,
    optimizer_groups,
    parametrize_model,
)

ARMS = ("full", "dynamic", "sum", "static", "tuned")
OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
BATCH, PROBE = 128, 256
MULTIPLIERS = (0.25, 1.0, 4.0)


class Setting(NamedTuple):
    """A network, its optimizer and its data."""

    data: str
    name: str
    optimizer: str
    depth: int
    width: int


class Size(NamedTuple):
    """The size of a comparison."""

    steps: int
    seeds: int
    rates: tuple[float, ...]  # powers of ten, relative to a typical one


SMALL = Size(150, 3, (-0.75, -0.5, -0.25, 0.0, 0.25, 0.5))
FULL = Size(600, 3, (-2.0, -1.5, -1.0, -0.75, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0))


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Return standardised digits (1797, 64) in a fixed order, and their labels."""
    found = load_digits()
    x = torch.tensor(found.data, dtype=torch.float32)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return ((x - x.mean()) / x.std())[order], torch.tensor(found.target)[order]


@cache
def teacher() -> tuple[Tensor, Tensor]:
    """Return Gaussian inputs (20000, 32) and the classes that a random network assigns."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20_000, 32, generator=generator)
    first, second = (torch.randn(n, m, generator=generator) for n, m in ((32, 64), (64, 10)))
    return x, (torch.tanh(x @ first / 32**0.5) @ second).argmax(1)


DATA = {"digits": digits, "teacher": teacher}


def train(
    setting: Setting,
    arm: str,
    rate: float,
    seed: int,
    steps: int,
    gains: Mapping[str, float] | None = None,
    *,
    rise: int = 0,
    **options: Any,
) -> tuple[float, dict[str, float]]:
    """Return the training loss of the last tenth (∞ if it diverges), and the final multipliers.

    Learning rates rise over the first `rise` steps, and fall as a cosine. `options` are those of
    the scheduler that follows alignments.
    """
    torch.manual_seed(seed)
    X, Y = DATA[setting.data]()
    widths = [X.shape[1], *[setting.width] * (setting.depth - 1), 10]
    linears = [nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(widths)]
    model = nn.Sequential(*[m for linear in linears for m in (linear, nn.ReLU())][:-1])
    probe = Probe(X[-PROBE:], max_rows=None)
    hidden = {str(2 * i): 2**0.5 for i in range(1, setting.depth - 1)}
    layers = parametrize_model(model, probe, setting.name, scale=hidden)
    groups = optimizer_groups(model, layers, setting.name, setting.optimizer, lr=10**rate)
    optimizer = OPTIMIZERS[setting.optimizer](groups)
    plain: LRScheduler = CosineAnnealingLR(optimizer, steps - rise)
    if rise:
        rising = LinearLR(optimizer, 1 / rise, total_iters=rise)
        plain = SequentialLR(optimizer, [rising, plain], [rise])
    scheduler = None
    if arm in ("dynamic", "sum"):
        scheduler = MaxLRScheduler(
            *(optimizer, model, probe),
            mode="dynamic",
            parametrization=setting.name,
            objective="sum" if arm == "sum" else "pareto",
            **{"every_n_steps": 10, "warm_up": steps // 10, **options},
        )
    elif gains is not None:
        scheduler = MaxLRScheduler(optimizer, model, probe, mode="static", gains=gains)
    losses = []
    for _ in range(steps):
        rows = torch.randint(len(X) - PROBE, (BATCH,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(X[rows]), Y[rows])
        loss.backward()
        optimizer.step()
        plain.step()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            return math.inf, {}
        if scheduler is not None:
            scheduler.see_loss(losses[-1])
    tail = losses[-steps // 10 :]
    return sum(tail) / len(tail), {} if scheduler is None else dict(scheduler.gains)


def typical(setting: Setting) -> float:
    """Return the power of ten around which rates are tried: that of a rate of order one."""
    # Rates are η n^(−c): with Adam an update is η at width one, with SGD η times the gradient.
    mup = setting.name in ("mup", "mfp")
    return (-0.75 if mup else -1.0) if setting.optimizer == "adam" else -0.25


def compare(setting: Setting, size: Size) -> dict[str, object]:
    """Return, for each arm, the losses of all seeds at its best rate, and that rate."""
    tried: dict[str, dict[float, list[float]]] = {arm: {} for arm in ARMS}
    last: dict[tuple[float, int], dict[str, float]] = {}
    rates = [typical(setting) + offset for offset in size.rates]
    for rate, seed in itertools.product(rates, range(size.seeds)):
        for arm in ("full", "sum", "dynamic"):
            loss, gains = train(setting, arm, rate, seed, size.steps)
            tried[arm].setdefault(rate, []).append(loss)
        last[rate, seed] = gains  # of the dynamic one
        # Not all ones, or it would be full.
        loss = train(setting, "static", rate, seed, size.steps, gains)[0] if gains else math.inf
        tried["static"].setdefault(rate, []).append(loss)
    best = min(rates, key=lambda rate: mean(tried["full"][rate]))
    paths = [str(2 * i) for i in range(setting.depth)]
    choices = []
    for of_hidden, of_readout in itertools.product(MULTIPLIERS, MULTIPLIERS):
        gains = {**dict.fromkeys(paths[1:-1], of_hidden), paths[-1]: of_readout}
        loss = train(setting, "tuned", best, 0, size.steps, gains)[0]
        choices.append((loss, of_hidden, of_readout))
    _, of_hidden, of_readout = min(choices)
    gains = {**dict.fromkeys(paths[1:-1], of_hidden), paths[-1]: of_readout}
    for rate, seed in itertools.product(rates, range(size.seeds)):
        if abs(rate - best) <= 0.75:
            loss = train(setting, "tuned", rate, seed, size.steps, gains)[0]
            tried["tuned"].setdefault(rate, []).append(loss)
    found: dict[str, object] = {"setting": setting._asdict()}
    for arm in ARMS:
        rate = min(tried[arm], key=lambda rate: mean(tried[arm][rate]))
        found[arm] = {"rate": rate, "losses": tried[arm][rate], "at full's": tried[arm].get(best)}
    found["multipliers"] = {"dynamic": last[best, 0], "tuned": gains}
    return found


def options_of(page: str | None) -> argparse.Namespace:
    """Return the options of an experiment, which its docstring describes, and use one thread."""
    options = argparse.ArgumentParser(description=(page or "").partition("\n")[0])
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--quick", action="store_true", help="one setting: does it still run?")
    torch.set_num_threads(1)
    return options.parse_args()


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def save(results: object, file: Path) -> None:
    """Write results, and how they were made."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    models = (line.partition(": ")[2] for line in lines if line.startswith("model name"))
    processor = next(models, platform.machine())
    made = {
        "command": f"python examples/alignment/{' '.join([Path(sys.argv[0]).name, *sys.argv[1:]])}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "processor": f"{processor}, {torch.get_num_threads()} thread(s)",
    }
    file.write_text(json.dumps({**made, "results": results}, indent=1) + "\n")


def plot(results: list[dict[str, object]], file: Path) -> None:
    """Draw the loss of every arm relative to that of full, with the range over seeds."""
    figure = Figure(figsize=(2.5 + 1.1 * len(results), 4.6), layout="constrained")
    axes = figure.subplots()
    for place, arm in enumerate(ARMS):
        base = [mean(r["full"]["losses"]) for r in results]
        losses = [r[arm]["losses"] for r in results]
        middle = [mean(values) / b for values, b in zip(losses, base, strict=True)]
        low = [min(values) / b for values, b in zip(losses, base, strict=True)]
        high = [max(values) / b for values, b in zip(losses, base, strict=True)]
        at = [i + 0.16 * (place - 2) for i in range(len(results))]
        errors = [
            [m - x for m, x in zip(middle, low, strict=True)],
            [x - m for m, x in zip(middle, high, strict=True)],
        ]
        axes.errorbar(at, middle, yerr=errors, fmt="o", capsize=3, label=arm)
    names = ["{name} {optimizer}\n{depth} × {width}".format(**r["setting"]) for r in results]
    axes.set_xticks(range(len(results)), names, fontsize=8)
    axes.axhline(1, color="grey", lw=0.8)
    axes.set(yscale="log", ylabel="training loss / that under full alignment")
    for axis in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        axis("{x:.3g}")
    axes.set_title("each arm at its own best rate; bars: range over seeds")
    figure.legend(loc="outside right upper")
    figure.savefig(file, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--data", choices=DATA, default="digits")
    parser.add_argument("--names", nargs="+", choices=PARAMETRIZATIONS, default=PARAMETRIZATIONS)
    parser.add_argument("--quick", action="store_true", help="does it run?")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    size = FULL if given.full else Size(20, 1, (0.0,)) if given.quick else SMALL
    shapes = itertools.product((3, 5), (64, 256)) if given.full else [(3, 128)]
    results = []
    given.out.mkdir(parents=True, exist_ok=True)
    for (depth, width), name, optimizer in itertools.product(shapes, given.names, OPTIMIZERS):
        found = compare(Setting(given.data, name, optimizer, depth, width), size)
        results.append(found)
        shown = "  ".join(
            f"{arm} {mean(found[arm]['losses']):.4f} (10^{found[arm]['rate']:+.2f})" for arm in ARMS
        )
        print(f"{name} {optimizer:4} {depth}×{width}:  {shown}", flush=True)
        (given.out / f"grid_{given.data}.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(results, given.out / f"grid_{given.data}.png")


if __name__ == "__main__":
    main()
