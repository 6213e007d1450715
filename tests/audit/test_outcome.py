"""What came of an advice: one mark and the same words in the terminal and on the page."""

import io
import itertools
import math
import re
from html import unescape

from example_audits import made_up

from adiv_monitor.audit.command.output import show
from adiv_monitor.audit.report import AuditReport
from adiv_monitor.diagnosis.finding import NO_STEPS, Advice, Finding, Trial
from adiv_monitor.pages import page

SMALL = made_up(["stem", "head"], 3)

LOSSES = (0.2, 0.5, 0.95, 1.0, 1.5, math.inf)
GRID = [
    Trial(
        fix, 50, loss, without, by_rate, 0.01 if math.isfinite(loss + without) else math.nan,
        rate, constant=constant,
    )
    for fix, loss, without, by_rate, constant, rate in itertools.product(
        ("rate*10", "clip"), LOSSES, (1, math.inf), (None, 0.3, math.inf), (None, 0.45), (1, 3)
    )
]  # fmt: skip


def advised() -> AuditReport:
    """One advice for each trial of the grid, and those that were not tried."""
    untried = (Advice("do 1000", "clip", untried=NO_STEPS), Advice("do 1001"))
    tried = tuple(Advice(f"do {i}", trial.fix, trial) for i, trial in enumerate(GRID))
    return AuditReport((Finding("exploding", "act", advice=(*tried, *untried)),), SMALL.record)


def in_the_terminal(report: AuditReport) -> dict[str, tuple[str, str]]:
    file = io.StringIO()
    show(report, file, width=1000)
    found = re.findall(r"^ +(\S) (do \d+)(?:: | \()(.*?)\)?$", file.getvalue(), re.MULTILINE)
    return {text: (mark, words.strip()) for mark, text, words in found}


def on_the_page(report: AuditReport) -> dict[str, tuple[str, str]]:
    found = re.findall(
        r'<p>(do \d+)</p>\s*<p class="trial[^"]*"><span class="mark">(.)</span> (.*?)</p>',
        page(report),
    )
    return {text: (mark, unescape(words).strip()) for text, mark, words in found}


def test_terminal_and_page_show_the_same_mark_and_words() -> None:
    report = advised()
    terminal, shown = in_the_terminal(report), on_the_page(report)
    advice = {each.text: each.outcome for each in report.findings[0].advice}
    assert set(advice) == set(terminal) == set(shown) and len(advice) > 100
    assert {mark for mark, _ in shown.values()} == {"✓", "✗", "→"}
    for text, (mark, words) in advice.items():
        assert shown[text] == (mark, words)
        assert terminal[text][0] == mark
        assert terminal[text][1].rstrip(")") == words.rstrip(")")


def test_a_tick_is_for_what_is_lower_than_all_that_it_must_beat() -> None:
    for trial in GRID:
        others = [trial.loss_without, math.inf if trial.constant is None else trial.constant]
        if not trial.fix.startswith("rate*") and trial.loss_by_rate is not None:
            others.append(trial.loss_by_rate)
        helps = math.isfinite(trial.loss) and all(trial.loss < 0.98 * other for other in others)
        mark, words = Advice("", trial=trial).outcome
        assert mark == ("✓" if helps else "✗")
        said = "does not help" in words or "no better than" in words
        assert said == (not helps and math.isfinite(trial.loss))
        assert bool(trial.objection) == (not helps)
