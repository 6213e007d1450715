"""The schedule changes steps as defined, is invisible to others, and can be resumed."""

import copy
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Tied
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.optim import lr_scheduler

pytest.importorskip("scipy")

from adiv_monitor.alignment import Alignment, Probe
from adiv_monitor.max_lr import MaxLRScheduler, solve_max_lr
from adiv_monitor.max_lr.optimizers import ADAFACTOR, ADAM, MUON, SGD, update_rule

PATHS = ["0", "2", "4"]


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5)
    )


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 20, generator=generator)
    return x, x[:, :5].argmax(1)


PROBE = Probe(torch.randn(32, 20, generator=torch.Generator().manual_seed(99)))
EAGER = {"every_n_steps": 2, "warm_up": 4}


def train(
    model: nn.Module, optimizer: optim.Optimizer, steps: range, after: Callable[[], object] = int
) -> list[float]:
    losses = []
    for step in steps:
        x, y = data(step)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        after()
        losses.append(loss.item())
    return losses


def reading(alpha: float | None = 1.0, omega: float = 0.5, u: float = 1.0) -> Callable[..., Any]:
    """Replace the measured reading by these values in each layer."""
    real = Alignment.read

    def read(self: Alignment) -> Mapping[str, Any]:
        found = real(self)
        return {p: replace(r, alpha=alpha, omega=omega, u=u) for p, r in found.items()}

    return read


def scheduled(
    kind: Any = optim.Adam, lr: float = 1e-3, **options: Any
) -> tuple[nn.Module, Any, MaxLRScheduler]:
    model = mlp()
    optimizer = kind(model.parameters(), lr=lr)
    given = {"mode": "dynamic", "every_n_steps": 1, "warm_up": 0, **options}
    return model, optimizer, MaxLRScheduler(optimizer, model, PROBE, **given)


# What a step does --------------------------------------------------------------------------------


def test_telling_changes_nothing() -> None:
    plain, told = mlp(), mlp()
    optimizers = [optim.AdamW(m.parameters(), lr=1e-3) for m in (plain, told)]
    scheduler = MaxLRScheduler(optimizers[1], told, PROBE, **EAGER)
    groups = copy.deepcopy(optimizers[1].state_dict()["param_groups"])
    assert train(plain, optimizers[0], range(12)) == train(told, optimizers[1], range(12))
    assert all(map(torch.equal, plain.state_dict().values(), told.state_dict().values()))
    assert optimizers[1].state_dict()["param_groups"] == groups
    assert scheduler.latest.step == 12
    assert scheduler.latest.status == "optimal"
    assert set(scheduler.gains.values()) == {1.0}
    assert all(m > 1 for p, m in scheduler.proposed.items() if p != "0")
    assert scheduler.failures == 0


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_each_layer_steps_at_its_own_rate(lr: float | Tensor) -> None:
    """Weights step at their factors; biases, which have none, at the optimizer's rate."""
    gains = {"0": 0.5, "2": 2.0, "4": 3.0}
    model = mlp()
    before = copy.deepcopy(model)
    groups = [{"params": model[:3].parameters()}, {"params": model[3:].parameters(), "lr": 0.2}]
    optimizer = optim.SGD(groups, lr=lr, foreach=False)
    MaxLRScheduler(optimizer, model, PROBE, mode="static", gains=gains)
    train(model, optimizer, range(1))
    for i, rate in ((0, 0.1), (2, 0.1), (4, 0.2)):
        for name, factor in (("weight", gains[str(i)]), ("bias", 1.0)):
            moved, p = getattr(before[i], name), getattr(model[i], name)
            torch.testing.assert_close(moved - p, rate * factor * p.grad, rtol=1e-4, atol=1e-8)
    assert [len(group["params"]) for group in optimizer.param_groups] == [4, 2]
    assert [group["lr"] for group in optimizer.param_groups] == [lr, 0.2]


@pytest.mark.parametrize(
    ("kind", "decays"),
    [(optim.AdamW, True), (optim.SGD, True), (optim.Adam, False), (optim.Adafactor, True)],
)
def test_a_gain_does_not_raise_the_decay(kind: Any, decays: bool) -> None:
    """Without gradients only decay moves the weights, by rate × decay."""
    model = mlp()
    before = copy.deepcopy(model)
    optimizer = kind(model.parameters(), lr=0.01, weight_decay=0.1)
    MaxLRScheduler(optimizer, model, PROBE, mode="static", gains=dict.fromkeys(PATHS, 4.0))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    if decays:
        shrunk = (1 - model[2].weight / before[2].weight).mean().item()
        assert shrunk == pytest.approx(0.001, rel=1e-3)
    assert optimizer.param_groups[0]["weight_decay"] == 0.1


class Notes(optim.SGD):
    """An optimizer that writes into its groups, and may raise."""

    raises = False

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        if self.raises:
            raise RuntimeError("no step")
        return super().step(closure)


def test_what_optimizers_note_in_groups_stays_and_a_step_that_raises_is_put_back() -> None:
    model, optimizer, _ = scheduled(Notes, 0.1, mode="static", gains={"2": 2.0})
    train(model, optimizer, range(3))
    assert optimizer.param_groups[0]["count"] == 3
    optimizer.raises = True
    with pytest.raises(RuntimeError, match="no step"):
        optimizer.step()
    optimizer.raises = False
    train(model, optimizer, range(1))
    assert [len(group["params"]) for group in optimizer.param_groups] == [6]
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_second_one_that_scales_is_refused_until_the_first_is_closed() -> None:
    """A second scheduler is refused, because factors would multiply (as when a cell runs twice)."""
    static: Any = {"mode": "static", "gains": {"2": 3.0}}
    model, optimizer, first = scheduled(optim.SGD, **static)
    for options in (static, {"mode": "dynamic"}):
        with pytest.raises(ValueError, match=r"another one scales.*expected close\(\)"):
            MaxLRScheduler(optimizer, model, PROBE, **options)
    first.close()
    first.close()
    MaxLRScheduler(optimizer, model, PROBE, **static)
    another = optim.SGD(model.parameters(), lr=0.1)
    MaxLRScheduler(another, model, PROBE, **static)


def test_an_interrupted_step_leaves_no_split_groups() -> None:
    """Groups are whole at once, so that other schedulers go on as if nothing had happened."""
    model, optimizer, _ = scheduled(optim.SGD, 0.1, mode="static", gains={"2": 3.0})
    other = lr_scheduler.LambdaLR(optimizer, lambda t: 0.5**t)

    def interrupt(o: optim.Optimizer, *_: object) -> None:
        assert len(o.param_groups) == 2
        raise KeyboardInterrupt

    handle = optimizer.register_step_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(model, optimizer, range(1))
    handle.remove()
    assert [group["lr"] for group in optimizer.state_dict()["param_groups"]] == [0.1]
    other.step()
    train(model, optimizer, range(1))
    other.step()
    assert [group["lr"] for group in optimizer.param_groups] == [pytest.approx(0.025)]


def test_an_optimizer_of_another_model_is_refused() -> None:
    optimizer = optim.SGD(mlp().parameters(), lr=0.1)
    with pytest.raises(ValueError, match="SGD trains no weight of the model's layers"):
        MaxLRScheduler(optimizer, mlp(), PROBE)


# Beside other schedulers -------------------------------------------------------------------------

OTHERS: dict[str, Callable[[optim.Optimizer], Any]] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.93**step),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.2),
}


def rates(name: str, scale: str | None) -> list[list[float]]:
    """Return each group's rate after each step, with or without factors, in either order."""
    model = mlp()
    groups = [{"params": model[:3].parameters()}, {"params": model[3:].parameters(), "lr": 0.02}]
    optimizer = optim.SGD(groups, lr=0.05, momentum=0.9)

    def scheduler() -> MaxLRScheduler:
        return MaxLRScheduler(optimizer, model, PROBE, mode="dynamic", **EAGER)

    ours = scheduler() if scale == "before" else None
    other = OTHERS[name](optimizer)
    ours = scheduler() if scale == "after" else ours
    seen = []
    metrics = iter([1.0, *[0.9] * 12, 0.2, *[0.3] * 20])

    def after() -> None:
        args = (next(metrics),) if name == "plateau" else ()
        other.step(*args)
        seen.append([group["lr"] for group in optimizer.param_groups])

    train(model, optimizer, range(24), after)
    if ours is not None:
        assert ours.failures == 0
        # Every rate rises in the first steps of some; at the end all have been read.
        assert ours.latest is not None
        assert any(abs(math.log(m)) > 0.05 for m in ours.gains.values())
    return seen


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("scale", ["before", "after"])
def test_other_schedulers_keep_their_sequence(name: str, scale: str) -> None:
    assert rates(name, scale) == rates(name, None)


def test_nothing_is_read_while_the_rate_rises_nor_after_the_freeze() -> None:
    model, optimizer, scheduler = scheduled(optim.SGD, 0.1, **EAGER, freeze_at=16)
    warm = lr_scheduler.LinearLR(optimizer, 0.1, 1, total_iters=9)
    read = []

    def after() -> None:
        warm.step()
        read.append(scheduler.latest.step if scheduler.latest else None)

    train(model, optimizer, range(20), after)
    assert read == [*[None] * 11, 12, 12, 14, 14, 14, 14, 14, 14, 14]


# Breaks ------------------------------------------------------------------------------------------


def parts() -> tuple[nn.Module, optim.Optimizer, Any, MaxLRScheduler]:
    model, optimizer, scheduler = scheduled(optim.AdamW, 3e-3, **EAGER)
    return model, optimizer, lr_scheduler.CosineAnnealingLR(optimizer, 40), scheduler


def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Any) -> None:
    model, optimizer, other, scheduler = parts()

    def after() -> None:
        other.step()
        scheduler.see_loss(1.0)

    train(model, optimizer, range(9), after)
    saved = [x.state_dict() for x in (model, optimizer, other, scheduler)]
    torch.save(saved, tmp_path / "run.pt")
    losses = train(model, optimizer, range(9, 20), after)
    gains, weights = dict(scheduler.gains), copy.deepcopy(model.state_dict())
    scheduler.close()

    resumed = model, optimizer, other, scheduler = parts()
    for part, state in zip(
        resumed, torch.load(tmp_path / "run.pt", weights_only=False), strict=True
    ):
        part.load_state_dict(state)
    assert scheduler.gains != dict.fromkeys(PATHS, 1.0)
    assert train(model, optimizer, range(9, 20), after) == losses
    assert scheduler.gains == gains
    assert all(map(torch.equal, weights.values(), model.state_dict().values()))
    assert (scheduler.step, scheduler.latest.step) == (20, 20)


@pytest.mark.parametrize("lost", ["alignment", "layers", "probe"])
def test_a_state_without_its_reference_begins_at_one(lost: str) -> None:
    model, optimizer, _, scheduler = parts()
    train(model, optimizer, range(8))
    state = scheduler.state_dict()
    assert state["log_gains"] != dict.fromkeys(PATHS, 0.0)
    if lost == "alignment":
        state["alignment"] = None
    elif lost == "layers":
        state["log_gains"] = {"a": 0.1}
    else:
        state["alignment"] = {**state["alignment"], "probe": "of other samples"}
    with pytest.warns(UserWarning, match="factors begin at 1"):
        scheduler.load_state_dict(state)
    assert scheduler.gains == dict.fromkeys(PATHS, 1.0)
    assert scheduler.step == 8


# What is read, and what follows from it ----------------------------------------------------------


def test_factors_are_what_the_solver_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """SP with Adam: c = max(alpha, u); the reading's gain is n^(1 − c), smoothed."""
    monkeypatch.setattr(Alignment, "read", reading(0.8, 0.5, 0.75))
    model, optimizer, scheduler = scheduled(beta=0.5, limit=9)
    assert scheduler.c_full == pytest.approx({"0": 0.0, "2": 1.0, "4": 1.0})
    log_gain = 0.0
    for step in range(3):
        train(model, optimizer, range(1))
        log_gain = 0.5 * log_gain + 0.5 * 0.2 * math.log(32)
        assert scheduler.latest.step == step + 1
        assert scheduler.latest.c == pytest.approx({"0": 0.0, "2": 0.8, "4": 0.8})
        gain = math.exp(log_gain)
        assert scheduler.gains == pytest.approx({"0": 1.0, "2": gain, "4": gain})
    expected = solve_max_lr(
        parametrization="sp", optimizer="adam", alpha=(1, 0.8, 0.8), omega=0.5, u=(1, 0.75, 0.75)
    )
    assert tuple(scheduler.latest.c.values()) == pytest.approx(expected.c)


def test_what_is_undefined_is_what_it_was_and_what_is_off_is_clipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer, scheduler = scheduled(beta=0, limit=99)
    for alpha, c in ((0.8, 0.8), (None, 0.8), (1.1, 1.0), (0.3, 0.5), (-3.0, 0.5)):
        monkeypatch.setattr(Alignment, "read", reading(alpha, 0.5, 0.2))
        train(model, optimizer, range(1))
        assert scheduler.latest.c["2"] == pytest.approx(c)
        assert scheduler.gains["2"] == pytest.approx(min(32 ** (1 - c), 8))


def test_readings_that_give_nothing_leave_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, scheduler = scheduled()
    train(model, optimizer, range(2))
    gains = dict(scheduler.gains)
    assert gains != dict.fromkeys(PATHS, 1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monkeypatch.setattr(Alignment, "read", reading(alpha=math.nan))
        train(model, optimizer, range(2))
        assert (scheduler.failures, scheduler.latest.status) == (2, "infeasible")

        def breaks(self: Alignment) -> None:
            raise RuntimeError("out of memory")

        monkeypatch.setattr(Alignment, "read", breaks)
        train(model, optimizer, range(2))
    assert scheduler.failures == 4
    assert scheduler.gains == gains
    assert [str(w.message).split(": ")[2] for w in caught] == ["infeasible", "RuntimeError"]


def test_a_loss_that_goes_astray_takes_factors_back() -> None:
    model, optimizer, scheduler = scheduled(**EAGER)
    train(model, optimizer, range(8))
    for loss in (1.0, 100.0, *[torch.tensor(1.0)] * 20, 2.99):  # few losses have no usual one
        scheduler.see_loss(loss)
    assert scheduler.gains["2"] > 1
    scheduler.see_loss(3.01)
    assert scheduler.gains == dict.fromkeys(PATHS, 1.0)
    train(model, optimizer, range(9))
    assert scheduler.latest.step == 8  # on hold for five intervals
    train(model, optimizer, range(1))
    assert scheduler.latest.step == 18
    assert scheduler.gains["2"] > 1
    scheduler.see_loss(math.nan)
    assert scheduler.gains == dict.fromkeys(PATHS, 1.0)


def test_rules_of_optimizers() -> None:
    weights = [nn.Parameter(torch.zeros(4, 4))]
    for kind, rule in (
        (optim.SGD, SGD),
        (optim.Adam, ADAM),
        (optim.AdamW, ADAM),
        (optim.RMSprop, ADAM),
        (optim.Adafactor, ADAFACTOR),
    ):
        assert update_rule(kind(weights)) is rule
    absolute = type("Adafactor", (optim.SGD,), {})(  # as Hugging Face's says it
        [{"params": weights, "scale_parameter": False}]
    )
    assert update_rule(absolute) is ADAM
    if hasattr(optim, "Muon"):
        assert update_rule(optim.Muon(weights)) is MUON
        assert update_rule(optim.Muon(weights, adjust_lr_fn="match_rms_adamw")) is ADAM
    with pytest.raises(ValueError, match="Adagrad grow with width is not known"):
        update_rule(optim.Adagrad(weights))


def test_what_can_not_be_meant_is_refused() -> None:
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    lone = nn.Sequential(nn.Linear(20, 5))
    static = {"mode": "static"}
    for error, message, changed in (
        (TypeError, "optimizer", {"optimizer": 3}),
        (TypeError, "expected a Probe", {"probe": None}),
        (ValueError, "beta", {"beta": 1.0}),
        (ValueError, "cap", {"cap": 0.5}),
        (ValueError, "limit", {"limit": math.nan}),
        (ValueError, "mode", {"mode": "magic"}),
        (ValueError, "gains with 'static'", static),
        (ValueError, "gains with 'static'", {"gains": {}}),
        (ValueError, "every_n_steps", {"every_n_steps": 0}),
        (ValueError, "none feeds another", {"model": lone}),
        (ValueError, "expected names among 0, 2, 4", {**static, "gains": {"9": 2.0}}),
        (ValueError, "factors above 0", {**static, "gains": {"0": 0.0}}),
    ):
        with pytest.raises(error, match=message):
            MaxLRScheduler(**{"optimizer": optimizer, "model": model, "probe": PROBE, **changed})
    assert not optimizer._optimizer_step_pre_hooks


def test_the_factor_of_a_shared_parameter_is_that_of_its_first_use() -> None:
    model = Tied(20, 32)
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    probe, gains = Probe(torch.arange(6)), {"embed": 2.0, "head": 3.0}
    MaxLRScheduler(optimizer, model, probe, mode="static", gains=gains)
    before = model.embed.weight.detach().clone()
    model(torch.arange(6)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(before - model.embed.weight, 2 * model.embed.weight.grad)
