"""Figs 6 and 7 of the paper: accuracy against batch size, at equal epochs and at equal updates."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from slopes import (
    BATCHNORM_BY_BATCH,
    Arm,
    Read,
    Run,
    arms,
    at_the_end,
    at_updates,
    fewest_updates,
    with_both_tests,
)

# The paper's colours, as far as it names them.
COLOURS = {
    "standard": "tab:blue",
    "batchnorm": "tab:orange",
    BATCHNORM_BY_BATCH: "goldenrod",
    "layernorm": "tab:brown",
    "rmsnorm": "tab:purple",
    "norm-like": "tab:green",
    "norm-like-half": "yellowgreen",
    "affine-like": "tab:red",
    "isotropic-tanh": "tab:gray",
    "constant-scale": "black",
    "centred": "tab:cyan",
    "centred-affine-like": "tab:pink",
    "rate-by-layer": "tab:olive",
    "gradient-proportional": "teal",
    "gradient-disproportional": "gold",
    "gradient-batch": "navy",
}


def plot(runs: Sequence[Run], file: Path) -> None:
    """A column per activation; means over seeds with standard errors.

    Args:
        runs: as in table1.json.
        file: where to write the picture.
    """
    runs = with_both_tests(runs)
    activations = list(dict.fromkeys(run["activation"] for run in runs))
    updates = fewest_updates(runs)
    several = len({run["learning_rate"] for run in runs}) > 1
    kinds: list[tuple[str, Read]] = [("equal epochs", at_the_end)]
    if any(len(arm.accuracies) > 1 for arm in arms(runs, at_updates(updates))):
        kinds.append((f"equal updates ({updates})", at_updates(updates)))
    figure = Figure((6 * len(activations) + 2.6, 4.6 * len(kinds)), layout="constrained")
    grid = figure.subplots(len(kinds), len(activations), squeeze=False)
    for (kind, read), row in zip(kinds, grid, strict=True):
        for activation, axes in zip(activations, row, strict=True):
            found = arms([run for run in runs if run["activation"] == activation], read)
            for arm in found:
                colour = COLOURS[arm.method]
                sizes = sorted(arm.accuracies)
                means, errors = zip(*map(arm.at, sizes), strict=True)
                label = f"{arm.method}, {arm.learning_rate:g}" if several else arm.method
                style = {"marker": "o", "linestyle": "none", "capsize": 3, "markersize": 4}
                axes.errorbar(sizes, means, errors, color=colour, label=label, **style)
                axes.plot(sizes, means, color=colour, lw=1)
            sizes = sorted({size for arm in found for size in arm.accuracies})
            axes.set_xscale("log", base=2)
            axes.set(xticks=sizes, xticklabels=sizes, xlabel="batch size")
            axes.set(title=f"{activation}, {kind}", ylabel="test accuracy, percent ± error")
            axes.set(ylim=(_least(found), None))
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside right upper", title="map, learning rate" if several else "map"
    )
    figure.suptitle(runs[0]["data"], fontsize=8)
    figure.savefig(file, dpi=110)


def _least(found: Sequence[Arm]) -> float | None:
    """The lower end of a panel: below all maps but RMSNorm, whose networks may collapse."""
    means = [arm.at(b)[0] for arm in found for b in arm.accuracies if arm.method != "rmsnorm"]
    return min(means) - 1 if means else None
