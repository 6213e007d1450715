"""The closing line of a run: findings, their layers, and where to read more."""

import logging
import sys
from collections.abc import Iterable, Sequence

from adiv_monitor.diagnosis.diagnose import LOSS_UNKNOWN, finding_title, running_headline
from adiv_monitor.diagnosis.finding import Finding
from adiv_monitor.diagnosis.running import Running
from adiv_monitor.printable import printable, quoted
from adiv_monitor.report.wording import listed

_logger = logging.getLogger("adiv_monitor")
_MOST = 2  # number of findings that the line names


def conclude(running: Running, sinks: Iterable[object], whose: str = "") -> None:
    """Log the line: as a warning if there is something to fix or to watch, else as information.

    Where logging is not set up, Python prints warnings to standard error but no information. The
    line is then printed there, too.

    Args:
        running: summary of the training; nothing is logged before its first report.
        sinks: sinks of the reports; the line names the `place` of those that have one.
        whose: name of the monitor that the line begins with, if there are several.
    """
    if not running.count:
        return
    record, findings = running.record(), running.findings()
    found = [finding for finding in findings if finding.strength != "note"]
    count = f"{running.count:,} measured step{'s' * (running.count != 1)}"
    is_named = found and found[0].name != "loss-stuck"
    headline = running_headline(findings, record)
    said = _named(found) if is_named else f"{headline[:1].lower()}{headline[1:]} ({count})"
    said += f"; the loss is {LOSS_UNKNOWN}" * (not record.losses)
    places = ", ".join(filter(None, map(_place, sinks)))
    line = ": ".join(filter(None, ("adiv-monitor", whose, said))) + f" → {places}" * bool(places)
    _logger.log(logging.WARNING if found else logging.INFO, "%s", printable(line))
    is_set_up = _logger.hasHandlers() or _logger.level != logging.NOTSET or _logger.disabled
    if not (found or is_set_up) and sys.stderr is not None:
        print(printable(line), file=sys.stderr)


def _place(sink: object) -> str:
    return str(getattr(getattr(sink, "borrowed", sink), "place", "") or "")


def _named(found: Sequence[Finding]) -> str:
    said = "; ".join(map(_said, found[:_MOST]))
    return said + f"; and {len(found) - _MOST} more" * (len(found) > _MOST)


def _said(finding: Finding) -> str:
    since = "" if finding.since is None else f" since step {finding.since:,}"
    where = f" ({listed([*map(quoted, finding.layers)])})" if finding.layers else ""
    title = finding_title(finding.name)
    return title[:1].lower() + title[1:] + where + since
