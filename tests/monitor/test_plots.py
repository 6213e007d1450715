"""Figures of reports: returned but not shown, saved anywhere, and the same as dashboards draw."""

import io
import sys
from pathlib import Path

import pytest
import torch
from example_reports import reading, report, running

from adiv_monitor import Monitor, StepReport
from adiv_monitor.sinks.board import overview

pytest.importorskip("matplotlib")
from matplotlib.figure import Figure
from matplotlib.image import imread

from adiv_monitor.pictures.grid import grid
from adiv_monitor.pictures.heat import heat_picture
from adiv_monitor.sinks.plots import run_figure


def pixels(png: bytes):  # type: ignore[no-untyped-def]
    return (imread(io.BytesIO(png), format="png")[..., :3] * 255).round()


def test_the_figure_is_the_picture_of_dashboards() -> None:
    run = running(*map(report, range(3)))
    record = run.record()
    front = overview(record, run.findings())
    named = {layer for finding in run.findings() for layer in finding.layers}
    ratios = grid(record, "update_ratio")
    assert front is not None and ratios is not None
    for measure, drawn in ((None, front), ("update_ratio", heat_picture(ratios, named))):
        shown = run_figure(run, measure)._repr_png_()  # type: ignore[attr-defined]
        assert (pixels(shown) == pixels(drawn.png())).all()


def test_a_monitor_draws_its_run(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, every_n_steps=1) as monitor:
        with pytest.raises(ValueError, match="no report yet"):
            monitor.plot()
        for _ in range(3):
            model(torch.ones(5, 3)).sum().backward()
            optimizer.step()
    figures = monitor.plot(), monitor.plot("update_ratio"), monitor.reports[0].plot()
    for figure, kind in zip(figures, ("png", "pdf", "svg"), strict=True):
        assert isinstance(figure, Figure)
        figure.savefig(tmp_path / f"x.{kind}")
        assert (tmp_path / f"x.{kind}").stat().st_size > 1000
    assert (
        "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()
    )


NOTHING_TO_DRAW = [
    ([report()], "update", "expected a measure of the reports"),
    ([], None, "no report yet"),
    ([report(layers={})], None, "no layers"),
    ([report(layers={"a": reading(update_ratio=None)})], "update_ratio", "no layers with update_r"),
]


@pytest.mark.parametrize(("reports", "measure", "said"), NOTHING_TO_DRAW)
def test_where_nothing_can_be_drawn_it_is_said_why(
    reports: list[StepReport], measure: str | None, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        run_figure(running(*reports), measure)


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for draw in (report().plot, lambda: run_figure(running(report()))):
        with pytest.raises(ImportError, match=r"plot needs .* pip install \"adiv-monitor\[audit\]"):
            draw()
