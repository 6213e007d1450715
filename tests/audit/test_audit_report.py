"""Reports as plain data and JSON, there and back; what is written; the documented schema."""

import json
import math
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import finding_texts
import pytest
import report_schema
import torch
from audited import mlp, seen
from example_reports import report as example_report
from setups import equal, trained
from torch import nn

from adiv_monitor import StepReport
from adiv_monitor.audit.report import AuditReport
from adiv_monitor.diagnosis.faults import FAULTS
from adiv_monitor.diagnosis.finding import Advice, Evidence, Finding, Trial

HARD = {"update_cosine": math.nan, "scale_mean": math.inf, "descent": -math.inf, "scale_cv": None}


@cache
def step_reports() -> list[StepReport]:
    """Of a run with attention and what really happened, and one with all that is awkward."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    everything = {"attainable": True, "attention": True, "realised": True, "max_rows": 4}
    seen = trained(layer, lambda of: of(torch.randn(3, 5, 8)).square().sum(), 2, **everything)
    made = example_report()
    path = "head"
    hard = replace(
        made,
        layers={**made.layers, path: replace(made.layers[path], **HARD)},
        coverage=math.nan,
        realised_loss_change=math.nan,
    )
    return [*seen, made, hard]


@cache
def audited() -> AuditReport:
    """A real one, with whatever its classes can hold put in."""
    real = AuditReport((), seen(mlp(), steps=4, every_n_steps=1))
    trial = Trial("rate*0.1", 9, math.inf, 0.1, None, math.nan)
    finding = Finding(
        "input-scale",
        "act",
        "It is so.",
        (Evidence("scale_cv", math.inf, 1.0, "a", 3), Evidence("loss", math.nan)),
        (Advice("Fix it", "rate*0.1", trial), Advice("Or so")),
        layers=("a", "<b>&\u2028é"),
        since=2,
    )
    made = replace(
        real.record,
        reports=(*real.record.reports, *step_reports()),
        losses=(*real.record.losses, math.nan),
        rates={0.1: trial, 10.0: trial},
        overfit=trial,
        first_non_finite="loss",
        notes=("NaN",),
    )
    return AuditReport((finding, replace(finding, strength="note")), made)


@pytest.mark.parametrize("number", range(4))
def test_a_step_report_comes_back_exactly(number: int) -> None:
    report = step_reports()[number]
    assert equal(StepReport.from_dict(report.to_dict()), report)


def test_an_audit_comes_back_exactly() -> None:
    report = audited()
    assert equal(AuditReport.from_dict(report.to_dict()), report)
    text = report.to_json()
    assert equal(AuditReport.from_json(text), report)
    assert AuditReport.from_json(text).to_json() == text


def test_json_is_strict() -> None:
    def refuse(word: str) -> None:
        pytest.fail(f"{word} is no JSON")

    record = json.loads(audited().to_json(), parse_constant=refuse)
    assert record["schema"] == 4
    assert record["worst"] == "act"
    assert record["record"]["losses"][-1] == "NaN"
    assert record["record"]["overfit"]["loss_by_rate"] is None


def test_what_an_earlier_or_a_later_version_wrote_can_be_read() -> None:
    report = audited()
    record = report.to_dict()
    del record["record"]["notes"]
    record["record"]["later"] = record["later"] = 1
    assert AuditReport.from_dict(record).record.notes == ()


def test_what_was_written_as_schema_2_can_be_read() -> None:
    text = (Path(__file__).parent / "report_of_schema_2.json").read_text(encoding="utf-8")
    old, report = json.loads(text), AuditReport.from_json(text)
    assert old["schema"] == 2 and old["what_if"]
    assert report.findings[0].name == old["findings"][0]["name"]
    assert report.record.losses == tuple(old["record"]["losses"])
    first = old["record"]["reports"][0]["layers"]
    assert {path: r.scale_cv for path, r in report.record.reports[0].layers.items()} == {
        path: reading["scale_cv"] for path, reading in first.items()
    }
    new = report.to_dict()
    assert new["schema"] == 4 and "what_if" not in new
    assert equal(AuditReport.from_dict(new), report)


def test_the_page_says_of_findings_what_the_docs_do() -> None:
    """`make schema` writes it."""
    assert finding_texts.ASSET.read_text(encoding="utf-8") == finding_texts.text()
    texts = json.loads(finding_texts.text())
    assert set(texts) == set(FAULTS)
    assert all("means" in text for text in texts.values())
    assert not any("<a" in html for text in texts.values() for html in text.values())


def test_the_schema_is_documented() -> None:
    """Every field that a report holds, and as the classes say: `make schema` writes it."""
    text = report_schema.PAGE.read_text(encoding="utf-8")
    assert text == report_schema.text()
    sections = dict(re.findall(r"^## `(\w+)`\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    whole, step = audited().to_dict(), step_reports()[0].to_dict()
    for kind, written in (
        ("AuditReport", whole),
        ("Record", whole["record"]),
        ("Finding", whole["findings"][0]),
        ("StepReport", step),
        ("LayerReading", next(iter(step["layers"].values()))),
    ):
        assert set(written) <= set(re.findall(r"`(\w+)`", sections[kind])), kind
