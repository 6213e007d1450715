"""Modules and parameters that change, copies, several monitors, several threads."""

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from faults.scenarios import Scenario, dense_loss, mlp
from faults.trial import take, trained
from faults.world import Result, result
from torch import Tensor, nn
from torch.optim import Optimizer

from adiv_monitor import Monitor

MLP = Scenario(mlp, dense_loss)
Change = Callable[[nn.Module, Optimizer], object]


def append_module(model: nn.Module, optimizer: Optimizer) -> None:
    added = nn.Linear(3, 3).double()
    model.append(added)
    optimizer.add_param_group({"params": list(added.parameters())})


def weight_of(model: nn.Module) -> Tensor:
    return model[3].weight.detach().clone()


CHANGES: dict[str, Change] = {
    "module": lambda model, _: setattr(model, "0", nn.Linear(4, 5).double()),
    "parameter": lambda model, _: setattr(model[3], "weight", nn.Parameter(weight_of(model))),
    "data": lambda model, _: setattr(model[3].weight, "data", weight_of(model)),
    "gradient": lambda model, _: setattr(model[0].weight, "grad", None),
    "frozen": lambda model, _: model[0].requires_grad_(False),
    "removed": lambda model, _: model.pop(2),
    "hooks": lambda model, _: [
        hooks.clear() for hooks in (model[0]._forward_hooks, model[0]._forward_pre_hooks)
    ],
    "appended": append_module,
}


@pytest.mark.slow(one_in=19)
@pytest.mark.parametrize("when", ["before forward", "before backward", "before step", "after step"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changes(change: str, when: str) -> None:
    """The change may come at any moment of a measured step; the next step uses the new model."""
    taken = []

    def step(model: nn.Module, optimizer: Optimizer) -> Tensor:
        def comes(moment: str) -> None:
            if moment == when and len(taken) % 3 == 0:
                CHANGES[change](model, optimizer)

        optimizer.zero_grad()
        comes("before forward")
        loss = dense_loss(model)
        comes("before backward")
        loss.backward()
        comes("before step")
        optimizer.step()
        comes("after step")
        taken.append(loss)
        return loss.detach()

    expected = trained(MLP, 3, step)
    for options in ({"on_error": "raise"}, {"realised": True}):
        trial = take(MLP, step=step, steps=3, **options)
        assert trial.raised is None, repr(trial.raised)
        assert trial.result == expected
        assert len(trial.reports) == 3
        assert not any("monitor failed" in note for r in trial.reports for note in r.notes)
        hooks = {k for k in trial.left if k.endswith(("hooks", "called", "kwargs", "accumulation"))}
        assert not [k for k in hooks if trial.left[k] not in (None, [], ([], {}))], trial.left


def test_two_monitors_on_one_model() -> None:
    """One monitor closes while the other continues; one fails while the other measures."""

    def run(monitored: bool) -> Result:
        model, optimizer = MLP.make()
        monitors = [
            Monitor(model, optimizer, every_n_steps=n, on_error="raise", realised=n == 1)
            for n in (1, 2)
        ]
        for monitor in () if monitored else monitors:
            monitor.close()
        losses = []
        for number in range(6):
            if monitored and number in (0, 1):
                monitors[number].attach()
            if monitored and number == 4:
                monitors[0].close()
            optimizer.zero_grad()
            loss = dense_loss(model)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        for monitor in monitors:
            monitor.close()
        if monitored:
            assert [report.step for report in monitors[0].reports] == [0, 1, 2, 3]
            assert [report.step for report in monitors[1].reports] == [0, 2, 4]
            assert all(len(r.layers) == 3 for m in monitors for r in m.reports)
        return result(model, optimizer, losses)

    assert run(True) == run(False)


def trains(seed: int, monitored: bool, threads: threading.Barrier | None = None) -> list[bytes]:
    """Train with a separate random generator; return the bytes of losses and weights."""
    generator = torch.Generator().manual_seed(seed)
    with _BUILDS:
        torch.manual_seed(seed)
        model = mlp().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer, every_n_steps=1, on_error="raise")
    monitor.attach() if monitored else monitor.close()
    found = []
    for _ in range(12):
        if threads is not None:
            threads.wait(30)
        optimizer.zero_grad()
        loss = model(torch.randn(5, 4, generator=generator, dtype=torch.float64)).square().mean()
        loss.backward()
        with _STEPS:  # torch goes through its hooks of all optimizers without a lock
            optimizer.step()
        found.append(loss.detach().numpy().tobytes())
    with _STEPS:
        monitor.close()
    assert len(monitor.reports) == (12 if monitored else 0)
    assert all(len(report.layers) == 3 for report in monitor.reports)
    assert torch._C._len_torch_function_stack() == 0
    return [*found, *(p.detach().numpy().tobytes() for p in model.parameters())]


_BUILDS, _STEPS = threading.Lock(), threading.Lock()


def test_two_models_are_trained_in_two_threads() -> None:
    barrier = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(trains, seed, True, barrier) for seed in (0, 1)]
        found = [run.result(60) for run in runs]
    assert found == [trains(seed, False) for seed in (0, 1)]


class Waits(nn.Module):
    """A module whose forward waits, in a thread other than the training's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.inside, self.may_leave = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if threading.current_thread() is not threading.main_thread():
            self.inside.set()
            assert self.may_leave.wait(30)
        return self.inner(x @ self.inner.weight)


def test_the_model_is_evaluated_in_another_thread_while_it_is_trained() -> None:
    """The step ends while the other thread is in a forward pass, where no mode is active."""
    model = Waits().double()
    twin = copy.deepcopy(model.inner)
    x = torch.ones(2, 4, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)

    def uses() -> tuple[int, bytes]:
        with torch.no_grad():
            out = model(x)
        return torch._C._len_torch_function_stack(), out.detach().numpy().tobytes()

    with ThreadPoolExecutor(1) as pool:
        monitor = Monitor(model, optimizer, on_error="raise")
        monitor.attach()
        used = pool.submit(uses)
        assert model.inside.wait(30)
        model(x).sum().backward()
        optimizer.step()
        twin(twin(x) @ twin.weight).sum().backward()
        plain.step()
        model.may_leave.set()
        modes, _ = used.result(30)
        monitor.close()
        assert modes == 0
        assert pool.submit(torch._C._len_torch_function_stack).result(30) == 0
    assert torch.equal(model.inner.weight, twin.weight)
    assert not model._forward_hooks and not model.inner._forward_hooks
    assert monitor.latest.layers["inner"].rows_total == 4
