"""The audit's findings on reported bugs and on their fixed twins, as Markdown."""

from collections.abc import Sequence
from typing import Any

from audit.fault_benchmark.reported import HELD_OUT, SET_BY
from audit.fault_benchmark.reported_sources import SOURCES
from audit.fault_benchmark.run import Case
from write_up import table

Row = dict[str, Any]


def page(rows: Sequence[Row]) -> str:
    """Return the tables of docs/reported-bugs.md: both halves, the twins, and totals."""
    lines = []
    for title, cases in (("Rules were set by these", SET_BY), ("Held out", HELD_OUT)):
        some = [(case, row) for case in cases for row in rows if row["name"] == case.name]
        if some:
            lines += [f"## {title}", "", _counts(some), "", *_paid(some), *_cases(some)]
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


def _paid(some: Sequence[tuple[Case, Row]]) -> list[str]:
    """Return a sentence on the advice, or nothing if it was not tried."""
    tried = [row for _, row in some if "advice" in row]
    if not tried:
        return []
    paid = [sum(row[change]["pays"] for row in tried) for change in ("random", "rate")]
    return [
        f"The first advice pays: {sum(map(_pays, tried))} of {len(tried)} "
        f"({sum('literally' in row for row in tried)} of them in words, applied literally). One "
        f"random fix: {paid[0]}. The best learning rate: {paid[1]}.",
        "",
    ]


def _pays(row: Row) -> bool:
    return bool(row.get("literally", row["advice"])["pays"])


def _cases(some: Sequence[tuple[Case, Row]]) -> list[str]:
    header = ["bug", "network", "reported", "cause", "found", "first"]
    tried = any("advice" in row for _, row in some)
    if tried:
        header += ["first advice", "pays", "without", "with it"]
    return table(header, [
        (
            case.name,
            case.kind,
            f"[thread]({SOURCES[case.name]})" if case.name in SOURCES else "–",
            case.expected[0],
            _found(row),
            "yes" if _names(row)[:1] == [case.expected[0]] else "no",
            *(_advised(case, row) if tried else ()),
        )
        for case, row in some
    ])  # fmt: skip


def _advised(case: Case, row: Row) -> tuple[str, str, str, str]:
    """Return the advice, whether it pays, and the loss, or the error, without and with it."""
    if "advice" not in row:
        return "–", "–", "–", "–"
    done = row.get("literally", row["advice"])
    unit = " (error)" * (case.judged_by == "error")
    without, loss = (f"{x:.3g}{unit}" for x in (row["without"], done["loss"]))
    said = done["change"] or "none that can be applied"
    return said, "yes" if done["pays"] else "no", without, loss


def _names(row: Row) -> list[str]:
    return [name for name, _ in row["findings"]]


def _found(row: Row) -> str:
    said = [f"{name} ({strength})" for name, strength in row["findings"]]
    return row.get("raised") or ", ".join(said) or "nothing"
