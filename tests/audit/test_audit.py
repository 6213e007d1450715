"""The audit as a whole: what it trains, what it leaves alone, and what it says of bad input."""

import copy
import math
import random
import re
import time
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from audited import batches, cross_entropy, mlp, seen, sgd, unasked
from computes import Computes
from torch import Tensor, nn

from adiv_monitor import audit
from adiv_monitor.audit.experiments.observe import in_order
from adiv_monitor.audit.training.setup import of_batch
from adiv_monitor.diagnosis.readings import maps

QUICK: dict[str, Any] = {"loss": cross_entropy, "steps": 6, "every_n_steps": 2, "try_fixes": False}


@pytest.fixture(autouse=True)
def _quick(request: pytest.FixtureRequest) -> Iterator[None]:
    with nullcontext() if request.function in ASKING else unasked():
        yield


def state(model: nn.Module) -> dict[str, Tensor]:
    gradients = {f"{n}.grad": p.grad for n, p in model.named_parameters() if p.grad is not None}
    return copy.deepcopy({**model.state_dict(), **gradients})


def test_a_run_is_that_of_a_plain_loop() -> None:
    model = mlp(nn.Dropout(0.5), nn.BatchNorm1d(12))
    trained = copy.deepcopy(model)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(3)
    losses, norms = [], []
    for step in range(6):
        optimizer.zero_grad()
        loss = cross_entropy(trained, batches()[step % 4])
        loss.backward()
        losses.append(loss.item())
        norms.append(float(nn.utils.get_total_norm([p.grad for p in trained.parameters()])))
        nn.utils.clip_grad_norm_(trained.parameters(), 0.5)
        optimizer.step()
    record = seen(model, steps=6, optimizer=sgd(0.1, momentum=0.9), clip_norm=0.5, seed=3)
    assert record.losses == tuple(losses)
    assert record.gradient_norms == tuple(norms)
    assert [report.step for report in record.reports] == [0, 2, 4]
    assert record.facts.parameters == sum(p.numel() for p in model.parameters())
    assert (record.facts.batch_size, record.facts.batches, record.facts.steps) == (10, 4, 6)
    assert record.facts.settings["momentum"] == 0.9


def test_what_was_given_is_untouched() -> None:
    class Greedy(nn.Module):
        """Writes into its inputs, draws random numbers everywhere, and counts."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp(nn.Dropout(), nn.BatchNorm1d(12))
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            x.mul_(1 + 0.01 * random.random() * np.random.random())
            return self.inner(x)

    model = Greedy()
    model.inner[0].weight.grad = torch.ones(12, 6)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    data = batches()
    before = state(model), copy.deepcopy(optimizer.state_dict()), copy.deepcopy(data)
    chance = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    report = audit(model, data, optimizer=optimizer, **QUICK)
    assert len(report.record.losses) == 6
    after = state(model), optimizer.state_dict(), data
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0)
    assert model.calls == 0
    assert torch.equal(torch.get_rng_state(), chance[0])
    assert random.getstate() == chance[1]
    assert np.array_equal(np.random.get_state()[1], chance[2])
    assert not model._forward_pre_hooks and not optimizer._optimizer_step_pre_hooks
    assert any("has taken steps" in note for note in report.record.notes)
    assert report.record.facts.resumed


def on_a_machine(times_slower: float) -> dict[str, Any]:
    """The report, but for measured times, of an audit whose clock runs that much faster."""
    torch.manual_seed(0)
    clock = time.perf_counter
    began = clock()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(time, "perf_counter", lambda: began + times_slower * (clock() - began))
        report = audit(mlp(), batches(), loss=cross_entropy, steps=4)
    facts = replace(report.record.facts, seconds_per_step=0.0)
    return replace(report, record=replace(report.record, facts=facts)).to_dict()


@pytest.mark.slow
def test_the_verdict_does_not_depend_on_the_clock() -> None:
    usual = on_a_machine(1)
    assert usual["record"]["rates"]
    assert on_a_machine(1e9) == usual


def test_a_loss_that_stops_being_finite_ends_the_run() -> None:
    record = seen(mlp(), optimizer=sgd(1e20), steps=50, every_n_steps=1)
    assert not math.isfinite(record.losses[-1])
    assert all(map(math.isfinite, record.losses[:-1]))
    assert len(record.gradient_norms) == len(record.losses) < 50
    assert len(record.reports) == len(record.losses) - 1


def test_ctrl_c_leaves_what_there_is() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        if calls["n"] == 10:
            raise KeyboardInterrupt
        calls["n"] += 1
        return cross_entropy(model, batch)

    calls = {"n": 0}
    given = {**QUICK, "loss": loss, "try_fixes": True, "every_n_steps": 1}
    record = audit(mlp(), batches(), **given).record
    assert record.interrupted and len(record.losses) >= 2 and not record.rates
    assert any("interrupted" in note for note in record.notes)


def test_the_whole_of_it() -> None:
    """A fault that all rooms have a part in: found, and its fix tried."""
    truth = torch.randn(6, 3)
    data = [(1000 * x, (x @ truth).argmax(1)) for x, _ in batches(20, 32)]
    steps: list[tuple[str, int, int]] = []
    given: dict[str, Any] = {"loss": cross_entropy, "optimizer": sgd(0.1), "steps": 20}
    report = audit(mlp(), data, progress=lambda *told: steps.append(told), **given)
    first = report.findings[0]
    assert (first.name, first.strength) == ("input-scale", "act")
    assert first.advice[0].trial is not None and first.advice[0].trial.pays
    assert report.worst == "act" and str(first.advice[0]) in report.verdict
    assert report.record.rates.keys() >= {0.1, 0.01}  # the loss rises: lower ones, until one helps
    assert report.record.overfit is not None
    assert steps[:9] == [("training", step + 1, 20) for step in range(9)]
    assert {what for what, _, _ in steps} == {"training", "learning rates", "fixes"}


ASKING = (test_what_was_given_is_untouched, test_the_whole_of_it)


@pytest.mark.parametrize("within", [False, True])
def test_ctrl_c_while_fixes_are_tried_keeps_what_was_found(within: bool) -> None:
    """Between two trials, or in the training of one."""
    tried: list[str] = []

    def progress(what: str, done: int, of: int) -> None:
        tried.append(what)
        if what == "fixes" and not within:
            raise KeyboardInterrupt

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if tried[-1:] == ["fixes"]:
            raise KeyboardInterrupt
        return cross_entropy(model, batch)

    data = [(1000 * x, y) for x, y in batches(20, 32)]
    report = audit(mlp(), data, loss=loss, optimizer=sgd(0.1), steps=12, progress=progress)
    assert report.record.interrupted
    assert report.record.rates
    assert report.findings[0].strength == "act"
    assert tried.count("fixes") == 1


def test_lbfgs() -> None:
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)
    record = seen(model, batches(1), optimizer=optimizer)
    assert record.losses[-1] < record.losses[0] / 2
    assert record.reports


def test_hooks_and_schedulers_are_told_of() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine: list[bool] = []
    optimizer.register_step_post_hook(lambda *args: mine.append(True))
    model[0].weight.register_hook(lambda gradient: mine.append(True))  # type: ignore[no-untyped-call]
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    lost = "; ".join(seen(model.eval(), optimizer=optimizer).lost)
    hooks = "hooks on parameter '0.weight', the optimizer do not run"
    for word in (hooks, "scheduler", "evaluation mode"):
        assert word in lost
    assert not mine


def test_a_model_with_its_own_loss() -> None:
    def forward(model: nn.Module, inputs: Tensor, labels: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=nn.functional.cross_entropy(model.inner(inputs), labels))

    own = Computes(forward, inner=mlp())
    data = [{"labels": y, "inputs": x} for x, y in batches()]
    assert set(audit(own, data, **{**QUICK, "loss": None}).record.inputs) == {"inputs"}


def test_a_loss_of_outputs_and_targets_is_as_one_of_model_and_batch() -> None:
    model = mlp()
    expected = audit(model, batches(), **QUICK).record.losses
    found = audit(model, batches(), **{**QUICK, "loss": nn.CrossEntropyLoss()}).record
    assert found.losses == expected
    assert found.facts.loss == "CrossEntropyLoss"


@pytest.mark.parametrize(
    ("loss", "of_outputs"),
    [
        (lambda out, y: out, True),
        (nn.functional.mse_loss, True),
        (nn.CrossEntropyLoss(), True),
        (cross_entropy, False),
        (lambda m, b: b, False),
        (lambda f, xy: xy, False),
        (lambda *given: given, False),
    ],
)
def test_the_names_of_its_parameters_tell_what_a_loss_takes(loss: Any, of_outputs: bool) -> None:
    assert (of_batch(loss) is not loss) is of_outputs


def test_a_data_set_of_samples_is_put_into_batches() -> None:
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    samples = torch.utils.data.TensorDataset(x, x[:, :3].argmax(1))
    record = audit(mlp(), samples, **{**QUICK, "loss": nn.CrossEntropyLoss()}).record  # type: ignore[arg-type]
    assert (record.facts.batch_size, record.facts.batches) == (16, 2)
    assert any("shuffled, in batches of 16" in note for note in record.notes)


class Uncopyable(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("locked")


FROZEN = mlp().requires_grad_(False)
GIVEN = mlp()
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no module": ({"model": 3}, TypeError, "model=….*int.*torch.nn.Module"),
    "all frozen": ({"model": FROZEN}, ValueError, "requires_grad=True"),
    "lazy": ({"model": nn.LazyLinear(3)}, ValueError, "weight has no shape.*one batch"),
    "uncopyable": ({"model": Uncopyable(6, 3)}, TypeError, "locked.*expected one that it can"),
    "steps": ({"steps": 0}, ValueError, "steps=….*0.*at least 1"),
    "clip": ({"clip_norm": 0}, ValueError, "clip_norm.*above 0"),
    "no batches": ({"batches": []}, ValueError, "no batch.*at least one"),
    "no iterable": ({"batches": 3}, TypeError, "batches=….*int.*iterable"),
    "empty batch": ({"batches": [(torch.ones(0, 6), torch.ones(0).long())]}, ValueError, "empty"),
    "loss": ({"loss": "mse"}, TypeError, "loss=….*str.*function"),
    "loss of nothing": ({"loss": None, "batches": [b[:1] for b in batches()]}, TypeError, "`loss`"),
    "loss of other targets": (
        {"loss": nn.CrossEntropyLoss(), "batches": [b[:1] * 2 for b in batches()]},
        ValueError,
        "the loss CrossEntropyLoss can't take.*choose another loss",
    ),
    "no loss": ({"loss": None}, TypeError, "can't take the whole batch.*give audit a loss"),
    "loss per sample": ({"loss": lambda m, b: m(b[0])}, TypeError, r"shape \(10, 3\).*mean"),
    "loss number": ({"loss": lambda m, b: m(b[0]).sum().item()}, TypeError, "float.*tensor"),
    "loss detached": (
        {"loss": lambda m, b: m(b[0]).sum().detach()},
        TypeError,
        "without a gradient",
    ),
    "loss of the given": (
        {"model": GIVEN, "loss": lambda m, b: cross_entropy(GIVEN, b)},
        ValueError,
        "first argument",
    ),
    "optimizer": ({"optimizer": "sgd"}, TypeError, "optimizer=….*str.*torch.optim"),
    "a class": ({"optimizer": torch.optim.SGD}, TypeError, "optimizer=….*type.*torch.optim"),
    "optimizer of others": (
        {"optimizer": torch.optim.SGD(mlp().parameters(), lr=1)},
        ValueError,
        "holds none of the parameters.*model.parameters()",
    ),
    "factory": ({"optimizer": lambda m: None}, TypeError, "NoneType.*torch.optim.Optimizer"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_told_clearly(name: str) -> None:
    given, kind, message = BAD[name]
    call = {"model": mlp(), "batches": batches(), **QUICK, **given}
    with pytest.raises(kind, match=re.compile(message, re.DOTALL)):
        audit(**call)
    assert all(p.grad is None for p in GIVEN.parameters())


def test_an_optimizer_of_frozen_parameters_alone_is_found() -> None:
    model = mlp()
    model[0].requires_grad_(False)

    def frozen_alone(copied: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in copied.parameters() if not p.requires_grad], lr=0.1)

    report = audit(model, batches(), **{**QUICK, "steps": 12, "optimizer": frozen_alone})
    first = report.findings[0]
    assert (first.name, first.strength) == ("not-held", "act")
    assert first.layers == report.record.wiring.not_held
    assert len(report.record.reports) == 6


def test_layers_stand_in_the_order_in_which_they_run() -> None:
    """They are registered in another order."""
    sizes = {"never": (6, 12), "head": (12, 3), "late": (12, 12), "early": (6, 12)}
    parts = {name: nn.Linear(*size) for name, size in sizes.items()}
    forward = lambda m, x: m.head(m.late(m.early(x + m.bias).relu()).relu())  # noqa: E731
    record = seen(Computes(forward, bias=nn.Parameter(torch.zeros(6)), **parts))
    for report in record.reports:
        assert list(report.layers)[1:] == ["early", "late", "head"]
    assert list(record.weights) == ["early", "late", "head", "never"]
    assert maps(record) == ("early", "late", "head")
    layers = {"head": 0, "a.q": 1, "a.k": 2, "never": 3, "first": 4}  # parts run with their module
    assert list(in_order(layers, ["first", "a", "head"])) == [
        *("first", "a.q", "a.k", "head", "never")
    ]


def test_a_loss_that_keeps_something_from_call_to_call_is_told_and_nothing_is_tried() -> None:
    calls = 0

    def annealed(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return cross_entropy(model, batch) / (1 + calls / 20)

    record = audit(mlp(), batches(), loss=annealed, steps=12).record
    assert not record.repeats and not record.rates and record.overfit is None
    assert any("from call to call" in note for note in record.notes)


def test_a_warning_of_the_training_is_shown_once() -> None:
    """However often the audit runs it, with batches of whatever size."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with warnings.catch_warnings():  # Python forgets at this what it showed
            pass
        warnings.warn(f"{len(batch[0])} samples", stacklevel=1)
        return cross_entropy(model, batch)

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        audit(mlp(), batches(), **{**QUICK, "loss": loss})
    assert len([w for w in shown if str(w.message).endswith("samples")]) == 1
