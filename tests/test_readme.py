"""The README's code blocks run as they stand, one after the other."""

from pathlib import Path

import blocks
import pytest

README = blocks.ROOT / "README.md"


def test_every_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pytorch_lightning")
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)  # Trainers make folders for their logs
    assert len(blocks.python_blocks(README)) == 10
    namespace = blocks.names()
    blocks.run(README, namespace)
    assert list(Path("runs/mine").iterdir()), "the first screen leaves a dashboard"
    assert namespace["report"].layers["encoder.0"].update_cosine is not None


AUDIT = "adiv-audit "
COMMANDS = [line for line in blocks.commands(README) if line.startswith(AUDIT)]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_one(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert len(COMMANDS) >= 7
    monkeypatch.chdir(tmp_path)
    blocks.assert_audits(command.removeprefix(AUDIT), monkeypatch, capsys)
