"""Transfer of a narrow network's alignments to a wide one: the wide one's alignments and loss.

A network of three layers, 64 wide, learns handwritten digits. The alignments to which it converges
(means over the last third of the steps) determine exponents c for a network that is 256 wide, with
the objective "sum", as Kilian & Wojnar 2025 do. The rate of each arm is tuned separately:

- full: rates n^(−c) under full alignment;
- carried A: exponents c from the narrow network's A;
- carried κ: exponents c from its κ = n^(A − 1) instead, which does not change with width.

Expected before the run: the wide network converges to other alignments than the given ones, with
SGD more so than with Adam (as published). The transferred A is too low at the larger width, so
rates are too large, and κ does better. Slowing one layer in favour of others costs.

    python examples/alignment/carried.py [--quick] --out OUT
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from grid import BATCH, OPTIMIZERS, PROBE, digits, mean, options_of, save
from matplotlib.figure import Figure
from torch import nn

from adiv_monitor.alignment import Alignment, Probe
from adiv_monitor.max_lr import (
    PARAMETRIZATIONS,
    optimizer_groups,
    parametrize_model,
    solve_max_lr,
)

NARROW, WIDE = 64, 256
PATHS = ("0", "2", "4")
NAMES = ("alpha", "omega", "u")
STEPS, SEEDS = 150, 2
RATES = (-1.25, -0.75, -0.25, 0.25)  # powers of ten, times a typical rate
Alignments = dict[str, dict[str, float]]  # measure → layer → value


class Run(NamedTuple):
    """A training run: the loss of its last tenth (∞ if it diverges), and its final alignments."""

    loss: float
    alignments: Alignments


def train(
    name: str, optimizer: str, width: int, rate: float, gains: Mapping[str, float], seed: int
) -> Run:
    """Train once, at a constant rate."""
    torch.manual_seed(seed)
    X, Y = digits()
    linears = [nn.Linear(a, b, bias=False) for a, b in itertools.pairwise((64, width, width, 10))]
    model = nn.Sequential(*[m for linear in linears for m in (linear, nn.ReLU())][:-1])
    probe = Probe(X[-PROBE:], max_rows=None)
    layers = parametrize_model(model, probe, name, scale={"2": 2**0.5})
    groups = optimizer_groups(model, layers, name, optimizer, lr=10**rate, gains=gains)
    chosen = OPTIMIZERS[optimizer](groups)
    alignment = Alignment(model, probe)
    losses, readings = [], []
    for step in range(1, STEPS + 1):
        rows = torch.randint(len(X) - PROBE, (BATCH,))
        chosen.zero_grad()
        loss = nn.functional.cross_entropy(model(X[rows]), Y[rows])
        loss.backward()
        chosen.step()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            return Run(math.inf, {})
        if step > 2 * STEPS // 3 and step % 10 == 0:
            readings.append(alignment.read())
    found = {
        measure: {path: mean([getattr(r[path], measure) for r in readings]) for path in PATHS[1:]}
        for measure in NAMES
    }
    return Run(mean(losses[-STEPS // 10 :]), found)


def tuned(
    name: str, optimizer: str, width: int, gains: Mapping[str, float], rates: Sequence[float]
) -> dict[str, Any]:
    """Return the best rate, its losses by seed, and the alignments of the first seed."""
    typical = 0.0 if optimizer == "sgd" else (-0.75 if name in ("mup", "mfp") else -1.0)
    found = {}
    for offset in rates:
        runs = [train(name, optimizer, width, typical + offset, gains, s) for s in range(SEEDS)]
        found[typical + offset] = runs
    rate = min(found, key=lambda rate: mean([run.loss for run in found[rate]]))
    losses = [run.loss for run in found[rate]]
    return {"rate": rate, "losses": losses, "alignments": found[rate][0].alignments}


def exponents(name: str, optimizer: str, given: Alignments) -> tuple[dict[str, float], float]:
    """Return n^(c_full − c) by layer at the larger width, and the mean increase of c."""
    ratios = {measure: [None, *(min(1.0, x[p]) for p in PATHS[1:])] for measure, x in given.items()}
    solution = solve_max_lr(
        parametrization=name, optimizer=optimizer, objective="sum", layers=3, **ratios
    )
    if solution.status != "optimal":
        raise ValueError(f"{name}, {optimizer}: {solution.status}: {solution.message}")
    gains = {path: WIDE**gain for path, gain in zip(PATHS, solution.gains, strict=True)}
    return gains, mean([max(0.0, -gain) for gain in solution.gains])


def carried(given: Alignments) -> Alignments:
    """Return the alignments at the larger width that have the same κ = n^(A − 1)."""
    share = math.log(NARROW) / math.log(WIDE)
    return {m: {p: 1 + (A - 1) * share for p, A in x.items()} for m, x in given.items()}


def compare(name: str, optimizer: str, rates: Sequence[float]) -> dict[str, Any]:
    """Run all arms of one parametrization and optimizer."""
    given = tuned(name, optimizer, NARROW, {}, rates)["alignments"]
    found: dict[str, Any] = {"name": name, "optimizer": optimizer, "narrow": given}
    found["full"] = tuned(name, optimizer, WIDE, {}, rates)
    for arm, used in (("carried A", given), ("carried κ", carried(given))):
        gains, trade_off = exponents(name, optimizer, used)
        found[arm] = {
            **tuned(name, optimizer, WIDE, gains, rates),
            "gains": gains,
            "trade-off": trade_off,
        }
    return found


def differences(result: dict[str, Any], arm: str) -> dict[str, float]:
    """Return by measure how far the arm's final alignments are from those of full."""
    full, own = (result[x]["alignments"] for x in ("full", arm))
    return {m: mean([abs(full[m][p] - own[m][p]) for p in PATHS[1:]]) for m in NAMES}


def plot(results: list[dict[str, Any]], file: Path) -> None:
    """Draw differences of alignments, losses relative to full, and these over the trade-off."""
    figure = Figure(figsize=(14, 4.6), layout="constrained")
    converged, losses, trades = figure.subplots(1, 3, width_ratios=[1.3, 1.3, 1])
    labels = [f"{r['name']}\n{r['optimizer']}" for r in results]
    for place, measure in enumerate(NAMES):
        at = [i + 0.25 * (place - 1) for i in range(len(results))]
        converged.bar(
            at, [differences(r, "carried A")[measure] for r in results], 0.22, label=measure
        )
    converged.set_title("carried A: |converged alignment − that of full|")
    for place, arm in enumerate(("carried A", "carried κ")):
        ratios = [mean(r[arm]["losses"]) / mean(r["full"]["losses"]) for r in results]
        at = [i + 0.3 * (place - 0.5) for i in range(len(results))]
        losses.bar(at, ratios, 0.28, label=arm)
        for x, r in zip(at, results, strict=True):
            of_seeds = zip(r[arm]["losses"], r["full"]["losses"], strict=True)
            losses.plot([x] * SEEDS, [own / full for own, full in of_seeds], "k.", ms=4)
        trades.plot(
            [r[arm]["trade-off"] for r in results], [1 - x for x in ratios], "os"[place], label=arm
        )
    losses.axhline(1, color="grey", lw=0.8)
    losses.set_title("training loss over that of full, each at its best rate; dots: seeds")
    trades.axhline(0, color="grey", lw=0.8)
    trades.set(
        title="gain over trade-off", xlabel="mean increase of c", ylabel="1 − loss / loss of full"
    )
    for axes in (converged, losses):
        axes.set_xticks(range(len(results)), labels, fontsize=8)
    converged.legend(fontsize=8)
    losses.legend(fontsize=8)
    trades.legend(fontsize=8, loc="center")
    figure.savefig(file, dpi=110)


def main() -> None:
    given = options_of(__doc__)
    results = []
    for name, optimizer in itertools.product(PARAMETRIZATIONS, OPTIMIZERS):
        results.append(compare(name, optimizer, RATES[1:2] if given.quick else RATES))
        shown = {m: round(x, 3) for m, x in differences(results[-1], "carried A").items()}
        print(f"{name}, {optimizer}: differences {shown}")
        for arm in ("full", "carried A", "carried κ"):
            found = results[-1][arm]
            print(f"  {arm:9}  loss {mean(found['losses']):.4f} at 10^{found['rate']:g}")
        if given.quick:
            break
    given.out.mkdir(parents=True, exist_ok=True)
    save(results, given.out / "carried.json")
    plot(results, given.out / "carried.png")


if __name__ == "__main__":
    main()
