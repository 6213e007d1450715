"""Models that are hard to monitor: compiled, partly frozen, scripted, called in parts.

Every test compares with a plain run of the same step, or with values computed by hand.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from cases import loss_of
from computes import Computes
from setups import mlp, one_step, plain_step, same, trained
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from adiv_monitor import Monitor, StepReport


def in_function(model: nn.Module, batch: object, backend: Callable[..., object]) -> object:
    return torch.compile(lambda: loss_of(model, batch), backend=backend)


def block_by_block(model: nn.Module, batch: object, backend: Callable[..., object]) -> object:
    model[0] = torch.compile(model[0], backend=backend)
    model[2] = torch.compile(model[2], backend=backend)
    return lambda: loss_of(model, batch)


def in_place(model: nn.Module, batch: object, backend: Callable[..., object]) -> object:
    model.compile(backend=backend)
    return lambda: loss_of(model, batch)


def under_checkpointing(model: nn.Module, batch: object, backend: Callable[..., object]) -> object:
    """Run without compilation, but under checkpoint(), which torch.compile does not trace."""
    x, y = batch
    return lambda: functional.cross_entropy(checkpoint(model, x, use_reentrant=False), y)


COMPILED = {
    "a wrapper": lambda m, batch, b: partial(loss_of, torch.compile(m, backend=b), batch),
    "a whole graph": lambda m, batch, b: partial(
        loss_of, torch.compile(m, backend=b, fullgraph=True), batch
    ),
    "itself": in_place,
    "a function": in_function,
    "blocks": block_by_block,
    "none": under_checkpointing,
}


@pytest.mark.slow(one_in=4)
@pytest.mark.parametrize("way", COMPILED)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo's
def test_what_trains_the_model_is_compiled_as_often_as_without_the_monitor(way: str) -> None:
    """The monitor holds the raw model and causes no recompilation."""
    graphs = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        nonlocal graphs
        graphs += 1
        return graph.forward

    def train(monitored: bool) -> tuple[int, list[int]]:
        nonlocal graphs
        torch._dynamo.reset()
        graphs = 0
        model, batch = mlp()
        loss = COMPILED[way](model, batch, backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = Monitor(model, optimizer, every_n_steps=4, on_error="raise")
        monitor.attach() if monitored else monitor.close()
        waits = []
        for step in range(10):
            if step in (0, 4) and way not in ("itself", "blocks"):
                with torch.no_grad():
                    model(batch[0])  # evaluated uncompiled
            optimizer.zero_grad()
            loss().backward()
            waits.append(len(monitor.reports))
            optimizer.step()
        monitor.close()
        if monitored:
            same(monitor.reports[0], expected)
            assert all(len(report.layers) == 3 for report in monitor.reports)
        return graphs, waits

    expected = plain_step()
    plain, _ = train(monitored=False)
    monitored, reports = train(monitored=True)
    assert monitored == plain
    assert bool(plain) == (way != "none")
    assert reports == [0, 1, 1, 1, 1, 2, 2, 2, 2, 3]


def test_frozen_unreached_and_foreign_parameters() -> None:
    model = nn.ModuleDict(
        {
            "frozen": nn.Linear(4, 4),
            "partly": nn.Linear(4, 4),
            "used": nn.Linear(4, 3),
            "idle": nn.Linear(4, 4),
            "foreign": nn.Linear(3, 3),
        }
    ).double()
    model["frozen"].requires_grad_(False)
    model["partly"].weight.requires_grad_(False)
    mine = [p for n, p in model.named_parameters() if "foreign" not in n and p.requires_grad]
    groups = [{"params": mine[:1], "lr": 0.5}, {"params": mine[1:]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    x = torch.randn(5, 4, dtype=torch.float64)
    with Monitor(model, optimizer, on_error="raise") as monitor:
        hidden = model["partly"](model["frozen"](x))
        model["foreign"](model["used"](hidden)).square().sum().backward()
        optimizer.step()
    report = monitor.latest
    assert report.layers.keys() == {"partly", "used"}
    assert report.layers["partly"].scale_mean == 1  # only the bias is trained
    assert report.layers["partly"].bias_share == 1
    assert report.unsupported.keys() == {"idle", "foreign"}
    assert report.unsupported["idle"] == "no gradient reached it in this step"
    assert "holds none" in report.unsupported["foreign"]
    assert report.unmeasured == {"idle.weight": 16, "idle.bias": 4}
    assert report.coverage == pytest.approx((4 + 15) / sum(p.numel() for p in mine))


def reported(model: nn.Module, x: Tensor) -> StepReport:
    """Return the report of the second measured step of a plain training."""
    return trained(model, lambda model: model(x).square().mean(), 2)[-1]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_scripted_modules_inside_a_model() -> None:
    """Their tables of modules can't be iterated; their functions can't be seen."""
    model = nn.Sequential(
        nn.Linear(4, 4), torch.jit.script(nn.ReLU()), torch.jit.script(nn.Linear(4, 4))
    )
    report = reported(model, torch.randn(8, 4))
    assert report.layers.keys() == {"0"}
    assert "scripted code" in report.unsupported["2"]


def test_a_parameter_of_which_a_part_is_used_says_so() -> None:
    """As of embeddings of positions."""
    model = Computes(
        lambda m, x: m.inner(x + m.positions[:, : x.shape[1]]),
        inner=nn.Linear(4, 4),
        positions=nn.Parameter(torch.randn(1, 32, 4)),
    )
    report = reported(model, torch.randn(3, 10, 4))
    assert report.unsupported == {
        "positions": "only a part of it was seen to be used, as 'positions[0+]'"
    }
    assert report.unmeasured == {"positions": 22 * 4}


def test_each_parameter_of_a_module_has_its_own_reason() -> None:
    def loss(model: nn.Module) -> Tensor:
        return (model(torch.randint(11, (8,))) * model.outside).square().mean()

    parts = {"refused": (11, 4), "unused": (4,), "outside": ()}
    own = {name: nn.Parameter(torch.randn(shape)) for name, shape in parts.items()}
    look_up = lambda m, x: functional.embedding(x, m.refused, sparse=True)  # noqa: E731
    why = trained(Computes(look_up, **own), loss)[0].unsupported
    assert why["refused"].startswith("sparse=True")
    assert why["unused"] == "no gradient reached it in this step"
    assert "outside of `forward`" in why["outside"]


def test_layers_that_are_frozen_are_not_trained() -> None:
    """They have no part in reports, also if `.grad` is zero instead of None."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Monitor(model, optimizer, every_n_steps=1, on_error="raise") as monitor:
        for step in range(5):
            optimizer.zero_grad(set_to_none=False)
            if step == 2:
                model[0].requires_grad_(False)
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    for report in monitor.reports[2:]:
        assert (report.layers.keys(), report.coverage) == ({"1"}, 1)


@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("called", [True, False])
def test_branches_with_old_or_zero_gradients(zero: bool, watched: bool, called: bool) -> None:
    """A branch that is left out has a reason that holds, while its `.grad` is still there."""
    model = nn.ModuleDict({"always": nn.Linear(4, 3), "branch": nn.Linear(4, 3)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, first_left_out = torch.randn(8, 4), 1 if watched else 2
    with Monitor(model, optimizer, every_n_steps=1, on_error="raise") as monitor:
        for step in range(first_left_out + 1):
            if zero:
                optimizer.zero_grad(set_to_none=False)
            out = model["always"](x)
            other = model["branch"](x) if called or step < first_left_out else 0.0
            (out + other if step < first_left_out else out).square().sum().backward()
            optimizer.step()
    report = monitor.latest
    assert report.layers.keys() == {"always"}
    assert report.unmeasured == {"branch.weight": 12, "branch.bias": 3}
    (reason,) = report.unsupported.values()
    assert "zero" in reason
    assert "of an earlier step" in reason


def test_names_of_wrappers_are_dropped_but_not_the_users_own() -> None:
    inner = nn.Sequential()
    inner.add_module("norm", nn.LayerNorm(4))
    parts = {"module": inner, "norm": nn.LayerNorm(4)}
    model = nn.Sequential(Computes(lambda m, x: m.norm(x + m.module(x)), **parts))
    report = one_step(nn.DataParallel(model), lambda m: m(torch.randn(3, 4)).sum().backward())
    assert report.layers.keys() == {"0.norm", "0.module.norm"}


def test_a_model_that_is_called_in_parts() -> None:
    """A model whose parts are called, but never its own forward, is measured."""
    x, shift = torch.randn(5, 3, dtype=torch.float64), nn.Parameter(torch.randn(2))

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        hidden, second = model.first(x), model.second  # which is used without being called
        return functional.linear(hidden, second.weight, second.bias) + model.shift

    def in_parts(model: nn.Module) -> None:
        (model.second(model.first(x)) + model.shift).square().sum().backward()

    whole = Computes(forward, first=nn.Linear(3, 4), second=nn.Linear(4, 2), shift=shift).double()
    found = one_step(copy.deepcopy(whole), in_parts)
    expected = one_step(whole, lambda m: m(x).square().sum().backward())
    assert found.layers.keys() == {"first", "second"}
    assert "outside" in found.unsupported["shift"]
    same(found, replace(expected, layers={path: expected.layers[path] for path in found.layers}))
