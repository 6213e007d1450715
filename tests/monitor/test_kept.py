"""State that modules keep in plain attributes: reruns start from it, and leave it as it was."""

import copy
import warnings
from collections import deque, namedtuple
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from adiv_monitor import Monitor
from adiv_monitor.alignment import Probe
from adiv_monitor.rerun.kept import Contents, kept_by

CRITERION = nn.CrossEntropyLoss()
Pair = namedtuple("Pair", "mean count")


class Statistics:
    """An object that holds a running mean, as reinforcement learning code has."""

    def __init__(self) -> None:
        self.mean, self.count = torch.ones(()), 0


class RunningScale(nn.Module):
    """Divides by the root of a running mean square, which it keeps in one of many ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.mean = torch.ones(())
        self.table = {"mean": torch.ones(()), "inner": [1.0]}
        self.last = deque([1.0], maxlen=3)
        self.array = np.ones(1)
        self.statistics = Statistics()
        self.pair = Pair(torch.ones(()), 0)

    def forward(self, x: Tensor) -> Tensor:
        now = x.detach().square().mean()
        return x / self.updated(now) ** 0.5

    def updated(self, now: Tensor) -> Any:
        if self.how == "in place":
            return self.mean.mul_(0.9).add_(now, alpha=0.1).clone()
        if self.how == "anew":
            self.mean = 0.9 * self.mean + 0.1 * now
            return self.mean
        if self.how == "dictionary":
            self.table["mean"] = 0.9 * self.table["mean"] + 0.1 * now
            return self.table["mean"]
        if self.how == "list":
            self.table["inner"][0] = 0.9 * self.table["inner"][0] + 0.1 * float(now)
            return self.table["inner"][0]
        if self.how == "deque":
            self.last.append(float(now))
            return sum(self.last) / len(self.last)
        if self.how == "array":
            self.array[0] = 0.9 * self.array[0] + 0.1 * float(now)
            return float(self.array[0])
        if self.how == "tuple":
            return self.pair.mean.mul_(0.9).add_(now, alpha=0.1).clone()
        self.statistics.mean.mul_(0.9).add_(now, alpha=0.1)
        self.statistics.count += 1
        return self.statistics.mean / self.statistics.count


WAYS = ("in place", "anew", "dictionary", "list", "deque", "array", "tuple", "object")


def net(how: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), RunningScale(how), nn.ReLU(), nn.Linear(8, 3))


def data() -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(1)
    return torch.randn(12, 6, generator=drawn), torch.arange(12) % 3


def loss(model: nn.Module, number: int) -> Tensor:
    x, y = data()
    return CRITERION(model((1 + number) * x), y)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("measure", ["realised", "alignment"])
def test_the_run_is_the_same_whatever_keeps_a_modules_state(how: str, measure: str) -> None:
    options: dict[str, Any] = (
        {"realised": CRITERION} if measure == "realised" else {"alignment": Probe(data()[0])}
    )
    models = [net(how), net(how)]
    for model, given in zip(models, (None, options), strict=True):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with ExitStack() as stack:
            if given is not None:
                asked = Monitor(model, optimizer, every_n_steps=1, on_error="raise", **given)
                monitor = stack.enter_context(asked)
            for number in range(4):
                optimizer.zero_grad()
                loss(model, number).backward()
                optimizer.step()
    assert len(monitor.reports) == 4
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(a, b)


def on_probe(model: nn.Module) -> float:
    """Return the loss of the first eight samples of the first batch, in evaluation mode."""
    x, y = data()
    with torch.no_grad():
        return CRITERION(model.eval()(x[:8]), y[:8]).item()


@pytest.mark.parametrize("how", WAYS)
def test_the_realised_change_of_the_loss_starts_from_the_state_of_the_step(how: str) -> None:
    model = net(how)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Monitor(model, optimizer, every_n_steps=1, realised=CRITERION) as monitor:
        for number in range(3):
            optimizer.zero_grad()
            loss(model, number).backward()
            old, new = copy.deepcopy(model), copy.deepcopy(model)
            optimizer.step()
    assert monitor.latest is not None
    new.load_state_dict({**new.state_dict(), **dict(model.named_parameters())})
    change = on_probe(new) - on_probe(old)
    assert monitor.latest.realised_loss_change == pytest.approx(change, rel=1e-4)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch.jit.script is deprecated
def test_an_alignment_leaves_scripted_modules_in_their_mode() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(nn.Sequential(nn.BatchNorm1d(8), nn.ReLU()))
    model = nn.Sequential(nn.Linear(6, 8), scripted, nn.Dropout(0.5), nn.Linear(8, 3))
    before = copy.deepcopy(scripted.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Monitor(model, optimizer, every_n_steps=1, alignment=Probe(data()[0])) as monitor:
        assert all(module.training for module in model.modules())
        assert all(torch.equal(x, before[name]) for name, x in scripted.state_dict().items())
        loss(model, 0).backward()
        optimizer.step()
    assert monitor.latest is not None and set(monitor.latest.alignment) == {"0", "3"}
    assert all(module.training for module in model.modules())


def test_hooks_and_closures_share_the_state() -> None:
    """As the features that hooks collect for a model's forward, in a dictionary of both."""

    class Collecting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
            self.features = features = {}

            def keep(module: nn.Module, args: Any, output: Tensor) -> None:
                features["z"] = output

            self.first.register_forward_hook(keep)

        def forward(self, x: Tensor) -> Tensor:
            self.first(x)
            return self.last(torch.relu(self.features.pop("z")))

    model = Collecting()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Monitor(model, optimizer, every_n_steps=1, realised=CRITERION) as monitor:
        loss(model, 0).backward()
        before = on_probe(model)
        optimizer.step()
    assert monitor.latest is not None
    change = on_probe(model) - before
    assert monitor.latest.realised_loss_change == pytest.approx(change, rel=1e-4)


def test_trained_tensors_move_though_no_module_knows_them() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.shift = nn.Linear(6, 3), torch.zeros(3, requires_grad=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.shift

    model = Shifted()
    optimizer = torch.optim.SGD([*model.parameters(), model.shift], 0.5)
    with Monitor(model, optimizer, every_n_steps=1, realised=CRITERION) as monitor:
        loss(model, 0).backward()
        before = on_probe(model)
        optimizer.step()
    assert monitor.latest is not None
    change = on_probe(model) - before
    assert monitor.latest.realised_loss_change == pytest.approx(change, rel=1e-4)


def test_what_is_no_state_is_left_alone() -> None:
    """Not copied, and not written to."""
    module = nn.Linear(2, 2)
    module.freed = torch.ones(4)
    module.freed.untyped_storage().resize_(0)
    module.expanded = torch.ones(1).expand(30_000, 30_000)
    module.graph = module.weight.sum()
    module.alias = module.weight.detach()
    module.trained = torch.zeros(2, requires_grad=True)
    module.words = dict.fromkeys(range(20_000), 0)
    module.nested = []
    for _ in range(3_000):
        module.nested = [module.nested]
    shared: tuple[Any, ...] = (1,)
    for _ in range(60):
        shared = (shared, shared)
    module.shared = shared
    kept = Contents([module])
    with torch.no_grad():
        for tensor in (module.alias, module.trained):
            tensor.fill_(7)
    module.words[0] = 1
    kept.put_back()
    assert bool((module.weight == 7).all()) and bool((module.trained == 7).all())
    assert module.words[0] == 1 and "graph" not in kept_by(module)
