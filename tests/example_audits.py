"""Example reports of audits, made without running one."""

import math
import random
from functools import cache

import torch
from torch import nn

from adiv_monitor import Monitor
from adiv_monitor.audit.report import AuditReport
from adiv_monitor.diagnosis.finding import Advice, Evidence, Finding, Trial
from adiv_monitor.diagnosis.record import (
    Facts,
    InputStatistics,
    Record,
    UnitStatistics,
    WeightStatistics,
    Wiring,
)
from adiv_monitor.diagnosis.running import Running
from adiv_monitor.report import QUANTILE_LEVELS, LayerReading, StepReport

HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(2)</script>",
    "\"quoted\" 'names' & more",
    "слой.层.🔥.\u202egnp",
    "deep." * 60,
    "${alert(3)}{{ 7 * 7 }}",
)


class Small(nn.Module):
    """A small convolutional network whose layers have the names used in the examples."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.block = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.stem(x)))


def trained() -> Record:
    """Return the record of a real run on artificial images."""
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    centres = torch.rand(10, 1, 8, 8)
    losses, norms = [], []
    with Monitor(model, optimizer, every_n_steps=4, attainable=True, realised=True) as monitor:
        for _ in range(12):
            y = torch.randint(10, (16,))
            x = 16 * (centres[y] + 0.3 * torch.randn(16, 1, 8, 8))
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters()])))
            losses.append(loss.item())
            optimizer.step()
    return record(tuple(monitor.reports), losses, norms)


def record(reports: tuple[StepReport, ...], losses: list[float], norms: list[float]) -> Record:
    """Return a record around a run's reports, losses and gradient norms."""
    facts = Facts(
        model="my_project.models.Small",
        parameters=10_000,
        trainable=9_500,
        optimizer="AdamW",
        settings={"lr": 3e-3, "betas": (0.9, 0.999), "weight_decay": 0.01},
        batch_size=48,
        batches=len(losses),
        steps=len(losses),
        every_n_steps=4,
        seed=0,
        device="cpu",
        torch=torch.__version__,
        seconds_per_step=0.0123,
        clip_norm=1.0,
    )
    return Record(
        facts,
        tuple(losses),
        tuple(norms),
        reports,
        inputs={"0": InputStatistics(8.1, 6.3, -12.4, 31.2, 2.2, 1.4, 0.31, 1)},
        units={
            "stem.1": UnitStatistics("relu", 8, 2, 0.41, 10),
            "block.2": UnitStatistics("relu", 16, 0, 0.52, 10),
            "head.2": UnitStatistics("relu", 32, 5, 0.63, 10),
        },
        wiring=Wiring(frozen=("stem.0.bias",), input_matters=0.83),
        overfit=Trial("overfit", 60, 0.011, 2.4, None, 0.01),
        rates={
            factor: trial(f"rate*{factor:g}", len(losses), losses, ratio)
            for factor, ratio in ((0.1, 3.1), (0.3, 0.88), (3.0, 1.6), (10.0, math.inf))
        },
        chance=math.log(10),
        weights={"head.1": WeightStatistics(0.58, 0.04, 0.0)},
        notes=("Batches were repeated: there were fewer than steps.",),
    )


def trial(fix: str, steps: int, losses: list[float], ratio: float) -> Trial:
    """Return a trial with this ratio of its loss to the loss without the fix."""
    last = losses[-(len(losses) // 4) :]
    without = sum(last) / len(last)
    by_rate = None if fix.startswith("rate") else 0.88 * without
    return Trial(fix, steps, ratio * without, without, by_rate, 0.05 * without)


def findings(layers: list[str], losses: list[float]) -> tuple[Finding, ...]:
    """Return one finding of each strength, with every field that a finding can have."""
    tried = trial("standardise-inputs", len(losses), losses, 0.44)
    failed = trial("norm-like", len(losses), losses, 1.02)
    return (
        Finding(
            "input-scale",
            "act",
            "Inputs are 6 times as large as is usual, so that the first layer learns 40 times "
            "faster than all others.",
            (
                Evidence("input_std", 6.3, 3.0),
                Evidence("scale_mean", 812.5, 64.0, layers[0], 0),
                Evidence("update_cosine", 0.0213, 0.05, layers[0], 8),
            ),
            (
                Advice("Standardise the inputs per channel", "standardise-inputs", tried),
                Advice("Give the first layer a norm-like map", "norm-like", failed),
                Advice("Look at the code that loads the data"),
            ),
            "A lower learning rate for the whole model starves the other layers.",
            layers=tuple(layers[:1]),
            since=0,
            against=(),
        ),
        Finding(
            "dead-units",
            "watch",
            "5 of 32 units gave zero for every sample of 10 batches.",
            (Evidence("dead", 5, 3, layers[-1]),),
            (Advice("Use LeakyReLU in place of ReLU", "leaky-relu"),),
            layers=tuple(layers[1:]),
            since=12,
        ),
        Finding("frozen", "note", "One parameter does not take part in training."),
    )


@cache
def faulty() -> AuditReport:
    """Return the report of a run with a finding of each strength."""
    of_run = trained()
    layers = list(of_run.reports[-1].layers)
    return AuditReport(findings(layers, list(of_run.losses)), of_run)


def made_up(layers: list[str], steps: int, seed: int = 0) -> AuditReport:
    """Return a report with these layers and so many measured steps; readings drift randomly."""
    draw = random.Random(seed)
    lengths = [10 ** draw.uniform(0, 2) for _ in layers]
    reports = tuple(
        StepReport(
            10 * step,
            {
                layer: _reading(draw, step / steps, length)
                for layer, length in zip(layers, lengths, strict=True)
            },
            {"decoder.rnn": "no rule for this type of module"},
            0.987,
            unmeasured={"decoder.rnn.weight": 8192},
        )
        for step in range(steps)
    )
    losses = [2.3 * math.exp(-step / 400) + 0.1 * draw.random() for step in range(10 * steps)]
    of_run = record(reports, losses, [draw.uniform(0.5, 2) for _ in losses])
    return AuditReport(findings(layers, list(of_run.losses)), of_run)


def _reading(draw: random.Random, share: float, length: float) -> LayerReading:
    diagonal = draw.uniform(0.8, 1)
    gradient = diagonal * draw.uniform(0.1, 0.6)
    update = gradient * draw.uniform(0.5, 1.1) * (1 - 0.5 * share)
    cv = draw.uniform(0.05, 0.9)
    return LayerReading(
        kind="linear",
        rows_seen=128,
        rows_total=8192,
        rows_without_gradient=0,
        gradient_factor=1.0,
        update_cosine=update,
        gradient_cosine=gradient,
        diagonal_cosine=diagonal,
        attainable_cosine=min(gradient * 1.6, 1.0),
        effective_lr=length * 1e-3 * draw.uniform(0.8, 1.2),
        scale_mean=length,
        scale_cv=cv,
        scale_p05=length / 2,
        scale_p50=length,
        scale_p95=length * 2,
        scale_max=length * 3,
        common_share=draw.random(),
        interference_ratio=10 ** draw.uniform(0, 2),
        row_cosine_mean=update,
        row_cosine_p05=update - 0.3,
        row_cosine_p50=update,
        row_cosine_p95=update + 0.3,
        harmed_fraction=draw.uniform(0.1, 0.4),
        idle_share=0.0,
        bias_share=draw.random(),
        update_ratio=10 ** draw.uniform(-4, -1),
        descent=draw.uniform(0, 1e-3),
        parameter_cosine=draw.uniform(0.3, 0.9),
        projection_cosine=1.0,
        applied_cosine=draw.uniform(0.3, 0.9),
        standard_error={"update_cosine": 0.02 * update, "interference_ratio": 0.4},
        scale_quantiles=tuple(length * math.exp(cv * (4 * q - 2)) for q in QUANTILE_LEVELS),
        row_cosine_quantiles=tuple(
            max(-1.0, min(1.0, update + 0.9 * (q - 0.5) ** 3 * 4)) for q in QUANTILE_LEVELS
        ),
    )


def known_by_reports(seed: int = 0, losses: bool = True) -> AuditReport:
    """Return the report of a monitored training of four layers without an audit."""
    from example_reports import LAYERS, reading, report

    running = Running()
    for i, step in enumerate((0, 250, 500)):
        layers = {path: reading(100 * seed + 10 * i + j) for j, path in enumerate(LAYERS)}
        told = {s: 2.0 - s / 500 for s in range(step - 240, step + 1, 20) if s >= 0 and losses}
        running.add(report(step, layers=layers, losses=told, learning_rates=(0.1 / (1 + seed),)))
    return AuditReport(running.findings(), running.record())
