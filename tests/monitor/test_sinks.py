"""Sinks that need no dashboard: memory, JSON lines, table."""

import io
import json
import math
import os
import pickle
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from example_reports import LAYERS, reading, report

from adiv_monitor.report import MEASURES, REALISED_MEASURES, StepReport
from adiv_monitor.report.wording import not_measured
from adiv_monitor.sinks import HtmlSink, JsonlSink, MemorySink, TableSink, TensorBoardSink
from adiv_monitor.sinks.scalars import FRONT_MEASURES, board_scalars, summary_scalars

GOLDEN = Path(__file__).parent / "golden" / "table.txt"


def test_memory_as_a_data_frame_has_a_row_per_step_and_layer() -> None:
    pandas = pytest.importorskip("pandas")
    sink = MemorySink()
    assert sink.to_pandas().empty
    exact = {path: reading(i) for i, path in enumerate(LAYERS)}
    sampled = {**exact, "head": reading(9, standard_error={"update_cosine": 0.25})}
    sink.write(report(0, layers=exact))
    sink.write(report(50, layers=sampled))
    frame = sink.to_pandas()
    assert list(frame[["step", "layer"]].itertuples(index=False, name=None)) == [
        (step, layer) for step in (0, 50) for layer in LAYERS
    ]
    assert {*MEASURES, "loss", "learning_rate"} <= set(frame.columns)
    assert list(frame["update_cosine"]) == [
        r.update_cosine for layers in (exact, sampled) for r in layers.values()
    ]
    errors = frame["update_cosine_standard_error"]
    assert list(errors) == [0.0] * 7 + [0.25], "0 is exact, at every step"
    rows = [row for one in sink.reports for row in one.to_rows()]
    pandas.testing.assert_frame_equal(
        frame[list(pandas.DataFrame(rows))].iloc[4:], pandas.DataFrame(rows).iloc[4:]
    )


# JSON lines


def strict_lines(path: Path) -> list[dict[str, object]]:
    """Return all lines, parsed by a parser that accepts strict JSON only."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_jsonl_lines_hold_the_report(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "run.jsonl"
    sink = JsonlSink(path)
    sink.write(report(7))
    assert strict_lines(path) == [report(7).to_dict()], "readable before close"
    sink.close()


def test_jsonl_has_words_for_numbers_that_are_not_finite(tmp_path: Path) -> None:
    odd = reading(
        update_cosine=math.nan, effective_lr=math.inf, descent=-math.inf, attainable_cosine=None
    )
    sink = JsonlSink(tmp_path / "run.jsonl")
    sink.write(report(layers={"odd": odd}))
    sink.close()
    (line,) = strict_lines(tmp_path / "run.jsonl")
    layer = line["layers"]["odd"]  # type: ignore[index]
    assert layer["update_cosine"] is None
    assert (layer["effective_lr"], layer["descent"]) == ("Infinity", "-Infinity")
    assert "attainable_cosine" not in layer


@pytest.mark.parametrize("lines", [0, 2])
@pytest.mark.parametrize("torn", ['{"step": 3, "cov', '{"st'])
def test_jsonl_keeps_aside_what_is_no_line(tmp_path: Path, torn: str, lines: int) -> None:
    path = tmp_path / "run.jsonl"
    sink = JsonlSink(path)
    for step in range(lines):
        sink.write(report(step))
    sink.close()
    for again in (1, 2):
        with path.open("a") as file:
            file.write(torn)
        sink = JsonlSink(path)
        with pytest.warns(UserWarning, match=rf"run\.jsonl: .*{len(torn):,} bytes.*torn-{again}"):
            sink.write(report(7))
        sink.close()
        assert (tmp_path / f"run.jsonl.torn-{again}").read_text() == torn
    assert [line["step"] for line in strict_lines(path)] == [*range(lines), 7, 7]


@pytest.mark.parametrize(
    "content", [b"PK\x03\x04\0\0\0", b'{"step": 1}\nDear diary', b'{"step": 1}\n\0\0']
)
def test_jsonl_cuts_nothing_off_other_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a file of its own"):
        JsonlSink(path)
    assert path.read_bytes() == content and list(tmp_path.iterdir()) == [path]


def test_jsonl_touches_no_file_before_it_writes(tmp_path: Path) -> None:
    """A sink that does not write creates no file: every rank has one, and only one rank writes."""
    path = tmp_path / "new folder" / "run.jsonl"
    sink = JsonlSink(path)
    copied = pickle.loads(pickle.dumps(sink))
    assert not path.parent.exists()
    copied.write(report(0))
    torn = '{"step": 1, "cov'
    path.write_text(path.read_text() + torn)
    JsonlSink(path).close()
    assert path.read_text().endswith(torn), "whose line another process may be writing"
    copied.close()
    with pytest.warns(UserWarning, match="torn-1"):
        sink.write(report(1))
    sink.close()
    assert [line["step"] for line in strict_lines(path)] == [0, 1]


# Table


def printed(*reports: object, **options: object) -> str:
    file = io.StringIO()
    sink = TableSink(file=file, **options)  # type: ignore[arg-type]
    for one in reports:
        sink.write(one)  # type: ignore[arg-type]
    sink.close()
    return file.getvalue()


def test_table_is_the_golden_one() -> None:
    """`REWRITE_GOLDEN=1 pytest tests/monitor/test_sinks.py` accepts the present table."""
    layers = {path: reading(i) for i, path in enumerate(LAYERS)}
    layers["no.direction"] = reading(9, update_cosine=math.nan, gradient_cosine=None)
    layers["few.rows"] = reading(10, rows_seen=8, rows_total=8, effective_lr=1e-5, scale_mean=2e5)
    errors = {"update_cosine": 0.02, "effective_lr": 4e-5, "interference_ratio": 0.3}
    layers["sampled"] = reading(11, update_cosine=-0.013, standard_error=errors)
    text = printed(report(1200, layers=layers))
    if os.environ.get("REWRITE_GOLDEN"):
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def row(text: str, layer: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.split()[:1] == [layer])
    return line.split()


@pytest.mark.parametrize(
    ("ratios", "marked"),
    [
        ((0.02, 0.05, 0.3), ""),  # all are healthy
        ((0.02, 0.05, 3.0), "c"),
        ((0.001, 0.05, 3.0), "ac"),
        ((0.005, 0.05, 0.9), ""),  # outside by less than two standard errors
    ],
)
def test_both_ends_of_a_move_are_marked_outside_the_healthy_range(
    ratios: tuple[float, ...], marked: str
) -> None:
    errors = {"update_ratio": 0.003} if 0.9 not in ratios else {"update_ratio": 0.11}
    errors = {} if 0.001 in ratios else errors
    layers = {
        name: reading(update_ratio=ratio, standard_error=errors)
        for name, ratio in zip("abc", ratios, strict=True)
    }
    layers["gain"] = replace(reading(update_ratio=1e-6), kind="gain")  # not comparable
    text = printed(report(layers=layers), measures=["update_ratio"])
    assert "".join(name for name in layers if row(text, name)[-1].endswith("*")) == marked


@pytest.mark.parametrize(
    ("value", "error", "shown"),
    [
        (0.0431, 0.0, "0.043"),
        (0.0431, 0.012, "0.04"),
        (0.0468, 0.03, "0.05"),
        (48.31, 5.0, "48"),
        (1234.5, 300.0, "1200"),
        (7.44e-4, 0.0, "7.4e-04"),
        (2.34e5, 1.8e5, "2e+05"),
        (0.01, 0.012, "≈0"),
        (0.578, 0.06, "0.58"),
        (0.5, 0.5, "0.5"),
        (0.0, 0.0, "0.000"),
        (0.3, math.inf, "?"),
        (math.nan, 0.1, "–"),
        (math.inf, 0.0, "inf"),
    ],
)
def test_no_digit_that_the_error_makes_meaningless(value: float, error: float, shown: str) -> None:
    layers = {"a": reading(update_cosine=value, standard_error={"update_cosine": error})}
    assert row(printed(report(layers=layers), measures=["update_cosine"]), "a")[-1] == shown


def test_what_is_not_measured_is_said_once() -> None:
    idle = {"head": "no gradient reached it in this step"}
    first, again, changed = report(0), report(1), report(2, unsupported=idle, unmeasured={})
    lines = [
        line for line in printed(first, again, changed, first).splitlines() if "not mea" in line
    ]
    assert [line.split()[2] for line in lines] == ["decoder.lstm", "head:"]


def test_many_unsupported_modules_stay_readable() -> None:
    lstm = "torch.nn.modules.rnn.LSTM: no rule"
    unsupported = {f"block.{i}": lstm for i in range(300)}
    unsupported |= {f"head.{i}": f"measuring it failed: number {i}" for i in range(40)}
    unmeasured = {f"{path}.weight": 10 for path in unsupported}
    lines = not_measured(report(unsupported=unsupported, unmeasured=unmeasured))
    assert len(lines) == 12
    assert lines[0] == f"block.0, block.1, block.2 and 297 more (3,000 elements): {lstm}"
    assert lines[1] == "head.0 (weight: 10 elements): measuring it failed: number 0"
    assert lines[-1] == "30 more reasons for 300 elements are in the report's `unsupported`"
    assert sum(len(line) for line in lines) < 1200


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_narrow_terminal_gets_several_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    TableSink(file=terminal).write(report())
    assert "\x1b[" in terminal.getvalue(), "a terminal has colours"
    lines = re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue()).splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines if line.startswith("head ")]
    values = [cell.rstrip("*") for cells in rows for cell in cells[4:]]
    assert values == [cell.rstrip("*") for cell in row(printed(report()), "head")[4:]]
    assert len(rows) > 1
    monkeypatch.setattr("sys.stdout", terminal)
    text = str(report())
    assert max(map(len, text.splitlines())) <= 80 and "\x1b" not in text, "as wide as print's"
    assert text.count("stem.conv") > 1, "several tables"


# Selection of measures


@pytest.mark.parametrize("make", [TableSink, lambda measures: TensorBoardSink("unused", measures)])
def test_an_unknown_measure_is_refused_with_the_choices(make, tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"'update_cosin'.*Choose from update_cosine, gradient_"):
        make(measures=["scale_cv", "update_cosin"])
    assert not list(tmp_path.iterdir()), "refused before a file was made"


def test_the_realised_change_of_the_loss_stands_beside_the_expected_one() -> None:
    layers = {"a": reading(descent=0.5), "b": reading(descent=0.25)}
    one = report(3, layers=layers, realised_loss_change=-0.7)
    scalars = summary_scalars(one, ["descent"], "optimizer_1")
    assert scalars["adiv.summary.optimizer_1/realised_loss_change"] == -0.7
    assert scalars["adiv.summary.optimizer_1/descent"] == 0.75
    assert "changed by -0.700; the batch's was to change by -0.750" in printed(one)
    assert "really" not in printed(report(3))
    assert "adiv.summary/descent" not in summary_scalars(report(3), ["descent"])


def test_few_scalars_however_many_layers_there_are() -> None:
    layers = {f"encoder.{i}.{part}": reading(i) for i in range(100) for part in "abc"}
    few = board_scalars(report(layers=layers), None, "few")
    assert len(few) <= 3 * 8 + 3 * len(FRONT_MEASURES) + 1
    asked = dict.fromkeys(("attainable_cosine", *REALISED_MEASURES))
    sizes = ("gradient_norm", "unclipped_gradient_norm", "update_norm", "clipped_share")
    one = report(
        layers={path: replace(of, **asked) for path, of in layers.items()},
        **dict.fromkeys(sizes, 1.0),
    )
    scalars = board_scalars(one, None, "few")
    assert {f"adiv.sizes/{name}" for name in sizes} <= scalars.keys()
    assert 50 < len(scalars) < 60
    everything = board_scalars(report(layers=layers), None, "all")
    assert {f"adiv.scale_cv/{path}" for path in layers} <= set(everything)
    chosen = board_scalars(report(layers=layers), ["scale_cv"], "few")
    assert {tag.partition("/")[0] for tag in chosen} == {"adiv.scale_cv", "adiv.summary"}


@pytest.mark.parametrize(
    ("package", "use", "install"),
    [
        ("tensorboard", lambda: TensorBoardSink("unused"), r'"adiv-monitor\[tensorboard\]"'),
        ("matplotlib", lambda: report().plot(), r'plot needs .* pip install "adiv-monitor\[audit'),
        ("pandas", lambda: MemorySink().to_pandas(), "to_pandas needs .*: pip install pandas"),
        ("jinja2", lambda: HtmlSink("unused"), r'jinja2: pip install "adiv-monitor\[audit\]"'),
    ],
)
def test_a_missing_package_is_named(monkeypatch, package: str, use, install: str) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=install):
        use()


@pytest.mark.parametrize("make", [JsonlSink, HtmlSink])
def test_where_a_sink_writes_must_be_a_file(make: type, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=f"{make.__name__}.*got 5, expected the path of a file"):
        make(5)
    with pytest.raises(IsADirectoryError, match=f"{make.__name__}.*got the folder"):
        make(tmp_path)


def with_lone_surrogate() -> StepReport:
    one = report()
    layers = {f"a\ud800.{path}": reading for path, reading in one.layers.items()}
    return replace(one, layers=layers, unsupported={"b\udfff": "c\ud800"}, notes=("d\ud800",))


def test_jsonl_keeps_names_that_have_no_utf8(tmp_path: Path) -> None:
    given = with_lone_surrogate()
    sink = JsonlSink(tmp_path / "run.jsonl")
    sink.write(given)
    sink.close()
    (line,) = strict_lines(tmp_path / "run.jsonl")
    assert line["layers"].keys() == given.layers.keys()  # type: ignore[attr-defined]
    assert (line["unsupported"], line["notes"]) == (given.unsupported, list(given.notes))
