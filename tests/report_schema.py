"""Generator of docs/report-schema.md from the data classes of a report: `make schema`."""

import inspect
import re
import textwrap
from dataclasses import fields
from pathlib import Path

from adiv_monitor import AlignmentReading, AttentionReading, LayerReading, StepReport
from adiv_monitor.audit.report import AuditReport
from adiv_monitor.diagnosis import finding, record
from adiv_monitor.diagnosis.diagnosis import SCHEMA
from adiv_monitor.report import Alarm, Turn

PAGE = Path(__file__).parent.parent / "docs" / "report-schema.md"
CLASSES = (
    *(AuditReport, finding.Finding, finding.Evidence, finding.Advice, finding.Trial),
    *(record.Record, record.Facts, record.InputStatistics, record.UnitStatistics),
    *(record.WeightStatistics, record.Wiring),
    *(StepReport, LayerReading, AttentionReading, AlignmentReading, Alarm, Turn),
)
COMPUTED = {
    "AuditReport": {
        "schema": f"{SCHEMA}; it grows when a field is removed or changes its meaning.",
        "verdict": "the conclusion, in one or two sentences.",
        "worst": "the strength of the strongest finding; null if there is none.",
    },
    "StepReport": {
        "descent": "Σ of the layers' descents; null if there are none.",
        "loss": "loss of this step's batch before the step; null if it is not known.",
    },
}
TOP = f"""# report.json

This page describes the JSON file that an audit, and `HtmlSink` for a training, write beside their
page: one object, `AuditReport.to_dict()`, schema {SCHEMA}. `AuditReport.from_json(text)` reads it
back exactly; it also reads schemas 2 and 3, without what is no field any more. If something
does not fit, its error says where, what is there and what is expected.

- JSON cannot represent numbers that are not finite. They are the strings `"NaN"` (no direction, or
  not known), `"Infinity"` and `"-Infinity"`. `null` is "None" below: not requested, or not defined.
- Keys of objects are strings: `"0.1"` for a factor of the learning rate, `"10"` for a step.
- A layer's reading contains only the measures that were computed; others are absent, not null.
  [Measures](api/measures.md) defines them.
- New fields may appear without a new schema number, so readers should ignore fields that they do
  not know.
"""


def text() -> str:
    """Return the page's text."""
    return "\n".join([TOP, *map(section, CLASSES)])


def section(kind: type) -> str:
    """Return a class's heading, its first docstring line, and its fields as a table."""
    described = attributes(kind) | COMPUTED.get(kind.__name__, {})
    named = [f.name for f in fields(kind) if f.name in described]
    computed = COMPUTED.get(kind.__name__, {})
    names = [*computed, *named] if kind is AuditReport else [*named, *computed]
    rows = [f"| `{name}` | {described[name]} |" for name in names]
    missing = [f"`{f.name}`" for f in fields(kind) if f.name not in described]
    others = [f"\nBesides, the measures: {', '.join(missing)}.\n"] if missing else []
    first = (inspect.getdoc(kind) or "").splitlines()[0]
    head = [f"## `{kind.__name__}`", "", first, "", "| field | what it is |", "| --- | --- |"]
    return "\n".join([*head, *rows, *others, ""])


def attributes(kind: type) -> dict[str, str]:
    """Return the descriptions in a docstring's "Attributes" section by attribute."""
    listed = (inspect.getdoc(kind) or "").split("Attributes:\n")[1].split("\n\n")[0]
    found: dict[str, str] = {}
    for line in textwrap.dedent(listed).splitlines():
        if begins := re.match(r"(\w+): (.*)", line):
            name = begins[1]
            found[name] = begins[2]
        else:
            found[name] += " " + line.strip()
    return {name: words.replace("|", "\\|") for name, words in found.items()}


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
