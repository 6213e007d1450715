"""The picture of docs/paper.md: the paper's Table 1, at its learning rate and at tuned ones.

Drawn of the runs that are kept in examples/paper/results; nothing is trained.

    python docs/figures/paper.py [--out docs/images]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "paper"))

from fair_report import Accuracies, Arm, difference
from figures import COLOURS
from headlines import after, table1, tuned
from slopes import mean_and_error

SHOWN = ("standard", "affine-like", "constant-scale")
NAMES = {
    "standard": "no correction",
    "affine-like": "affine-like",
    "constant-scale": "input ÷ a constant",
}
SIZE = 32


def by_size(axes: Axes, found: Accuracies, title: str) -> None:
    """Accuracy with tanh against the batch size, means over seeds with standard errors."""
    for method in SHOWN:
        sizes = sorted(arm.batch_size for arm in found if arm[:2] == (method, "tanh"))
        values = [list(found[Arm(method, "tanh", size)].values()) for size in sizes]
        means, errors = zip(*map(mean_and_error, values), strict=True)
        style = {"fmt": "o-", "ms": 4, "lw": 1.3, "capsize": 3}
        axes.errorbar(sizes, means, errors, color=COLOURS[method], label=NAMES[method], **style)
    axes.set_xscale("log", base=2)
    axes.set(xticks=(8, 16, 32, 64, 128), xticklabels=(8, 16, 32, 64, 128), xlabel="batch size")
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3)


def left(axes: Axes, steps: Sequence[tuple[str, Accuracies]]) -> None:
    """What affine-like is better by than no correction, as one thing after the other changes."""
    for place, (_, found) in enumerate(steps):
        for shift, activation, colour in ((-0.12, "tanh", "tab:red"), (0.12, "leaky", "tab:gray")):
            values = difference(found, Arm("affine-like", activation, SIZE), "standard")
            if not values:
                continue
            x = place + shift
            axes.plot([x] * len(values), values, ".", ms=4, color=colour, alpha=0.4)
            mean, error = mean_and_error(values)
            label = {"tanh": "tanh", "leaky": "leaky ReLU"}[activation] if place == 0 else None
            axes.errorbar(x, mean, error, fmt="o", ms=5, capsize=3, color=colour, label=label)
            axes.annotate(
                f"{mean:+.1f}".replace("-", "−"),
                (x, mean),
                (7, -3),
                textcoords="offset points",
                fontsize=8,
            )
    axes.axhline(0, color="black", lw=0.8)
    axes.set(xticks=range(len(steps)), xlim=(-0.5, len(steps) - 0.4))
    axes.set_xticklabels([name for name, _ in steps], fontsize=8)
    axes.set_ylabel("affine-like less no correction, points")
    axes.set_title(f"(c) What is left of it, batch size {SIZE}", fontsize=9)
    axes.grid(alpha=0.3, axis="y")
    axes.legend(fontsize=8)


def picture() -> Figure:
    """The three panels."""
    figure = Figure(figsize=(12.5, 3.9), layout="constrained")
    first, second, third = figure.subplots(1, 3)
    common, fair, own = table1(), tuned(), tuned("fair-adam-unit")
    by_size(
        first, common, "(a) The paper's setting: tanh, Adam at 0.001,\npixels in [0, 1], 100 epochs"
    )
    by_size(
        second, fair, "(b) A learning rate tuned for each: tanh, SGD,\ncentred pixels, 25 epochs"
    )
    second.sharey(first)
    first.set_ylabel("test accuracy, percent")
    first.legend(fontsize=8, loc="lower right")
    left(
        third,
        [
            ("Adam at 0.001,\npixels in [0, 1],\n100 epochs", common),
            ("the same,\n25 epochs", table1(after(25))),
            ("the same,\nrates tuned", own),
            ("SGD, centred,\nrates tuned", fair),
        ],
    )
    return figure


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--steps", type=int, default=60, help="of no effect: nothing is trained")
    options.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "images")
    path = options.parse_args().out / "paper.png"
    picture().savefig(path, dpi=100)
    print(path)


if __name__ == "__main__":
    main()
