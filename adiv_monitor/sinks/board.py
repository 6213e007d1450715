"""What a dashboard shows of a training so far: pictures, and findings in words."""

import textwrap
import time
import warnings
from collections.abc import Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING

from adiv_monitor.printable import markdown, printable
from adiv_monitor.report import WORST, StepReport
from adiv_monitor.sinks.blocks import common_stem
from adiv_monitor.sinks.health import HEALTH, OVERVIEW, is_told
from adiv_monitor.sinks.running import Raised, Running
from adiv_monitor.sinks.wording import listed

if TYPE_CHECKING:
    from adiv_monitor.audit.finding import Finding
    from adiv_monitor.audit.record import Record

NO_PICTURES = (
    'Heat maps of layers by steps are not drawn: they need matplotlib (pip install "adiv-monitor'
    '[audit]")'
)
_GROWTH = 1.4  # pictures are drawn anew when there are so many times as many reports
_PATIENCE = 20
_MOST_LETTERS = 80  # in a line of the overview
_MOST_LINES = 7
_UNTOLD = (
    "Reports can't tell whether another learning rate does better, nor see wiring, single units "
    "or labels: run adiv-audit."
)


class Board:
    """Collects reports, and says when pictures are due and what is in them.

    Pictures show the whole course, so that only the last of them matters. They are due at the first
    report, then whenever there are two fifths more reports, so that a run's file stays small, but
    not before twenty times as long has passed as drawing them took.

    Args:
        owner: the class that warns where pictures can't be drawn.
    """

    def __init__(self, owner: str) -> None:
        self.draws = find_spec("matplotlib") is not None
        if not self.draws:
            warnings.warn(f"{owner}: {NO_PICTURES}", stacklevel=3)
        self._running = Running()
        self._count = 0
        self._shown = 0
        self._began = 0.0  # seconds, of the clock
        self._not_before = 0.0

    def add(self, report: StepReport) -> bool:
        """Take a report; whether pictures and findings are due."""
        self._running.add(report)
        self._count += 1
        enough = self._count > self._shown * _GROWTH
        return enough and time.monotonic() >= self._not_before

    @property
    def is_behind(self) -> bool:
        """Whether there are reports that no picture has shown."""
        return self._shown < self._count

    def shown(self) -> None:
        """What is there was shown."""
        self._shown = self._count

    def rest(self) -> None:
        """It was tried, and is not tried again too soon."""
        now = time.monotonic()
        self._not_before = now + _PATIENCE * (now - self._began)

    @property
    def last(self) -> StepReport:
        """The last report, or what the last round has come to."""
        return self._running.last

    @property
    def alarms(self) -> tuple[Raised, ...]:
        """What rules of the user's have raised so far."""
        return self._running.alarms

    @property
    def record(self) -> "Record":
        """The training as its reports tell of it."""
        return self._running.record()

    def findings(self) -> tuple["Finding", ...]:
        """What the audit's rules find in the reports; strongest first."""
        self._began = time.monotonic()
        return self._running.findings()

    def pictures(self, findings: Iterable["Finding"], name: str = "") -> dict[str, bytes]:
        """Tag → PNG: `adiv/overview`, and `adiv/per_layer/<measure>` of each that tells something.

        Args:
            findings: what the overview says.
            name: tells several monitors of one run apart: `adiv/overview/<name>` and so on, so
                that the overviews of all come first.
        """
        from adiv_monitor.audit.page.verdict import running_headline
        from adiv_monitor.sinks.heat import grid, heat_picture, overview_picture

        record = self._running.record()
        grids = {measure: grid(record, measure) for measure in HEALTH}
        told = {m: g for m, g in grids.items() if g is not None and is_told(m, g.values)}
        found = tuple(findings)
        named = {layer for finding in found for layer in finding.layers}
        front = [g for m in OVERVIEW if (g := grids[m]) is not None]
        maps = set(front[0].layers) if front else set()
        end = f"/{name}" if name else ""
        pictures = {f"adiv/per_layer/{m}{end}": heat_picture(g, named) for m, g in told.items()}
        if front:
            lines = _lines(found)
            rows = [g.only(maps) for g in front]
            headline = running_headline(found, record)
            stem = printable(common_stem(maps).rstrip(".") or name)
            whose = f"{stem}: {headline}" if name else headline
            pictures[f"adiv/overview{end}"] = overview_picture(rows, whose, lines, named)
        return pictures


def alarms_text(alarms: Iterable[object]) -> str:
    """Alarms as a list in Markdown; "" without any."""
    lines = [f"- {markdown(str(alarm))}" for alarm in alarms]
    return "\n".join(["### Alarms\n", *lines, "", ""]) if lines else ""


def findings_text(findings: Iterable["Finding"], record: "Record") -> str:
    """Findings as Markdown: verdict, where, evidence, fixes; what reports can't tell."""
    from adiv_monitor.audit.page.titles import finding_title
    from adiv_monitor.audit.page.verdict import running_headline, untold

    found = tuple(findings)
    parts = [f"### {running_headline(found, record)}"]
    for finding in found:
        where = f" Where: {listed(list(finding.layers), as_code=True)}." if finding.layers else ""
        since = "" if finding.since is None else f", since step {finding.since:,}"
        parts.append(
            f"**{finding_title(finding.name)}** ({finding.strength}, `{finding.name}`{since}). "
            + markdown(finding.summary)
            + where
        )
        parts.append("\n".join(f"{i}. {markdown(a.text)}" for i, a in enumerate(finding.advice, 1)))
        if finding.not_advised:
            parts.append(f"What would not: {markdown(finding.not_advised)}")
    told = "\n".join(f"- {line.title}: {line.would_tell}" for line in untold(record))
    return "\n\n".join([*parts, f"Can't tell from reports:\n\n{told}"])


def _lines(findings: tuple["Finding", ...]) -> list[str]:
    """What, where and what to do, as short as a card has room for."""
    from adiv_monitor.audit.page.titles import finding_title

    lines: list[str] = []
    for finding in findings:
        where = f": {listed(list(finding.layers))}" if finding.layers else ""
        advice = f" To mend it: {finding.advice[0].text}." if finding.advice else ""
        said = f"• {finding_title(finding.name)} ({finding.strength}){where}.{advice}"
        lines += textwrap.wrap(printable(said), _MOST_LETTERS, subsequent_indent="   ")
    lines = lines or textwrap.wrap(_UNTOLD, _MOST_LETTERS)
    return lines if len(lines) <= _MOST_LINES else [*lines[: _MOST_LINES - 1], "   … (see Text)"]


def worst_layers(report: StepReport, measures: Iterable[str]) -> str:
    """A Markdown table: per measure the layer at its bad end, where it is told and is not ideal."""
    chosen = set(measures)
    rows = []
    for measure, summary in report.summary().items():
        if measure not in chosen or summary.min_layers == summary.max_layers:
            continue
        bad = WORST.get(measure)
        low = _extreme(report, measure, summary.min_layers, summary.min)
        high = _extreme(report, measure, summary.max_layers, summary.max)
        if (bad == "min" and summary.min > 1 - 1e-3) or (bad == "max" and summary.max == 0):
            continue  # as good as can be
        rows.append(f"| {measure} | {high if bad == 'max' else low} |"
                    + (" |" if bad else f" {high} |"))  # fmt: skip
    head = ["| measure | worst, or smallest | and largest |", "| --- | --- | --- |"]
    return "\n".join([*head, *rows])


def _extreme(report: StepReport, measure: str, layers: tuple[str, ...], value: float) -> str:
    """The layer and its value, or those that may be the one and what fits them."""
    names = listed(list(layers), as_code=True)
    if len(layers) > 1:
        return f"one of {names}, near {value:.3g}"
    error = report.readings(measure)[layers[0]].standard_error.get(measure, 0.0)
    return f"{names} {value:.3g}" + (f" ± {error:.1g}" if error else "")
