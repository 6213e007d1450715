"""The verdict of an audit, what trials overrule, and what came of an advice."""

import io
import itertools
import math
import re
from dataclasses import replace
from html import unescape
from typing import Any, NamedTuple

import pytest
from audit.test_diagnosis import HITS
from example_audits import made_up
from made_records import STEPS, STILL, record, trials

from adiv_monitor.audit.command.output import show
from adiv_monitor.audit.report import AuditReport
from adiv_monitor.audit.trials.fixes import FIXES
from adiv_monitor.diagnosis import diagnose
from adiv_monitor.diagnosis.diagnosis import Diagnosis
from adiv_monitor.diagnosis.finding import NO_STEPS, RATES, Advice, Finding, Trial, unrefuted
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.pages import page

HIGH = trials(own=2.2, x01=0.5)


class Said(NamedTuple):
    """A sentence of the verdict; a diagnosis that says it, and one that does not."""

    sentence: str
    by: Diagnosis
    but_not_by: Diagnosis


def told(*findings: Finding, of: Record | None = None) -> Diagnosis:
    return Diagnosis(findings, record(rates=HIGH) if of is None else of)


def fault(*trials_of: Trial | None, name: str = "rate-too-high", strength: Any = "act") -> Finding:
    advice = tuple(Advice("Do", "clip", trial) for trial in trials_of)
    return Finding(name, strength, "It is so.", (), advice)


EXPLAINED = replace(HITS["hidden-parameters"], losses=STILL)
PAYS = Trial("clip", 50, 0.5, 1.0, None, 0.01)
LOSES = Trial("clip", 50, 1.5, 1.0, None, 0.01)
NOT_PAID = fault(LOSES)
OWN = record(rates=HIGH, own_losses=dict.fromkeys(range(STEPS), 9.0))
UNTRIED = Finding(
    "rate-too-high", "act", "So.", advice=(Advice("Do", "clip", untried=NO_STEPS), Advice("Or"))
)
UNREAD = Finding("targets-moved", "watch", "So.")
TRAIT = Finding("input-mean", "watch", "So.")
ROWS = [
    Said("The audit found nothing that hinders this training.", told(), told(NOT_PAID)),
    Said("The audit found nothing to act on, but a fix that it tried lowers the loss: Do",
         told(fault(PAYS, strength="watch")), told(fault(LOSES, strength="watch"))),
    Said("; so short a run favours high learning rates.",
         told(Finding("rate-too-low", "watch", advice=(
             Advice("Do", "rate*100", replace(PAYS, fix="rate*100")),))),
         told(fault(PAYS, strength="watch"))),
    Said("Other learning rates were not tried.", told(of=record()), told()),
    Said("2 weaker findings below.", told(fault(strength="note"), fault(strength="note")), told()),
    Said("It is so. The audit did not find the cause.",
         told(fault(name="loss-stuck", strength="watch")), told(NOT_PAID)),
    Said("It is so. The audit did not find the cause.",
         told(fault(name="behind-reference", strength="watch")), told(TRAIT)),
    Said("It is so. The likely cause: So.",
         told(fault(name="loss-stuck", strength="watch"), UNREAD),
         told(fault(name="loss-stuck", strength="watch"))),
    Said("nothing to act on for certain. If its results are not what they should be, this is the "
         "likely cause: So.", told(UNREAD), told(fault(PAYS, strength="watch"))),
    # Healthy runs have traits, too: they explain nothing while the loss falls.
    Said("The audit found nothing that hinders this training. 1 weaker finding below.",
         told(TRAIT), told(UNREAD)),
    Said("It is so. The likely cause: So.",
         told(fault(name="loss-stuck", strength="watch"), TRAIT),
         told(fault(name="loss-stuck", strength="watch"))),
    Said("And 1 more finding to act on.", told(NOT_PAID, NOT_PAID), told(NOT_PAID)),
    Said("To fix it: Do: loss after 50 steps 0.5 instead of 1 (± 0.01).",
         told(fault(PAYS)), told(NOT_PAID)),
    Said("What to do: Do.", told(fault(LOSES, name="not-held")), told(NOT_PAID)),
    Said("What to do: Do (not tried: the steps for trials were used up).", told(UNTRIED),
         told(NOT_PAID)),
    Said("None of its fixes helped in a trial; a fix of another finding did: Do: loss after 50 "
         "steps 0.5", told(NOT_PAID, fault(PAYS)), told(NOT_PAID)),
    Said("None of its fixes helped in a trial.", told(NOT_PAID), told(fault(PAYS))),
    Said("None of its fixes helped in a trial; to try next: Do (not tried)",
         told(fault(None, LOSES)), told(NOT_PAID)),
    Said("The copy does not train as your run did: over the steps 0 to 19, its mean loss is",
         told(of=OWN), told(of=replace(OWN, own_losses=dict(enumerate(OWN.losses))))),
    Said("This would explain: loss-stuck.", Diagnosis(diagnose(EXPLAINED), EXPLAINED), told()),
    Said("The copy differs from your run: no scheduler runs.",
         told(of=record(rates=HIGH, lost=("no scheduler runs",))), told()),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.sentence[:50])
def test_a_sentence_of_the_verdict_is_printed_only_where_it_is_so(row: Said) -> None:
    assert row.sentence in row.by.verdict and row.sentence not in row.but_not_by.verdict


SPOKEN_OF = {
    "igher learning rate": ("rate*3", "rate*10", "rate*100"),
    "ower learning rate": ("rate*0.01", "rate*0.1", "rate*0.3"),
    "nother learning rate": RATES,
    "lipping": ("clip",),
    "each row's length": ("affine-like",),
    "Corrected layers": ("affine-like",),
    "Another limit": ("clip", "no-clip"),
}


def test_what_was_tried_overrules_what_would_not_help() -> None:
    """All findings × all fixes: no finding speaks against what a trial says pays."""
    findings = {f.not_advised: f for of in HITS.values() for f in diagnose(of)}.values()
    for finding in findings:
        assert set(finding.against) <= set(FIXES)
        for fix in FIXES:
            paid, lost = (Trial(fix, 50, loss, 1.0, None, 0.01) for loss in (0.5, 1.5))
            assert unrefuted(finding, [lost]) == finding
            after = unrefuted(finding, [paid]).not_advised
            spoken = {fix for words, fixes in SPOKEN_OF.items() if words in after for fix in fixes}
            assert fix not in spoken, after
    assert len(findings) > 20


def test_a_finding_speaks_against_learning_rates_unless_it_names_others() -> None:
    assert Finding("a", "act").against == ()
    assert Finding("a", "act", not_advised="No.").against == RATES
    assert Finding("a", "act", not_advised="No.", against=("clip",)).against == ("clip",)


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
