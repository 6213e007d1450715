"""Table 1 and Figs 6 and 7 of the paper: accuracy on CIFAR-10 against batch size, with controls.

    python examples/paper/table1.py --quick --data DIR --out OUT     under two minutes
    python examples/paper/table1.py --data DIR --out OUT             all of it: hours on a CPU

`--data` is a folder with CIFAR-10 (`--download` fetches torchvision's copy into it), an .npz, or
`synthetic`; see `cifar.py`. Killed at any moment, `--resume` goes on; networks whose runs are in
OUT/table1.json with all epochs are not trained again.
"""

from collections.abc import Sequence

import cifar
from commandline import count, parsed, rate
from ensemble import NONLINEAR
from experiment import Experiment, arguments, load, networks
from figures import plot
from methods import METHODS
from table import text
from training import Run, Setting

ARMS = (
    *("standard", "batchnorm", "layernorm", "rmsnorm", "norm-like", "norm-like-half"),
    *("affine-like", "constant-scale"),
)
BATCH_SIZES = (128, 64, 32, 16, 8)  # the cheapest first


def main() -> None:
    parser = arguments(__doc__.split("\n\n")[0], epochs=100)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=ARMS)
    parser.add_argument("--activations", nargs="+", choices=NONLINEAR, default=NONLINEAR)
    parser.add_argument("--batch-sizes", nargs="+", type=count, default=BATCH_SIZES)
    parser.add_argument("--width", type=count, default=32)
    parser.add_argument("--depth", type=count, default=2)
    parser.add_argument("--lr", nargs="+", type=rate, default=[1e-3])
    parser.add_argument("--pixels", choices=cifar.PIXELS, default="unit")
    given = parsed(parser, activations=["tanh"], batch_sizes=[128, 32, 8], seeds=2, epochs=1)

    def show(runs: Sequence[Run]) -> None:
        (given.out / "table1.md").write_text(text(runs))
        plot(runs, given.out / "table1.png")

    data = load(given)
    experiment = Experiment(given.out, "table1", data, given.epochs, given.device, show)
    experiment.check(parser, given.resume)
    chosen = networks(given.methods, given.activations, given.seeds, given.lr)
    shared = (given.width, given.depth, given.pixels, chosen)
    experiment.train(Setting(batch_size, *shared) for batch_size in given.batch_sizes)
    print((given.out / "table1.md").read_text())


if __name__ == "__main__":
    main()
