"""Verdicts on a run from its reports alone, as on a dashboard or a page."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from audit.fault_benchmark.run import STEPS, Case, Healthy
from torch.nn.utils import clip_grad_norm_

from adiv_monitor import Monitor, StepReport
from adiv_monitor.audit.training.setup import seeded
from adiv_monitor.audit.training.train import held
from adiv_monitor.diagnosis.course import fell
from adiv_monitor.diagnosis.diagnose import running_headline
from adiv_monitor.diagnosis.running import Running

NOTHING = "nothing"  # as strength: no finding


class Listener:
    """A sink that collects a training twice: with its losses and without them."""

    def __init__(self) -> None:
        self.known, self.unknown = Running(), Running()

    def write(self, report: StepReport) -> None:
        self.known.add(report)
        self.unknown.add(replace(report, losses={}))

    def add_losses(self, losses: Mapping[int, float]) -> None:
        self.known.add_losses(losses)

    def close(self) -> None:
        pass


def trained(bed: Case | Healthy, seed: int) -> Listener:
    """Train without any checks, as a plain loop does: values that are not finite are kept."""
    fork = bed.build(seed).setup(STEPS, seed).fork()
    listener = Listener()
    monitor = Monitor(
        fork.model, fork.optimizer, every_n_steps=STEPS // 10, sinks=[listener], on_error="raise"
    )
    with warnings.catch_warnings(), seeded(seed):
        warnings.simplefilter("ignore")  # of the monitor's: findings say the same
        monitor.attach()
        for batch in fork.batches:
            fork.optimizer.zero_grad()
            loss = fork.loss(fork.model, batch)
            monitor.log_loss(loss)
            loss.backward()  # type: ignore[no-untyped-call]
            if fork.clip_norm is not None:
                clip_grad_norm_(held(fork.optimizer), fork.clip_norm)
            fork.optimizer.step()
        monitor.close(quietly=True)
    return listener


def reported(bed: Case | Healthy, seed: int) -> dict[str, Any]:
    """Return the verdicts with and without the loss, and whether the loss falls; or a refusal."""
    try:
        listener = trained(bed, seed)
    except ValueError as refused:  # an optimizer that holds nothing of the model, say
        return {"refused": str(refused)}
    record = listener.known.record()
    return {
        "known": _verdict(listener.known),
        "unknown": _verdict(listener.unknown),
        "fell": fell(record),
        "finite": record.first_non_finite is None,
        "first": record.losses[0],
        "last": record.losses[-1],
    }


def _verdict(running: Running) -> dict[str, Any]:
    findings, record = running.findings(), running.record()
    headline = running_headline(findings, record)
    found = [[finding.name, finding.strength] for finding in findings]
    return {"headline": headline, "findings": found, "said": [f.summary for f in findings]}
