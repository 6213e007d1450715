"""Runs of a specimen with monitors and without, and whether they are the same to the last bit."""

import random
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from adiv_monitor import Monitor, StepReport
from zoo.training import Specimen, Training, seed

STEPS = 3


@dataclass(frozen=True)
class Run:
    """The state after a run of three steps, and the reports of each monitor."""

    training: Training
    losses: list[float]
    random: tuple[object, ...]
    reports: list[list[StepReport]]

    def assert_same(self, other: "Run") -> None:
        """Assert that losses, weights, buffers and random streams are equal bitwise."""
        assert self.losses == other.losses
        assert self.random == other.random
        pairs = zip(self.training.trained, other.training.trained, strict=True)
        for state, expected in ((a.model.state_dict(), b.model.state_dict()) for a, b in pairs):
            assert state.keys() == expected.keys()
            for path, tensor in expected.items():
                assert torch.equal(state[path], tensor), path


def run(
    specimen: Specimen,
    *,
    monitored: bool,
    device: str = "cpu",
    prepare: Callable[[Training], object] = lambda training: None,
    **options: Any,
) -> Run:
    """Train; the middle one of the steps is not measured."""
    seed(7)
    with ExitStack() as stack, nullcontext() if device == "cpu" else torch.device(device):
        training = specimen.build()
        for each in training.trained:  # parameters that are made without a device
            each.model.to(device)
        prepare(training)
        options = {"every_n_steps": 2, "on_error": "raise", **options}
        monitors = [
            stack.enter_context(Monitor(each.model, each.optimizer, **options))
            for each in training.trained
            if monitored
        ]
        losses = [loss.item() for _ in range(STEPS) for loss in training.step()]
    streams = [torch.get_rng_state().tolist()]
    streams += [torch.cuda.get_rng_state().tolist()] if device == "cuda" else []
    drawn = (random.getstate(), np.random.get_state()[1].tolist(), *streams)
    return Run(training, losses, drawn, [list(monitor.reports) for monitor in monitors])
