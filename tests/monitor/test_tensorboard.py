"""Event files of a run, as TensorBoard itself reads and shows them."""

import math
from pathlib import Path
from typing import Any

import pytest
from example_reports import reading, report

from adiv_monitor.report import StepReport
from adiv_monitor.sinks import TensorBoardSink

pytest.importorskip("tensorboard")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray
from torch.utils.tensorboard import SummaryWriter


def events(log_dir: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(log_dir), size_guidance={"tensors": 0})
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


def test_no_direction_is_written_as_nan_and_not_taken_not_at_all(tmp_path: Path) -> None:
    layers = {"a": reading(update_cosine=math.nan, scale_cv=None)}
    found = write(tmp_path, report(layers=layers), scalars="all")
    (event,) = found.Scalars("adiv.update_cosine/a")
    assert math.isnan(event.value)
    assert "adiv.scale_cv/a" not in found.Tags()["scalars"]
    assert "adiv.summary/update_cosine_min" not in found.Tags()["scalars"]


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
    pictures = events(tmp_path).Tags()["images"]
    assert {"adiv/overview/generator", "adiv/per_layer/descent/critic"} <= set(pictures)
    assert {"adiv.summary.generator/descent_max", "adiv.summary.critic/descent_max"} <= set(tags)
    assert len(list(tmp_path.iterdir())) == 1, "no second event file"


def test_a_target_of_another_kind_is_refused() -> None:
    with pytest.raises(TypeError, match=r"got a builtins\.int, expected a folder or a torch"):
        TensorBoardSink(3)  # type: ignore[arg-type]
