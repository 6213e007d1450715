"""The audit's findings on reported bugs and on their fixed twins, as Markdown."""

import shlex
from collections.abc import Sequence
from typing import Any

from audit.fault_benchmark.reported import HELD_OUT, SET_BY
from audit.fault_benchmark.reported_sources import SOURCES
from audit.fault_benchmark.run import Case
from write_up import hardware, table

Row = dict[str, Any]

INTRODUCTION = """
# Bugs that people report

The [fault benchmark](fault-benchmark.md) plants faults of the step: learning rates, scales, dead
units. This one plants bugs of wiring, loss and data. Each bug is planted into a healthy run, which
is also audited without it (the fixed twin). The link leads to a report of the same mistake in
another project; a bug without a link is one for which no report was found.

The rules were made while looking at the first half. The second half has other networks and other
ways to make the same mistakes. The authors of the rules also wrote its cases, so it says less than
cases of others would. Two rules were changed after a look at this table. A fact whose fix helps now
ranks before "cannot overfit", which came first in both halves for logits without a temperature
(23 of 24 and 26 of 27 before). And `input-partly-ignored` has strength "watch" if units are dead or
saturated, as in a case of the second half.
"""


def page(rows: Sequence[Row], arguments: Sequence[str]) -> str:
    """Return the page: both halves, the twins, and totals."""
    command = f"`python tests/audit/fault_benchmark/benchmark.py {shlex.join(arguments)}`"
    lines = [INTRODUCTION.strip(), "", f"{command}, on {hardware()}.", ""]
    for title, cases in (("Rules were set by these", SET_BY), ("Held out", HELD_OUT)):
        some = [(case, row) for case in cases for row in rows if row["name"] == case.name]
        if some:
            lines += [f"## {title}", "", _counts(some), "", *_cases(some)]
    twins = {case.twin.name for case in (*SET_BY, *HELD_OUT)}
    well = [row for row in rows if row["name"] in twins]
    if well:
        alarms = sum(any(s == "act" for _, s in row["findings"]) for row in well)
        lines += ["## Fixed twins", "", f"Alarms (*act*): {alarms} of {len(well)}.", ""]
        lines += table(("twin", "found"), [(row["name"], _found(row)) for row in well])
    return "\n".join(lines).rstrip() + "\n"


def _counts(some: Sequence[tuple[Case, Row]]) -> str:
    first = sum(_names(row)[:1] == [case.expected[0]] for case, row in some)
    named = sum(case.expected[0] in _names(row) for case, row in some)
    act = sum(row["findings"][:1] == [[case.expected[0], "act"]] for case, row in some)
    return (
        f"The cause first: {first} of {len(some)} ({act} to act on, the others to watch); named at "
        f"all: {named} of {len(some)}."
    )


def _cases(some: Sequence[tuple[Case, Row]]) -> list[str]:
    header = ("bug", "network", "reported", "cause", "found", "first")
    return table(header, [
        (
            case.name,
            case.kind,
            f"[thread]({SOURCES[case.name]})" if case.name in SOURCES else "–",
            case.expected[0],
            _found(row),
            "yes" if _names(row)[:1] == [case.expected[0]] else "no",
        )
        for case, row in some
    ])  # fmt: skip


def _names(row: Row) -> list[str]:
    return [name for name, _ in row["findings"]]


def _found(row: Row) -> str:
    said = [f"{name} ({strength})" for name, strength in row["findings"]]
    return row.get("raised") or ", ".join(said) or "nothing"
