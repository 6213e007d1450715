"""Example reports of audits, made without running one."""

import math
import random
from dataclasses import replace

import made_records
from example_reports import LAYERS, reading, report

from adiv_monitor.audit.report import AuditReport
from adiv_monitor.diagnosis.finding import Advice, Evidence, Finding, Trial
from adiv_monitor.diagnosis.record import Record, UnitStatistics, Wiring
from adiv_monitor.diagnosis.running import Running
from adiv_monitor.report import LayerReading, StepReport

HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(2)</script>",
    "\"quoted\" 'names' & more",
    "слой.层.🔥.\u202egnp",
    "deep." * 60,
    "${alert(3)}{{ 7 * 7 }}",
)


UNITS = UnitStatistics("relu", 32, 0, 0.41, 10)


def record(reports: tuple[StepReport, ...], losses: list[float], norms: list[float]) -> Record:
    """Return a record around a run's reports, losses and gradient norms."""
    facts = replace(
        made_records.FACTS,
        model="my_project.models.Small",
        optimizer="AdamW",
        settings={"lr": 3e-3, "betas": (0.9, 0.999), "weight_decay": 0.01},
        batches=len(losses),
        steps=len(losses),
        clip_norm=1.0,
    )
    return made_records.record(
        facts=facts,
        losses=tuple(losses),
        gradient_norms=tuple(norms),
        reports=reports,
        units={path: replace(UNITS, dead=dead) for path, dead in (("stem.1", 2), ("head.2", 5))},
        wiring=Wiring(frozen=("stem.0.bias",), input_matters=0.83),
        overfit=Trial("overfit", 60, 0.011, 2.4, None, 0.01),
        rates={
            factor: trial(f"rate*{factor:g}", len(losses), losses, ratio)
            for factor, ratio in ((0.1, 3.1), (0.3, 0.88), (3.0, 1.6), (10.0, math.inf))
        },
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


def faulty() -> AuditReport:
    """Return the report of a run with a finding of each strength."""
    return made_up(["stem.0", "block.0", "head.1", "head.3"], 3)


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
    """Return a reading whose step turns away from the gradient as training goes on."""
    gradient = draw.uniform(0.1, 0.6)
    return reading(
        draw.randrange(1000),
        gradient_cosine=gradient,
        update_cosine=gradient * draw.uniform(0.5, 1.1) * (1 - 0.5 * share),
        effective_lr=length * 1e-3 * draw.uniform(0.8, 1.2),
        scale_mean=length,
        update_ratio=10 ** draw.uniform(-4, -1),
        standard_error={"update_cosine": 0.02 * gradient, "interference_ratio": 0.4},
    )


def known_by_reports(seed: int = 0, losses: bool = True) -> AuditReport:
    """Return the report of a monitored training of four layers without an audit."""
    running = Running()
    for i, step in enumerate((0, 250, 500)):
        layers = {path: reading(100 * seed + 10 * i + j) for j, path in enumerate(LAYERS)}
        told = {s: 2.0 - s / 500 for s in range(step - 240, step + 1, 20) if s >= 0 and losses}
        running.add(report(step, layers=layers, losses=told, learning_rates=(0.1 / (1 + seed),)))
    return AuditReport(running.findings(), running.record())
