"""Code blocks of Markdown pages: extract them, run them, and check the commands in them."""

import re
import shlex
import textwrap
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parent.parent
NOT_RUN = "# Not run by the tests: "


def python_blocks(page: Path) -> list[str]:
    """Return a page's Python blocks, in order."""
    return _blocks(page, "python")


def commands(page: Path) -> list[str]:
    """Return every command line of a page's shell blocks, without comments."""
    lines = [line for block in _blocks(page, "sh") for line in block.splitlines()]
    lines = [line.partition(" #")[0].strip() for line in lines]
    return [line for line in lines if line and not line.startswith("#")]


def _blocks(page: Path, language: str) -> list[str]:
    """Return a page's blocks in a language, those indented inside lists included."""
    fenced = re.compile(rf"^( *)```{language}\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for _, block in fenced.findall(page.read_text())]


def run(page: Path, namespace: dict[str, Any]) -> None:
    """Run a page's Python blocks in order; blocks marked as not run are only compiled."""
    for number, block in enumerate(python_blocks(page), start=1):
        code = compile(block, f"{page.name}, block {number}", "exec")
        if not block.startswith(NOT_RUN):
            exec(code, namespace)


def names() -> dict[str, Any]:
    """Return the names that a page presupposes: a model, an optimizer, data, a loss, `train`."""
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
        "batch": loader[0][0],
        "dataset": [{"x": x, "labels": y} for x, y in loader],
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": loader,
        "loss_function": loss_function,
        "train": train,
    }


def assert_audits(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Assert that `adiv-audit` accepts the command's options; the files it names need not exist."""
    pytest.importorskip("yaml")
    scripts = (ROOT / "pyproject.toml").read_text().partition("[project.scripts]")[2]
    entry = re.search(r'adiv-audit = "([\w.]+):main"', scripts)
    assert entry
    cli = import_module(entry[1])
    Path("adiv-audit").mkdir()
    Path("adiv-audit/config.yaml").write_text("model: a.b:c\n")
    monkeypatch.setattr(cli, "_audit", lambda config: 0)
    arguments = shlex.split(command)
    code = cli.main(arguments)
    error = capsys.readouterr().err
    assert code == 0 or (arguments[0] == "compare" and "No such file" in error)
