"""With monitors as without, to the last bit: models that keep state, draw and run again."""

import copy
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_sequence

from adiv_monitor import Monitor
from adiv_monitor.alignment import Probe

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")

CRITERION = nn.CrossEntropyLoss()
DRAWS: dict[str, Callable[["Drawing"], float]] = {
    "torch": lambda module: float(torch.rand((), generator=module.noise)),
    "numpy": lambda module: module.numbers.random(),
    "python": lambda module: module.dice.random() + module.old.rand(),
    "global": lambda module: random.random() + np.random.random() + float(torch.rand(())),
}


class Drawing(nn.Module):
    """Measured as a whole, as no rule describes `cdist`; draws from a generator of its own."""

    def __init__(self, draws: Callable[["Drawing"], float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6))
        self.draws = draws
        self.noise, self.numbers = torch.Generator().manual_seed(0), np.random.default_rng(0)
        self.dice, self.old = random.Random(0), np.random.RandomState(0)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(x * (1 + self.draws(self)), self.weight)


class Averaged(nn.Module):
    """A student, and a frozen teacher that the forward itself moves, as that of MoCo does."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(6, 4), nn.Linear(6, 4)
        self.teacher.requires_grad_(False)
        self.weight = nn.Parameter(torch.randn(4, 4))  # no rule: measured through this module
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            pairs = zip(self.teacher.parameters(), self.student.parameters(), strict=True)
            for mine, other in pairs:
                if self.in_place:
                    mine.lerp_(other, 0.1)
                else:
                    mine.data = 0.9 * mine.data + 0.1 * other.data
            self.student.bias.clamp_(-0.2, 0.2)
        return torch.cdist(self.student(x), self.weight) - self.teacher(x)


class RunningScale(nn.Module):
    """Divides by the root of a running mean square, which is no buffer."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place, self.mean, self.calls = in_place, torch.ones(()), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        now = x.detach().square().mean()
        if self.in_place:
            self.mean.mul_(0.9).add_(now, alpha=0.1)
        else:
            self.mean = 0.9 * self.mean + 0.1 * now
        return x / self.mean.clone() ** 0.5


class Restless(nn.Module):
    """Spectral norms, a table that look-ups renormalise, buffers, a hook that writes weights.

    A learned power has no rule, so that the whole module runs again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.3)
        self.spectral = parametrizations.spectral_norm(nn.Linear(6, 6))
        self.old_spectral = nn.utils.spectral_norm(nn.Linear(6, 6))
        self.table = nn.Embedding(7, 6, max_norm=0.5)
        self.power = nn.Parameter(torch.rand(6))
        self.register_buffer("mean", torch.zeros(6))
        self.calls = 0
        self.spectral.register_forward_pre_hook(noisy)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.old_spectral(self.spectral(self.drop(self.norm(x))))
        if random.random() < 0.5 or self.calls % 3 == 0:
            x = x * np.random.normal()
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.last = x.detach()
        x = x - self.mean + self.table(torch.arange(len(x)) % 7)
        return (x.abs() + 0.1) ** self.power


@torch.no_grad()
def noisy(module: nn.Module, args: object) -> None:
    module.parametrizations.weight.original += 0.01 * torch.randn(6, 6)


class Picture(nn.Module):
    """A convolution, norms, attention beside a token of its own, and a layer that runs thrice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 2), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.token, self.again = nn.Parameter(torch.randn(1, 1, 8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 1, 2, 3).to(memory_format=torch.channels_last)
        tokens = self.stem(x).flatten(2).mT
        x = self.block(torch.cat([self.token.expand(len(x), -1, -1), tokens], 1))[:, 0]
        for _ in range(3):
            x = functional.dropout(self.again(x).relu_(), 0.1, self.training)
        return x


class Recurrent(nn.Module):
    """Two layers in both directions, with masks between them; every other input is packed."""

    def __init__(self, kind: type[nn.RNNBase], dtype: torch.dtype, **options: Any) -> None:
        super().__init__()
        own = {"num_layers": 2, "bidirectional": True, "dropout": 0.5, "dtype": dtype}
        self.rnn, self.dtype, self.calls = kind(2, 4, **own, **options), dtype, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        rows = x.to(self.dtype).view(len(x), 3, 2).transpose(0, 1)
        if self.calls % 2:
            return self.rnn(rows)[0][-1].float()
        lengths = [3 - i % 3 for i in range(len(x))]
        each = [rows[:n, i] for i, n in enumerate(lengths)]
        output = self.rnn(pack_sequence(each, enforce_sorted=False))[0].data
        return output[: len(x)].float()


RECURRENT: dict[str, Callable[[torch.dtype], nn.Module]] = {
    "rnn": lambda dtype: Recurrent(nn.RNN, dtype),
    "relu rnn": lambda dtype: Recurrent(nn.RNN, dtype, nonlinearity="relu"),
    "lstm": lambda dtype: Recurrent(nn.LSTM, dtype),
    "projected lstm": lambda dtype: Recurrent(nn.LSTM, dtype, proj_size=3),
    "gru": lambda dtype: Recurrent(nn.GRU, dtype),
}
MODULES: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda draws=draws: Drawing(draws) for name, draws in DRAWS.items()},
    "teacher in place": lambda: Averaged(True),
    "teacher anew": lambda: Averaged(False),
    "tensor in place": lambda: RunningScale(True),
    "tensor anew": lambda: RunningScale(False),
    "restless": Restless,
    "picture": Picture,
    **{
        f"{name}, {dtype}": lambda build=build, dtype=dtype: build(dtype)
        for name, build in RECURRENT.items()
        for dtype in (torch.float32, torch.float64)
    },
}
MEASURES: dict[str, Callable[[], dict[str, Any]]] = {
    "": lambda: {"attainable": True, "max_rows": 7, "watch": "norms"},
    "realised": lambda: {"realised": CRITERION, "attention": True},
    "alignment": lambda: {"alignment": Probe(data()[0])},
}
AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "parametrizations cached": nn.utils.parametrize.cached,
    "a device": lambda: torch.device("cpu"),
}


def net(middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), middle, nn.ReLU(), nn.LazyLinear(3))


def data() -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(1)
    return torch.randn(12, 6, generator=drawn), torch.arange(12) % 3


def loss(model: nn.Module, number: int) -> Tensor:
    x, y = data()
    return CRITERION(model((1 + number) * x), y)


def trained(name: str, measure: str, around: str, *, watched: bool) -> tuple[list[Tensor], Any]:
    """Return losses, weights, buffers and random numbers, and what else the run leaves."""
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    model = net(MODULES[name]())
    model(data()[0])
    rest = [p for p in model[1:].parameters() if p.requires_grad]
    optimizers = [torch.optim.SGD(model[0].parameters(), 0.1), torch.optim.AdamW(rest, 0.05)]
    options = MEASURES[measure]()
    found = []
    with ExitStack() as stack:
        monitors = [
            stack.enter_context(Monitor(model, own, every_n_steps=every, **options))
            for every, own in enumerate(optimizers, start=1)
            if watched
        ]
        for number in range(4):
            with AROUND[around]():
                value = loss(model, number)
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            for own in optimizers:
                own.step()
                own.zero_grad()
            found.append(value.detach())
            if number % 2:
                model.eval()
                with torch.inference_mode(), AROUND[around]():
                    found.append(model(data()[0]).sum())
                model.train()
    assert [len(monitor.reports) for monitor in monitors] == [4, 2][: len(monitors)]
    inner = vars(model[1])
    found += [*model.state_dict().values(), torch.get_rng_state()]
    found += [inner[name] for name in ("mean", "last") if name in inner]
    drawn = random.random(), np.random.random(), inner.get("calls")
    return found, (*drawn, [monitor.reports for monitor in monitors])


CASES = [(name, measure, "") for name in MODULES for measure in MEASURES]
CASES += [("restless", "realised", around) for around in AROUND if around]
CASES += [("picture", "", around) for around in AROUND if around]


@pytest.mark.slow(one_in=11)
@pytest.mark.parametrize(("name", "measure", "around"), CASES)
def test_the_run_is_the_one_without_a_monitor(name: str, measure: str, around: str) -> None:
    ours, (*left, every) = trained(name, measure, around, watched=True)
    plain, (*expected, _) = trained(name, measure, around, watched=False)
    assert len(ours) == len(plain) and all(map(torch.equal, ours, plain))
    assert left == expected
    for report in (report for reports in every for report in reports):
        assert report.coverage == 1 or name != "picture"
        if measure == "realised" and not around:
            assert report.realised_loss_change is not None


def on_probe(model: nn.Module) -> float:
    """Return the loss of the first eight samples of the first batch, in evaluation mode."""
    x, y = data()
    with torch.no_grad():
        return CRITERION(model.eval()(x[:8]), y[:8]).item()


@pytest.mark.parametrize("in_place", [False, True])
def test_the_realised_change_of_the_loss_starts_from_the_state_of_the_step(in_place: bool) -> None:
    torch.manual_seed(0)
    model = net(RunningScale(in_place))
    model(data()[0])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Monitor(model, optimizer, every_n_steps=1, realised=CRITERION) as monitor:
        for number in range(3):
            optimizer.zero_grad()
            loss(model, number).backward()
            old, new = copy.deepcopy(model), copy.deepcopy(model)
            optimizer.step()
    new.load_state_dict({**new.state_dict(), **dict(model.named_parameters())})
    change = on_probe(new) - on_probe(old)
    assert monitor.latest.realised_loss_change == pytest.approx(change, rel=1e-4)
