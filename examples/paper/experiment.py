"""What the commands share: arguments, runs kept in a JSON file, and training what it lacks.

An experiment is a folder OUT and a name: `OUT/NAME.json` holds runs, `OUT/runs` the ensembles that
are being trained. Networks whose runs are in the file with all epochs are not trained again.
"""

import argparse
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from urllib.error import URLError

import cifar
import torch
from cifar import Data
from commandline import count, device, folder
from ensemble import Network
from training import Run, Setting, images, longest, replace, runs, train


class Clock:
    """Time left, from the seconds that epochs have taken."""

    # A step takes as long as it took at other batch sizes, times (46 + batch size): so it was
    # measured on one core.
    FIXED = 46

    def __init__(self, images: int, epochs: int, settings: Sequence[Setting]) -> None:
        self.per_epoch = {
            s: len(s.networks) * s.width * images / s.batch_size * (self.FIXED + s.batch_size)
            for s in settings
        }
        self.left = dict.fromkeys(self.per_epoch, epochs)
        self.seconds = self.work = 0.0

    def saw(self, setting: Setting, epoch: int, epochs: int, seconds: float) -> str:
        """What to print after an epoch."""
        self.left[setting] = epochs - epoch
        self.seconds += seconds
        self.work += self.per_epoch[setting]
        speed = self.work / self.seconds
        here = self.left[setting] * self.per_epoch[setting] / speed
        rest = sum(left * self.per_epoch[s] for s, left in self.left.items()) / speed
        of_all = f", {rest / 3600:.2f} h in all" if len(self.left) > 1 else ""
        return f"{seconds:.1f} s; left {here / 60:.1f} min here{of_all}"


class Experiment:
    """Runs of one kind on the same images.

    Args:
        out: the folder.
        name: of the JSON file in it, without its ending.
        data: what is trained on.
        epochs: how long.
        device: where.
        show: called with all runs whenever an ensemble is finished: writes tables and pictures.
    """

    def __init__(
        self,
        out: Path,
        name: str,
        data: Data,
        epochs: int,
        device: str = "cpu",
        show: Callable[[Sequence[Run]], None] = lambda runs: None,
    ) -> None:
        self.file = out / f"{name}.json"
        self.ensembles = out / ("runs" if name == "table1" else f"{name}-runs")
        self.data = data
        self.epochs = epochs
        self.device = device
        self.show = show

    def check(self, parser: argparse.ArgumentParser, resume: bool) -> None:
        """End the command if results would be lost or mixed with those on other images."""
        for there in (self.ensembles, self.file):
            if there.exists() and not resume:
                parser.error(f"{there} exists: --resume goes on with it, another --out starts anew")
        same = (images(self.data), self.data.source)
        if any(run.get("images", run["data"]) not in same for run in self.known()):
            parser.error(
                f"{self.file} holds runs on other images than --data: choose another --out"
            )

    def known(self) -> list[Run]:
        """The runs in the file and those of the ensembles."""
        before: list[Run] = json.loads(self.file.read_text()) if self.file.exists() else []
        return longest([*before, *runs(self.ensembles)])

    def train(self, settings: Iterable[Setting]) -> list[Run]:
        """Train the networks that have no run of all epochs yet; all runs that are known then."""
        finished = self.known()
        left = [setting.without(finished, self.epochs) for setting in settings]
        left = [setting for setting in left if setting.networks]
        clock = Clock(len(self.data.train), self.epochs, left)
        for setting in left:

            def tell(epoch: int, seconds: float, setting: Setting = setting) -> None:
                shown = clock.saw(setting, epoch, self.epochs, seconds)
                place = f"batch size {setting.batch_size}, {setting.depth} × {setting.width} wide"
                print(f"{place}, epoch {epoch}/{self.epochs}: {shown}", flush=True)

            folder = self.ensembles / setting.name
            train(setting, self.data, folder, self.epochs, self.device, tell)
            self.write()  # what there is by now
        return self.write()  # although nothing was left to train

    def write(self, more: Iterable[Run] = ()) -> list[Run]:
        """Write and show all that is known, and more runs."""
        found = longest([*self.known(), *more])
        lines = ",\n".join(json.dumps(run) for run in found)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        replace(self.file, f"[\n{lines}\n]\n".encode())
        self.show(found)
        return found


def arguments(description: str, epochs: int) -> argparse.ArgumentParser:
    """A parser of the arguments that all commands have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", required=True)
    parser.add_argument("--download", action="store_true")
    parser.add_argument("--out", type=folder, required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--seeds", type=count, default=3)
    parser.add_argument("--epochs", type=count, default=epochs)
    parser.add_argument("--device", type=device, default="cpu")
    parser.add_argument("--quick", action="store_true", help="as little as shows that it runs")
    return parser


def load(given: argparse.Namespace) -> Data:
    """The images that the arguments name, and torch set up for small operations."""
    torch.set_flush_denormal(True)  # saturated networks have gradients that a CPU is slow with
    torch.set_num_threads(1)  # operations are small: threads would mostly wait for each other
    try:
        data = cifar.load(given.data, download=given.download)
    except FileNotFoundError as error:
        raise SystemExit(str(error)) from error
    except URLError as error:
        raise SystemExit(
            f"--download: {error}. Where there is no network, give --data a copy: a folder with "
            "cifar-10-batches-py, one with train/<class>/ and test/<class>/ of images, or an .npz."
        ) from error
    print(f"data: {data.source}", flush=True)
    return data


def networks(
    methods: Iterable[str], activations: Iterable[str], seeds: int, rates: Iterable[float]
) -> tuple[Network, ...]:
    """All combinations."""
    every = itertools.product(methods, activations, range(seeds), rates)
    return tuple(itertools.starmap(Network, every))
