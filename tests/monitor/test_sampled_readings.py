"""Estimates from sampled rows: unbiased, with true standard errors, unmoved by zero-gradient rows.

Invariants 8 and 9 of the definitions, on an MLP, a CNN, a vision transformer and a causal language
model.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from cases import OPTIMIZERS
from models import GPT, ViT
from processes import contributions_of_ranks, merged
from setups import EXACT, trained
from torch import Tensor, nn
from torch.nn import functional

from adiv_monitor import Monitor, StepReport
from adiv_monitor.report import LayerReading

IDLE = -100  # ignored by cross_entropy


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4)
    )


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, groups=8),
        nn.Conv2d(8, 6, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 4),
    )


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    return functional.cross_entropy(out.flatten(0, -2), y.flatten(), ignore_index=IDLE)


def pictures(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3, 12, 12, dtype=torch.float64), torch.randint(4, (n,))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]]]] = {
    "mlp": (mlp, lambda: (torch.randn(400, 8, dtype=torch.float64), torch.randint(4, (400,)))),
    "cnn": (cnn, lambda: pictures(16)),
    "vit": (lambda: ViT(side=12, patch=3, channels=3, width=16, depth=1), lambda: pictures(24)),
    "gpt": (
        lambda: GPT(vocabulary=11, length=20, width=16, depth=1, heads=2),
        lambda: tuple(torch.randint(11, (2, 20, 20))),
    ),
}


class Step:
    """One step that can be measured any number of times."""

    def __init__(self, case: str, optimizer: str) -> None:
        torch.manual_seed(1)
        build, data = CASES[case]
        self.model = build().double()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.x, self.y = data()
        for _ in range(3):  # so that the optimizer has state
            self.optimizer.zero_grad()
            loss_of(self.model, self.x, self.y).backward()
            self.optimizer.step()

    def measured(self, max_rows: int | None, seed: int = 0, padding: int = 0) -> StepReport:
        """Measure the next step, optionally with this many samples of zero gradient added."""
        model, optimizer = copy.deepcopy((self.model, self.optimizer))
        x = torch.cat([self.x, self.x[:padding]])
        y = torch.cat([self.y, torch.full_like(self.y[:padding], IDLE)])
        asked = {"optimizer": optimizer, "max_rows": max_rows, "seed": seed}
        return trained(model, lambda model: loss_of(model, x, y), **asked)[0]


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("case", CASES)
def test_idle_rows_change_nothing(case: str, optimizer: str) -> None:
    """Invariant 8: added zero-gradient rows change only idle_share and the number of rows."""
    step = Step(case, optimizer)
    plain, padded = step.measured(None), step.measured(None, padding=8)
    for path, reading in padded.layers.items():
        expected = plain.layers[path]
        # Positions are looked up once for all samples.
        assert reading.rows_total > expected.rows_total or reading.kind == "embedding"
        idle = reading.rows_total - expected.rows_total + expected.rows_without_gradient
        assert reading.idle_share == pytest.approx(idle / reading.rows_total)
        for name, value in reading.measures().items():
            assert name not in reading.standard_error
            if name != "idle_share":
                assert value == pytest.approx(getattr(expected, name), **EXACT), f"{name} of {path}"


# Quantiles and maxima are not smooth sums: their errors are rough.
ROUGH = ("p05", "p50", "p95", "max")


class Deviations:
    """Differences between sampled readings and those of all rows, in standard errors."""

    def __init__(self) -> None:
        self._found: dict[str, list[float]] = defaultdict(list)

    def add(self, reading: LayerReading, exact: LayerReading) -> None:
        """Add the measures of one layer; those without an error must be the same."""
        for name, value in reading.measures().items():
            error = reading.standard_error.get(name, 0.0)
            if name.endswith(ROUGH):
                continue
            if error == 0 or math.isnan(error):
                same = pytest.approx(getattr(exact, name), rel=1e-7, abs=1e-9)
                assert value == same, (reading.kind, name)
            else:
                self._found[name].append((value - getattr(exact, name)) / error)

    def check(self, draws: int) -> None:
        """Check that they are within three errors, and zero in the mean."""
        assert self._found.keys() >= {"update_cosine", "gradient_cosine", "interference_ratio"}
        every = [d for found in self._found.values() for d in found]
        # One in a hundred; twice that, because a draw's layers share their rows.
        assert sum(abs(d) > 3 for d in every) < 0.02 * len(every)
        for name, found in self._found.items():
            assert abs(sum(found) / len(found)) < 4 / math.sqrt(draws), name


@pytest.mark.slow(one_in=8)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("case", CASES)
def test_sampled_readings_know_how_far_off_they_are(case: str, optimizer: str, whole: bool) -> None:
    """Invariant 9: unbiased, and within three errors of all rows in 99 % of the draws."""
    step = Step(case, optimizer)
    truth, draws = step.measured(None), 40 if whole else 20
    deviations = Deviations()
    for seed in range(draws):
        for path, reading in step.measured(100, seed=seed).layers.items():
            deviations.add(reading, truth.layers[path])
    deviations.check(draws)


# Several ranks

WORLD, MAX_ROWS = 2, 100


class Divided(Step):
    """A step of two ranks, of which one has three quarters of the samples."""

    def __init__(self, case: str) -> None:
        super().__init__(case, "adamw")
        self.y[-len(self.y) // 8 :] = IDLE  # only rank 1 has zero-gradient rows
        model = copy.deepcopy(self.model)
        model.zero_grad()
        loss_of(model, self.x, self.y).backward()
        self.gradients = [0.3 * p.grad for p in model.parameters() if p.grad is not None]

    def whole(self) -> dict[str, LayerReading]:
        """Measure the step with all rows in one process."""
        model, optimizer = copy.deepcopy((self.model, self.optimizer))
        with Monitor(model, optimizer, max_rows=None, on_error="raise") as monitor:
            optimizer.zero_grad()
            loss_of(model, self.x, self.y).backward()
            for parameter, gradient in zip(model.parameters(), self.gradients, strict=True):
                parameter.grad.copy_(gradient)
            optimizer.step()
        return dict(monitor.latest.layers)

    def hand_in(self, rank: int, seed: int) -> None:
        """Run one rank's part of the step, which hands in its contribution."""
        cut = 3 * len(self.x) // 4
        mine = slice(cut) if rank == 0 else slice(cut, None)
        share = int((self.y[mine] != IDLE).sum()) / int((self.y != IDLE).sum())
        model, optimizer = copy.deepcopy((self.model, self.optimizer))
        options = {"every_n_steps": 1, "max_rows": MAX_ROWS, "on_error": "raise"}
        options["seed"] = WORLD * seed + rank
        with Monitor(model, optimizer, **options):
            optimizer.zero_grad()
            (WORLD * share * loss_of(model, self.x[mine], self.y[mine])).backward()
            for parameter, gradient in zip(model.parameters(), self.gradients, strict=True):
                parameter.grad.copy_(gradient)  # averaged over both ranks, then clipped
            optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["mlp", "cnn", "vit"])
def test_sampled_readings_of_two_processes_know_how_far_off_they_are(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariants 6 and 9: the sample is of all rows, however uneven the batches are."""
    step, draws = Divided(case), 30
    truth = step.whole()
    parts = contributions_of_ranks(monkeypatch, WORLD)  # two ranks from here on
    deviations = Deviations()
    for seed in range(draws):
        parts.clear()
        for rank in range(WORLD):
            step.hand_in(rank, seed)
        report = merged(parts, MAX_ROWS, seed)
        assert report.notes == ()
        for path, reading in report.layers.items():
            exact = truth[path]
            if reading.kind == "embedding":  # of positions, which each rank looks up once
                continue
            assert reading.rows_total == exact.rows_total
            assert reading.rows_seen <= MAX_ROWS
            deviations.add(reading, exact)
    deviations.check(draws)


@pytest.mark.parametrize("rows", [2, 20], ids=["fewer than features", "more than features"])
def test_without_active_rows_there_is_no_ceiling(rows: int) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    loss = lambda model: (0 * model(torch.randn(rows, 4))).sum()  # noqa: E731
    for reading in trained(model, loss, attainable=True)[0].layers.values():
        assert reading.idle_share == 1
        assert math.isnan(reading.attainable_cosine)


def test_few_active_rows_are_not_taken_for_certain() -> None:
    """With 4 of 2,048 rows active, most samples contain none or one of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 4)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.randn(2_048, 12, dtype=torch.float64)

    def reading_of(max_rows: int | None, seed: int = 0) -> StepReport:
        loss = lambda model: model(x)[:4].square().sum()  # noqa: E731
        return trained(model, loss, optimizer=optimizer, max_rows=max_rows, seed=seed)[0]

    truth = reading_of(None).layers["0"].measures()
    seen = set()
    for seed in range(16):
        report = reading_of(512, seed)
        reading = report.layers["0"]
        active = reading.rows_seen - reading.rows_without_gradient
        seen.add(min(active, 2))
        assert any("zero gradient, but" in note for note in report.notes) is (active == 0)
        for name in ("gradient_cosine", "interference_ratio", "common_share"):
            value, error = reading.measures()[name], reading.standard_error.get(name, 0.0)
            assert math.isnan(value) is (active == 0), name
            if active == 1:
                assert not math.isfinite(error), name
        for name in ("effective_lr", "diagonal_cosine", "idle_share", "scale_mean"):
            assert reading.measures()[name] == pytest.approx(truth[name], rel=1e-9), name
    assert seen == {0, 1, 2}
