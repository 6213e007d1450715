"""Alignment and noise in the data: how alignments change when the inputs are mostly noise.

An MLP (3 layers, 128 wide, muP, Adam) learns handwritten digits with noise: x = s · digit +
(1 − s) · Gaussian noise, drawn anew at each step. The probe has the same noise. The picture shows
means over the last fifth of training, with the range over seeds.

    python examples/alignment/data_noise.py [--steps 400] [--seeds 3] --out OUT
"""

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn

from adiv_monitor.alignment import Alignment, Probe
from adiv_monitor.max_lr import optimizer_groups, parametrize_model

WIDTH, BATCH, LR = 128, 128, 0.05
STRENGTHS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)
RATIOS = ("alpha", "omega", "u")


def digits() -> tuple[Tensor, Tensor]:
    """Return standardised digits (1797, 64) and their labels."""
    found = load_digits()
    x = torch.tensor(found.data, dtype=torch.float32)
    return (x - x.mean()) / x.std(), torch.tensor(found.target)


def run(strength: float, seed: int, steps: int) -> tuple[Tensor, float]:
    """Return ratios (layers, ratios), NaN if undefined, and the loss: means over the last fifth."""
    torch.manual_seed(seed)
    x, y = digits()

    def noisy(rows: Tensor) -> Tensor:
        return strength * x[rows] + (1 - strength) * torch.randn(len(rows), x.shape[1])

    model = nn.Sequential(
        nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)
    )
    probe = Probe(noisy(torch.arange(len(x) - 256, len(x))), max_rows=None)
    layers = parametrize_model(model, probe, "mup")
    optimizer = torch.optim.Adam(optimizer_groups(model, layers, "mup", "adam", lr=LR))
    alignment = Alignment(model, probe)
    seen, losses = [], []
    for step in range(steps):
        rows = torch.randint(len(x) - 256, (BATCH,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(noisy(rows)), y[rows])
        loss.backward()
        optimizer.step()
        if step >= 0.8 * steps:
            losses.append(loss.item())
            if step % 4 == 0:
                readings = alignment.read().values()
                values = [[getattr(r, name) for name in RATIOS] for r in readings]
                seen.append([[torch.nan if v is None else v for v in row] for row in values])
    return torch.tensor(seen).mean(0), sum(losses) / len(losses)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    runs = [
        [run(strength, seed, given.steps) for seed in range(given.seeds)] for strength in STRENGTHS
    ]
    values = torch.stack([torch.stack([ratios for ratios, _ in seeds]) for seeds in runs])
    losses = [sum(loss for _, loss in seeds) / len(seeds) for seeds in runs]
    print("strength  loss   " + "  ".join(f"{n}_{i}" for n in RATIOS for i in (1, 2, 3)))
    for strength, loss, row in zip(STRENGTHS, losses, values.mean(1), strict=True):
        shown = "  ".join(f"{value:7.3f}" for value in row.T.flatten().tolist())
        print(f"{strength:8.2f}  {loss:.3f}  {shown}")
    figure = Figure(figsize=(12, 4), layout="constrained")
    for place, (axes, name) in enumerate(zip(figure.subplots(1, 3), RATIOS, strict=True)):
        for layer in range(3):
            each = values[:, :, layer, place]
            if each.isnan().any():
                continue
            colour = f"C{layer}"
            axes.plot(STRENGTHS, each.mean(1), "o-", color=colour, label=f"layer {layer + 1}")
            axes.fill_between(STRENGTHS, each.amin(1), each.amax(1), color=colour, alpha=0.25, lw=0)
        axes.set(title=name, xlabel="signal strength s", ylim=(0.4, 1))
        axes.legend()
    figure.suptitle("Alignment in the last fifth of training: mean and range over seeds")
    given.out.mkdir(parents=True, exist_ok=True)
    figure.savefig(given.out / "data_noise.png", dpi=130)


if __name__ == "__main__":
    main()
