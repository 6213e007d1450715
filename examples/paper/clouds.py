"""Fig 1 of the paper: what each map does to a cloud of points in the plane.

    python examples/paper/clouds.py --out OUT

A thousand points are drawn from a standard normal distribution. The picture shows them, and the
input of the affine map as each normaliser leaves it. An affine-like map leaves x/√(‖x‖² + 1): its
points lie inside the unit circle, and no two of them coincide.
"""

import argparse
from pathlib import Path

import torch
from figures import COLOURS
from matplotlib.figure import Figure
from methods import METHODS, Columns, Rows
from torch import Tensor

MAPS = ("batchnorm", "layernorm", "norm-like", "rmsnorm", "affine-like")
POINTS = 1000


def treated(method: str, x: Tensor) -> Tensor:
    """Points (points, 2) as a map's normaliser leaves them."""
    x = x.unsqueeze(0)
    if kind := METHODS[method].columns:
        x = Columns(kind, 1, x.shape[-1], x).train(x, 1)
    rows, _ = Rows([METHODS[method]], x.shape[-1], x)(x)
    return rows[0]


def plot(x: Tensor, file: Path) -> None:
    """A panel per map.

    Args:
        x: points, (points, 2).
        file: where to write the picture.
    """
    figure = Figure(figsize=(2.9 * len(MAPS), 3.6), layout="constrained")
    grid = figure.subplots(1, len(MAPS), sharex=True, sharey=True)
    for method, axes in zip(MAPS, grid, strict=True):
        axes.plot(*x.t(), ".", color="tab:gray", ms=2, alpha=0.3, label="points")
        axes.plot(*treated(method, x).t(), ".", color=COLOURS[method], ms=3, label="treated")
        axes.set(title=method, aspect="equal", xlim=(-3.5, 3.5), ylim=(-3.5, 3.5), xlabel="x₁")
        axes.legend(loc="lower right", fontsize=7, markerscale=2)
    grid[0].set(ylabel="x₂")
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    plot(torch.randn(POINTS, 2, generator=generator), given.out / "fig1.png")


if __name__ == "__main__":
    main()
