"""Standard and corrected layers side by side, watched while they train.

Trains a small MLP and a small CNN, each with standard and with corrected layers, and prints what
the last measured step did to the activations of every layer. Expected: in the corrected layers a
scale of exactly 1 with no spread between rows, so a diagonal cosine of exactly 1. The accuracies
come from one seed and prove nothing. Under a minute on two cores.

    python examples/demo.py                                   handwritten digits, nothing to load
    python examples/demo.py --dataset cifar10 --root data     downloads CIFAR-10 if need be
    python examples/demo.py --dataset imagefolder --root pictures
                            pictures/train/<class>/*.jpg and pictures/test/<class>/*.jpg
"""

import argparse
import logging
import time
import warnings
from collections import OrderedDict
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from adiv_layers import AffineLikeLinear, PatchNormConv2d
from pytorch_lightning.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from adiv_monitor import StepReport
from adiv_monitor.lightning import DivergenceCallback
from adiv_monitor.sinks import TableSink

KINDS = ("standard", "corrected")
SHOWN = (
    "update_cosine",
    "gradient_cosine",
    "diagonal_cosine",
    "effective_lr",
    "scale_mean",
    "scale_cv",
    "interference_ratio",
)


# Data


class Data(NamedTuple):
    """Images in [0, 1] with labels."""

    train: Dataset[Any]
    test: Dataset[Any]
    classes: int


def digits(seed: int) -> Data:
    """1,797 handwritten digits of 8 × 8 pixels, which come with scikit-learn."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(found.target)
    train, test = train_test_split(
        range(len(labels)), test_size=0.25, stratify=labels, random_state=seed
    )
    parts = (TensorDataset(images[part], labels[part]) for part in (train, test))
    return Data(*parts, classes=10)


def cifar10(root: Path) -> Data:
    from torchvision.datasets import CIFAR10
    from torchvision.transforms import ToTensor

    parts = (CIFAR10(root, train, ToTensor(), download=True) for train in (True, False))
    return Data(*parts, classes=10)


def image_folder(root: Path) -> Data:
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import Compose, Resize, ToTensor

    same_size = Compose([Resize((32, 32)), ToTensor()])
    train, test = (ImageFolder(root / part, same_size) for part in ("train", "test"))
    if train.classes != test.classes:
        raise SystemExit(
            f"{root}: got the classes {train.classes} in train/ and {test.classes} in test/, "
            "expected the same folders in both"
        )
    return Data(train, test, len(train.classes))


# Nets


def mlp(shape: torch.Size, classes: int, kind: str) -> nn.Module:
    linear = nn.Linear if kind == "standard" else AffineLikeLinear
    layers = {
        "flatten": nn.Flatten(),
        "input": linear(shape.numel(), 128),
        "tanh1": nn.Tanh(),
        "hidden": linear(128, 128),
        "tanh2": nn.Tanh(),
        "output": linear(128, classes),
    }
    return nn.Sequential(OrderedDict(layers))


def cnn(shape: torch.Size, classes: int, kind: str) -> nn.Module:
    linear = nn.Linear if kind == "standard" else AffineLikeLinear
    conv = nn.Conv2d if kind == "standard" else PatchNormConv2d
    layers = {
        "conv1": conv(shape[0], 16, 3, padding=1),
        "relu1": nn.ReLU(),
        "conv2": conv(16, 32, 3, padding=1),
        "relu2": nn.ReLU(),
        "pool": nn.AdaptiveAvgPool2d(4),
        "flatten": nn.Flatten(),
        "output": linear(32 * 4 * 4, classes),
    }
    return nn.Sequential(OrderedDict(layers))


NETS = {"MLP": mlp, "CNN": cnn}


class Classifier(pl.LightningModule):
    """Nothing in here knows of the monitor."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy of one batch."""
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Share of right answers."""
        images, labels = batch
        right = (self.net(images).argmax(dim=1) == labels).float().mean()
        self.log("test_accuracy", right, batch_size=len(labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam, with the learning rate it is most often used with."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


# The runs and what they say


class Run(NamedTuple):
    """What is left of a training run."""

    report: StepReport
    accuracy: float


def train(name: str, kind: str, data: Data, log_dir: Path, max_epochs: int, seed: int) -> Run:
    pl.seed_everything(seed, verbose=False)
    shape = data.train[0][0].shape
    model = Classifier(NETS[name](shape, data.classes, kind))
    callback = DivergenceCallback(every_n_steps=20, prog_bar=True)
    print(f"\n{name}, {kind} layers")
    trainer = pl.Trainer(
        max_epochs=max_epochs,
        accelerator="cpu",
        logger=TensorBoardLogger(log_dir, f"{name}-{kind}", version="", default_hp_metric=False),
        callbacks=[callback],
        enable_checkpointing=False,
        enable_model_summary=False,
        log_every_n_steps=10,
    )
    trainer.fit(model, DataLoader(data.train, 64, shuffle=True))
    (result,) = trainer.test(model, DataLoader(data.test, 64), verbose=False)
    report = callback.monitors[""].latest
    assert report is not None
    return Run(report, result["test_accuracy"])


def side_by_side(runs: dict[tuple[str, str], Run]) -> StepReport:
    """All layers of all nets in one report, standard and corrected next to each other."""
    layers = {
        f"{name} {path.removeprefix('net.')}, {kind}": runs[name, kind].report.layers[path]
        for name in NETS
        for path in runs[name, "standard"].report.layers
        for kind in KINDS
    }
    reports = [run.report for run in runs.values()]
    return StepReport(reports[0].step, layers, {}, min(report.coverage for report in reports))


def accuracies(runs: dict[tuple[str, str], Run]) -> str:
    lines = ["test accuracy (from one seed, which proves nothing about accuracy)"]
    for name in NETS:
        values = ", ".join(f"{kind} {runs[name, kind].accuracy:.1%}" for kind in KINDS)
        lines.append(f"  {name}: {values}")
    return "\n".join(lines)


def meaning(runs: dict[tuple[str, str], Run]) -> str:
    """Two sentences: what a layer's rows have in common, and what differs from row to row."""
    layers = {
        kind: [r for name in NETS for r in runs[name, kind].report.layers.values()]
        for kind in KINDS
    }
    mean = {kind: [r.scale_mean for r in layers[kind]] for kind in KINDS}
    cv = {kind: max(r.scale_cv for r in layers[kind]) for kind in KINDS}
    diagonal = {kind: min(r.diagonal_cosine for r in layers[kind]) for kind in KINDS}
    update = {kind: median(r.update_cosine for r in layers[kind]) for kind in KINDS}
    standard, corrected = KINDS
    return (
        f"What all rows of a layer have in common: their mean scale is {span(mean[standard])} in "
        f"the standard layers and {span(mean[corrected])} in the corrected ones, which a learning "
        "rate per layer would level as well. "
        f"What differs from row to row: the scale's spread (cv) is at most {cv[standard]:.2f}, "
        f"corrected {cv[corrected]:.2f}, which alone takes a plain gradient step to a cosine of at "
        f"least {diagonal[standard]:.3f}, corrected {diagonal[corrected]:.3f}, while interference "
        f"and the optimizer leave the layers at a median update cosine of {update[standard]:.2f}, "
        f"corrected {update[corrected]:.2f}."
    )


def span(values: list[float]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"between {low} and {high}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dataset", choices=("digits", "cifar10", "imagefolder"), default="digits")
    parser.add_argument("--root", type=Path, help="folder of cifar10 or imagefolder")
    parser.add_argument("--max-epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.dataset != "digits" and args.root is None:
        parser.error(f"--dataset {args.dataset} needs --root")
    # Not for a demo: advice on workers and intervals, what Lightning 2.6 calls in newer torch
    # versions, other Lightning products.
    for message in (".*many workers", ".*logging interval", ".*LeafSpec.*is deprecated"):
        warnings.filterwarnings("ignore", message)
    for package in ("pytorch_lightning", "lightning.pytorch"):
        logging.getLogger(package).setLevel(logging.WARNING)

    if args.dataset == "digits":
        data = digits(args.seed)
    else:
        data = {"cifar10": cifar10, "imagefolder": image_folder}[args.dataset](args.root)
    log_dir = Path("runs") / time.strftime(f"{args.dataset}-%Y%m%d-%H%M%S")
    runs = {
        (name, kind): train(name, kind, data, log_dir, args.max_epochs, args.seed)
        for name in NETS
        for kind in KINDS
    }
    print()
    TableSink(SHOWN).write(side_by_side(runs))
    print(f"\n{accuracies(runs)}\n\n{fill(meaning(runs), 100)}")
    print(f"\nCurves and histograms: tensorboard --logdir {log_dir}")


if __name__ == "__main__":
    main()
