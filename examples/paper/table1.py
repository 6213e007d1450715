"""Table 1 and Figs 6 and 7 of the paper: accuracy on CIFAR-10 against batch size, with controls.

    python examples/paper/table1.py --quick --data DIR --out OUT     under two minutes
    python examples/paper/table1.py --data DIR --out OUT             all of it: hours on a CPU

`--data` is a folder with CIFAR-10 (`--download` fetches torchvision's copy into it), an .npz, or
`synthetic`; see `cifar.py`. Killed at any moment, `--resume` goes on; networks whose runs are in
OUT/table1.json with all epochs are not trained again.
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import cifar
import torch
from ensemble import ACTIVATIONS, Network
from figures import plot
from methods import METHODS
from table import text
from training import Run, Setting, images, longest, replace, runs, train

ARMS = (
    *("standard", "batchnorm", "layernorm", "rmsnorm", "norm-like", "norm-like-half"),
    *("affine-like", "constant-scale"),
)
BATCH_SIZES = (128, 64, 32, 16, 8)  # the cheapest first


class Clock:
    """Time left, from the seconds that epochs have taken."""

    # A step takes as long as it took at other batch sizes, times (46 + batch size): so it was
    # measured on one core.
    FIXED = 46

    def __init__(self, images: int, epochs: int, settings: Sequence[Setting]) -> None:
        self.per_epoch = {
            s.batch_size: len(s.networks) * images / s.batch_size * (self.FIXED + s.batch_size)
            for s in settings
        }
        self.left = dict.fromkeys(self.per_epoch, epochs)
        self.seconds = self.work = 0.0

    def saw(self, batch_size: int, epoch: int, epochs: int, seconds: float) -> str:
        """What to print after an epoch."""
        self.left[batch_size] = epochs - epoch
        self.seconds += seconds
        self.work += self.per_epoch[batch_size]
        speed = self.work / self.seconds
        here = self.left[batch_size] * self.per_epoch[batch_size] / speed
        rest = sum(left * self.per_epoch[b] for b, left in self.left.items()) / speed
        return f"{seconds:.1f} s; left {here / 60:.1f} min here, {rest / 3600:.2f} h in all"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--download", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=ARMS)
    parser.add_argument("--activations", nargs="+", choices=ACTIVATIONS, default=ACTIVATIONS)
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=BATCH_SIZES)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--lr", nargs="+", type=float, default=[1e-3])
    parser.add_argument("--pixels", choices=cifar.PIXELS, default="unit")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="one epoch of little, for tanh")
    given = parser.parse_args()
    if given.quick:
        given.activations, given.batch_sizes = ["tanh"], [128, 32, 8]
        given.seeds, given.epochs = 2, 1
    ensembles = given.out / "runs"
    for there in (ensembles, given.out / "table1.json"):
        if there.exists() and not given.resume:
            parser.error(f"{there} exists: --resume goes on with it, another --out starts anew")
    torch.set_flush_denormal(True)  # saturated networks have gradients that a CPU is slow with
    torch.set_num_threads(1)  # operations are small: threads would mostly wait for each other
    data = cifar.load(given.data, download=given.download)
    print(f"data: {data.source}", flush=True)
    finished = known(given.out)
    if any(run.get("images", run["data"]) not in (images(data), data.source) for run in finished):
        parser.error(f"{given.out} holds runs on other images than --data: choose another --out")
    networks = tuple(
        itertools.starmap(
            Network,
            itertools.product(given.methods, given.activations, range(given.seeds), given.lr),
        )
    )
    shared = (given.width, given.depth, given.pixels, networks)
    settings = [Setting(b, *shared).without(finished, given.epochs) for b in given.batch_sizes]
    settings = [setting for setting in settings if setting.networks]
    clock = Clock(len(data.train), given.epochs, settings)
    for setting in settings:

        def tell(epoch: int, seconds: float, batch_size: int = setting.batch_size) -> None:
            shown = clock.saw(batch_size, epoch, given.epochs, seconds)
            print(f"batch size {batch_size}, epoch {epoch}/{given.epochs}: {shown}", flush=True)

        train(setting, data, ensembles / setting.name, given.epochs, given.device, tell)
        write(given.out)  # what there is by now
    write(given.out)  # although nothing was left to train
    print((given.out / "table1.md").read_text())


def known(out: Path) -> list[Run]:
    """The runs in table1.json and those of the ensembles in `out / "runs"`."""
    table = out / "table1.json"
    before: list[Run] = json.loads(table.read_text()) if table.exists() else []
    return longest([*before, *runs(out / "runs")])


def write(out: Path) -> None:
    """The table, the picture and the runs themselves, of all that is known."""
    found = known(out)
    lines = ",\n".join(json.dumps(run) for run in found)
    replace(out / "table1.json", f"[\n{lines}\n]\n".encode())
    (out / "table1.md").write_text(text(found))
    plot(found, out / "table1.png")


if __name__ == "__main__":
    main()
