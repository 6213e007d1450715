"""One line at the end of a run: what was found, in which layers, and where to read more."""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from adiv_monitor.printable import printable, quoted
from adiv_monitor.sinks.running import Running
from adiv_monitor.sinks.wording import listed

if TYPE_CHECKING:
    from adiv_monitor.audit.finding import Finding

_logger = logging.getLogger("adiv_monitor")
_MOST = 2  # findings that are named


def conclude(running: Running, sinks: Iterable[object]) -> None:
    """Log the line: a warning where there is something to fix or to watch, else for information.

    Args:
        running: the training, of which nothing is said before its first report.
        sinks: where its reports went; those with a `place` to look at say it.
    """
    if not running.count:
        return
    places = [place for sink in sinks if (place := _place(sink))]
    line = f"adiv-monitor: {_verdict(running)}" + f" → {', '.join(places)}" * bool(places)
    is_warning = any(finding.strength != "note" for finding in running.findings())
    _logger.log(logging.WARNING if is_warning else logging.INFO, "%s", printable(line))


def _place(sink: object) -> str:
    return str(getattr(getattr(sink, "lent", sink), "place", "") or "")


def _verdict(running: Running) -> str:
    from adiv_monitor.audit.page.verdict import running_headline

    findings, record = running.findings(), running.record()
    found = [finding for finding in findings if finding.strength != "note"]
    if not found:
        headline = running_headline(findings, record)
        return headline[:1].lower() + headline[1:]
    said = "; ".join(map(_said, found[:_MOST]))
    return said + f"; and {len(found) - _MOST} more" * (len(found) > _MOST)


def _said(finding: "Finding") -> str:
    from adiv_monitor.audit.page.titles import finding_title

    since = "" if finding.since is None else f" since step {finding.since:,}"
    where = f" ({listed([*map(quoted, finding.layers)])})" if finding.layers else ""
    title = finding_title(finding.name)
    return title[:1].lower() + title[1:] + where + since
