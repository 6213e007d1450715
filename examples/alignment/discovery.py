"""Learning rates that follow alignment from the first step on, in place of a warm-up.

Kilian & Wojnar 2025 ask whether a phase in which alignment is discovered could replace the linear
warm-up. A network of three layers, 128 wide, learns handwritten digits; all rates fall as a cosine.
Arms, the rate of each tuned anew:

- neither: no warm-up, the rates of full alignment;
- warm-up: rates rise over the first tenth of the steps;
- discovery: no warm-up; alignments are read every 3 steps from the first on, factors follow them
  for the first fifth, and then stay as they are;
- both: the warm-up, after it factors that follow to the end.

Expected before it was run: early alignments are low, so discovery raises rates where they are
riskiest, and does no better than neither; the warm-up helps at the largest rates alone.

    python examples/alignment/discovery.py [--quick] --out OUT
"""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grid import OPTIMIZERS, Setting, mean, options_of, save, train, typical
from matplotlib.figure import Figure

STEPS, SEEDS = 150, 3
RATES = (-0.25, 0.0, 0.25, 0.5)  # powers of ten, times a typical rate
RISE, FOUND = STEPS // 10, STEPS // 5
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "neither": ("full", {}),
    "warm-up": ("full", {"rise": RISE}),
    "discovery": ("dynamic", {"every_n_steps": 3, "warm_up": 0, "freeze_at": FOUND}),
    "both": ("dynamic", {"every_n_steps": 3, "warm_up": RISE, "rise": RISE}),
}


def compare(setting: Setting, rates: Sequence[float]) -> dict[str, Any]:
    """Losses over rates, by arm."""
    found: dict[str, Any] = {"setting": setting._asdict(), "arms": {}}
    for name, (arm, options) in ARMS.items():
        found["arms"][name] = {
            typical(setting) + rate: [
                train(setting, arm, typical(setting) + rate, seed, STEPS, **options)[0]
                for seed in range(SEEDS)
            ]
            for rate in rates
        }
    return found


def best(curve: dict[float, list[float]]) -> float:
    """The rate of the least mean loss."""
    return min(curve, key=lambda rate: mean(curve[rate]))


def plot(results: list[dict[str, Any]], file: Path) -> None:
    """Loss over rate, a line for each arm, the best rate marked."""
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    panels = figure.subplots(1, len(results), squeeze=False)[0]
    for axes, result in zip(panels, results, strict=True):
        for place, (name, curve) in enumerate(result["arms"].items()):
            shown = {rate: losses for rate, losses in curve.items() if math.isfinite(mean(losses))}
            powers = [10**rate for rate in shown]
            means = [mean(losses) for losses in shown.values()]
            axes.plot(powers, means, color=f"C{place}", label=name)
            at = best(curve)
            axes.plot([10**at] * SEEDS, curve[at], ".", ms=5, color=f"C{place}")
            axes.plot(10**at, mean(curve[at]), "o", ms=7, color=f"C{place}")
        least = min(mean(curve[best(curve)]) for curve in result["arms"].values())
        axes.set(xscale="log", yscale="log", ylim=(0.75 * least, 16 * least))
        axes.set(xlabel="learning rate η", title="{name}, {optimizer}".format(**result["setting"]))
        axes.set_xticks([10**rate for rate in curve], [f"{10**rate:.2g}" for rate in curve])
        axes.set_xticks([], minor=True)
        axes.yaxis.set_major_formatter("{x:.3g}")
        axes.yaxis.set_minor_formatter("{x:.2g}")
        axes.tick_params(axis="y", which="both", labelsize=7)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("training loss, last tenth")
    panels[0].legend(fontsize=8)
    figure.savefig(file, dpi=110)


def main() -> None:
    given = options_of(__doc__)
    results = []
    for name, optimizer in itertools.product(("sp", "mup"), OPTIMIZERS):
        setting = Setting("digits", name, optimizer, 3, 128)
        results.append(compare(setting, RATES[1:2] if given.quick else RATES))
        for arm, curve in results[-1]["arms"].items():
            at = best(curve)
            print(
                f"{name} {optimizer:4} {arm:9}: {mean(curve[at]):.4f} "
                f"({min(curve[at]):.4f} to {max(curve[at]):.4f}) at 10^{at:+.2f}",
                flush=True,
            )
        if given.quick:
            break
    given.out.mkdir(parents=True, exist_ok=True)
    save(results, given.out / "discovery.json")
    plot(results, given.out / "discovery.png")


if __name__ == "__main__":
    main()
