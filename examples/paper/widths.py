"""Figs 2 to 5 of the paper: widths, depths, and networks without an activation.

    python examples/paper/widths.py --quick --data DIR --out OUT     minutes
    python examples/paper/widths.py --data DIR --out OUT             all of it: days on a CPU

Figs 2 (tanh), 3 (leaky ReLU) and 5 (no activation): one and three hidden layers, 16 to 128 wide,
accuracy by epoch. Fig 4: accuracy against widths 1 to 256, of `--depth` hidden layers, for the
paper does not say how many. Killed at any moment, `--resume` goes on.
"""

import argparse
from collections.abc import Iterator

from commandline import count, parsed, rate
from experiment import Experiment, arguments, load, networks
from methods import METHODS
from table1 import ARMS
from training import Setting
from widths_report import ACTIVATION, DEPTHS, curves, sweep, text

WIDTHS = (16, 32, 64, 128)  # of Figs 2, 3 and 5
SWEEP = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # of Fig 4
FIGURES = (2, 3, 4, 5)


def settings(given: argparse.Namespace) -> Iterator[Setting]:
    """An ensemble per depth and width, of all activations that the figures need, narrow first."""
    needed: dict[tuple[int, int], set[str]] = {}
    for figure in given.figures:
        if figure == 4:
            for width in given.sweep:
                needed.setdefault((width, given.depth), set()).update(("tanh", "leaky"))
        else:
            for width in given.widths:
                for depth in DEPTHS:
                    needed.setdefault((width, depth), set()).add(ACTIVATION[figure])
    for (width, depth), activations in sorted(needed.items()):
        chosen = networks(given.methods, sorted(activations), given.seeds, [given.lr])
        yield Setting(given.batch_size, width, depth, "unit", chosen)


def main() -> None:
    parser = arguments(__doc__.split("\n\n")[0], epochs=100)
    parser.set_defaults(seeds=5)
    parser.add_argument("--figures", nargs="+", type=int, choices=FIGURES, default=FIGURES)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=ARMS)
    parser.add_argument("--widths", nargs="+", type=count, default=WIDTHS, help="of Figs 2, 3, 5")
    parser.add_argument("--sweep", nargs="+", type=count, default=SWEEP, help="widths of Fig 4")
    parser.add_argument("--depth", type=count, default=2, help="hidden layers of Fig 4")
    parser.add_argument("--batch-size", type=count, default=32)
    parser.add_argument("--lr", type=rate, default=1e-3)
    few = {"widths": [16, 64], "sweep": [1, 8, 64]}
    given = parsed(parser, seeds=1, epochs=1, batch_size=128, **few)

    experiment = Experiment(given.out, "widths", load(given), given.epochs, given.device)
    experiment.check(parser, given.resume)
    runs = experiment.train(settings(given))
    (given.out / "widths.md").write_text(text(runs, given.depth))
    for figure in given.figures:
        file = given.out / f"fig{figure}.png"
        if figure == 4:
            sweep(runs, given.depth, file)
        else:
            curves(runs, figure, file)
    print((given.out / "widths.md").read_text())


if __name__ == "__main__":
    main()
