"""The content of dashboards: pictures of the training so far, and findings in words."""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec

from adiv_monitor.diagnosis.diagnose import finding_title, running_headline, untold
from adiv_monitor.diagnosis.finding import Finding, red_layers
from adiv_monitor.diagnosis.health import HEALTH, OVERVIEW, is_told
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.pages.digest import finding_lines, named
from adiv_monitor.pictures.grid import Grid, grids
from adiv_monitor.pictures.heat import heat_picture, overview_picture
from adiv_monitor.pictures.picture import Picture
from adiv_monitor.printable import printable, quoted
from adiv_monitor.report import StepReport
from adiv_monitor.report.blocks import common_stem
from adiv_monitor.report.wording import listed
from adiv_monitor.sinks.course import CourseSink
from adiv_monitor.sinks.scalars import Metrics, Scalars

NO_PICTURES = (
    'Heat maps of layers by steps are not drawn: they need matplotlib (pip install "adiv-monitor'
    '[audit]")'
)
_GROWTH = 1.4  # pictures are redrawn when the number of reports has grown by this factor
_FIRST = 0.3  # seconds, on the slower of two processors: imports and the pictures of a small net
_MOST_EVIDENCE = 2  # panels of the overview that show the evidence of findings
_UNTOLD = (
    "Reports can't tell whether another learning rate does better, and do not show wiring, single "
    "units or labels: run adiv-audit."
)


class BoardSink(CourseSink):
    """Shows pictures and findings of the training so far on a dashboard.

    Each picture shows the whole course, so only the last one matters. Pictures are due whenever the
    number of reports has grown by two fifths, which keeps a run's file small, and as long as
    drawing takes at most a twentieth of the time since the first report. A short run only has the
    pictures of its end.

    Attributes:
        draws: whether pictures can be drawn.

    Warns:
        UserWarning: matplotlib, whose fonts pictures need, is not installed.
    """

    def __init__(self, measures: Iterable[str] | None, scalars: Scalars, name: str) -> None:
        super().__init__(_FIRST)
        self._metrics = Metrics(None if measures is None else tuple(measures), scalars, name=name)
        self._step = 0
        self.draws = find_spec("matplotlib") is not None
        if not self.draws:
            warnings.warn(f"{type(self).__name__}: {NO_PICTURES}", stacklevel=3)

    def add(self, report: StepReport) -> bool:
        """Add a report; return whether pictures and findings are due."""
        return super().add(report) and self.count > self.shown * _GROWTH


def pictures(record: Record, findings: Sequence[Finding], name: str = "") -> dict[str, bytes]:
    """Draw pictures, tag → PNG: `adiv/overview` and informative `adiv/per_layer/<measure>`.

    Args:
        record: the training so far.
        findings: findings that the overview states.
        name: distinguishes several monitors of one run: `adiv/overview/<name>` and so on, so
            that all overviews come first.
    """
    red, end = red_layers(findings), f"/{name}" if name else ""
    drawn = {
        f"adiv/per_layer/{measure}{end}": heat_picture(found, red).png()
        for measure, found in grids(record, HEALTH).items()
        if is_told(measure, found.values) or found.not_finite.any()
    }
    if (front := overview(record, findings, name)) is not None:
        drawn[f"adiv/overview{end}"] = front.png()
    return drawn


def overview(record: Record, findings: Sequence[Finding], name: str = "") -> Picture | None:
    """Draw the overview of a training; return None if no layer has anything to draw."""
    known = grids(record, HEALTH)
    panels = _panels(known, findings)
    if not panels:
        return None
    layers = known[panels[0]].layers
    headline = running_headline(findings, record)
    stem = printable(common_stem(layers).rstrip(".") or name)
    whose = f"{stem}: {headline}" if name else headline
    rows = list(grids(record, panels, layers).values())
    red = red_layers(findings)
    return overview_picture(
        rows, whose, [*map(said_of, findings)] or [_UNTOLD], red, _losses(record)
    )


def _losses(record: Record) -> list[float | None]:
    """Return the loss of each reported step over the first of the run; [] if that says nothing."""
    first = next(iter(record.losses), math.nan)
    if not first > 0 or math.isinf(first):
        return []
    return [None if report.loss is None else report.loss / first for report in record.reports]


def _panels(known: Mapping[str, Grid], findings: Iterable[Finding]) -> tuple[str, ...]:
    """Choose the overview's measures; the last defaults make room for evidence of findings.

    >>> from adiv_monitor.diagnosis.finding import Evidence, Finding
    >>> scale = Finding("input-scale", "act", "", (Evidence("scale_mean", 1e6),))
    >>> _panels(dict.fromkeys(HEALTH), [scale])
    ('update_ratio', 'gradient', 'idle_share', 'scale_mean')
    """
    front = [measure for measure in OVERVIEW if measure in known]
    seen = dict.fromkeys(e.measure for finding in findings for e in finding.evidence)
    extra = [m for m in seen if m in known and m not in front][:_MOST_EVIDENCE]
    return (*front[: len(OVERVIEW) - len(extra)], *extra) if front else ()


def findings_text(findings: Iterable[Finding], record: Record) -> str:
    """Format findings as Markdown: verdict, layers, fixes; and questions that stay open."""
    found = tuple(findings)
    parts = [f"### {running_headline(found, record)}"]
    parts += [f"**{named(each)}**\n\n" + "\n".join(finding_lines(each, False)) for each in found]
    open_questions = "\n".join(f"- {title}: {do}" for title, do in untold(record).items())
    return "\n\n".join([*parts, f"Reports can't tell, and how to find out:\n\n{open_questions}"])


def said_of(finding: Finding) -> str:
    """Return a finding in one paragraph: title, first advice and layers, which pictures mark."""
    where = f" In {listed([*map(quoted, finding.layers)])}." if finding.layers else ""
    fixes = finding.advice if finding.strength != "note" else ()
    advice = f" To try: {fixes[0].text}." if fixes else ""
    return printable(f"• {finding_title(finding.name)} ({finding.strength}).{advice}{where}")
