"""Generator of docs/report-schema.md from the data classes of a report: `make schema`."""

import inspect
import re
import textwrap
from dataclasses import fields
from pathlib import Path

from adiv_monitor import AlignmentReading, AttentionReading, LayerReading, StepReport
from adiv_monitor.audit import AuditReport
from adiv_monitor.diagnosis import finding, record
from adiv_monitor.diagnosis.diagnosis import SCHEMA
from adiv_monitor.report import Alarm, Turn

PAGE = Path(__file__).parent.parent / "docs" / "report-schema.md"
CLASSES = (
    *(AuditReport, finding.Finding, finding.Evidence, finding.Advice, finding.Trial),
    *(record.Record, record.Facts, record.InputStatistics, record.UnitStatistics),
    *(record.WeightStatistics, record.Wiring, record.Alternative),
    *(StepReport, LayerReading, AttentionReading, AlignmentReading, Alarm, Turn),
)
COMPUTED = {
    "AuditReport": {
        "schema": f"{SCHEMA}; it grows when a field goes or means something else.",
        "verdict": "what it comes to, in one or two sentences.",
        "worst": "the strength of the strongest finding; null: there is none.",
    },
    "StepReport": {
        "descent": "Σ of the layers' descents; null if there are none.",
        "loss": "loss of this step's batch before the step; null if it is not known.",
    },
}
TOP = f"""# report.json

What an audit, and of a training `HtmlSink`, writes beside its page: one JSON object,
`AuditReport.to_dict()`, schema {SCHEMA}.
`AuditReport.from_json(text)` reads it back exactly; of what does not fit it says where,
what is there and what is expected.

- JSON has no word for numbers that are not finite: they are the texts `"NaN"` (no direction, or not
  known), `"Infinity"` and `"-Infinity"`. `null` is "None" below: not asked for, or not defined.
- Keys of objects are texts: `"0.1"` for a learning rate's factor, `"10"` for a step.
- In a layer's reading a measure that was not taken is absent, not null. What the measures are is
  said in `adiv_monitor/maths/measures.py`, those of attention in `adiv_monitor/maths/attention.py`.
- New fields may come without another schema: readers should pass over what they don't know.
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
