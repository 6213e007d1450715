"""The README's code blocks run as they stand, one after the other."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def names() -> dict[str, Any]:
    """What a reader has already: a model, an optimizer, data, a loss, a training function."""
    model = nn.Sequential()
    model.add_module("encoder", nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    loader = [(torch.randn(5, 4), torch.randint(2, (5,))) for _ in range(3)]
    loss_function = nn.CrossEntropyLoss()

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for x, y in loader:
            optimizer.zero_grad()
            loss_function(model(x), y).backward()
            optimizer.step()

    return {
        "model": model,
        "dataset": [{"x": x, "labels": y} for x, y in loader],
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": loader,
        "loss_function": loss_function,
        "train": train,
    }


def test_every_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pytorch_lightning")
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)  # Trainers make folders for their logs
    assert len(BLOCKS) == 9
    namespace = names()
    for block in BLOCKS:
        exec(compile(block, "README.md", "exec"), namespace)
    assert list(Path("runs/mine").iterdir()), "the first screen leaves a dashboard"
    assert namespace["report"].layers["encoder.0"].update_cosine is not None


COMMANDS = re.findall(r"^adiv-audit (.*)$", README, flags=re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_one(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its options are understood; what it names is the reader's, and not there."""
    pytest.importorskip("yaml")
    from adiv_monitor.audit.command import cli

    assert len(COMMANDS) >= 7
    monkeypatch.chdir(tmp_path)
    Path("adiv-audit").mkdir()
    Path("adiv-audit/config.yaml").write_text("model: a.b:c\n")
    monkeypatch.setattr(cli, "_audit", lambda config: 0)
    code = cli.main(shlex.split(command))
    error = capsys.readouterr().err
    assert code == 0 or (command.startswith("compare") and "report.json" in error)
