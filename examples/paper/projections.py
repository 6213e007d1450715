"""Weights kept within norms: does the cosine of the projection say how much it hurts?

    python examples/paper/projections.py --out OUT     a minute; needs scikit-learn

After every step of plain SGD the rows, the columns or the whole of every weight are scaled down to
a norm of at most κ. A network of two hidden layers, 64 wide, learns handwritten digits so.
`projection_cosine` compares what is left of a step with the step.

Expected before it was run: the smaller κ, the lower the accuracy and the lower the cosine.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from commandline import folder
from sklearn.datasets import load_digits
from slopes import mean_and_error
from table import markdown, plus
from torch import Tensor, nn

from adiv_monitor import Monitor

STEPS, SEEDS, BATCH, RATE, EVERY = 300, 3, 64, 0.1, 10
HELD_OUT = 360
ACROSS = {"rows": 1, "columns": 0, "whole weight": (0, 1)}  # dimensions of a norm
ARMS = (
    ("none", None),
    *(("rows", kappa) for kappa in (1.0, 0.5, 0.25, 0.1)),
    *(("columns", kappa) for kappa in (1.0, 0.5, 0.25, 0.1)),
    *(("whole weight", kappa) for kappa in (4.0, 2.0, 1.0)),
)
MEASURES = ("projection_cosine", "update_ratio")
Run = dict[str, Any]


@torch.no_grad()
def project(weight: Tensor, what: str, kappa: float | None) -> None:
    """Scale rows, columns or the whole of a weight down to a norm of at most κ."""
    if kappa is not None:
        norms = torch.linalg.vector_norm(weight, dim=ACROSS[what], keepdim=True)
        weight.mul_((kappa / norms).clamp(max=1.0))


def train(what: str, kappa: float | None, seed: int) -> Run:
    """Train and test one network; medians over steps and layers of what the monitor read."""
    data, target = load_digits(return_X_y=True)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(data, dtype=torch.float32)[order], torch.tensor(target)[order]
    x = (x - x.mean()) / x.std()
    torch.manual_seed(seed)
    sizes = (64, 64, 64, 10)
    linears = [nn.Linear(n, m) for n, m in pairwise(sizes)]
    model = nn.Sequential(*(part for linear in linears for part in (linear, nn.ReLU())))[:-1]
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with Monitor(model, optimizer, every_n_steps=EVERY, keep=STEPS, on_error="raise") as monitor:
        for _ in range(STEPS):
            rows = torch.randint(HELD_OUT, len(x), (BATCH,))
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(model(x[rows]), y[rows]))
            optimizer.step()
            for linear in linears:
                project(linear.weight, what, kappa)
        monitor.complete_report()
        reports = list(monitor.reports)
    with torch.no_grad():
        right = (model(x[:HELD_OUT]).argmax(-1) == y[:HELD_OUT]).float().mean().item()
    found: Run = {"projected": what, "kappa": kappa, "seed": seed, "accuracy": 100 * right}
    for measure in MEASURES:
        read = [getattr(layer, measure) for r in reports for layer in r.layers.values()]
        found[measure] = statistics.median(value for value in read if value is not None)
    return found


def text(runs: Sequence[Run]) -> str:
    """The page, in Markdown."""
    rows = []
    for what, kappa in dict.fromkeys((run["projected"], run["kappa"]) for run in runs):
        mine = [run for run in runs if (run["projected"], run["kappa"]) == (what, kappa)]
        cosines = [run["projection_cosine"] for run in mine]
        rows.append(
            [
                *(what, "" if kappa is None else f"{kappa:g}"),
                plus(*mean_and_error([run["accuracy"] for run in mine])),
                f"{statistics.fmean(cosines):.2f} ({min(cosines):.2f} to {max(cosines):.2f})",
                f"{statistics.fmean(run['update_ratio'] for run in mine):.1g}",
            ]
        )
    head = ["projected", "κ", "accuracy, percent", "projection_cosine (seeds)", "update_ratio"]
    return (
        "# Weights projected onto norms after every step\n\n"
        f"Handwritten digits, {HELD_OUT} of them held out; two hidden layers, 64 wide, ReLU; plain "
        f"SGD at {RATE:g}, batches of {BATCH}, {STEPS} steps; seeds: {SEEDS}. ± standard error "
        f"over seeds. Readings: medians over layers and every {EVERY}th step, means over seeds.\n\n"
        f"{markdown(head, rows)}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=folder, required=True)
    out: Path = parser.parse_args().out
    torch.set_num_threads(1)
    runs = [train(what, kappa, seed) for what, kappa in ARMS for seed in range(SEEDS)]
    out.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(run) for run in runs)
    (out / "projections.json").write_text(f"[\n{lines}\n]\n")
    (out / "projections.md").write_text(text(runs))
    print(text(runs))


if __name__ == "__main__":
    main()
