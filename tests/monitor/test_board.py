"""Pictures and findings of a whole training, as dashboards show them and as figures."""

import io
import math
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from audited import batches, cross_entropy, seen, sgd
from example_reports import reading, report, running
from matplotlib.figure import Figure
from matplotlib.image import imread
from pixels import share
from torch import nn

from adiv_monitor import Monitor, StepReport
from adiv_monitor.diagnosis import diagnose
from adiv_monitor.diagnosis.faults import FAULTS
from adiv_monitor.diagnosis.health import GRADIENT, value_of
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.diagnosis.running import MOST_REPORTS
from adiv_monitor.pictures.grid import grid
from adiv_monitor.pictures.heat import heat_picture
from adiv_monitor.report import LayerReading
from adiv_monitor.sinks import MemorySink, TensorBoardSink
from adiv_monitor.sinks import board as board_module
from adiv_monitor.sinks import course as course_module
from adiv_monitor.sinks.board import NO_PICTURES, BoardSink, findings_text, overview, pictures
from adiv_monitor.sinks.plots import run_figure

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def vanishing() -> Record:
    """Return a network in whose middle the gradient vanishes."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)), nn.Linear(6, 3))
    with torch.no_grad():
        model[2].weight.mul_(1e-5)
    return seen(model, optimizer=sgd(0.01), loss=cross_entropy, steps=14)


# Kept reports


@pytest.mark.parametrize("count", [2, 101, 1000])
def test_the_beginning_the_end_and_every_so_many_are_kept(count: int) -> None:
    lean = report(layers={"a": reading()})
    reports = running(*(report(i, layers=lean.layers) for i in range(count))).reports
    steps = [report.step for report in reports]
    assert len(steps) <= MOST_REPORTS
    assert steps[:2] == list(range(min(count, 2)))
    assert steps[-1] == count - 1
    ways = {b - a for a, b in pairwise(steps[2:-1])}
    assert len(ways) <= 1, "evenly"
    assert len(steps) >= min(count, MOST_REPORTS // 2)


# Findings


def test_findings_are_the_audits_of_the_same_run(vanishing: Record) -> None:
    """Findings that need only reports have the audit's name, layers, evidence and advice.

    Excepted are numbers that depend on the optimizer, which reports do not name.
    """
    record = vanishing
    ours = {f.name: f for f in running(*record.reports).findings()}
    audits = {f.name: f for f in diagnose(record)}
    assert "vanishing" in ours
    assert set(ours) <= set(audits)
    for name, finding in ours.items():
        assert finding.layers == audits[name].layers
        assert finding.evidence == audits[name].evidence
        if FAULTS[name].about == "symptom":  # give no advice beside their cause
            continue
        for advice, audits_own in zip(finding.advice, audits[name].advice, strict=True):
            assert advice.fix == audits_own.fix
            assert audits_own.text.startswith(advice.text)
            assert advice.text == audits_own.text or advice.fix == "rate-per-layer"


def test_a_layer_that_dies_is_found_with_what_lies_behind_it() -> None:
    """The layer before dead units is found; the audit, which sees activations, names the units."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    with torch.no_grad():
        model[0].bias.fill_(-100)
    record = seen(model, optimizer=sgd(), loss=cross_entropy, steps=12)
    (ours,) = [f for f in running(*record.reports).findings() if f.name == "dead-units"]
    (audits,) = [f for f in diagnose(record) if f.name == "dead-units"]
    assert ours.strength == audits.strength == "act"
    assert ours.advice == audits.advice
    assert ours.layers == ("0",) and audits.layers == ("1",), "maps alone have readings"
    assert "units between them are dead" in ours.summary


@pytest.mark.parametrize("since", [0, 3])
def test_no_gradient_at_the_end_or_at_all_is_no_dead_layer(since: int) -> None:
    """A satisfied loss, such as a hinge, or a branch that starts at zero is no dead layer."""
    well = reading(update_ratio=0.1)
    idle = replace(well, idle_share=1.0)
    content = [report(s, layers={"a": well if s < since else idle} | {"b": idle}) for s in range(8)]
    begins = [report(s, layers={"a": well if s else idle, "b": well}) for s in range(8)]
    for steps in (content, begins):
        assert "dead-units" not in {f.name for f in running(*steps).findings()}


def test_the_text_says_what_where_and_what_to_do(vanishing: Record) -> None:
    found = running(*vanishing.reports)
    text = findings_text(found.findings(), found.record())
    assert "**Vanishing gradients (watch, `vanishing`, since step 0)**" in text
    assert "- Fix: add layer normalisation in front of all layers" in text
    assert "`adiv-audit`" in text


# Pictures


BLUE, RED, GREY, BLACK = (8, 81, 156), (179, 0, 0), (227, 235, 223), (0, 0, 0)


@pytest.mark.parametrize(
    ("value", "colour"), [(1e-4, BLUE), (1e-7, BLUE), (0.02, GREY), (0.5, GREY), (20.0, RED)]
)
def test_a_cell_has_the_colour_of_its_health(value: float, colour: tuple[int, int, int]) -> None:
    layers = {f"layer{i}": reading(update_ratio=value if i < 3 else 0.1) for i in range(6)}
    found = grid(
        running(report(0, layers=layers), report(1, layers=layers)).record(), "update_ratio"
    )
    cells = 0.3  # at least this share of the picture: half of the grid
    assert share(heat_picture(found), colour) > 0.7 * cells / 2


def test_the_gradient_that_arrives_is_that_of_the_last_layer_at_the_end() -> None:
    """‖G‖² = ⟨d, G⟩ / (⟨d, G⟩ / ‖G‖²) = descent / effective_lr."""
    layers = {
        "first": reading(descent=0.04, effective_lr=4.0),
        "last": reading(descent=0.09, effective_lr=0.01),
    }
    one = report(layers=layers)
    found = value_of(running(one).record(), one, GRADIENT)
    assert found == {"first": pytest.approx(0.1 / 3), "last": 1.0}


# When pictures are drawn, and at what cost


def drawings(monkeypatch: pytest.MonkeyPatch, reports: int) -> list[int]:
    """Return the reports out of `count` at which pictures are drawn if drawing takes no time."""
    monkeypatch.setattr(course_module, "_PATIENCE", 0)
    drawn: list[int] = []

    class Counts(BoardSink):
        def show(self) -> None:
            drawn.append(self.count - 1)

    board = Counts(None, "few", "")
    for i in range(reports):
        board.write(report(i, layers={}))
    return drawn


def test_pictures_are_drawn_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = drawings(monkeypatch, 200)
    assert drawn[:3] == [0, 1, 2]
    ways = [b - a for a, b in pairwise(drawn)]
    assert ways == sorted(ways)
    assert drawings(monkeypatch, 2000)[: len(drawn)] == drawn


def test_a_short_run_is_drawn_at_its_end_alone(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    for step in range(5):
        sink.write(report(step))
    assert not sink.shown
    sink.close()
    assert sink.shown == 5


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize(
    ("faulty", "colour"),
    [
        (reading(idle_share=1.0, update_ratio=0.1), RED),
        (reading(idle_share=0.0, update_ratio=math.inf), BLACK),
        (reading(idle_share=0.0, update_ratio=0.1, non_finite=("gradient",)), BLACK),
    ],
)
def test_one_faulty_layer_of_300_is_seen_in_the_overview(
    faulty: LayerReading, colour: tuple[int, int, int]
) -> None:
    """A second faulty layer is visible, although it has less than a row of pixels."""
    well = reading(idle_share=0.0, update_ratio=0.1)
    layers = {f"layer{i}": well for i in range(1, 300)} | {"layer0": faulty}
    shares = []
    for one in (faulty, well):
        some = layers | {"layer151": one}
        found = running(*(report(step, layers=some) for step in range(3)))
        shares.append(share(pictures(found.record(), ())["adiv/overview"], colour))
    assert shares[0] > shares[1] + 5e-4


def test_without_matplotlib_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setattr(board_module, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match=r"need matplotlib \(pip install .adiv-monitor\[audit\]"):
        sink = TensorBoardSink(tmp_path)
    sink.write(report())
    sink.close()
    found = EventAccumulator(str(tmp_path)).Reload()
    assert not found.Tags()["images"]
    (event,) = found.Tensors("adiv.summary/no_pictures/text_summary")
    assert NO_PICTURES in str(event.tensor_proto.string_val)
    assert "adiv.summary/findings/text_summary" in found.Tags()["tensors"]


# Weights that begin at zero


class Adapted(nn.Linear):
    """A frozen layer with a low-rank update whose second factor begins at zero (LoRA)."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.weight.requires_grad_(False)
        self.bias.requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.up(self.down(x))


def found_in(model: nn.Module, rate: float) -> list[str]:
    """Return what the reports of a run say, the loss of which is known."""
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=rate)
    sink = MemorySink()
    with Monitor(model, optimizer, every_n_steps=4, sinks=[sink]) as monitor:
        for batch in batches(24):
            optimizer.zero_grad()
            loss = cross_entropy(model, batch)
            monitor.log_loss(loss)
            loss.backward()
            optimizer.step()
    found = running(*sink.reports)
    for each in sink.reports:
        found.add_losses(each.losses)
    return [finding.name for finding in found.findings()]


def test_low_rank_updates_do_not_vanish_because_they_begin_at_zero() -> None:
    torch.manual_seed(0)
    layers = [m for _ in range(3) for m in (Adapted(6), nn.Tanh())]
    assert "vanishing" not in found_in(nn.Sequential(*layers, Adapted(6)), 1e-4)


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
