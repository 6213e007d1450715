"""Two measures of alignment over widths: κ and the spectral one.

A network of three layers learns handwritten digits in muP with Adam; read is its hidden layer. κ is
‖W z‖ / (‖W‖_F ‖z‖) = n^(A − 1), the spectral alignment ‖W z‖ / (‖W‖₂ ‖z‖), and their ratio the root
of the stable rank of W. Yang, Simon & Bernstein 2023 (arXiv 2310.17813) show that the second is of
order one at any width, of weights at their initialisation as of updates.

Expected before it was run: of omega, weights at their initialisation, κ falls as n^(−½) and the
spectral one stays at ½, for the largest singular value of a square matrix is twice the root mean
square of all; of alpha and u both stay, the spectral one nearer to 1.

    python examples/alignment/spectral.py [--quick] --out OUT
"""

import itertools
import math
from pathlib import Path

import torch
from grid import BATCH, PROBE, digits, mean, options_of, save
from matplotlib.figure import Figure
from torch import nn

from adiv_monitor.alignment import Alignment, Probe
from adiv_monitor.max_lr import optimizer_groups, parametrize_model

WIDTHS, STEPS, SEEDS, RATE = (64, 128, 256, 512, 1024), 30, 3, 0.1
NAMES = ("alpha", "omega", "u")


def read(width: int, seed: int) -> dict[str, float]:
    """Train, and return the measures of the hidden layer."""
    torch.manual_seed(seed)
    X, Y = digits()
    linears = [nn.Linear(a, b, bias=False) for a, b in itertools.pairwise((64, width, width, 10))]
    model = nn.Sequential(*[m for linear in linears for m in (linear, nn.ReLU())][:-1])
    probe = Probe(X[-PROBE:], max_rows=None, spectral=True)
    layers = parametrize_model(model, probe, "mup", scale={"2": 2**0.5})
    optimizer = torch.optim.Adam(optimizer_groups(model, layers, "mup", "adam", lr=RATE))
    alignment = Alignment(model, probe)
    for _ in range(STEPS):
        rows = torch.randint(len(X) - PROBE, (BATCH,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X[rows]), Y[rows]).backward()
        optimizer.step()
    return alignment.read()["2"].measures()


def slope(widths: tuple[int, ...], values: list[float]) -> float:
    """Of the logarithm over that of the width, by least squares."""
    x, y = ([math.log(v) for v in of] for of in (widths, values))
    from_mean = [v - mean(x) for v in x]
    return sum(d * v for d, v in zip(from_mean, y, strict=True)) / sum(d * d for d in from_mean)


def plot(found: dict[str, dict[int, list[float]]], file: Path) -> None:
    """A line for each measure over widths, a dot for each seed."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    titles = {
        "kappa": "κ = ‖W z‖ / (‖W‖F ‖z‖)",
        "spectral": "spectral: ‖W z‖ / (‖W‖₂ ‖z‖)",
    }
    for axes, (kind, title) in zip(figure.subplots(1, 2, sharey=True), titles.items(), strict=True):
        for place, name in enumerate(NAMES):
            by_width = found[f"{kind}_{name}"]
            widths, means = tuple(by_width), [mean(values) for values in by_width.values()]
            label = f"{name}, as n^{slope(widths, means):+.2f}" if len(widths) > 1 else name
            axes.plot(widths, means, color=f"C{place}", marker="os^"[place], label=label)
            for width, values in by_width.items():
                axes.plot([width] * len(values), values, ".", ms=3, color=f"C{place}")
        axes.set(xscale="log", yscale="log", title=title, xlabel="width n")
        axes.set_xticks(widths, [str(width) for width in widths])
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=9)
        axes.set_yticks([0.03, 0.1, 0.3, 1], ["0.03", "0.1", "0.3", "1"])
        axes.set_yticks([], minor=True)
    figure.savefig(file, dpi=110)


def main() -> None:
    given = options_of(__doc__)
    widths = WIDTHS[:1] if given.quick else WIDTHS
    readings = {width: [read(width, seed) for seed in range(SEEDS)] for width in widths}
    found = {
        f"{kind}_{name}": {
            width: [r[f"{kind}_{name}"] for r in readings[width]] for width in widths
        }
        for kind in ("kappa", "spectral")
        for name in NAMES
    }
    for measure, by_width in found.items():
        print(measure, *(f"{width}: {mean(values):.3f}" for width, values in by_width.items()))
    given.out.mkdir(parents=True, exist_ok=True)
    save(found, given.out / "spectral.json")
    plot(found, given.out / "spectral.png")


if __name__ == "__main__":
    main()
