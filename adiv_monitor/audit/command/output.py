"""The folder of a report: written whole, or not at all."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from adiv_monitor.audit.command.config import Config, dumped
from adiv_monitor.audit.command.usage import UsageError
from adiv_monitor.audit.report import AuditReport
from adiv_monitor.files import write_whole
from adiv_monitor.sinks.tensorboard import TensorBoardSink


def check(out: str) -> None:
    """Raise UsageError if `out` can't be written to; leaves nothing behind."""
    folder = Path(out).absolute()
    if folder.exists():
        try:
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise _unwritable(out, error) from error
    _staging(folder, out).rmdir()


@contextmanager
def staged(out: str) -> Iterator[Path]:
    """A folder beside `out`, to write into; what is in it goes there at the end, or nothing does.

    What `out` holds under other names stays; missing folders above it are made.

    Raises:
        UsageError: `out` can't be written to.
    """
    folder = Path(out).absolute()
    stage = _staging(folder, out)
    try:
        yield stage
        _move(stage, folder)
    except OSError as error:
        raise _unwritable(out, error) from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _staging(folder: Path, out: str) -> Path:
    above = next(path for path in folder.parents if path.exists())
    try:
        return Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=above))
    except OSError as error:
        raise _unwritable(out, error) from error


def _unwritable(out: str, error: OSError) -> UsageError:
    return UsageError(f"--out {out}: can't be written to: {error.strerror or error}")


def _move(stage: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for made in sorted(stage.iterdir()):
        target = folder / made.name
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        made.replace(target)


def write(report: AuditReport, config: Config, folder: Path) -> None:
    """report.html, report.json, config.yaml, and tensorboard/ with every measured step."""
    report.write(folder)
    (folder / "config.yaml").write_text(dumped(config), encoding="utf-8")
    sink = TensorBoardSink(folder / "tensorboard")
    for step in report.record.reports:
        sink.write(step)
    sink.close()


def write_page(file: str, text: str) -> None:
    """Write a page.

    Raises:
        UsageError: it can't be written.
    """
    try:
        write_whole({Path(file): text})
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"--out {file}: can't be written: {reason}") from error
