"""How many passes and steps an audit of a healthy network takes."""

import importlib
from typing import Any

import pytest
import torch
import trial_setups
from torch import Tensor, nn
from torch.autograd import graph
from torch.optim.optimizer import register_optimizer_step_post_hook

from adiv_monitor.audit import audit


class Counted(nn.Sequential):
    """A network that counts the samples of its forward passes."""

    samples = 0

    def forward(self, x: Tensor) -> Tensor:
        Counted.samples += len(x)
        found: Tensor = super().forward(x)
        return found


@pytest.mark.parametrize(
    ("costly", "forward", "backward", "steps"),
    [
        pytest.param(True, 69, 34, 24, id="costly"),
        pytest.param(False, 367, 388, 341, id="small", marks=pytest.mark.slow),
    ],
)
def test_a_healthy_network_takes_few_passes_and_steps(
    costly: bool, forward: int, backward: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = {"backward": 0, "steps": 0}
    differentiate = graph._engine_run_backward

    def backward_pass(*args: Any, **kwargs: Any) -> Any:
        taken["backward"] += 1
        return differentiate(*args, **kwargs)

    for module in (graph, torch.autograd):
        monkeypatch.setattr(module, "_engine_run_backward", backward_pass)
    if costly:
        run = importlib.import_module("adiv_monitor.audit.run")
        monkeypatch.setattr(run, "counted", lambda setup: (1.0, False))
    monkeypatch.setattr(Counted, "samples", 0)

    def stepped(*_: Any) -> None:
        taken["steps"] += 1

    torch.manual_seed(0)
    model = Counted(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 3))
    hook = register_optimizer_step_post_hook(stepped)
    try:
        found = audit(
            model,
            trial_setups.batches(8, 64),
            loss=trial_setups.loss,
            optimizer=lambda m: torch.optim.Adam(m.parameters(), lr=0.02),
        )
    finally:
        hook.remove()
    assert not any(f.strength == "act" for f in found.findings)
    assert Counted.samples / 64 <= forward
    assert taken["backward"] <= backward and taken["steps"] <= steps
    assert len(found.record.losses) == (24 if costly else 60)
