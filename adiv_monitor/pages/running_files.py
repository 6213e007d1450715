"""Files about a running training: the page, its record, and a text to paste."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from adiv_monitor.diagnosis.diagnosis import Diagnosis
from adiv_monitor.diagnosis.finding import Finding
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.pages.digest import MARK, digest
from adiv_monitor.pages.report_page import page as page_of

_HEAD = 200  # characters in which the marks of our files are searched


def running_files(
    record: Record, findings: Sequence[Finding], count: int, alarms: Sequence[object] = ()
) -> Mapping[str, str]:
    """Return file ending → text: ".html", ".json" and ".md"; see `digest`."""
    report = Diagnosis(tuple(findings), record)
    return {
        ".html": page_of(report, count, alarms),
        ".json": report.to_json(),
        ".md": digest(report, count, alarms),
    }


def beside(page: Path, ending: str) -> Path:
    """Return the path of the file with this ending beside a page: "run.json" for "run.html"."""
    is_page = page.suffix.lower() in (".html", ".htm")
    return page.with_name((page.stem if is_page else page.name) + ending)


def is_ours(path: Path) -> bool:
    """Return whether the file was written by this package, or does not exist."""
    try:
        head = path.read_bytes()[:_HEAD].decode("utf-8", "replace")
    except FileNotFoundError:
        return True
    return head.startswith((MARK, '{"schema":'))
