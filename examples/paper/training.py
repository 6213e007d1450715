"""Training an ensemble epoch by epoch, such that it can be killed at any moment and go on.

A folder holds one ensemble: `setting.json` (what is trained), `results.jsonl` (a line per epoch,
with accuracies in the order of the setting's networks) and `checkpoint.pt`. What happens in an
epoch depends on nothing but the checkpoint before it: the order of the images is drawn from seed
and number of the epoch. So results do not depend on when a run was killed.
"""

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cifar import Data, pixels
from ensemble import ACTIVATIONS, Ensemble, Network, Through, directly
from graph import Graph, is_settled
from methods import METHODS
from torch import Tensor, nn

Run = dict[str, Any]
CLASSES = 10
CHECKPOINT_EVERY = 5  # epochs
TRAIN_SUBSET = 5000  # training images, always the same, that training accuracy is taken on
BY_BATCH = "test_accuracy_by_batch_statistics"
EVALUATED = 256  # rows at once, about
# By networks of an ensemble.
SHARED = ("batch_size", "width", "depth", "pixels", "optimizer", "residual")
CRITERION = nn.CrossEntropyLoss()
BEFORE = {"optimizer": "adam", "residual": False}  # the only choice when older runs were made


class Setting(NamedTuple):
    """An ensemble: what its networks share, and the networks."""

    batch_size: int
    width: int
    depth: int
    pixels: str
    networks: tuple[Network, ...]
    optimizer: str = "adam"
    residual: bool = False

    @property
    def name(self) -> str:
        """Name of the ensemble's folder, which other networks do not share."""
        networks = hashlib.sha256(json.dumps(sorted(self.networks)).encode()).hexdigest()[:8]
        shared = f"batch{self.batch_size}-width{self.width}-depth{self.depth}-{self.pixels}"
        optimizer = "" if self.optimizer == "adam" else f"-{self.optimizer}"
        return f"{shared}{optimizer}{'-residual' * self.residual}-{networks}"

    def without(self, runs: Iterable[Run], epochs: int) -> "Setting":
        """The ensemble of those networks that have no run of so many epochs yet."""
        done = {_identity(run) for run in runs if run["epoch"][-1] >= epochs}
        shared = {name: getattr(self, name) for name in SHARED}
        left = [n for n in self.networks if _identity({**n._asdict(), **shared}) not in done]
        return self._replace(networks=tuple(left))


def train(
    setting: Setting,
    data: Data,
    folder: Path,
    epochs: int,
    device: str = "cpu",
    tell: Callable[[int, float], None] = lambda epoch, seconds: None,
) -> list[dict[str, Any]]:
    """Train to a number of epochs, from the last checkpoint if there is one.

    Args:
        setting: the ensemble.
        data: images and labels.
        folder: of this ensemble.
        epochs: where to stop; more can follow later.
        device: where to train.
        tell: called after every epoch with its number and its seconds.

    Returns:
        The lines of `results.jsonl`.

    Raises:
        ValueError: the folder holds another ensemble.
    """
    folder.mkdir(parents=True, exist_ok=True)
    course = Course(setting, data, device)
    _same_setting(course, setting, data, folder / "setting.json")
    results, checkpoint = folder / "results.jsonl", folder / "checkpoint.pt"
    done = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        course.ensemble.load(state["ensemble"])
        done = state["epoch"]
    lines = _lines(results)[:done]
    replace(results, "".join(lines).encode())
    for epoch in range(done + 1, epochs + 1):
        started = time.perf_counter()
        found = course.epoch(epoch)
        seconds = time.perf_counter() - started
        with results.open("a") as file:
            file.write(json.dumps({"epoch": epoch, **found, "seconds": round(seconds, 3)}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if epoch % CHECKPOINT_EVERY == 0 or epoch == epochs:
            unfinished = checkpoint.with_suffix(".new")
            torch.save({"epoch": epoch, "ensemble": course.ensemble.state()}, unfinished)
            unfinished.replace(checkpoint)
        tell(epoch, seconds)
    return [json.loads(line) for line in _lines(results)]


def runs(folder: Path) -> list[Run]:
    """All runs below a folder of ensembles, as the published tables hold them.

    Returns:
        Per run what tells it from the others, and by epoch its accuracies in percent.
    """
    found = []
    for file in sorted(folder.glob("*/setting.json")):
        setting = BEFORE | json.loads(file.read_text())
        lines = [json.loads(line) for line in _lines(file.with_name("results.jsonl"))]
        if not lines:  # it has only begun
            continue
        shared = {name: setting[name] for name in (*SHARED, "images")}
        for place, network in enumerate(setting["networks"]):
            run = {**Network(*network)._asdict(), **shared, "data": setting["source"]}
            run["updates_per_epoch"] = -(-setting["training_images"] // setting["batch_size"])
            run["epoch"] = [line["epoch"] for line in lines]
            for name in ("train_accuracy", "test_accuracy", BY_BATCH):
                if name in lines[0] and (name != BY_BATCH or run["method"] == "batchnorm"):
                    run[name] = [line[name][place] for line in lines]
            found.append(run)
    return longest(found)


def longest(runs: Iterable[Run]) -> list[Run]:
    """The longest run of every network, and of runs as long the last."""
    found: dict[tuple[Any, ...], Run] = {}
    for run in sorted(runs, key=lambda run: len(run["epoch"])):
        found[_identity(run)] = run
    return sorted(found.values(), key=_place)


def images(data: Data) -> str:
    """SHA-256 of the training images, which tells whether runs are on the same."""
    return hashlib.sha256(data.train.numpy().tobytes()).hexdigest()


class Course:
    """An ensemble, its data, and what an epoch of it is.

    Args:
        setting: the ensemble.
        data: images and labels.
        device: where to train.
        dtype: of parameters and inputs.
    """

    def __init__(
        self,
        setting: Setting,
        data: Data,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.batch_size = setting.batch_size
        self.pixels = pixels(setting.pixels, data.train, dtype).to(device)
        self.train = data.train.to(device), data.train_labels.to(device)
        # Shuffled, for files come in the order of classes, and then a batch has statistics of one.
        self.test = _some(len(data.test), data.test, data.test_labels, device)
        self.subset = _some(TRAIN_SUBSET, data.train, data.train_labels, device)
        squares = 0.0
        for rows in torch.split(self.train[0], 1000):
            squares += self.pixels(rows).square().sum(dtype=torch.float64).item()
        self.typical = math.sqrt(squares / len(data.train))
        sizes = (data.train.shape[1], *[setting.width] * setting.depth, CLASSES)
        kind = (setting.optimizer, setting.residual)
        self.ensemble = Ensemble(setting.networks, sizes, self.typical, dtype, device, *kind)
        self._graph: Graph | None = None

    def epoch(self, number: int) -> dict[str, list[float]]:
        """Train one epoch; accuracies in percent after it, per network."""
        orders = torch.stack([self.order(seed, number) for seed in self.ensemble.seeds])
        for rows in torch.split(orders, self.batch_size, 1):
            self.step(rows)
        found = {
            "train_accuracy": self.accuracy(*self.subset),
            "test_accuracy": self.accuracy(*self.test),
        }
        if any(network.method == "batchnorm" for network in self.ensemble.networks):
            # The paper does not say which statistics batch normalisation takes when tested.
            by_batch = self.accuracy(*self.test, group=self.batch_size)
            found[BY_BATCH] = by_batch
        return found

    def step(self, rows: Tensor) -> None:
        """Take a step; on a GPU it replays a CUDA graph, for launching small operations is slow.

        Args:
            rows: which training images, per seed: (seeds, batch size).
        """
        whole = rows.shape[1] == self.batch_size
        if self._graph is None and whole and is_settled(self.ensemble) and rows.is_cuda:
            self._graph = Graph(self.ensemble, self.take, rows)
        if self._graph is not None and whole:
            self._graph.step(rows)
        else:
            self.take(rows)

    def take(self, rows: Tensor, through: Through = directly) -> None:
        """Take a step, one operation after the other, `through` what makes small ones fast."""
        self.ensemble.step(*through(self._batches)(rows), through)

    def _batches(self, rows: Tensor) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Inputs and labels of training images, per seed."""
        images, labels = self.train
        chosen = dict(zip(self.ensemble.seeds, rows, strict=True))
        inputs = {seed: self.pixels(images[each]) for seed, each in chosen.items()}
        return inputs, {seed: labels[each] for seed, each in chosen.items()}

    def order(self, seed: int, epoch: int) -> Tensor:
        """The training images of an epoch, in the order in which networks of a seed see them."""
        images = self.train[0]
        return torch.randperm(len(images), generator=_generator(seed, epoch)).to(images.device)

    def accuracy(self, images: Tensor, labels: Tensor, group: int | None = None) -> list[float]:
        """Percent of images that every network classifies rightly."""
        rows = EVALUATED if group is None else max(EVALUATED // group, 1) * group
        right = torch.zeros(len(self.ensemble.networks), dtype=torch.long, device=images.device)
        for some, theirs in zip(torch.split(images, rows), torch.split(labels, rows), strict=True):
            said = self.ensemble.logits(self.pixels(some), group).argmax(-1)
            right += (said == theirs).sum(-1)
        return [round(100 * n / len(images), 4) for n in right.tolist()]


def fit(
    model: nn.Module,
    stepper: torch.optim.Optimizer,
    course: Course,
    seed: int,
    epochs: int,
    after: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Train one model of its own as anyone would.

    Args:
        model: takes rows of inputs.
        stepper: its optimizer.
        course: the images, and how many are a batch.
        seed: of the order of the images.
        epochs: how long.
        after: called after the steps of every epoch.

    Returns:
        Accuracies in percent by epoch.
    """
    images, labels = course.train
    found: dict[str, list[float]] = {"train_accuracy": [], "test_accuracy": []}
    for epoch in range(1, epochs + 1):
        for rows in torch.split(course.order(seed, epoch), course.batch_size):
            stepper.zero_grad()
            logits = model(course.pixels(images[rows]))
            torch.autograd.backward(CRITERION(logits, labels[rows]))
            stepper.step()
        after()
        found["train_accuracy"].append(accuracy(model, course, *course.subset))
        found["test_accuracy"].append(accuracy(model, course, *course.test))
    return found


def accuracy(model: nn.Module, course: Course, images: Tensor, labels: Tensor) -> float:
    """Percent of images that a model classifies rightly; it is in training mode afterwards."""
    model.eval()
    right = 0
    with torch.no_grad():
        parts = zip(torch.split(images, EVALUATED), torch.split(labels, EVALUATED), strict=True)
        for some, theirs in parts:
            right += int((model(course.pixels(some)).argmax(-1) == theirs).sum())
    model.train()
    return round(100 * right / len(images), 4)


def _some(count: int, images: Tensor, labels: Tensor, device: str) -> tuple[Tensor, Tensor]:
    """Images and labels in an order that is random and always the same."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:count]
    return images[order].to(device), labels[order].to(device)


def _generator(seed: int, epoch: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * seed + epoch)


def _identity(run: Run) -> tuple[Any, ...]:
    """What tells a run from those of other networks."""
    return tuple((BEFORE | run)[name] for name in (*Network._fields, *SHARED))


def _place(run: Run) -> tuple[float, ...]:
    """Runs in the order of activations and methods, as they are declared."""
    kind = (ACTIVATIONS.index(run["activation"]), list(METHODS).index(run["method"]))
    return (*kind, run["learning_rate"], run["batch_size"], run["seed"])


def _same_setting(course: Course, setting: Setting, data: Data, file: Path) -> None:
    """Write what is trained on what, or find the same there.

    Raises:
        ValueError: something else is there.
    """
    networks = [list(network) for network in course.ensemble.networks]
    mine = {**setting._asdict(), "networks": networks, "images": images(data)}
    known = {**mine, "source": data.source, "training_images": len(data.train)}
    if not file.exists():
        replace(file, json.dumps(known, indent=1).encode())
    theirs = BEFORE | json.loads(file.read_text())
    for name, value in mine.items():
        if theirs[name] != value:
            raise ValueError(f"{file.parent} holds runs with other {name}: choose another folder.")


def _lines(file: Path) -> list[str]:
    """Lines that were written whole."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [line for line in lines if line.endswith("\n")]


def replace(file: Path, content: bytes) -> None:
    """Write a file such that at any moment the old one or the new one is there whole."""
    unfinished = file.with_suffix(".new")
    unfinished.write_bytes(content)
    unfinished.replace(file)
