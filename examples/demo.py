"""One story: a network that trains badly, what is wrong with it, and what mends it.

A small network learns handwritten digits as they come, pixels and all, by gradient descent with
momentum at a usual rate. The monitor watches, the audit says what is wrong and tries what would
mend it, and the mended run stands beside the first. Then standard and corrected layers, each at the
best of a few learning rates. Under a minute on two cores; nothing is opened.

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
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from textwrap import fill
from typing import NamedTuple

import pytorch_lightning as pl
import torch
from adiv_layers import AffineLikeLinear
from pytorch_lightning.loggers import TensorBoardLogger
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from adiv_monitor import Monitor, StepReport, audit
from adiv_monitor.audit.command.terminal import ProgressBars
from adiv_monitor.audit.report import AuditReport
from adiv_monitor.lightning import DivergenceCallback
from adiv_monitor.sinks import HtmlSink, TableSink

RATE, MOMENTUM, BATCH = 0.1, 0.9, 64
RATES = (1e-3, 3e-3, 1e-2, 3e-2)  # of Adam, in the last part
SEEDS = 3
SHOWN = ("update_ratio", "update_cosine", "effective_lr", "scale_mean", "scale_cv")


# Data


class Data(NamedTuple):
    """Images as they come, with labels."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    classes: int


def digits(seed: int) -> Data:
    """1,797 handwritten digits of 8 × 8 pixels from 0 to 16, which come with scikit-learn."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None]
    labels = torch.tensor(found.target)
    train, test = train_test_split(
        range(len(labels)), test_size=0.25, stratify=labels, random_state=seed
    )
    return Data((images[train], labels[train]), (images[test], labels[test]), classes=10)


def cifar10(root: Path) -> Data:
    from torchvision.datasets import CIFAR10

    found = [CIFAR10(root, train, download=True) for train in (True, False)]
    parts = [
        (torch.tensor(part.data).movedim(-1, 1).float(), torch.tensor(part.targets))
        for part in found
    ]
    return Data(parts[0], parts[1], classes=10)


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
    return Data(parts[0], parts[1], len(train.classes))


def standardised(data: Data) -> Data:
    """Each channel less its mean, over its standard deviation, both of the training data."""
    images = data.train[0]
    mean, std = images.mean((0, 2, 3), keepdim=True), images.std((0, 2, 3), keepdim=True)
    train, test = (((x - mean) / std, y) for x, y in (data.train, data.test))
    return data._replace(train=train, test=test)


def batches(part: tuple[Tensor, Tensor], seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch, shuffled."""
    order = torch.randperm(len(part[0]), generator=torch.Generator().manual_seed(seed))
    for some in order.split(BATCH):
        yield part[0][some], part[1][some]


# Nets

Kind = type[nn.Linear] | type[AffineLikeLinear]


def mlp(data: Data, kind: Kind = nn.Linear) -> nn.Module:
    layers = {
        "flatten": nn.Flatten(),
        "input": kind(data.train[0][0].numel(), 128),
        "tanh1": nn.Tanh(),
        "hidden": kind(128, 128),
        "tanh2": nn.Tanh(),
        "output": kind(128, data.classes),
    }
    return nn.Sequential(OrderedDict(layers))


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)


def accuracy(net: nn.Module, part: tuple[Tensor, Tensor]) -> float:
    with torch.no_grad():
        return float((net(part[0]).argmax(dim=1) == part[1]).float().mean())


class Classifier(pl.LightningModule):
    """Nothing in here knows of the monitor."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy of one batch."""
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Gradient descent with momentum."""
        return momentum(self)


# The parts of the story


class Run(NamedTuple):
    """What is left of a training run."""

    report: StepReport
    accuracy: float


def train(name: str, data: Data, folder: Path, max_epochs: int, seed: int) -> Run:
    """Train with Lightning; the monitor is one callback."""
    pl.seed_everything(seed, verbose=False)
    model = Classifier(mlp(data))
    page = HtmlSink(folder / f"{name}.html")
    callback = DivergenceCallback(every_n_steps=20, sinks=[page])
    trainer = pl.Trainer(
        max_epochs=max_epochs,
        accelerator="cpu",
        logger=TensorBoardLogger(folder, name, version="", default_hp_metric=False),
        callbacks=[callback],
        enable_checkpointing=False,
        enable_model_summary=False,
        log_every_n_steps=5,
    )
    trainer.fit(model, DataLoader(TensorDataset(*data.train), BATCH, shuffle=True))
    page.close()
    report = callback.monitors[""].latest
    assert report is not None
    return Run(report, accuracy(model.net, data.test))


def audited(data: Data, folder: Path, seed: int) -> AuditReport:
    """The same training from its start, with what would mend it tried."""
    torch.manual_seed(seed)
    with Progress(transient=True) as bars:
        report = audit(
            mlp(data),
            batches(data.train, seed),
            loss=lambda net, batch: nn.functional.cross_entropy(net(batch[0]), batch[1]),
            optimizer=momentum,
            try_seconds=20,
            seed=seed,
            progress=ProgressBars(bars),
        )
    report.write(folder / "audit")
    return report


def show_findings(report: AuditReport) -> None:
    for finding in report.findings:
        print(fill(f"{finding.strength}: {finding.summary}", 100, subsequent_indent="  "))
        for advice in finding.advice if finding.strength == "act" else ():
            print(
                fill(
                    f"{advice.outcome.mark} {advice}",
                    100,
                    initial_indent="  ",
                    subsequent_indent="    ",
                )
            )


def side_by_side(runs: dict[str, StepReport]) -> StepReport:
    """The layers of all runs in one report, next to each other."""
    first = next(iter(runs.values()))
    layers = {
        f"{path.removeprefix('net.')}, {name}": report.layers[path]
        for path in first.layers
        for name, report in runs.items()
    }
    return replace(first, layers=layers, unsupported={}, unmeasured={}, notes=())


def best_of_rates(
    data: Data,
    kind: type[nn.Linear] | type[AffineLikeLinear],
    epochs: int,
    done: Callable[[], None],
) -> tuple[dict[float, list[float]], StepReport]:
    """Rate → accuracy of each seed, by Adam; and the last step at the best rate."""
    found: dict[float, list[float]] = {}
    reports: dict[float, StepReport] = {}
    for rate in RATES:
        found[rate] = []
        for seed in range(SEEDS):
            torch.manual_seed(seed)
            net = mlp(data, kind)
            optimizer = torch.optim.Adam(net.parameters(), lr=rate)
            with Monitor(net, optimizer, every_n_steps=50) as monitor:
                for epoch in range(epochs):
                    for x, y in batches(data.train, 1000 * seed + epoch):
                        optimizer.zero_grad()
                        nn.functional.cross_entropy(net(x), y).backward()
                        optimizer.step()
            found[rate].append(accuracy(net, data.test))
            assert monitor.latest is not None
            reports[rate] = monitor.latest
            done()
    best = max(RATES, key=lambda rate: fmean(found[rate]))
    return found, reports[best]


def standard_and_corrected(data: Data, epochs: int) -> None:
    kinds = {"standard": nn.Linear, "corrected": AffineLikeLinear}
    reports = {}
    with Progress(transient=True) as bars:
        task = bars.add_task("training", total=len(kinds) * len(RATES) * SEEDS)
        results = {
            name: best_of_rates(data, kind, epochs, lambda: bars.advance(task))
            for name, kind in kinds.items()
        }
    for name, (found, reports[name]) in results.items():
        best = max(found, key=lambda rate: fmean(found[rate]))
        error = stdev(found[best]) / SEEDS**0.5
        others = ", ".join(f"{fmean(a):.1%} at {rate:g}" for rate, a in found.items())
        print(f"{name}: {fmean(found[best]):.1%} ± {error:.1%} at its best rate ({others})")
    print()
    TableSink(SHOWN).write(side_by_side(reports))
    print(f"\n{fill(meaning(reports), 100)}")


def meaning(reports: dict[str, StepReport]) -> str:
    """What the row scales and the effective rates say of both kinds."""
    said = []
    for name, report in reports.items():
        scales = [r.scale_mean for r in report.layers.values() if r.scale_mean is not None]
        rates = [r.effective_lr for r in report.layers.values() if r.effective_lr is not None]
        said.append(
            f"In the {name} layers the mean row scale is {span(scales)}, and activations move "
            f"downhill at rates of {span(rates)}."
        )
    return " ".join(said) + (
        " A scale that all rows of a layer share is a learning rate in disguise: a rate of its own "
        "does as well as a layer without it. What a corrected layer alone can take out is the "
        "spread between rows (scale cv)."
    )


def span(values: list[float]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


def tell(data: Data, folder: Path, max_epochs: int, seed: int) -> None:
    low, high = data.train[0].min().item(), data.train[0].max().item()
    heading(1, f"Pixels as they come ({low:g} to {high:g}), momentum {MOMENTUM}, rate {RATE}")
    raw = train("raw", data, folder, max_epochs, seed)
    print(f"test accuracy {raw.accuracy:.1%}")

    heading(2, "What is wrong, and what would mend it")
    report = audited(data, folder, seed)
    show_findings(report)

    heading(3, "The mend, tried: standardised inputs, all else as it was")
    mended = train("mended", standardised(data), folder, max_epochs, seed)
    print(f"test accuracy {mended.accuracy:.1%} instead of {raw.accuracy:.1%}\n")
    TableSink(SHOWN).write(side_by_side({"raw": raw.report, "mended": mended.report}))

    heading(4, f"Standard and corrected layers, Adam, {SEEDS} seeds each")
    standard_and_corrected(standardised(data), max_epochs)

    heading(5, "Now your own model")
    print(
        "a callback, which writes where your Trainer logs:\n"
        "    from adiv_monitor.lightning import DivergenceCallback\n"
        "    trainer = Trainer(callbacks=[DivergenceCallback()])\n"
        "an audit, from the command line:\n"
        "    adiv-audit my_project.train:build --data my_project.train:batches\n\n"
        f"What you have just seen: {folder / 'audit' / 'report.html'}, {folder / 'raw.html'},\n"
        f"and the dashboard: tensorboard --logdir {folder}"
    )


def heading(number: int, text: str) -> None:
    Console(highlight=False).print(f"\n[bold]{number}. {text}[/bold]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dataset", choices=("digits", "cifar10", "imagefolder"), default="digits")
    parser.add_argument("--root", type=Path, help="folder of cifar10 or imagefolder")
    parser.add_argument("--max-epochs", type=int, default=8)
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

    torch.set_num_threads(1)  # nets as small as these are slower with more

    if args.dataset == "digits":
        data = digits(args.seed)
    else:
        data = {"cifar10": cifar10, "imagefolder": image_folder}[args.dataset](args.root)
    folder = Path("runs") / time.strftime(f"{args.dataset}-%Y%m%d-%H%M%S")
    tell(data, folder, args.max_epochs, args.seed)


if __name__ == "__main__":
    main()
