"""Event files of a run, as TensorBoard itself reads and shows them."""

import json
import math
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import pytest
from example_reports import LAYERS, reading, report

from adiv_monitor.report import MEASURES, QUANTILE_LEVELS, StepReport
from adiv_monitor.sinks import TensorBoardSink
from adiv_monitor.sinks.scalars import DEFAULT_MEASURES

pytest.importorskip("tensorboard")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.util.tensor_util import make_ndarray
from torch.utils.tensorboard import SummaryWriter

ATTENTION = "block.0.attention.q_proj"


def events(log_dir: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(log_dir), size_guidance={"tensors": 0, "histograms": 0})
    return accumulator.Reload()


def write(log_dir: Path, *reports: StepReport, **options: Any) -> EventAccumulator:
    sink = TensorBoardSink(log_dir, **options)
    for one in reports:
        sink.write(one)
    sink.close()
    return events(log_dir)


def texts(accumulator: EventAccumulator, tag: str) -> list[tuple[int, str]]:
    return [
        (event.step, make_ndarray(event.tensor_proto).item().decode())
        for event in accumulator.Tensors(f"{tag}/text_summary")
    ]


def test_scalars_of_every_layer_and_of_the_summary(tmp_path: Path) -> None:
    reports = [report(0), report(50)]
    found = write(tmp_path, *reports, scalars="all")
    for layer in LAYERS:
        per_layer = [tag for tag in found.Tags()["scalars"] if tag.endswith(f"/{layer}")]
        assert per_layer == [f"adiv.{m}/{layer}" for m in DEFAULT_MEASURES if m in MEASURES]
    (coverage, _) = found.Scalars("adiv.summary/coverage")
    assert coverage.value == 0.875
    values = [(e.step, e.value) for e in found.Scalars(f"adiv.update_cosine/{ATTENTION}")]
    assert values == [
        (r.step, pytest.approx(r.layers[ATTENTION].update_cosine, rel=1e-6)) for r in reports
    ]
    for end in ("min", "median", "max"):
        (first, _) = found.Scalars(f"adiv.summary/scale_cv_{end}")
        expected = getattr(reports[0].summary()["scale_cv"], end)
        assert first.value == pytest.approx(expected, rel=1e-6)


def test_no_direction_is_written_as_nan_and_not_taken_not_at_all(tmp_path: Path) -> None:
    layers = {"a": reading(update_cosine=math.nan, scale_cv=None)}
    found = write(tmp_path, report(layers=layers), scalars="all")
    (event,) = found.Scalars("adiv.update_cosine/a")
    assert math.isnan(event.value)
    assert "adiv.scale_cv/a" not in found.Tags()["scalars"]
    assert "adiv.summary/update_cosine_min" not in found.Tags()["scalars"]


def test_histogram_buckets_lie_between_neighbouring_quantiles(tmp_path: Path) -> None:
    found = write(tmp_path, report())
    layer = report().layers[ATTENTION]
    rows = 1024 - 24  # rows with a gradient
    for tag, quantiles in (
        ("row_scale", layer.scale_quantiles),
        ("row_cosine", layer.row_cosine_quantiles),
    ):
        (event,) = found.Histograms(f"adiv.{tag}/{ATTENTION}")
        histogram = event.histogram_value
        assert (histogram.min, histogram.max, histogram.num) == (quantiles[0], quantiles[-1], rows)
        assert list(histogram.bucket_limit) == list(quantiles[1:])
        assert list(histogram.bucket) == [rows / 32] * 32


def test_histogram_moments_are_those_of_the_distribution(tmp_path: Path) -> None:
    """Quantiles taken as a uniform distribution of levels have mean 1/2 and mean square 1/3."""
    found = write(tmp_path, report(layers={"a": reading(scale_quantiles=QUANTILE_LEVELS)}))
    (event,) = found.Histograms("adiv.row_scale/a")
    assert event.histogram_value.sum == pytest.approx(1000 / 2)
    assert event.histogram_value.sum_squares == pytest.approx(1000 / 3, rel=1e-3)


@pytest.mark.parametrize("value", [2.0, 0.0])
def test_equal_rows_make_one_peak(tmp_path: Path, value: float) -> None:
    found = write(tmp_path, report(layers={"a": reading(scale_quantiles=(value,) * 33)}))
    (event,) = found.Histograms("adiv.row_scale/a")
    assert set(event.histogram_value.bucket_limit) == {value}
    assert sum(event.histogram_value.bucket) == 1000
    (compressed,) = found.CompressedHistograms("adiv.row_scale/a")
    assert {point for _, point in compressed.compressed_histogram_values} == {value}


def test_rounding_is_not_shown_as_a_distribution(tmp_path: Path) -> None:
    quantiles = tuple(0.9999999 + 2e-7 * level for level in QUANTILE_LEVELS)
    found = write(tmp_path, report(layers={"a": reading(scale_quantiles=quantiles)}))
    (event,) = found.Histograms("adiv.row_scale/a")
    assert set(event.histogram_value.bucket_limit) == {1.0}


@pytest.mark.parametrize("quantiles", [(math.nan,) * 33, (*QUANTILE_LEVELS[:-1], math.inf), ()])
def test_no_histogram_without_numbers(tmp_path: Path, quantiles: tuple[float, ...]) -> None:
    found = write(tmp_path, report(layers={"a": reading(row_cosine_quantiles=quantiles)}))
    assert found.Tags()["histograms"] == ["adiv.row_scale/a"]


def test_histograms_can_be_left_out(tmp_path: Path) -> None:
    assert write(tmp_path, report(), histograms=False).Tags()["histograms"] == []


def test_text_names_the_worst_layers(tmp_path: Path) -> None:
    layers = {
        "low": reading(update_cosine=0.1, scale_cv=0.5, scale_mean=3.0, projection_cosine=1.0),
        "high": reading(update_cosine=0.9, scale_cv=2.0, scale_mean=70.0, projection_cosine=0.9999),
    }
    found = write(tmp_path, report(4, layers=layers))
    ((step, text),) = texts(found, "adiv.summary/worst_layers")
    assert step == 4
    assert "- Cosine of the step: 0.100 in `low`" in text
    assert "- Spread of the row scales: 2.000 in `high`" in text
    assert "- Row scale, mean, lowest: 3.000 in `low`\n" in text
    assert "- Row scale, mean, highest: 70.000 in `high`\n" in text
    assert "projection" not in text, "as good as can be"


def test_text_names_no_worst_layer_that_the_errors_do_not_tell(tmp_path: Path) -> None:
    cosines = {"a": 0.1, "b": 0.12, "c": 0.11, "d": 0.13, "e": 0.9}
    layers = {
        layer: reading(
            update_cosine=cosine,
            scale_mean=3.0,
            harmed_fraction=cosine,
            standard_error={"update_cosine": 0.02, "harmed_fraction": 0.0123},
        )
        for layer, cosine in cosines.items()
    }
    ((_, text),) = texts(write(tmp_path, report(4, layers=layers)), "adiv.summary/worst_layers")
    assert "- Cosine of the step: 0.12 in one of `a`, `c`, `b` and 1 more" in text
    assert "- Harmed rows: 0.90 in `e`" in text
    assert "Row scale" not in text, "nothing to be told"


def test_text_of_what_is_missing_only_when_it_changes(tmp_path: Path) -> None:
    found = write(
        tmp_path, report(0), report(1), report(2, unsupported={}, unmeasured={}, notes=())
    )
    not_measured = texts(found, "adiv.summary/not_measured")
    assert [step for step, _ in not_measured] == [0, 2]
    assert not_measured[0][1].startswith("87.5% of the trained parameters are in measured layers.")
    assert "- `decoder.lstm` (`weight_ih_l0`, `weight_hh_l0`," in not_measured[0][1]
    assert "12,544 elements): torch.nn.modules.rnn.LSTM: no rule" in not_measured[0][1]
    notes = [(0, f"- {report().notes[0]}"), (2, "none any more")]
    assert texts(found, "adiv.summary/notes") == notes


def test_names_of_classes_are_no_markup(tmp_path: Path) -> None:
    reason = "__main__.make.<locals>.Linear: no rule"
    unsupported = {"my_net.fc": reason}
    one = report(unsupported=unsupported, unmeasured={"my_net.fc._w_": 3}, notes=(reason,))
    found = write(tmp_path, one)
    escaped = r"\_\_main\_\_.make.&lt;locals&gt;.Linear: no rule"
    ((_, text),) = texts(found, "adiv.summary/not_measured")
    assert text.splitlines()[-1] == f"- `my_net.fc` (`_w_`: 3 elements): {escaped}"
    assert texts(found, "adiv.summary/notes") == [(0, f"- {escaped}")]


def test_no_text_about_no_notes(tmp_path: Path) -> None:
    tags = write(tmp_path, report(notes=())).Tags()["tensors"]
    assert "adiv.summary/worst_layers/text_summary" in tags
    assert "adiv.summary/notes/text_summary" not in tags


def layout(found: EventAccumulator) -> dict[str, list[tuple[str, str, str, str]]]:
    """Return category → title of each chart, and its tags: value, lower, upper."""
    event = found.Tensors("custom_scalars__config__")[-1]
    categories = Layout.FromString(make_ndarray(event.tensor_proto).item()).category
    return {
        category.title: [
            (chart.title, series.value, series.lower, series.upper)
            for chart in category.chart
            for series in chart.margin.series
        ]
        for category in categories
    }


def test_a_chart_is_the_median_between_smallest_and_largest(tmp_path: Path) -> None:
    measures = ["scale_cv", "row_cosine_p50"]
    found = write(tmp_path, report(0), report(1), measures=measures)
    assert len(found.Tensors("custom_scalars__config__")) == 1
    (charts,) = layout(found).values()
    assert charts == [
        (m, *(f"adiv.summary/{m}_{end}" for end in ("median", "min", "max")))
        for m in reversed(measures)
    ]
    assert {tag for chart in charts for tag in chart[1:]} <= set(found.Tags()["scalars"])


def test_a_writer_of_the_users_stays_open(tmp_path: Path) -> None:
    writer = SummaryWriter(str(tmp_path))
    for name in ("generator", "critic"):
        sink = TensorBoardSink(writer, name=name)
        sink.write(report())
        sink.close()
    writer.add_scalar("loss", 1.0, 0)
    writer.close()
    tags = events(tmp_path).Tags()["scalars"]
    assert "loss" in tags
    assert len(layout(events(tmp_path))) == 2, "of both"
    pictures = events(tmp_path).Tags()["images"]
    assert {"adiv/overview/generator", "adiv/per_layer/descent/critic"} <= set(pictures)
    assert {"adiv.summary.generator/descent_max", "adiv.summary.critic/descent_max"} <= set(tags)
    assert len(list(tmp_path.iterdir())) == 1, "no second event file"


def test_a_target_of_another_kind_is_refused() -> None:
    with pytest.raises(TypeError, match=r"got a builtins\.int, expected a folder or a torch"):
        TensorBoardSink(3)  # type: ignore[arg-type]


# A real server and a real browser


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of a TensorBoard with one run of three reports, one NaN among them."""
    log_dir = tmp_path_factory.mktemp("logs")
    sink = TensorBoardSink(log_dir / "run")
    for step in (0, 50, 100):
        layers = dict(report(step).layers)
        layers["head"] = reading(update_cosine=math.nan if step == 50 else 0.5)
        sink.write(report(step, layers=layers))
    sink.close()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(log_dir)]
    server = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_until_loaded(address)
        yield address
    finally:
        server.terminate()
        server.wait()


def _wait_until_loaded(address: str) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            found = _json(f"{address}/data/plugin/text/tags")
        except OSError:
            found = {}
        if found.get("run"):
            return
        time.sleep(0.2)
    pytest.fail(f"{address}: TensorBoard had not read the run after 60 s")


def _json(url: str) -> Any:
    with urlopen(url) as answer:
        return json.load(answer)


def test_each_chart_has_its_three_lines(board: str) -> None:
    (category,) = _json(f"{board}/data/plugin/custom_scalars/layout")["category"]
    assert [chart["title"] for chart in category["chart"]][-1] == "update_ratio"
    for chart in category["chart"]:
        (series,) = chart["margin"]["series"]
        for tag in series.values():
            url = f"{board}/data/plugin/custom_scalars/scalars?run=run&tag={quote(tag)}"
            assert list(_json(url)["tag_to_events"]) == [tag]


def test_the_server_has_the_pictures(board: str) -> None:
    tags = _json(f"{board}/data/plugin/images/tags")["run"]
    assert {"adiv/overview", "adiv/per_layer/update_ratio"} <= set(tags)
    url = f"{board}/data/plugin/images/images?run=run&tag={quote('adiv/overview')}&sample=0"
    assert _json(url)[-1]["step"] == 100


def test_a_chart_says_what_healthy_layers_read(board: str) -> None:
    tags = _json(f"{board}/data/plugin/scalars/tags")["run"]
    said = tags["adiv.summary/update_ratio_min"]["description"]
    assert "Healthy layers read 0.009 to 0.7" in said
    assert tags["adiv.summary/coverage"]["description"] == ""
    assert all(tags[t]["description"] for t in tags if t.startswith("adiv.update_ratio/"))


def test_the_server_answers_nan_with_a_word_its_charts_know(board: str) -> None:
    url = f"{board}/data/plugin/scalars/scalars?run=run&tag={quote('adiv.update_cosine/head')}"
    assert [value for _, _, value in _json(url)] == [0.5, "NaN", 0.5]


@pytest.mark.slow
def test_a_browser_draws_the_run(board: str, tmp_path: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("chromium is not installed")
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--disable-background-networking", f"--user-data-dir={tmp_path}"]
    command += ["--window-size=1400,1800", "--virtual-time-budget=20000", f"{board}/#timeseries"]
    page = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "adiv/overview" in page
    assert "adiv.descent" in page
