"""A worked example: a network that no learning rate trains well, the cause, and its fix.

A small network classifies three kinds of wine by 13 numbers of a chemical analysis, without any
preprocessing. It is trained at each of nine learning rates. The audit finds the cause at the best
of them, and tries fixes. Then the inputs are standardised, and the same learning rates are tried
again. The last table compares the monitor's readings of both, each at its best learning rate. All
of this takes less than a minute on two cores and opens no window.

    python examples/demo.py                                   three wines, nothing to load
    python examples/demo.py --dataset cifar10 --root data     downloads CIFAR-10 if need be
    python examples/demo.py --dataset imagefolder --root pictures
                            pictures/train/<class>/*.jpg and pictures/test/<class>/*.jpg
"""

import argparse
import logging
import math
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from textwrap import fill
from typing import NamedTuple

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import TensorBoardLogger
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from adiv_monitor import StepReport, audit
from adiv_monitor.audit.command.output import progress
from adiv_monitor.audit.report import AuditReport
from adiv_monitor.lightning import DivergenceCallback
from adiv_monitor.sinks import HtmlSink, TableSink

RATES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
MOMENTUM, SEEDS = 0.9, 5
EPOCHS = {"wine": 40, "cifar10": 1, "imagefolder": 5}
SHOWN = ("update_ratio", "update_cosine", "effective_lr", "scale_mean", "scale_cv")


# Data


class Data(NamedTuple):
    """Inputs without preprocessing, (samples, features) or images, with labels."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    classes: int
    batch: int


def wine(seed: int) -> Data:
    """Return scikit-learn's data of 178 wines of three growers: 13 numbers, from 0.1 to 1,680."""
    from sklearn.datasets import load_wine
    from sklearn.model_selection import train_test_split

    found = load_wine()
    inputs = torch.tensor(found.data, dtype=torch.float32)
    labels = torch.tensor(found.target)
    train, test = train_test_split(
        range(len(labels)), test_size=0.25, stratify=labels, random_state=seed
    )
    return Data((inputs[train], labels[train]), (inputs[test], labels[test]), classes=3, batch=16)


def cifar10(root: Path) -> Data:
    from torchvision.datasets import CIFAR10

    found = [CIFAR10(root, train, download=True) for train in (True, False)]
    parts = [
        (torch.tensor(part.data).movedim(-1, 1).float(), torch.tensor(part.targets))
        for part in found
    ]
    return Data(parts[0], parts[1], classes=10, batch=64)


def image_folder(root: Path) -> Data:
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import Compose, PILToTensor, Resize

    same_size = Compose([Resize((32, 32)), PILToTensor()])
    train, test = (ImageFolder(root / part, same_size) for part in ("train", "test"))
    if train.classes != test.classes:
        raise SystemExit(
            f"{root}: got the classes {train.classes} in train/ and {test.classes} in test/, "
            "expected the same folders in both"
        )
    parts = [
        (torch.stack([image for image, _ in part]).float(), torch.tensor(part.targets))
        for part in (train, test)
    ]
    return Data(parts[0], parts[1], len(train.classes), batch=64)


def standardised(data: Data) -> Data:
    """Subtract each feature's mean and divide by its standard deviation, both of training data."""
    inputs = data.train[0]
    others = [axis for axis in range(inputs.dim()) if axis != 1]
    mean, std = inputs.mean(others, keepdim=True), inputs.std(others, keepdim=True)
    train, test = (((x - mean) / std, y) for x, y in (data.train, data.test))
    return data._replace(train=train, test=test)


def batches(data: Data, seed: int, epochs: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of the training data, shuffled in every epoch."""
    inputs, labels = data.train
    chance = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for some in torch.randperm(len(labels), generator=chance).split(data.batch):
            yield inputs[some], labels[some]


# The network


def mlp(data: Data, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers = {
        "flatten": nn.Flatten(),
        "input": nn.Linear(data.train[0][0].numel(), 64),
        "tanh1": nn.Tanh(),
        "hidden": nn.Linear(64, 64),
        "tanh2": nn.Tanh(),
        "output": nn.Linear(64, data.classes),
    }
    return nn.Sequential(OrderedDict(layers))


def sgd(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=MOMENTUM)


def loss_of(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(net(batch[0]), batch[1])


def accuracy(net: nn.Module, part: tuple[Tensor, Tensor]) -> float:
    with torch.no_grad():
        return float((net(part[0]).argmax(dim=1) == part[1]).float().mean())


class Classifier(pl.LightningModule):
    """The module that is trained, without any code of the monitor."""

    def __init__(self, net: nn.Module, rate: float) -> None:
        super().__init__()
        self.net, self.rate = net, rate

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the cross-entropy of one batch."""
        loss = loss_of(self.net, batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return gradient descent with momentum."""
        return sgd(self, self.rate)


# Learning rates


class Sweep(NamedTuple):
    """Test accuracies of all seeds, by learning rate."""

    accuracies: dict[float, list[float]]

    @property
    def best(self) -> float:
        """The learning rate with the highest mean accuracy."""
        return max(self.accuracies, key=self.mean)

    def mean(self, rate: float) -> float:
        """The mean accuracy over the seeds."""
        return fmean(self.accuracies[rate])

    def error(self, rate: float) -> float:
        """The standard error of the mean accuracy; 0 with one seed."""
        found = self.accuracies[rate]
        return stdev(found) / math.sqrt(len(found)) if len(found) > 1 else 0.0

    def __str__(self) -> str:
        best = self.best
        return f"{self.mean(best):.1%} ± {self.error(best):.1%} at learning rate {best:g}"


def sweep(sets: Sequence[Data], epochs: int, done: Callable[[], None]) -> Sweep:
    """Train at every learning rate, with one seed for each set of data."""
    found: dict[float, list[float]] = {rate: [] for rate in RATES}
    for rate, accuracies in found.items():
        for seed, data in enumerate(sets):
            net = mlp(data, seed)
            optimizer = sgd(net, rate)
            for batch in batches(data, seed, epochs):
                optimizer.zero_grad()
                loss_of(net, batch).backward()
                optimizer.step()
            accuracies.append(accuracy(net, data.test))
            done()
    return Sweep(found)


def swept(sets: Sequence[Data], epochs: int) -> Sweep:
    with Progress(transient=True) as bars:
        task = bars.add_task("learning rates", total=len(RATES) * len(sets))
        return sweep(sets, epochs, lambda: bars.advance(task))


def show_sweeps(sweeps: dict[str, Sweep]) -> None:
    width = max(map(len, ("learning rate", *sweeps)))
    print(f"{'learning rate':{width}}" + "".join(f"{rate:>8g}" for rate in RATES))
    for name, found in sweeps.items():
        print(f"{name:{width}}" + "".join(f"{found.mean(rate):>8.1%}" for rate in RATES))


# Monitor and audit


def monitored(name: str, data: Data, rate: float, folder: Path, epochs: int) -> StepReport:
    """Train with Lightning, with the monitor as a callback; return its last report."""
    model = Classifier(mlp(data, seed=0), rate)
    page = HtmlSink(folder / f"{name}.html")
    callback = DivergenceCallback(every_n_steps=20, sinks=[page])
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=TensorBoardLogger(folder, name, version="", default_hp_metric=False),
        callbacks=[callback],
        enable_checkpointing=False,
        enable_model_summary=False,
        log_every_n_steps=5,
    )
    trainer.fit(model, DataLoader(TensorDataset(*data.train), data.batch, shuffle=True))
    page.close()
    report = callback.monitors[""].latest
    assert report is not None
    return report


def audited(data: Data, rate: float, folder: Path, epochs: int) -> AuditReport:
    """Audit the beginning of the same training, and try fixes."""
    with progress() as update:
        report = audit(
            mlp(data, seed=0),
            batches(data, 0, epochs),
            loss=loss_of,
            optimizer=lambda model: sgd(model, rate),
            progress=update,
        )
    report.write(folder / "audit")
    return report


def side_by_side(runs: dict[str, StepReport]) -> StepReport:
    """Return one report with the layers of all runs, side by side."""
    first = next(iter(runs.values()))
    layers = {
        f"{path.removeprefix('net.')}, {name}": report.layers[path]
        for path in first.layers
        for name, report in runs.items()
    }
    return replace(first, layers=layers, losses={}, unsupported={}, unmeasured={}, notes=())


def scales(report: StepReport) -> str:
    first, *others = (reading.scale_mean or 0.0 for reading in report.layers.values())
    return f"{first:,.0f} in the first layer and {min(others):,.0f} to {max(others):,.0f} behind it"


# The story


def tell(name: str, sets: Sequence[Data], folder: Path, epochs: int) -> None:
    low, high = sets[0].train[0].min().item(), sets[0].train[0].max().item()
    heading(1, f"{name}: inputs as they come ({low:g} to {high:g}), {len(RATES)} learning rates")
    raw = swept(sets, epochs)
    show_sweeps({"raw": raw})
    say(f"Test accuracy, {len(sets)} seeds, {epochs} epochs: the best is {raw}.")

    heading(2, f"What is wrong at {raw.best:g}? The audit")
    report = audited(sets[0], raw.best, folder, epochs)
    say(f"{loss_curve(report.record.losses)} {report.verdict}")

    if standardising_is_first(report):
        heading(3, "The audit's first advice, taken: standardised inputs")
    else:
        heading(3, "Not the audit's first advice, but to compare: standardised inputs")
    fixed_sets = [standardised(data) for data in sets]
    fixed = swept(fixed_sets, epochs)
    show_sweeps({"raw": raw, "standardised": fixed})
    say(f"At the best learning rate of each: raw {raw}, standardised {fixed}.")
    say(compared(raw, fixed))

    heading(4, "What the monitor reads of both, each at its best learning rate")
    runs = {
        "raw": monitored("raw", sets[0], raw.best, folder, epochs),
        "standardised": monitored("standardised", fixed_sets[0], fixed.best, folder, epochs),
    }
    TableSink(SHOWN).write(side_by_side(runs))
    say(
        "A gradient step moves a row's activations by the learning rate times the row's scale, "
        f"‖x‖² + 1. Its mean is, raw, {scales(runs['raw'])}; standardised, "
        f"{scales(runs['standardised'])}."
    )

    heading(5, "Where it is, and your own model")
    print(
        f"the audit's page:    {folder / 'audit' / 'report.html'}\n"
        f"the monitor's pages: {folder / 'raw.html'}, {folder / 'standardised.html'}\n"
        f"the dashboards:      tensorboard --logdir {folder}\n\n"
        "a callback, which writes where your Trainer logs:\n"
        "    from adiv_monitor.lightning import DivergenceCallback\n"
        "    trainer = Trainer(callbacks=[DivergenceCallback()])\n"
        "an audit, from the command line:\n"
        "    adiv-audit my_project.train:build --data my_project.train:batches\n"
        "layers in which a gradient step moves all rows alike, and when they help:\n"
        "    layers/README.md"
    )


def loss_curve(losses: Sequence[float]) -> str:
    end = fmean(losses[-math.ceil(len(losses) / 4) :])
    return (
        f"The loss begins at {losses[0]:.3g} and is {end:.3g} in the last quarter of {len(losses)} "
        "steps: that says how well the network learns, not why."
    )


def standardising_is_first(report: AuditReport) -> bool:
    """Whether standardising the inputs is the first advice, and its trial paid."""
    first = report.findings[0].advice[0] if report.findings else None
    return (
        first is not None
        and first.fix == "standardise-inputs"
        and first.trial is not None
        and first.trial.helps
    )


def compared(raw: Sweep, fixed: Sweep) -> str:
    """Return a sentence: whether a learning rate alone does as well as standardising."""
    gain = fixed.mean(fixed.best) - raw.mean(raw.best)
    error = math.hypot(raw.error(raw.best), fixed.error(fixed.best))
    if gain > 2 * error:
        return "None of these learning rates does for raw inputs what standardising does."
    return "That is no difference beyond the errors: here a learning rate does as well."


def say(text: str) -> None:
    print(f"\n{fill(text, 100)}")


def heading(number: int, text: str) -> None:
    Console(highlight=False).print(f"\n[bold]{number}. {text}[/bold]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dataset", choices=EPOCHS, default="wine")
    parser.add_argument("--root", type=Path, help="folder of cifar10 or imagefolder")
    parser.add_argument("--max-epochs", type=int, help="of each run; default: 40, 1 or 5")
    args = parser.parse_args()
    epochs: int | None = args.max_epochs
    if epochs is not None and epochs < 1:
        parser.error(f"--max-epochs {epochs}: expected at least 1")
    if args.dataset != "wine" and args.root is None:
        parser.error(f"--dataset {args.dataset} needs --root")
    # Not for a demo: advice on workers and intervals, what Lightning 2.6 calls in newer torch
    # versions, other Lightning products.
    for message in (".*many workers", ".*logging interval", ".*LeafSpec.*is deprecated"):
        warnings.filterwarnings("ignore", message)
    for package in ("pytorch_lightning", "lightning.pytorch"):
        logging.getLogger(package).setLevel(logging.WARNING)

    torch.set_num_threads(1)  # nets as small as these are slower with more

    if args.dataset == "wine":
        sets = [wine(seed) for seed in range(SEEDS)]  # each with a split of its own
    else:
        data = {"cifar10": cifar10, "imagefolder": image_folder}[args.dataset](args.root)
        sets = [data] * SEEDS
    folder = Path("runs") / time.strftime(f"{args.dataset}-%Y%m%d-%H%M%S")
    tell(args.dataset, sets, folder, EPOCHS[args.dataset] if epochs is None else epochs)


if __name__ == "__main__":
    main()
