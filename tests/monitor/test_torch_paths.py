"""Torch takes the same path through its code with a monitor as without: the same bits come out."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from computes import Computes
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from adiv_monitor import Monitor

STEPS, SIZE = 4, 8
Forward = Callable[[Any, Tensor], Tensor]


def trained(inner: Callable[[], nn.Module], forward: Forward, every: int | None) -> list[Tensor]:
    """Weights and outputs of a training; with a monitor unless `every` is None.

    The model is a layer, something that runs on its result, and a head.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    part = inner()
    model = Computes(
        lambda net, x: net.head(forward(net, net.first(x))),
        first=nn.Linear(SIZE, SIZE),
        head=nn.Linear(SIZE, 3),
        inner=part,
        outside=[copy.deepcopy(part).eval().requires_grad_(False)],  # not registered
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    monitor = None if every is None else Monitor(model, optimizer, every_n_steps=every)
    if monitor is not None:
        monitor.attach()
    for _ in range(STEPS):
        optimizer.zero_grad()
        y = model(torch.randn(4, 5, SIZE))
        y.square().mean().backward()
        optimizer.step()
        found.append(y.detach())
    if monitor is not None:
        monitor.close()
        assert [report.step for report in monitor.reports] == list(range(0, STEPS, every or 1))
        assert all({"first", "head"} <= set(report.layers) for report in monitor.reports)
    return [*found, *(p.detach() for p in model.parameters())]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # from torch's own code
def test_operators_with_branches_keep_the_gradients_of_what_they_close_over() -> None:
    """Torch compiles them even in a model that is not compiled."""

    def branches(net: Any, h: Tensor) -> Tensor:
        return torch.cond(h.sum() > 0, net.inner, lambda y: net.inner(y) * 2, (h,))

    runs = [trained(lambda: nn.Linear(SIZE, SIZE), branches, every) for every in (None, 1, 3)]
    for monitored in runs[1:]:
        assert all(map(torch.equal, monitored, runs[0]))
    assert not _get_current_function_mode_stack()  # type: ignore[no-untyped-call]


def outside(net: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        target = net.outside[0](h)
    return h + target


def inside(net: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        target = net.inner.eval()(h)
    return net.inner.train()(h) + target


PATHS: dict[str, Forward] = {
    "outside": outside,
    "trained elsewhere": inside,
    "copy": lambda net, h: h + copy.deepcopy(net.outside[0])(h.detach()),
}


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(SIZE, 2, 16, batch_first=True, dropout=0.0)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Notes the calls of an encoder layer's fast path."""
    found: list[int] = []
    fast: Any = torch._transformer_encoder_layer_fwd

    def counted(*args: Any) -> Tensor:
        found.append(1)
        return fast(*args)

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", counted)
    return found


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("name", PATHS)
def test_encoders_take_their_fast_path_where_nothing_requires_gradients(
    name: str, taken: list[int]
) -> None:
    """Which rounds in another way; torch leaves it while a function mode or a hook is on."""
    plain = trained(encoder, PATHS[name], None)
    assert len(taken) == STEPS
    monitored = trained(encoder, PATHS[name], 1)
    assert len(taken) == 2 * STEPS and all(map(torch.equal, monitored, plain))


def test_a_part_is_evaluated_on_its_fast_path_while_a_report_waits(taken: list[int]) -> None:
    model = nn.Sequential(nn.Linear(SIZE, SIZE), encoder())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(4, 5, SIZE)
    with Monitor(model, optimizer, every_n_steps=2) as monitor:
        for step in range(4):
            model(x).square().mean().backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                model[1](x)
            model.train()
            assert len(taken) == step + 1
    assert [report.step for report in monitor.reports] == [0, 2]


@pytest.mark.slow  # it compiles
def test_a_compiled_model_draws_the_same_numbers_where_inductor_falls_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise inductor draws its own: measured steps, which run eagerly, would draw others."""
    monkeypatch.setattr("torch._inductor.config.fallback_random", True)
    runs = []
    for monitored in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 3))
        compiled, optimizer = torch.compile(model), torch.optim.SGD(model.parameters(), 0.1)
        losses, states = [], []
        with Monitor(model, optimizer, every_n_steps=2) if monitored else nullcontext():
            for _ in range(4):
                optimizer.zero_grad()
                loss = compiled(torch.randn(20, 6)).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
                states.append(torch.get_rng_state())
        runs.append((torch.stack(losses), torch.stack(states)))
    (plain, before), (seen, after) = runs
    assert torch.equal(before, after)
    torch.testing.assert_close(seen, plain)
