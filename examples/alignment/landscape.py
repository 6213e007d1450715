"""The region of stable training, compared with theory: two slices through muP.

Every pixel is a training run: 3 layers, 64 wide, ReLU, 8 Gaussian inputs, 1 Gaussian output, full
batch, 500 steps of SGD. Blue: the output's change vanishes. White: it is of order one. Red: it
grows. Black: it is not finite; blue beyond black: all units are dead. The lines show where the
first layer leaves r = 0, under full alignment (solid), and under the alignments of a run at the
centre in its last hundred steps (dashed). The theory predicts exponents only. How far from the line
training breaks depends on η, which is near the largest that muP tolerates; with 0.1 it is half an
exponent.

    python examples/alignment/landscape.py [--side 24] [--lr 4] --out OUT
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from adiv_monitor.alignment import Alignment, Probe
from adiv_monitor.max_lr import MUP, optimizer_groups, parametrize_model, solve_max_lr
from adiv_monitor.max_lr.network import Alignments, Network, chain, full_alignment
from adiv_monitor.max_lr.optimizers import SGD
from adiv_monitor.max_lr.stability import feature_change

WIDTH, INPUTS, SAMPLES, STEPS, LAST = 64, 8, 128, 500, 100
SLICES = {
    "a3, b3": (("a", 2), ("b", 2)),
    "c1, c2": (("c", 0), ("c", 1)),
}
Exponents = dict[str, Tensor]


def points(name: str, side: int) -> Exponents:
    """Return a, b and c (points, layers) on a grid that reaches 1.5 to each side of muP."""
    offsets = torch.linspace(-1.5, 1.5, side)
    x, y = torch.meshgrid(offsets, offsets, indexing="xy")
    centre = {"a": MUP.a, "b": MUP.b, "c": (0.0, 0.0, 0.0)}
    found = {k: torch.tensor(v).float().repeat(side * side, 1) for k, v in centre.items()}
    for (kind, layer), offset in zip(SLICES[name], (x, y), strict=True):
        found[kind][:, layer] += offset.flatten()
    return found


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(SAMPLES, INPUTS, generator=generator),
        torch.randn(SAMPLES, 1, generator=generator),
    )


def train_all(exponents: Exponents, lr: float) -> Tensor:
    """Return r = −log_n RMS(change of the output) of every point, mean over the last steps."""
    torch.manual_seed(1)
    a, b, c = (exponents[name] for name in "abc")
    shapes = [(WIDTH, INPUTS), (WIDTH, WIDTH), (1, WIDTH)]
    constants = [INPUTS**-0.5, 1.0, 1.0]
    # The same draws at all points, so that neighbours differ by exponents alone.
    weights = [
        (s * torch.randn(shape) * WIDTH ** -b[:, i, None, None]).requires_grad_()
        for i, (shape, s) in enumerate(zip(shapes, constants, strict=True))
    ]
    factors = [WIDTH ** -a[:, i, None, None] for i in range(3)]
    x, y = data()

    def outputs() -> Tensor:
        hidden = x.expand(len(a), *x.shape)
        for i, (weight, factor) in enumerate(zip(weights, factors, strict=True)):
            hidden = factor * (hidden @ weight.transpose(1, 2))
            hidden = torch.relu(hidden) if i < 2 else hidden
        return hidden

    begun, total = None, torch.zeros(len(a))
    for step in range(STEPS):
        out = outputs()
        begun = out.detach() if begun is None else begun
        if step >= STEPS - LAST:
            total += (out.detach() - begun).square().mean((1, 2)).sqrt()
        gradients = torch.autograd.grad((out - y).square().mean((1, 2)).sum(), weights)
        with torch.no_grad():
            for i, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
                weight -= lr * WIDTH ** -c[:, i, None, None] * gradient
    return -torch.log(total / LAST) / np.log(WIDTH)


def measured(lr: float) -> Alignments:
    """Return alpha, omega and u of a run at muP, mean over its last steps."""
    torch.manual_seed(1)
    x, y = data()
    model = nn.Sequential(
        nn.Linear(INPUTS, WIDTH, bias=False),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH, bias=False),
        nn.ReLU(),
        nn.Linear(WIDTH, 1, bias=False),
    )
    probe = Probe(x, max_rows=None)
    layers = parametrize_model(model, probe, "mup")
    optimizer = torch.optim.SGD(optimizer_groups(model, layers, "mup", "sgd", lr=lr))
    alignment = Alignment(model, probe)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
        if step >= STEPS - LAST:
            readings = alignment.read().values()
            seen.append([[r.alpha or 0.5, r.omega or 0.5, r.u or 0.5] for r in readings])
    means = torch.tensor(seen, dtype=torch.float64).mean(0).T.tolist()
    return Alignments(*map(tuple, means))


def frontier(exponents: Exponents, alignments: Alignments) -> Tensor:
    """Return the smallest r of all layers and of the output at initialisation, at every point."""
    found = []
    for a, b, c in zip(*(exponents[name].tolist() for name in "abc"), strict=True):
        network = Network(tuple(a), tuple(b), SGD, chain(3))
        found.append(min(*feature_change(network, alignments, c), a[2] + b[2] - 0.5))
    return torch.tensor(found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", type=int, default=24)
    parser.add_argument("--lr", type=float, default=4.0)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    alignments = measured(given.lr)
    for name in ("alpha", "omega", "u"):
        print(f"{name:6}", " ".join(f"{value:.3f}" for value in getattr(alignments, name)))
    solution = solve_max_lr(
        parametrization="mup",
        optimizer="sgd",
        objective="sum",
        **vars(alignments),
    )
    print("c by the sum", [round(c, 3) for c in solution.c], "r", [round(r, 3) for r in solution.r])
    figure = Figure(figsize=(12, 5.2), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), SLICES, strict=True):
        exponents = points(name, given.side)
        shape = (given.side, given.side)
        r = train_all(exponents, given.lr).reshape(shape).numpy()
        places = [exponents[k][:, i].reshape(shape).numpy() for k, i in SLICES[name]]
        axes.set_facecolor("black")
        image = axes.pcolormesh(*places, r, cmap="coolwarm_r", vmin=-1, vmax=1)
        for known, style in ((full_alignment(3), "solid"), (alignments, "dashed")):
            least = frontier(exponents, known).reshape(shape).numpy()
            axes.contour(*places, least, levels=[-0.01], colors="gold", linestyles=style)
        axes.plot(*(p.mean() for p in places), "+", color="gold", ms=12)
        axes.set(title=f"{name}: +, muP", xlabel=name[:2], ylabel=name[-2:])
    figure.colorbar(image, label="r of the output: −log₆₄ RMS(change)")
    figure.suptitle(f"η = {given.lr:g}; r = 0 under full (solid) and measured alignment (dashed)")
    given.out.mkdir(parents=True, exist_ok=True)
    figure.savefig(given.out / "landscape.png", dpi=130)


if __name__ == "__main__":
    main()
