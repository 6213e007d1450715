"""Watched steps: losses far above those before, and norms of every step; who is named then."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from adiv_monitor import Monitor, StepReport
from adiv_monitor.step.every_norm import EveryNorm
from adiv_monitor.step.loss_watch import LossWatch


def noisy(count: int, *, to: float = 0.1) -> list[float]:
    """Return losses that fall from 2 to this, with log-normal noise."""
    noise = torch.randn(count, generator=torch.Generator().manual_seed(0)) * 0.2
    return [2 * (to / 2) ** (i / count) * math.exp(x) for i, x in enumerate(noise.tolist())]


def spikes(losses: list[float]) -> list[int]:
    watch = LossWatch()
    for step, loss in enumerate(losses):
        watch.spikes({step: [loss]})
    return [spike.step for spike in watch.take(len(losses))]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_spike_is_where_the_definition_says(sign: float) -> None:
    losses = noisy(300)
    for step in (150, 200, 250):
        losses[step] *= 1 + (step - 100) / 10
    losses[270:] = [8 * loss for loss in losses[270:]]  # each alone is too low for a spike
    losses = losses if sign > 0 else [loss - 3 for loss in losses]
    found = by_definition(losses, torch.log if sign > 0 else torch.clone)
    assert {200, 250} <= {*found}
    assert sign < 0 or 270 in found
    assert spikes(losses) == found


def by_definition(losses: list[float], scale: Callable[[Tensor], Tensor]) -> list[int]:
    """Return the first of each one to four losses in a row that are far above those before."""
    x, found, quiet = torch.tensor(losses, dtype=torch.float64), list[int](), -1
    usual = x.unfold(0, 16, 1)[:-1].quantile(0.5, dim=1)  # before losses 16, 17, …
    offs = scale(x[16:]) - scale(usual)
    for last in range(48, len(x)):
        for first in range(last, max(last - 4, 47), -1):
            limit = 8 * offs[: first - 16][-128:].square().mean().sqrt()
            off = scale(x[first : last + 1].min()) - scale(usual[first - 16])
            if off * (last + 1 - first) ** 0.5 > limit and last > quiet:
                found.append(first)
                quiet = last + 16
    return found


def test_what_is_not_finite_is_a_spike_once() -> None:
    losses = [2.0, 1.9, math.nan, math.inf, 1.8, *[1.7] * 9, math.inf]
    assert spikes(losses) == [2, 14]


def test_what_undoes_next_to_nothing_is_none() -> None:
    losses = [*noisy(300, to=1e-5), 2e-3]
    assert spikes(losses) == []
    assert spikes([*losses, 0.5]) == [301]


def test_a_loss_on_its_way_is_judged_when_it_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived: set[float] = set()

    def arriving(losses: Any) -> Callable[[], float | None]:
        return lambda: losses[0] if losses[0] in arrived else None

    monkeypatch.setattr("adiv_monitor.step.loss_watch._arriving", arriving)
    watch, losses = LossWatch(), [*noisy(60), 50.0]
    arrived |= {*losses[:-1]}
    assert not any(watch.spikes({step: [loss]}) for step, loss in enumerate(losses))
    arrived.add(50.0)
    assert watch.spikes({})


Plant = Callable[[int, nn.Sequential, torch.optim.Optimizer], None]
# Those of `AT` are planted; every 50th step is measured anyway.
AT, EVERY = 70, 50


def trained(
    plant: Plant, make: Any = torch.optim.SGD, *, rate: float = 0.1, **given: Any
) -> Monitor:
    """Train a small perceptron of which something is planted; return its monitor."""
    torch.manual_seed(0)
    layers = [nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)]
    model = nn.Sequential(*layers)
    optimizer = make([{"params": [*of.parameters()]} for of in model[::2]], lr=rate)
    x = torch.randn(512, 20)
    labels = x[:, :4].argmax(1)
    monitor = Monitor(model, optimizer, every_n_steps=EVERY, on_error="raise", **given)
    with monitor:
        for step in range(120):
            chosen = torch.randint(512, (64,))
            y = labels[chosen]
            monitor.bad = step == AT and plant is bad_batch  # type: ignore[attr-defined]
            scale = 30.0 if monitor.bad else 1.0  # type: ignore[attr-defined]
            loss = functional.cross_entropy(model(x[chosen] * scale), (y + (scale > 1)) % 4)
            monitor.log_loss(loss)
            optimizer.zero_grad()
            loss.backward()
            plant(step, model, optimizer)
            optimizer.step()
    return monitor


def bad_batch(step: int, model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    """Planted by `trained`."""


def healthy(step: int, model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    """Plant nothing."""


def rate_jump(step: int, model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    jump = 1e3 if isinstance(optimizer, torch.optim.SGD) else 1e4
    optimizer.param_groups[1]["lr"] *= jump if step == AT else 1


def weights_hit(step: int, model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    if step == AT:
        weight = model[2].weight
        assert isinstance(weight, Tensor)
        weight.data *= -30


def stale_moment(step: int, model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    """Keep the gradient of a layer tiny until then: Adam's second moment forgets slowly."""
    optimizer.param_groups[1]["lr"] = 1.0
    for parameter in model[2].parameters() if step < AT else ():
        parameter.grad *= 1e-8


def test_the_two_steps_after_a_spike_are_measured_and_no_others() -> None:
    assert [r.step for r in trained(healthy).reports] == [0, 50, 100]
    assert [r.step for r in trained(bad_batch).reports] == [0, 50, AT + 1, AT + 2, 100]
    assert [r.step for r in trained(bad_batch, watch=None).reports] == [0, 50, 100]


def spiked(monitor: Monitor) -> list[StepReport]:
    return [report for report in monitor.reports if report.spikes]


@pytest.mark.slow(one_in=7)
@pytest.mark.parametrize(
    ("plant", "make", "rate"),
    [
        (rate_jump, torch.optim.SGD, 0.1),
        (rate_jump, torch.optim.Adam, 1e-3),
        (weights_hit, torch.optim.SGD, 0.1),
        (weights_hit, torch.optim.Adam, 1e-3),
        (stale_moment, torch.optim.Adam, 1e-3),
    ],
)
def test_the_layer_is_named(plant: Plant, make: Any, rate: float) -> None:
    monitor = trained(plant, make, rate=rate)
    (report, *_) = spiked(monitor)
    assert AT < report.spikes[0].step < AT + 4
    assert next(iter(report.spikes[0].layers)) == "2"
    (finding,) = (f for f in monitor._outlet.running.findings() if f.name == "loss-spike")
    assert finding.layers[0] == "2"


def test_a_bad_batch_moves_all_layers() -> None:
    (report, *_) = spiked(trained(bad_batch))
    assert report.spikes[0].step == AT
    assert {*report.spikes[0].layers} == {"0", "2", "4"}


def test_monitored_runs_are_those_of_plain_ones() -> None:
    """Also where a spike has had steps measured."""
    every = [
        trained(bad_batch, watch=watch)._training.model.state_dict() for watch in ("loss", None)
    ]
    assert all(torch.equal(every[0][name], every[1][name]) for name in every[0])


LIMIT = 0.3


def whole(tensors: list[Tensor]) -> float:
    return torch.cat([x.flatten() for x in tensors]).norm().item()


def clipped(*, steps: int = 12, **given: Any) -> tuple[Monitor, list[float], list[float]]:
    """Train with a clipped gradient; return monitor, and the norms that a plain loop sees."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    gradients, updates = [], []
    with Monitor(model, optimizer, every_n_steps=5, on_error="raise", **given) as monitor:
        for step in range(steps):
            x = torch.randn(6, 4, dtype=torch.float64) * (0.1 if step % 3 else 3)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
            before = [p.detach().clone() for p in model.parameters()]
            gradients.append(whole([p.grad for p in model.parameters()]))
            optimizer.step()
            pairs = zip(model.parameters(), before, strict=True)
            updates.append(whole([p.detach() - old for p, old in pairs]))
    return monitor, gradients, updates


def test_norms_are_those_of_plain_tensors() -> None:
    monitor, gradients, updates = clipped(watch="norms")
    reports = monitor.reports
    assert [sorted(r.gradient_norms) for r in reports] == [[0], [1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    for field, expected in (("gradient_norms", gradients), ("update_norms", updates)):
        found = {s: x for report in reports for s, x in getattr(report, field).items()}
        assert found == pytest.approx(dict(enumerate(expected[:11])), rel=1e-6)


def test_measured_steps_that_clip_are_counted() -> None:
    monitor, gradients, _ = clipped(watch="norms")
    expected = [gradients[step] > LIMIT * 0.999 for step in (0, 5, 10)]
    assert 0 < sum(expected) < 3
    assert monitor.reports[-1].clipped_share == pytest.approx(sum(expected) / 3)


def test_sharded_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="got 'norms' for sharded parameters"):
        EveryNorm(SimpleNamespace(shards=[1]))  # type: ignore[arg-type]
