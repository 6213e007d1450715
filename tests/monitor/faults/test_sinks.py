"""Sinks that cannot write: full disks and closed writers."""

import errno
import io
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from faults.scenarios import SCENARIOS
from faults.trial import REASON, Fault, take, unmonitored
from torch.utils.tensorboard import SummaryWriter

from adiv_monitor import sinks
from adiv_monitor.sinks import MemorySink, Sink, TableSink, TensorBoardSink, TrackerSink

MLP = SCENARIOS["mlp"]
EVERY = [name for name in sinks.__all__ if name != "Sink"]
FILED = {"HtmlSink": "page.html", "JsonlSink": "reports.jsonl"}


class Mute(SummaryWriter):
    """A writer without threads to wait for."""

    def __init__(self, folder: str) -> None:
        self.log_dir, self.file_writer, self.all_writers = folder, None, None

    def _get_file_writer(self) -> MagicMock:
        return MagicMock()

    add_text = MagicMock()


def made(name: str, folder: Path) -> Sink:
    kind = getattr(sinks, name)
    if name == "TableSink":
        sink = TableSink(file=io.StringIO())
    elif name == "TrackerSink":
        sink = TrackerSink("trackio")
    elif name == "TensorBoardSink":
        sink = TensorBoardSink(Mute(str(folder)))
    else:
        sink = kind(*([folder / FILED[name]] if name in FILED else []))
    assert isinstance(sink, Sink)
    return sink


def raises(error: BaseException) -> Callable[..., None]:
    def body(*_: object, **__: object) -> None:
        raise error

    return body


@pytest.mark.slow(one_in=29)
@pytest.mark.parametrize("method", ["write", "close"])
@pytest.mark.parametrize("kind", [Fault, OSError, MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("name", EVERY)
def test_a_sink_that_raises(
    name: str,
    kind: type[BaseException],
    method: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", MagicMock())
    error = kind(errno.ENOSPC, REASON) if kind is OSError else kind(REASON)
    monkeypatch.setattr(getattr(sinks, name), method, raises(error))
    sound = MemorySink() if name != "MemorySink" else None
    several = [made(name, tmp_path), made(name, tmp_path), *([sound] if sound else [])]
    request.addfinalizer(lambda: [sink.close() for sink in several[:2]])
    request.addfinalizer(monkeypatch.undo)  # undo first
    trial = take(MLP, sinks=several)
    assert not trial.left
    if kind is KeyboardInterrupt:
        assert trial.raised is error
        return
    assert trial.raised is None
    assert trial.result == unmonitored("mlp")
    assert len(trial.warned) == 2, trial.warned  # once of each
    assert all(f"{name} failed" in said for said in trial.warned)
    assert len(trial.told) == (4 if method == "write" else 0)
    if sound:
        assert [report.step for report in sound.reports] == [0, 1]
    trial = take(MLP, sinks=several[:1], on_error="raise")
    assert trial.raised is error
    assert not trial.left


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboard_without_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of TensorBoard's writer dies, and nothing waits for it."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    sink = TensorBoardSink(tmp_path)
    monkeypatch.setattr(RecordWriter, "write", raises(OSError(errno.ENOSPC, REASON)))
    monkeypatch.setattr(threading, "excepthook", lambda *_: None)
    trial = take(MLP, sinks=[sink])
    assert trial.result == unmonitored("mlp")
    assert any("No space" in n or REASON in n for r in trial.reports for n in r.notes)
