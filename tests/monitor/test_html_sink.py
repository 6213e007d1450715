"""The page of a training in progress."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from example_reports import LAYERS, reading, report, running

from adiv_monitor.report import Alarm
from adiv_monitor.sinks import HtmlSink
from adiv_monitor.sinks import course as course_module
from adiv_monitor.sinks import html as html_module
from adiv_monitor.sinks.borrowed import borrowed

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

FILES = ["run.html", "run.json", "run.md"]


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the sink's clock in seconds, which tests advance."""
    now = [0.0]
    monkeypatch.setattr(course_module.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the page at each report."""
    monkeypatch.setattr(course_module, "_PATIENCE", 0)


@pytest.mark.usefixtures("at_once")
def test_the_page_says_where_the_training_is(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.html"
    sink = HtmlSink(path)
    for step in (0, 50, 1200):
        sink.write(report(step))
        text = path.read_text()
        assert f"up to step {step:,}" in text
    for layer in LAYERS:
        assert layer.rpartition(".")[2] in text
    assert "87.5%" in text, "coverage"
    assert "The gradient was clipped to 0.5 of its length." in text
    assert "3 <small>from step 0 on" in text
    assert names(path.parent) == FILES


def test_pages_take_a_twentieth_of_the_time_at_most(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.html"

    whole = html_module.running_files

    def slow(*given: object) -> Mapping[str, str]:
        clock[0] += 2.0  # seconds
        return whole(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(html_module, "running_files", slow)
    sink, shown = HtmlSink(path), []
    # The first page is thought to take 1.5 s; then 2 s were spent, 2 are to come, and 2 at the end.
    for step, time in enumerate((0, 59.9, 60.1, 119.9, 120.1)):
        clock[0] = time
        sink.write(report(step))
        text = path.read_text() if path.exists() else ""
        shown.append([*re.findall(r"up to step (\d+)", text)[:1]])
    assert shown == [[], [], ["2"], ["2"], ["4"]]
    sink.write(report(5))
    sink.close()
    assert "up to step 5" in path.read_text(), "as it ended"


def test_a_callback_leaves_it_open_with_all_reports_on_the_page(tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    sink = HtmlSink(path)
    (kept,) = borrowed([sink], "Callback")
    kept.write(report(0))
    kept.write(report(1))
    assert not path.exists()
    kept.close()
    assert "up to step 1" in path.read_text()
    kept.write(report(2))
    sink.close()
    assert "up to step 2" in path.read_text()


@pytest.mark.usefixtures("at_once")
def test_a_page_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.html"
    sink = HtmlSink(path)
    sink.write(report(0))
    before = path.read_text()

    def fails(self: Path, target: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match="full"):
        sink.write(report(1))
    assert path.read_text() == before
    assert names(tmp_path) == FILES


@pytest.mark.usefixtures("at_once")
def test_alarms_are_on_the_page_until_the_end(tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    sink = HtmlSink(path)
    sink.write(replace(report(0), alarms=(Alarm("update_ratio > <1", "a", 2.0, 0.25),)))
    assert "a: update_ratio &gt; &lt;1: 2 ± 0.2 (step 0)" in path.read_text()
    sink.write(replace(report(50), alarms=(Alarm("update_ratio > <1", "a", 3.0),)))
    sink.write(report(100))
    sink.close()
    text = path.read_text()
    assert "a: update_ratio &gt; &lt;1: 3 (step 50; 2 times since step 0)" in text
    assert text.count("update_ratio &gt;") == 1


def test_a_training_that_goes_on_from_a_checkpoint_replaces_what_came_after_it() -> None:
    steps = (0, 4, 8, 12, 6, 10)
    found = running(*(report(step, losses={step: float(step)}) for step in steps))
    assert [one.step for one in found.reports] == [0, 4, 6, 10]
    assert found.record().steps_of_losses == (0, 4, 6, 10) and found.count == 4


def test_what_lies_beside_the_page_says_the_same(tmp_path: Path) -> None:
    from adiv_monitor.audit.report import AuditReport

    layers = {f"layer{i}": reading(update_ratio=0.1) for i in range(5)}
    layers["slow"] = reading(update_ratio=1e-5)
    sink = HtmlSink(tmp_path / "run.html")
    for step in (0, 1):
        sink.write(report(step, layers=layers, losses={step: 2.0 - step}))
    sink.close()
    found = AuditReport.from_json((tmp_path / "run.json").read_text())
    assert found.record.reports[-1].layers == layers
    assert dict(zip(found.record.steps_of_losses, found.record.losses, strict=True)) == {
        0: 2.0,
        1: 1.0,
    }
    assert not found.record.is_audited
    assert found.verdict in (tmp_path / "run.json").read_text()
    text = (tmp_path / "run.md").read_text()
    assert found.verdict.removesuffix(".") in text and "`slow`" in text
    assert "reports can't tell; to find out, run `adiv-audit`" in text


@pytest.mark.parametrize("name", ["run.json", "run.md"])
def test_no_file_of_somebody_else_is_replaced_beside_the_page(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"mine": 1}')
    with pytest.raises(FileExistsError, match=f"{name}, which it did not write"):
        HtmlSink(tmp_path / "run.html")
    (tmp_path / name).unlink()
    for _ in range(2):  # the sink's own pages are replaced
        sink = HtmlSink(tmp_path / "run.html")
        sink.write(report())
        sink.close()
    assert names(tmp_path) == FILES
