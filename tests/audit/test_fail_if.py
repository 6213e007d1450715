"""Rules of --fail-if: what they mean, and that they are never run."""

from typing import Any

import made_records
import pytest
from made_records import by_reports

from adiv_monitor.alarms import Rule
from adiv_monitor.audit.command.cli import hits
from adiv_monitor.audit.command.code import UsageError
from adiv_monitor.audit.command.options import rule as parse
from adiv_monitor.audit.report import AuditReport
from adiv_monitor.diagnosis.finding import Finding
from adiv_monitor.report import LayerReading


def reading(cosine: float, error: float = 0.0, scale_cv: float | None = 0.5) -> LayerReading:
    errors = {"update_cosine": error} if error else {}
    return made_records.reading(update_cosine=cosine, scale_cv=scale_cv, standard_error=errors)


def report(*steps: dict[str, LayerReading], findings: tuple[Finding, ...] = ()) -> AuditReport:
    return AuditReport(findings, by_reports(*steps))


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (" encoder.*:update_cosine <= .5 ", ("encoder.*", "update_cosine", "<=", 0.5)),
        ("a:b c : attention_cosine < 0", ("a:b c", "attention_cosine", "<", 0.0)),
        ("rate-too-high", ("*", "rate-too-high")),
        ("head.*: dead-units", ("head.*", "dead-units")),
    ],
)
def test_a_rule_compares_a_measure_or_names_a_finding(text: str, rule: tuple[Any, ...]) -> None:
    assert repr(parse(text)) == repr(Rule(text, *rule)), "nan is no number"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("scale_cvv > 1", "scale_cvv.*scale_cv"),
        ("rate-to-high", "rate-to-high.*rate-too-high"),
        *((text, "expected") for text in ("scale_cv", "> 1", "scale_cv > 1 or True", "")),
        ("head.*: acts-up", r"or \[LAYERS:\] NAME, such as 'act'"),
    ],
)
def test_a_rule_that_can_never_hold_is_no_gate(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse(text)


def test_every_hit_is_listed_with_its_steps() -> None:
    ran = report({"a": reading(-0.5), "b": reading(0.5)}, {"a": reading(-0.25), "b": reading(-0.1)})
    found = hits(parse("update_cosine < 0"), ran)
    assert found == ["a: -0.5 (step 0), -0.25 (step 10)", "b: -0.1 (step 10)"]
    assert hits(parse("b: update_cosine < 0"), ran) == ["b: -0.1 (step 10)"]
    assert hits(parse("update_cosine < -0.5"), ran) == []
    assert len(hits(parse("a: update_cosine <= -0.5"), ran)) == 1


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ("enc*: update_cosine < 0", "update_cosine was measured at a$"),
        ("a: scale_cv > 0", "scale_cv was measured at no layer"),
    ],
)
def test_a_rule_that_compares_nothing_is_an_error(rule: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        hits(parse(rule), report({"a": reading(0.5, scale_cv=None)}))


@pytest.mark.parametrize(
    ("rule", "found"),
    [
        ("rate-too-high", ["rate-too-high (act) at the model"]),
        ("enc.*: dead-units", ["dead-units (watch) at enc.a"]),
        ("enc.*: rate-too-high", []),
        ("vanishing", []),
        ("act", ["rate-too-high (act) at the model"]),
        ("enc.*: note", ["dead-units (watch) at enc.a"]),
    ],
)
def test_findings_by_name_and_by_strength(rule: str, found: list[str]) -> None:
    act = Finding("rate-too-high", "act")
    watch = Finding("dead-units", "watch", layers=("enc.a", "dec.b"))
    assert hits(parse(rule), report({"a": reading(0.5)}, findings=(act, watch))) == found
