"""How often do alignments have to be measured for learning rates that follow them?

A network of three layers, 128 wide, learns handwritten digits with rates that follow measured
alignment (`MaxLRScheduler`, Pareto), read every 1, 10 or 100 of 150 steps; the rate of each
arm is tuned anew. Factors follow a reading by a share of 1 − β and by 1.25 at most, so they reach
what is allowed later where readings are rare; the second row of arms therefore takes each reading
at once (β = 0, no limit).

Expected before it was run: from 10 to 1 nothing is gained, since alignments change slowly after the
first steps; at 100 the factors come too late to matter, and the loss is that of full alignment;
taken at once, 10 is as good as 1.

    python examples/alignment/how_often.py [--quick] --out OUT
"""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grid import Setting, mean, options_of, save, train, typical
from matplotlib.figure import Figure

EVERY = (1, 10, 100)
SETTINGS = (("sp", "sgd"), ("mup", "adam"))
STEPS, SEEDS = 150, 3
RATES = (-0.25, 0.0, 0.25)  # powers of ten, times a typical rate
FOLLOWING: dict[str, dict[str, float]] = {
    "smoothed": {},
    "at once": {"beta": 0.0, "limit": 8.0},
}


def compare(setting: Setting, every: Sequence[int], rates: Sequence[float]) -> dict[str, Any]:
    """Losses at the best rate, by arm; of the dynamic ones with factors."""
    found: dict[str, Any] = {"setting": setting._asdict(), "arms": []}
    arms = [("full", 0), *itertools.product(FOLLOWING, every)]
    for following, interval in arms:
        tried = {}
        for rate in rates:
            options = {"every_n_steps": interval, **FOLLOWING.get(following, {})}
            runs = [
                train(setting, "dynamic", typical(setting) + rate, seed, STEPS, **options)
                if interval
                else train(setting, "full", typical(setting) + rate, seed, STEPS)
                for seed in range(SEEDS)
            ]
            tried[rate] = runs
        best = min(tried, key=lambda rate: mean([loss for loss, _ in tried[rate]]))
        found["arms"].append(
            {
                "following": following,
                "every": interval,
                "rate": typical(setting) + best,
                "losses": [loss for loss, _ in tried[best]],
                "gains": [gains for _, gains in tried[best]],
            }
        )
    return found


def chosen(result: dict[str, Any], following: str) -> list[dict[str, Any]]:
    return [arm for arm in result["arms"] if arm["following"] == following]


def plot(results: list[dict[str, Any]], file: Path) -> None:
    """Loss and factors over the interval, smoothed and at once."""
    figure = Figure(figsize=(12, 4.4), layout="constrained")
    panels = figure.subplots(1, 3)
    panels[1].sharey(panels[0])
    for place, result in enumerate(results):
        colour = f"C{place}"
        label = f"{result['setting']['name']}, {result['setting']['optimizer']}"
        (full,) = chosen(result, "full")
        for axes, following in zip(panels, FOLLOWING, strict=False):
            arms = chosen(result, following)
            ratios = [[x / mean(full["losses"]) for x in arm["losses"]] for arm in arms]
            every = [arm["every"] for arm in arms]
            axes.plot(every, [mean(values) for values in ratios], "o-", color=colour, label=label)
            for x, values in zip(every, ratios, strict=True):
                axes.plot([x] * len(values), values, ".", ms=4, color=colour)
        arms = chosen(result, "smoothed")
        logs = [mean([math.log(m) for g in arm["gains"] for m in g.values()]) for arm in arms]
        panels[2].plot(
            [arm["every"] for arm in arms], [math.exp(x) for x in logs], "o-", color=colour
        )
    for axes, following in zip(panels, FOLLOWING, strict=False):
        axes.set_title(
            f"training loss over that of full alignment\nfactors {following}", fontsize=9
        )
        axes.axhline(1, color="grey", lw=0.8)
        axes.legend(fontsize=8)
    panels[2].set_title("factors at the end\n(geometric mean, smoothed)", fontsize=9)
    for axes in panels:
        axes.set(xscale="log", xlabel="steps between readings")
        axes.set_xticks(EVERY, [str(x) for x in EVERY])
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3)
    figure.savefig(file, dpi=110)


def main() -> None:
    given = options_of(__doc__)
    settings, every, rates = SETTINGS, EVERY, RATES
    if given.quick:
        settings, every, rates = SETTINGS[:1], EVERY[-1:], RATES[1:2]
    results = []
    for name, optimizer in settings:
        results.append(compare(Setting("digits", name, optimizer, 3, 128), every, rates))
        for arm in results[-1]["arms"]:
            print(
                f"{name} {optimizer:4} {arm['following']:8} {arm['every']:3}: "
                f"{mean(arm['losses']):.4f} ({min(arm['losses']):.4f} to {max(arm['losses']):.4f})"
                f" at 10^{arm['rate']:+.2f}",
                flush=True,
            )
    given.out.mkdir(parents=True, exist_ok=True)
    save(results, given.out / "how_often.json")
    plot(results, given.out / "how_often.png")


if __name__ == "__main__":
    main()
