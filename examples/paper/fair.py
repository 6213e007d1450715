"""The fair test: is a corrected map better once pixels are centred and learning rates tuned?

    python examples/paper/fair.py --quick --data DIR --out OUT     a few minutes
    python examples/paper/fair.py --data DIR --out OUT             all of it: hours on a CPU

Plain SGD, for which the theory is exact; pixels less their training mean. The learning rate of
every arm, that is of every map, activation and batch size, is tuned in half decades on 5,000
training images held out, with a seed; then networks are trained on all training images with the
best one, tested on the test images, and compared seed by seed. Killed at any moment, `--resume`
goes on.

`--optimizer adam --pixels unit` is the paper's own setting but for the learning rates, which it
does not tune. Its files are called `fair-adam-unit`, those of `--depth 6` `fair-depth6`, and with
`--residual` `fair-depth6-residual`.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import cifar
from commandline import count, parsed
from ensemble import NONLINEAR, OPTIMIZERS, Network
from experiment import Experiment, arguments, load
from fair_report import ORDER, Arm, best, plot, text
from training import Setting

HELD_OUT = 5000
# Of the grid that is tried first, in half decades from 1: −3 is 0.03. A plain step moves outputs
# by (‖x‖² + 1)η, so an arm whose inputs are longer needs a lower learning rate.
GRIDS = {
    "sgd": {
        "standard": range(-5, -1),
        "batchnorm": range(-5, -1),
        "layernorm": range(-6, -2),
        "rmsnorm": range(-6, -2),
        "norm-like": range(-2, 2),
        "affine-like": range(-2, 2),
        "constant-scale": range(-3, 1),
        "centred": range(-5, -1),
        "centred-affine-like": range(-2, 2),
        "rate-by-layer": range(-2, 2),
        "gradient-proportional": range(-2, 2),
        "gradient-disproportional": range(-2, 2),
        "gradient-batch": range(-1, 3),
    },
    "adam": {
        "standard": range(-8, -5),
        "batchnorm": range(-8, -5),
        "layernorm": range(-7, -4),
        "rmsnorm": range(-9, -6),
        "constant-scale": range(-7, -4),
        "norm-like": range(-6, -3),
        "affine-like": range(-6, -3),
        "centred": range(-8, -5),
    },
}
WIDENED = 4  # half decades beyond the grid at most, to either side


def rate(half_decades: int) -> float:
    """The learning rate of a place in the grid: 1, 3, 10 for 0, 1, 2."""
    return float(f"{10 ** (half_decades / 2):.0e}")


class Kind(NamedTuple):
    """What all arms share: optimizer, pixels, the number of hidden layers, and paths past them."""

    optimizer: str = "sgd"
    pixels: str = "centred"
    depth: int = 2
    residual: bool = False

    @property
    def name(self) -> str:
        """Of the files with the runs."""
        plain = self[:2] == Kind()[:2]
        name = "fair" if plain else f"fair-{self.optimizer}-{self.pixels}"
        depth = "" if self.depth == 2 else f"-depth{self.depth}"
        return f"{name}{depth}{'-residual' * self.residual}"


FAIR = Kind()


def tune(
    experiment: Experiment, arms: Sequence[Arm], seeds: int, kind: Kind = FAIR
) -> dict[Arm, float]:
    """Train the grid of every arm, wider while the best lies on its edge.

    Returns:
        The best learning rate of every arm.
    """
    first = GRIDS[kind.optimizer]
    grids = {arm: list(first[arm.method]) for arm in arms}
    while True:
        rates = {arm: [rate(place) for place in places] for arm, places in grids.items()}
        found = experiment.train(settings(rates, seeds, kind))
        chosen = best(found)
        widened = [widen(grids[arm], chosen[arm], first[arm.method]) for arm in arms]
        if not any(widened):
            return {arm: chosen[arm] for arm in arms}


def widen(places: list[int], chosen: float, first: range) -> bool:
    """Add the half decade beyond the edge on which the best lies, if one may be added.

    Earlier runs may have found the best beyond the edge.
    """
    if chosen <= rate(places[0]) and places[0] > first[0] - WIDENED:
        places.insert(0, places[0] - 1)
    elif chosen >= rate(places[-1]) and places[-1] < first[-1] + WIDENED:
        places.append(places[-1] + 1)
    else:
        return False
    return True


def settings(rates: Mapping[Arm, Sequence[float]], seeds: int, kind: Kind = FAIR) -> list[Setting]:
    """An ensemble per batch size, of networks 32 wide."""
    found = []
    for batch_size in dict.fromkeys(arm.batch_size for arm in rates):
        networks = tuple(
            Network(arm.method, arm.activation, seed, each)
            for arm, tried in rates.items()
            for each in tried
            for seed in range(seeds)
            if arm.batch_size == batch_size
        )
        shape = (batch_size, 32, kind.depth, kind.pixels)
        found.append(Setting(*shape, networks, kind.optimizer, kind.residual))
    return found


def main() -> None:
    parser = arguments(__doc__.split("\n\n")[0], epochs=25)
    parser.add_argument("--methods", nargs="+", choices=ORDER, default=ORDER)
    parser.add_argument("--activations", nargs="+", choices=NONLINEAR, default=NONLINEAR)
    parser.add_argument("--batch-sizes", nargs="+", type=count, default=[128, 32, 8])
    parser.add_argument("--tuning-seeds", type=count, default=1)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--pixels", choices=cifar.PIXELS, default="centred")
    parser.add_argument("--depth", type=count, default=2, help="hidden layers")
    parser.add_argument("--residual", action="store_true", help="add paths past hidden layers")
    given = parsed(parser, batch_sizes=[128], seeds=2, epochs=1)
    kind = Kind(given.optimizer, given.pixels, given.depth, given.residual)
    data = load(given)
    apart = cifar.held_out(data, min(HELD_OUT, len(data.train) // 10))
    arms = [
        Arm(method, activation, batch_size)
        for batch_size in given.batch_sizes
        for activation in given.activations
        for method in ORDER
        if method in given.methods and method in GRIDS[given.optimizer]
    ]
    tuning = Experiment(given.out, f"{kind.name}-tuning", apart, given.epochs, given.device)
    final = Experiment(given.out, kind.name, data, given.epochs, given.device)
    for experiment in (tuning, final):
        experiment.check(parser, given.resume)
    page = given.out / f"{kind.name}.md"
    for batch_size in given.batch_sizes:  # so that something is finished early
        mine = [arm for arm in arms if arm.batch_size == batch_size]
        chosen = tune(tuning, mine, given.tuning_seeds, kind)
        final.train(settings({arm: [each] for arm, each in chosen.items()}, given.seeds, kind))
        page.write_text(text(tuning.known(), final.known()))
        plot(tuning.known(), final.known(), page.with_suffix(".png"))
    print(page.read_text())


if __name__ == "__main__":
    main()
