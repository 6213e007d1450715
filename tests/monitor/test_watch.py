"""`adiv-monitor watch` shows the newest report and the verdict of a run under way."""

import json
import os
import sys
from pathlib import Path

import pytest
from example_reports import LAYERS, report
from rich.console import Console

from adiv_monitor.audit.command.cli import main as command
from adiv_monitor.sinks import JsonlSink
from adiv_monitor.sinks.watch import Watched


def lines(path: Path, *steps: int) -> None:
    sink = JsonlSink(path)
    for step in steps:
        sink.write(report(step))
    sink.close()


def test_a_folder_stands_for_its_newest_run(tmp_path: Path) -> None:
    lines(tmp_path / "old.jsonl", 0)
    os.utime(tmp_path / "old.jsonl", (0, 0))
    lines(tmp_path / "deep" / "new.jsonl", 0, 50)
    watched = Watched(tmp_path)
    assert watched.update()
    text = str(watched.text())
    assert "step 50 · " in text and all(layer in text for layer in LAYERS)


def test_what_is_appended_is_shown_once_it_is_a_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    lines(path, 0)
    watched = Watched(path)
    assert watched.update() and not watched.update()
    (line,) = path.read_text().splitlines()
    later = json.dumps({**json.loads(line), "step": 10})
    with path.open("a") as file:
        file.write(later[:40])
        file.flush()
        assert not watched.update()
        file.write(later[40:] + "\n")
    assert watched.update()
    assert (watched.running.count, watched.running.last.step) == (2, 10)


def test_a_file_that_begins_anew_is_another_run(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    lines(path, 0, 10)
    watched = Watched(path)
    watched.update()
    path.unlink()
    lines(path, 0)
    assert watched.update() and watched.running.count == 1


def test_an_empty_file_has_no_report_yet(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").touch()
    assert "no report yet" in str(Watched(tmp_path).text())


def said(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["adiv-monitor", "watch", *arguments])
    return command()


def test_without_a_terminal_it_prints_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines(tmp_path / "run.jsonl", 0, 50)
    assert said(monkeypatch, str(tmp_path)) == 0
    assert "step 50 · " in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, "{}\n", "no JSON\n"])
def test_what_is_no_run_is_said(
    content: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if content is not None:
        (tmp_path / "run.jsonl").write_text(content)
    assert said(monkeypatch, str(tmp_path)) == 2
    assert capsys.readouterr().out.startswith("adiv-monitor: ")


def test_in_a_terminal_it_follows_the_run_until_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    lines(path, 0)
    waits = iter([lambda: lines(path, 70)])

    def sleep(_: float) -> None:
        next(waits, _interrupt)()

    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr(Console, "is_terminal", True)
    assert said(monkeypatch, str(path)) == 0
    assert "step 70 · " in capsys.readouterr().out


def _interrupt() -> None:
    raise KeyboardInterrupt
