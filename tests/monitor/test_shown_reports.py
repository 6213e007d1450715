"""A single report: printed, in a notebook, and on one line."""

import html
import io
import math
import re

import pytest
from example_reports import attention, reading, report

from adiv_monitor.report import Alarm, LayerReading, StepReport
from adiv_monitor.sinks import TableSink
from adiv_monitor.sinks.table import MOST_LINES, MOST_ROWS


def deep(layers: int = 300) -> StepReport:
    """Return a report of similar layers, but two extreme ones and a non-finite one, all alarmed."""
    readings = {f"blocks.{i}.linear": reading(1) for i in range(layers)}
    readings["blocks.200.linear"] = reading(1, update_cosine=-0.75)
    readings["blocks.150.linear"] = reading(1, update_cosine=-0.5)
    readings["blocks.250.linear"] = reading(
        1, update_cosine=math.nan, non_finite=("update",), gradient_cosine=math.nan
    )
    alarms = tuple(Alarm("update_cosine < 1", path, 0.5) for path in readings)
    return report(layers=readings, alarms=alarms, attention={"attention": attention()})


def test_print_shows_the_table_of_the_sink() -> None:
    one = report(3, attention={"block.0": attention()}, losses={3: 1.25})
    file = io.StringIO()
    TableSink(file=file).write(one)
    printed = [line.rstrip() for line in file.getvalue().splitlines()]
    assert str(one).splitlines() == printed
    assert printed[0] == "step 3 · 87.5% of the trained parameters measured · loss 1.250"
    assert "block.0.mlp[wide]" in str(one) and "*" in str(one) and "\x1b" not in str(one)


@pytest.mark.parametrize("show", [str, StepReport._repr_html_])
def test_hundreds_of_layers_are_no_flood(show) -> None:  # type: ignore[no-untyped-def]
    text = html.unescape(re.sub(r"<[^>]*>", " ", show(deep())))
    names = re.findall(r"blocks\.\d+\.linear(?=\s)", text)
    assert len(names) == MOST_ROWS
    assert names == sorted(names, key=lambda name: int(name.split(".")[1])), "the network's order"
    for place in (150, 200, 250):
        assert f"blocks.{place}.linear" in names, "the bad ends"
    assert "… 270 more of 300" in text
    assert text.count("alarm:") == MOST_LINES and "… 290 more alarms" in text
    assert "-0.750*" in text and "NaN: not finite" in text


def test_the_table_tells_worst_not_finite_no_direction_and_not_taken_apart() -> None:
    layers: dict[str, LayerReading] = {
        "good": reading(1, update_cosine=0.75),
        "bad": reading(1, update_cosine=-0.75),
        "still": reading(1, update_cosine=math.nan),
        "idle": reading(
            1, update_cosine=math.nan, parameter_cosine=math.nan, rows_without_gradient=1024
        ),
        "broken": reading(1, update_cosine=math.nan, non_finite=("gradient",)),
        "absent": reading(1, update_cosine=None),
    }
    file = io.StringIO()
    TableSink(["parameter_cosine", "update_cosine"], file).write(report(layers=layers))
    assert "idle: none of the sampled rows has a gradient" in file.getvalue()
    rows = {line.split()[0]: line.split()[4:] for line in file.getvalue().splitlines() if line}
    shown = {path: rows[path][1:] for path in layers}
    assert [*shown.values()] == [["0.750"], ["-0.750*"], ["–"], ["idle"], ["NaN"], []]
    assert rows["idle"][0] == "–", "the parameters' cosine needs no rows"
    text = report(layers=layers)._repr_html_()
    assert "<b>-0.750*</b>" in text and "<b>0.750" not in text


def test_names_are_no_markup() -> None:
    layers = {"<img src=x>": reading(), 'a"b': reading(2), "\x1b[31m": reading(3), "": reading(4)}
    text = report(layers=layers, notes=("<script>alert(1)</script>",))._repr_html_()
    assert set(re.findall(r"<[^>]*>", text)) == {
        '<pre style="overflow-x:auto">',
        "<b>",
        "</b>",
        "</pre>",
    }
    assert "&lt;img src=x&gt;" in text and "\x1b" not in text


def test_repr_is_one_line() -> None:
    assert repr(report(50)) == "<StepReport: step 50, 4 layers, coverage 0.875>"
    broken = {**report().layers, "head": reading(non_finite=("update",))}
    odd = report(7, layers=broken, losses={7: 0.5}, alarms=(Alarm("x", "head"),))
    assert repr(odd) == (
        "<StepReport: step 7, 4 layers, coverage 0.875, loss 0.5, "
        "update not finite in 'head', 1 alarm>"
    )
    assert len(repr(deep())) < 120
