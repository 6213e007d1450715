"""trackio and W&B get scalars, pictures, findings in words, and an alert for each new finding."""

import random
import sqlite3
import sys
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from example_reports import report

from adiv_monitor.diagnosis.readings import FEWEST_REPORTS
from adiv_monitor.sinks import Sink, TrackerSink
from adiv_monitor.sinks.scalars import board_scalars


class Level(Enum):
    INFO, WARN, ERROR = "info", "warn", "error"


class Product(SimpleNamespace):
    """A stand-in with the functions of trackio that the sink calls."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, Any], int | None]] = []
        self.alerts: list[tuple[str, str, Level]] = []
        super().__init__(AlertLevel=Level, Image=lambda picture: picture, Markdown=str)

    def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.logged.append((metrics, step))

    def alert(self, title: str, text: str, level: Level) -> None:
        self.alerts.append((title, text, level))


@pytest.fixture
def product(monkeypatch: pytest.MonkeyPatch) -> Product:
    found = Product()
    monkeypatch.setitem(sys.modules, "trackio", found)
    return found


def test_scalars_pictures_and_findings_are_logged(product: Product) -> None:
    sink = TrackerSink("trackio")
    assert isinstance(sink, Sink)
    steps = range(0, 10 * FEWEST_REPORTS, 10)
    for step in steps:
        sink.write(report(step))
    sink.close()
    sink.close()
    *scalars, (shown, at) = product.logged
    assert [step for _, step in scalars] == [*steps] and at == steps[-1]
    assert scalars[0][0].keys() == board_scalars(report(0), None, "few").keys()
    assert shown["adiv.summary/findings"].startswith("### ")
    assert shown["adiv/overview"].size > (100, 100)


def test_each_finding_alerts_once_by_its_strength(product: Product) -> None:
    sink = TrackerSink("trackio", scalars="none")
    for step in range(0, 10 * FEWEST_REPORTS, 10):
        sink.write(report(step))
        sink.flush()
    findings = sink.running.findings()
    assert findings
    levels = {"act": Level.ERROR, "watch": Level.WARN, "note": Level.INFO}
    told = {title: level for title, _, level in product.alerts}  # the last of each
    assert {f.name: levels[f.strength] for f in findings}.items() <= told.items()
    assert len({(title, level) for title, _, level in product.alerts}) == len(product.alerts)


def test_another_product_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 'trackio' or 'wandb'"):
        TrackerSink("tensorboard")


def test_beside_a_logger_its_own_count_goes_on(product: Product) -> None:
    """A Trainer's callback logs without a step: a step of ours would move its count."""
    sink = TrackerSink("trackio", scalars="none")
    sink.write(report(70))
    sink.close()
    assert [step for _, step in product.logged] == [None]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_trackio_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own database holds the scalars, a picture, the findings and the alerts."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))  # it is read by the import
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)
    trackio = pytest.importorskip("trackio", reason='pip install "adiv-monitor[products]"')
    trackio.init(project="p", name="r", embed=False)
    before = random.getstate()
    sink = TrackerSink("trackio")
    for step in range(0, 10 * FEWEST_REPORTS, 10):
        sink.write(report(step))
    sink.close()
    assert random.getstate() == before
    trackio.finish()
    (file,) = tmp_path.glob("*.db")
    with sqlite3.connect(file) as base:
        metrics = [str(row[0]) for row in base.execute("select metrics from metrics")]
        alerts = base.execute("select title, level from alerts").fetchall()
    base.close()
    assert sum('"adiv.summary/coverage"' in row for row in metrics) == FEWEST_REPORTS
    assert any("trackio.image" in row and "trackio.markdown" in row for row in metrics)
    assert {level for _, level in alerts} <= {"info", "warn", "error"} and alerts
