"""The report in Markdown: what the page says, in at most 200 lines, whatever the run."""

import re
from dataclasses import replace
from typing import Any

import example_audits
import pytest
from example_reports import reading, report

from adiv_monitor.audit.report import AuditReport
from adiv_monitor.diagnosis.diagnose import FIRST_THAT
from adiv_monitor.diagnosis.finding import Advice, Evidence, Finding
from adiv_monitor.diagnosis.running import Running
from adiv_monitor.pages import digest, page
from adiv_monitor.report import Alarm

LAYERS = [f"blocks.{i}.linear" for i in range(300)]


def many_findings(names: list[str]) -> tuple[Finding, ...]:
    """Twenty, each with more of everything than a page shows."""
    evidence = tuple(Evidence("scale_mean", 812.5, 64.0, name, 3) for name in names[:40])
    advice = tuple(Advice(f"do `this` *number* {i}\n# not a heading") for i in range(10))
    said: Any = ("act", "It <is> so.", evidence, advice, "That.")
    return tuple(Finding(f"made-up-{i}", *said, layers=tuple(names), since=i) for i in range(20))


def huge() -> AuditReport:
    made = example_audits.made_up(LAYERS, 3)
    notes = tuple(f"note {i}\nof two lines" for i in range(50))
    unsupported = {f"odd{i}": f"reason {i}" for i in range(50)}
    reports = tuple(replace(one, unsupported=unsupported) for one in made.record.reports)
    return AuditReport(many_findings(LAYERS), replace(made.record, notes=notes, reports=reports))


def huge_run() -> str:
    running = Running()
    layers = {name: reading(i) for i, name in enumerate(LAYERS)}
    unsupported = {f"odd{i}": f"reason {i}" for i in range(50)}
    notes = tuple(f"note {i}" for i in range(50))
    alarms = tuple(Alarm("update_cosine < 1", name, 0.5) for name in LAYERS)
    for step in range(50):
        given = {"layers": layers, "unsupported": unsupported, "notes": notes, "alarms": alarms}
        running.add(report(step, losses={step: 2.0}, **given))
    return digest(AuditReport(many_findings(LAYERS), running.record()), 50, running.alarms)


@pytest.mark.parametrize("make", [lambda: digest(huge()), huge_run])
def test_no_run_has_more_than_200_lines(make) -> None:  # type: ignore[no-untyped-def]
    text = make()
    assert len(text.splitlines()) <= 200
    assert max(map(len, text.splitlines())) < 1000
    assert "15 more" not in text and "… 3 more" in text, "20 findings: 5 whole, 12 by name"
    assert "# not a heading" not in [line.strip() for line in text.splitlines()]
    assert "It &lt;is&gt; so." in text and r"\*number\*" in text


def test_it_says_what_the_page_says() -> None:
    faulty = example_audits.faulty()
    text = digest(faulty)
    title, *headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    assert title == "Audit of `my_project.models.Small`"
    for of in (text, re.sub(r"<[^>]*>", "", page(faulty))):
        happens = of.index("Loss: ")
        why = of.index(faulty.findings[0].summary[:40], happens)
        assert faulty.findings[0].advice[0].text in of[why:]
    assert headings[1] == "1. Inputs of an unsuitable scale (act, `input-scale`, since step 0)"
    for words in ("## What was looked for", "## What was measured", "## Settings", "## Loss"):
        assert words in text
    first = faulty.findings[0]
    for advice in first.advice:
        assert f"- Fix: {advice.text} {advice.outcome.mark} " in text
    assert "- What would not help: A lower learning rate" in text
    assert "- Optimizer: AdamW (lr 0.003" in text
    assert f"| {len(faulty.record.losses) - 1} | {faulty.record.losses[-1]:.3g} |" in text
    assert "`stem.0`" in text


def test_a_learning_rate_of_any_type_is_named() -> None:
    """Without a report, since the inputs were NaN, it is what the optimizer was given."""
    made = example_audits.faulty()
    for rate in ("np.float32(0.1)", 10**400, ("text",), {"text": 1}):
        facts = replace(made.record.facts, settings={"lr": rate})
        told = digest(AuditReport((), replace(made.record, facts=facts, reports=())))
        assert f"learning rate {rate}" in told.replace("\\", "")


def test_what_follows_from_a_cause_comes_after_all_causes_without_advice() -> None:
    faulty = example_audits.faulty()
    behind = Finding("dead-units", "watch", "Units are dead.", (), FIRST_THAT, layers=("stem.0",))
    made = replace(faulty, findings=(behind, *faulty.findings))
    for of in (digest(made), re.sub(r"<[^>]*>", "", page(made))):
        assert FIRST_THAT[0].text not in of
        assert of.index(faulty.findings[-1].summary[:40]) < of.index("What may follow from these")


def test_secrets_and_steering_are_not_in_it() -> None:
    made = example_audits.made_up(list(example_audits.HOSTILE), 2)
    facts = replace(made.record.facts, settings={"lr": 0.1, "api_key": "sk-12345"})
    text = digest(replace(made, record=replace(made.record, facts=facts)))
    assert "sk-12345" not in text and r"api\_key \*\*\*" in text
    assert "<img" not in re.sub(r"`[^`]*`", "", text)
    assert "\u202e" not in text
