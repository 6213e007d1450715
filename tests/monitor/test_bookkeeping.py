"""State kept within and between steps: small errors in it would silently change readings."""

import copy
import gc
import weakref

import pytest
import torch
from cases import CASES, loss_of
from computes import Computes
from setups import EXACT, one_step, same
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from adiv_monitor import Monitor

NORMS = {
    "batch": lambda: nn.BatchNorm1d(8),
    "batch, evaluated": lambda: nn.BatchNorm1d(8).eval(),
    "layer": lambda: nn.LayerNorm(8),
    "instance": lambda: nn.Sequential(nn.Unflatten(0, (1, -1)), nn.InstanceNorm1d(16, affine=True)),
    "linear": lambda: nn.Linear(8, 8),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 4, 3, groups=2)),
    "weight norm": lambda: weight_norm(nn.Linear(8, 8)),
    "recurrent": lambda: Computes(lambda m, x: m.inner(x)[0], inner=nn.LSTM(8, 8, 2)),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_forward_pass_that_is_thrown_away_keeps_no_tensor(name: str) -> None:
    """What is upstream of a layer dies with the output: of it, the monitor holds no graph."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), NORMS[name](), nn.Tanh())
    alive: list[weakref.ref[Tensor]] = []
    model[1].register_forward_hook(lambda m, args, out: alive.append(weakref.ref(out)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, every_n_steps=1, on_error="raise") as monitor:
        for _ in range(3):
            out = model(torch.randn(16, 8))
            del out
            # A recurrent layer's call waits for gradients until the step.
            assert name == "recurrent" or not any(ref() is not None for ref in alive)
        loss = model(torch.randn(16, 8)).square().sum()
        loss.backward()
        optimizer.step()
        assert not any(ref() is not None for ref in alive), "though the loss is kept"
    assert monitor.latest.coverage == 1


def test_tokens_that_are_changed_after_the_look_up() -> None:
    """Readings refer to the tokens of the look-up, even if they are overwritten afterwards."""
    model = nn.Embedding(9, 4).double()
    tokens = torch.arange(9)

    def backward(model: nn.Module, *, spoil: bool) -> None:
        looked_up = tokens.clone()
        (model(looked_up) * torch.arange(36).view(9, 4)).sum().backward()
        if spoil:
            looked_up.zero_()

    plain = one_step(copy.deepcopy(model), lambda m: backward(m, spoil=False))
    same(one_step(model, lambda m: backward(m, spoil=True)), plain)
    assert plain.layers[""].update_cosine == pytest.approx(1, **EXACT)


def test_the_same_rows_are_drawn_after_a_resume() -> None:
    """`state_dict` contains the state of the row sampler, so that the same rows are drawn."""
    model, batch = CASES["mlp"].model(), CASES["mlp"].batches(1, size=40)[0]

    def run(monitor: Monitor, optimizer: torch.optim.Optimizer) -> None:
        loss_of(model, batch).backward()
        optimizer.step()
        monitor.close()

    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    first = Monitor(model, sgd, max_rows=5, seed=3)
    first.attach()
    run(first, sgd)
    state = first.state_dict()
    found = []
    for seed in (7, 8):  # overruled by the state
        again = Monitor(model, sgd, max_rows=5, seed=seed)
        again.load_state_dict(state)
        again.attach()
        sgd.zero_grad()
        run(again, sgd)
        assert again.reports[0].step == 1
        found.append(again.reports[0])
    same(*found)
    assert found[0].layers["0"].update_ratio == 0


@pytest.mark.parametrize(
    ("layer", "x", "features", "kind"),
    [
        (nn.Linear(6, 4), torch.ones(9, 6), 6, "linear"),
        (nn.Conv2d(4, 6, 3, groups=2), torch.ones(5, 4, 8, 8), 18, "convolution"),
        (nn.Conv2d(4, 4, 3, groups=4), torch.ones(5, 4, 8, 8), 9, "convolution"),
        (nn.LayerNorm(7), torch.arange(63.0).view(9, 7), 1, "gain"),
        (nn.Embedding(8, 5), torch.arange(8), None, "embedding"),
    ],
)
def test_a_layers_fan_in_and_kind(layer: nn.Module, x: Tensor, features: int, kind: str) -> None:
    x = x.double() if x.is_floating_point() else x
    found = one_step(layer.double(), lambda m: m(x).square().sum().backward())
    reading = found.layers[""]
    assert (reading.features, reading.kind) == (features, kind)


@pytest.mark.parametrize("state", [None, {}, {"step": 9}, {"step": -4, "generator": {}}])
def test_a_state_that_is_none_is_refused_before_anything_changes(state: object) -> None:
    model = nn.Linear(2, 2)
    monitor = Monitor(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"Monitor.load_state_dict: got .*expected what"):
        monitor.load_state_dict(state)  # type: ignore[arg-type]
    assert monitor.step == 0


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("name", CASES)
def test_a_measured_step_leaves_nothing_to_the_garbage_collector(name: str) -> None:
    """Reference cycles keep gradients and activations alive until Python looks for cycles."""
    case = CASES[name]
    model, batch = case.model(), case.batches(1)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Monitor(model, optimizer, every_n_steps=1):
        for step in range(4):  # all functions are watched in the first steps, plain hooks do later
            gc.freeze()  # what is there already, also what earlier tests left
            gc.set_debug(gc.DEBUG_SAVEALL)
            try:
                loss_of(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                loss_of(model, batch)  # completes the report
                gc.collect()
                left = {type(found) for found in gc.garbage}
            finally:
                gc.set_debug(0)
                gc.garbage.clear()
            ours = {kind for kind in left if kind.__module__.startswith("adiv_monitor")}
            assert not ours, f"step {step}"
