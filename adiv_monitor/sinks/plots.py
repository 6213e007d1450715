"""The pictures of dashboards as Matplotlib figures, for notebooks and files."""

from typing import TYPE_CHECKING

from adiv_monitor.diagnosis.finding import red_layers
from adiv_monitor.diagnosis.health import HEALTH, MEASURE_TITLES
from adiv_monitor.diagnosis.running import Running
from adiv_monitor.files import needs
from adiv_monitor.pictures.grid import grid
from adiv_monitor.pictures.heat import heat_picture
from adiv_monitor.pictures.picture import Picture
from adiv_monitor.report import StepReport
from adiv_monitor.sinks.board import overview

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def run_figure(running: Running, measure: str | None = None) -> "Figure":
    """Draw a training so far: one measure of its layers by steps, or the overview.

    Args:
        running: the training so far.
        measure: measure to draw; None: the overview.

    Raises:
        ImportError: the package matplotlib is missing.
        ValueError: the measure is unknown, or there is nothing to draw.
    """
    if measure is not None and measure not in MEASURE_TITLES:
        some = ", ".join(HEALTH)
        raise ValueError(
            f"plot({measure!r}): expected a measure of the reports ({some}, …), or None"
        )
    if not running.count:
        raise ValueError("plot: there is no report yet; one is complete when the next step begins")
    needs("plot", ["matplotlib"])
    record, findings = running.record(), running.findings()
    if measure is None:
        return _figure(overview(record, findings), "layers in reports")
    found = grid(record, measure)
    named = red_layers(findings)
    return _figure(found and heat_picture(found, named), f"layers with {measure} in reports")


def step_figure(report: StepReport) -> "Figure":
    """Draw the overview of a training of which this report alone is known; errors as above."""
    running = Running()
    running.add(report)
    return run_figure(running)


def _figure(picture: Picture | None, what: str) -> "Figure":
    from adiv_monitor.pictures.figure import PictureFigure

    if picture is None:
        raise ValueError(f"plot: there are no {what}")
    return PictureFigure(picture.png())
