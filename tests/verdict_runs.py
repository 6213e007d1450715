"""Trainings in a known state, run with and without the loss, with everything shown about them."""

import io
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from adiv_monitor import Monitor, StepReport
from adiv_monitor.diagnosis.running import Running
from adiv_monitor.pictures.picture import Picture
from adiv_monitor.sinks import HtmlSink, JsonlSink, MemorySink, Sink, TableSink, TensorBoardSink
from adiv_monitor.sinks import board as board_module

STEPS, EVERY, SIZE, CLASSES, WIDTH = 60, 6, 32, 4, 16
BREAKS = 40  # the first step with a non-finite loss; it is not a measured one
DECAYS = 21  # the first step with the low learning rate


def batches(spread: float) -> list[tuple[Tensor, Tensor]]:
    """Return points around one centre per class; random labels if the spread is infinite."""
    chance = torch.Generator().manual_seed(0)
    centres = torch.randn(CLASSES, WIDTH, generator=chance)
    found = []
    for _ in range(STEPS):
        right = torch.randint(CLASSES, (SIZE,), generator=chance)
        noise = torch.randn(SIZE, WIDTH, generator=chance)
        points = noise if spread == torch.inf else centres[right] + spread * noise
        found.append((points, right))
    return found


class Net(nn.Module):
    """Three layers and the loss, which is NaN from call number `breaks` on."""

    def __init__(
        self, breaks: int | None = None, function: Callable[[Tensor], Tensor] = torch.relu
    ) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(WIDTH, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, CLASSES)
        self.calls, self.breaks, self.function = 0, breaks, function

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.function(self.second(self.function(self.first(x)))))
        loss = nn.functional.cross_entropy(logits, labels)
        if self.breaks is not None and self.calls >= self.breaks:
            loss = loss * torch.nan
        self.calls += 1
        return {"loss": loss, "logits": logits}


@dataclass(frozen=True)
class State:
    """The state of a training.

    Attributes:
        rate: the learning rate at its peak.
        rates: step → share of the peak learning rate.
        prepare: changes the network before training.
        frozen: the layer whose parameters have a learning rate of zero; "" for none.
        spread: of the points around their centres; if infinite, labels are random.
        breaks: the first step with a NaN loss; None for no such step.
        function: activation between the layers. With a bounded one, outputs stay finite at any
            learning rate.
    """

    rate: float = 0.1
    rates: Callable[[int], float] = lambda step: 1.0
    prepare: Callable[[Net], object] = lambda net: None
    frozen: str = ""
    spread: float = 1.5
    breaks: int | None = None
    function: Callable[[Tensor], Tensor] = torch.relu

    def build(self) -> tuple[Net, SGD, LambdaLR]:
        net = Net(self.breaks, self.function)
        self.prepare(net)
        groups: dict[bool, list[nn.Parameter]] = {False: [], True: []}
        for name, parameter in net.named_parameters():
            if parameter.requires_grad:
                groups[bool(self.frozen) and name.startswith(self.frozen)].append(parameter)
        optimizer = SGD(
            [{"params": held, "lr": 0.0 if still else self.rate}
             for still, held in groups.items() if held]
        )  # fmt: skip
        return net, optimizer, LambdaLR(optimizer, self.rates)


def _learn(net: Net) -> None:
    optimizer = SGD(net.parameters(), lr=0.3)
    for x, labels in batches(0.5):
        optimizer.zero_grad()
        net(x, labels)["loss"].backward()  # type: ignore[no-untyped-call]
        optimizer.step()


STATES: Mapping[str, State] = {
    "healthy": State(),
    "not finite": State(breaks=BREAKS),
    "flat: learning rate too high": State(rate=3.0, spread=2.0, function=torch.tanh),
    "flat: random labels": State(spread=torch.inf),
    "diverged": State(rate=100.0, function=torch.tanh),
    "learning rate too low": State(rate=1e-5),
    "dead units": State(prepare=lambda net: nn.init.constant_(net.second.bias, -100.0)),
    "frozen by a learning rate of 0": State(frozen="second"),
    "frozen by requires_grad": State(prepare=lambda net: net.second.requires_grad_(False)),
    "decayed": State(rates=lambda step: 1.0 if step < DECAYS else 1e-3),
    "warm-up": State(rates=lambda step: 1e-3 * (step + 1) / STEPS),
    "converged": State(rate=0.3, spread=0.5),
    "resumed where it had converged": State(rate=0.3, spread=0.5, prepare=_learn),
}


class Listener:
    """A sink that collects what every sink with a verdict collects."""

    def __init__(self) -> None:
        self.running = Running()

    def write(self, report: StepReport) -> None:
        self.running.add(report)

    def add_losses(self, losses: Mapping[int, float]) -> None:
        self.running.add_losses(losses)

    def close(self) -> None:
        pass


@dataclass
class Seen:
    """Everything that a run shows to people.

    Attributes:
        running: the training as sinks collect it.
        reports: all reports.
        folder: contains TensorBoard's files, the page and the JSON lines.
        table: the last report as printed.
        logged: records of the logger `adiv_monitor`.
        warned: the monitor's warnings.
        overviews: headline and paragraphs of each drawn overview.
    """

    folder: Path
    running: Running
    reports: list[StepReport]
    table: str = ""
    logged: list[logging.LogRecord] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    overviews: list[tuple[str, list[str]]] = field(default_factory=list)

    @property
    def page(self) -> str:
        return (self.folder / "run.html").read_text()

    @property
    def findings_text(self) -> str:
        """Return the text of the last findings in TensorBoard."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(self.folder / "board")).Reload()
        last = events.Tensors("adiv.summary/findings/text_summary")[-1]
        return str(last.tensor_proto.string_val[0].decode())


class _Kept(logging.Handler):
    def __init__(self, records: list[logging.LogRecord]) -> None:
        super().__init__()
        self.records = records

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def seen(state: State, loop: str, folder: Path) -> Seen:
    """Train a state with a loop and all sinks, and return what is shown."""
    listener, memory, printed = Listener(), MemorySink(), io.StringIO()
    result = Seen(folder, listener.running, memory.reports)
    sinks: list[Sink] = [
        *(listener, memory, JsonlSink(folder / "run.jsonl"), HtmlSink(folder / "run.html")),
        TensorBoardSink(folder / "board"),
    ]
    overview, heat = board_module.overview_picture, board_module.heat_picture
    draws = loop == "plain"  # one drawing takes as long as the whole training

    def drawn(grids: Any, headline: str, paragraphs: list[str], *others: Any) -> Picture:
        result.overviews.append((headline, list(paragraphs)))
        return overview(grids, headline, paragraphs, *others) if draws else Picture(8)

    def heat_drawn(*given: Any) -> Picture:
        return heat(*given) if draws else Picture(8)

    logger, kept = logging.getLogger("adiv_monitor"), _Kept(result.logged)
    level = logger.level
    logger.addHandler(kept)
    logger.setLevel(logging.INFO)
    try:
        with (
            warnings.catch_warnings(record=True) as warned,
            mock.patch.object(board_module, "overview_picture", drawn),
            mock.patch.object(board_module, "heat_picture", heat_drawn),
        ):
            warnings.simplefilter("always")
            LOOPS[loop](state, sinks, folder)
            for sink in sinks:
                sink.close()
    finally:
        logger.removeHandler(kept)
        logger.setLevel(level)
    TableSink(file=printed).write(memory.reports[-1])
    result.table = printed.getvalue()
    result.warned = [text for w in warned if (text := str(w.message)).startswith("adiv_monitor")]
    return result


def _plain(state: State, sinks: list[Sink], folder: Path, *, says_loss: bool = True) -> None:
    net, optimizer, schedule = state.build()
    with Monitor(net, optimizer, every_n_steps=EVERY, sinks=sinks, on_error="raise") as monitor:
        for x, labels in batches(state.spread):
            loss = net(x, labels)["loss"]
            if says_loss:
                monitor.log_loss(loss)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()


LOOPS: Mapping[str, Callable[[State, list[Sink], Path], None]] = {
    "plain": _plain,
    "plain, without the loss": partial(_plain, says_loss=False),
}
