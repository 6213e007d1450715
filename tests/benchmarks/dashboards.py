"""Dashboards of whole trainings, for inspection: a ResNet-18, 300 layers, a GPT, a GAN.

    python tests/benchmarks/dashboards.py runs/dashboards [--only resnet …] [--write FILE]
    python tests/benchmarks/dashboards.py runs/dashboards --only resnet \\
        --picture docs/images/dashboard.png

Each is trained with the callback and nothing else, which leaves an event file in a folder of its
own. In the ResNet two layers have a learning rate 1,000 times too low. In the 300 layers one branch
is dead. The GPT and the GAN have no planted fault. TensorBoard then reads each file, and a headless
Chromium draws its first page; `--picture` keeps that of the first run.
"""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import TensorBoardLogger
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1]))  # location of the browser's package

from audit.browser import Browser, chromium

from adiv_monitor.diagnosis.diagnose import running_headline
from adiv_monitor.diagnosis.running import Running
from adiv_monitor.lightning import DivergenceCallback
from adiv_monitor.sinks import MemorySink

Batch = tuple[Tensor, Tensor]
Groups = Callable[[nn.Module], list[dict[str, Any]]]


class Training(NamedTuple):
    """A training: its model and its length."""

    module: pl.LightningModule
    batches: list[Any]
    every_n_steps: int


class Plain(pl.LightningModule):
    """One network with one loss and one optimizer."""

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.net = net
        self.optimizer = optimizer

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        outputs = self.net(batch[0])
        loss = nn.functional.cross_entropy(outputs.flatten(0, -2), batch[1].flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer


def digits(size: int, count: int, batch: int) -> list[Batch]:
    """Return a batch of standardised handwritten digits, drawn anew each time."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None]
    images = nn.functional.interpolate((images - images.mean()) / images.std(), size=(size, size))
    labels = torch.tensor(found.target)
    picks = [torch.randint(len(labels), (batch,)) for _ in range(count)]
    return [(images[pick], labels[pick]) for pick in picks]


def resnet() -> Training:
    """Return ResNet-18 whose second stage's second block hardly learns."""
    from torchvision.models import resnet18

    net = resnet18(num_classes=10)
    net.conv1 = nn.Conv2d(1, 64, 7, 2, 3, bias=False)
    slow = [net.layer2[1].conv1.weight, net.layer2[1].conv2.weight]
    others = [p for p in net.parameters() if not any(p is s for s in slow)]
    groups = [{"params": others}, {"params": slow, "lr": 1e-4}]
    return Training(Plain(net, torch.optim.SGD(groups, lr=0.1)), digits(32, 48, 16), 2)


class Branch(nn.Module):
    """A residual branch: x + W₂ ReLU(W₁ LayerNorm(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(self.norm(x)).relu()) / 12


def deep() -> Training:
    """Return residual branches of 300 layers in all; the first layer of branch 100 is dead."""
    branches = [Branch(24) for _ in range(149)]
    with torch.no_grad():
        branches[100].first.bias.fill_(-100)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), *branches, nn.Linear(24, 10))
    return Training(Plain(net, torch.optim.Adam(net.parameters(), 1e-3)), digits(8, 200, 32), 1)


class GPT(nn.Module):
    """Four causal blocks of torch's own transformer layer."""

    def __init__(self, letters: int, width: int, length: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(letters, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(4)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.token(tokens) + self.place(places)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


def gpt() -> Training:
    """Return a small GPT that learns to spell the licence."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    letters = sorted(set(text))
    codes = torch.tensor([letters.index(letter) for letter in text])
    starts = [torch.randint(len(codes) - 65, (16, 1)) for _ in range(200)]
    pieces = [codes[start + torch.arange(65)] for start in starts]
    net = GPT(len(letters), 64, 64)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    return Training(Plain(net, optimizer), [(p[:, :-1], p[:, 1:]) for p in pieces], 4)


class GAN(pl.LightningModule):
    """A generator and a discriminator with one optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            *(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64))
        )
        self.discriminator = nn.Sequential(
            *(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2)),
            nn.Linear(128, 1),
        )

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        real, made = batch[0].flatten(1), self.generator(torch.randn(len(batch[0]), 16))
        play, judge = self.optimizers()
        softplus = nn.functional.softplus
        losses = {
            "discriminator": lambda: (
                softplus(-self.discriminator(real)).mean()
                + softplus(self.discriminator(made.detach())).mean()
            ),
            "generator": lambda: softplus(-self.discriminator(made)).mean(),
        }
        for optimizer, (name, loss) in zip((judge, play), losses.items(), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            found = loss()
            self.manual_backward(found)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.log(f"{name}_loss", found)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        both = (self.generator, self.discriminator)
        return [torch.optim.Adam(net.parameters(), 2e-4, betas=(0.5, 0.999)) for net in both]


def gan() -> Training:
    """Return a GAN that generates digits."""
    return Training(GAN(), digits(8, 200, 64), 4)


RUNS: dict[str, Callable[[], Training]] = {"resnet": resnet, "deep": deep, "gpt": gpt, "gan": gan}


def train(name: str, folder: Path) -> tuple[list[str], int]:
    """Train, leaving an event file; return a table's cells and the last step.

    The cells are layers, reports, size and verdicts.
    """
    pl.seed_everything(0, verbose=False)
    module, batches, every = RUNS[name]()
    memory = MemorySink()
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=TensorBoardLogger(folder, name, version=""),
        callbacks=[DivergenceCallback(every, sinks=[memory])],
        enable_checkpointing=False,
        enable_model_summary=False,
        log_every_n_steps=every,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*does not have many workers")
        trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    layers = {path for report in memory.reports for path in report.layers}
    by_optimizer: dict[frozenset[str], Running] = {}
    for report in memory.reports:
        by_optimizer.setdefault(frozenset(report.layers), Running()).add(report)
    verdicts = [
        running_headline(running.findings(), running.record()) for running in by_optimizer.values()
    ]
    size = sum(file.stat().st_size for file in (folder / name).glob("events*"))
    cells = [str(len(layers)), str(len(memory.reports)), f"{size / 1e6:.1f}", "; ".join(verdicts)]
    return cells, memory.reports[-1].step


def look(folder: Path, last: int, browser: Browser, picture: Path) -> float:
    """Return the seconds from TensorBoard's start until the browser shows the last overview."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--port"]
    began = time.perf_counter()
    server = subprocess.Popen(
        [*command, str(port), "--host", "127.0.0.1", "--load_fast", "false"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        address = f"http://127.0.0.1:{port}"
        _wait(lambda: _last_drawn(f"{address}/data/plugin/images") == last)
        browser.driver.set_window_size(1500, 1150)
        browser.driver.get(f"{address}/#timeseries")
        _wait(lambda: any(_drawn(browser)))
        seconds = time.perf_counter() - began
        browser.run(_CLOSE_SETTINGS)
        time.sleep(4)  # until the other pictures are loaded
        browser.driver.save_screenshot(str(picture))
        return seconds
    finally:
        server.terminate()
        server.wait()


_CLOSE_SETTINGS = (
    "[...document.querySelectorAll('button')].find(b => b.textContent.includes('Settings')).click()"
)


def _last_drawn(address: str) -> int | None:
    """Return the step of the newest overview that the server has read."""
    tags = json.load(urlopen(f"{address}/tags")).get(".", {})
    overviews = [tag for tag in tags if tag.startswith("adiv/overview")]
    steps = [
        json.load(urlopen(f"{address}/images?run=.&tag={tag}&sample=0"))[-1]["step"]
        for tag in overviews
    ]
    return max(steps, default=None)


def _drawn(browser: Browser) -> Iterator[bool]:
    script = "return [...document.querySelectorAll('image-card img')].map(i => i.naturalWidth > 0)"
    yield from browser.run(script)


def _wait(ready: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if ready():
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise TimeoutError(f"TensorBoard showed nothing in {seconds} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    head = "| run | layers | reports | event file, MB | verdict | seconds until drawn |"
    lines = [head, "| --- | --- | --- | --- | --- | --- |"]
    with tempfile.TemporaryDirectory() as profile, chromium(Path(profile)) as browser:
        for name in given.only:
            cells, last = train(name, given.folder)
            kept = given.picture if name == given.only[0] else None
            picture = kept or given.folder / f"{name}.png"
            seconds = look(given.folder / name, last, browser, picture)
            lines.append(f"| {' | '.join([name, *cells, f'{seconds:.1f}'])} |")
    command = "python tests/benchmarks/dashboards.py runs/dashboards"
    text = "\n".join(["# Dashboards of whole trainings", "", f"`{command}`", "", *lines]) + "\n"
    print(text)
    if given.write is not None:
        given.write.write_text(text)


if __name__ == "__main__":
    main()
