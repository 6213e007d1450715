"""A training as far as it has come, in files: the page, its record, and a text to paste."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from adiv_monitor.diagnosis.diagnosis import Diagnosis
from adiv_monitor.diagnosis.finding import Finding
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.pages.digest import MARK, digest
from adiv_monitor.pages.running_page import running_page

_HEAD = 200  # characters, in which the marks of our files are


def running_files(
    record: Record, findings: Sequence[Finding], count: int, alarms: Sequence[object] = ()
) -> Mapping[str, str]:
    """Ending of the file → its text: ".html", ".json" and ".md"; see `digest`."""
    report = Diagnosis(tuple(findings), record)
    return {
        ".html": running_page(record, findings, count, alarms),
        ".json": report.to_json(),
        ".md": digest(report, count, alarms),
    }


def beside(page: Path, ending: str) -> Path:
    """The file of this ending that belongs to a page: "run.json" to "run.html"."""
    is_page = page.suffix.lower() in (".html", ".htm")
    return page.with_name((page.stem if is_page else page.name) + ending)


def is_ours(path: Path) -> bool:
    """Whether this package wrote a record or a text there, or nobody anything."""
    try:
        head = path.read_bytes()[:_HEAD].decode("utf-8", "replace")
    except FileNotFoundError:
        return True
    return head.startswith((MARK, '{"schema":'))
