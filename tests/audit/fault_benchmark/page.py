"""The fault benchmark's results as tables: totals, by fault, misses."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from audit.fault_benchmark.cases import CASES, HEALTHY, UNSEEN
from write_up import table

Row = dict[str, Any]
CHANGES = ("advice", "random", "search", "rate")


def page(rows: Iterable[Row]) -> str:
    """Return the tables of docs/fault-benchmark.md for rows of `benchmark.py`.

    Where runs were only audited (`--parts names`), no advice was tried.
    """
    parts = by_case(rows)
    audits = parts["audit"] or parts["names"]
    faulty_cases = {name: found for name, found in audits.items() if name in CASES}
    healthy = {name: found for name, found in audits.items() if name in HEALTHY}
    lines = [
        *_totals("Totals", faulty_cases, healthy),
        *_totals(
            "Of these, the cases that no rule was made with",
            {name: found for name, found in faulty_cases.items() if name in UNSEEN},
            {name: found for name, found in healthy.items() if name in UNSEEN},
        ),
        *_kinds(faulty_cases),
        *_misses(faulty_cases),
    ]
    return "\n".join(lines).rstrip() + "\n"


def by_case(rows: Iterable[Row]) -> dict[str, dict[str, list[Row]]]:
    """Return the rows by part of the benchmark and name of the case."""
    parts: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        parts[row["part"]][row["name"]].append(row)
    return parts


def share(hits: int, of: int) -> str:
    if not of:
        return "–"
    p = hits / of
    return f"{100 * p:.0f} % ± {100 * math.sqrt(p * (1 - p) / of):.0f} ({hits} of {of})"


def _count(rows: Iterable[Row], holds: Callable[[Row], bool]) -> str:
    found = [holds(row) for row in rows]
    return share(sum(found), len(found))


def _paid(rows: Iterable[Row], change: str) -> str:
    return _count((row for row in rows if change in row), lambda row: row[change]["pays"])


def named_first(row: Row) -> bool:
    return bool(row["findings"]) and row["findings"][0][0] in CASES[row["name"]].expected


def named(row: Row) -> bool:
    return any(name in CASES[row["name"]].expected for name, _ in row["findings"])


def alarmed(row: Row) -> bool:
    return any(strength == "act" for _, strength in row["findings"])


def paid_of(rows: Iterable[Row], change: str) -> str:
    paid = [row[change]["pays"] for row in rows if change in row]
    return f"{sum(paid)} of {len(paid)}"


def _more(row: Row, change: str, other: str) -> bool:
    return row[change]["loss"] < 0.98 * row[other]["loss"]


def _totals(
    title: str, faulty_cases: dict[str, list[Row]], healthy: dict[str, list[Row]]
) -> list[str]:
    faulty = [row for rows in faulty_cases.values() for row in rows]
    well = [row for rows in healthy.values() for row in rows]
    tried = [row for row in faulty if not row["words"]]
    lines = [
        ("planted fault named first", _count(faulty, named_first)),
        (
            "… and with strength act",
            _count(faulty, lambda row: named_first(row) and row["findings"][0][1] == "act"),
        ),
        ("planted fault named at all", _count(faulty, named)),
        ("healthy runs with an alarm (a finding to act on)", _count(well, alarmed)),
        ("first advice is in words only", _count(faulty, lambda row: row["words"])),
        ("first advice pays, where it can be tried", _paid(tried, "advice")),
        ("… one random change pays there", _paid(tried, "random")),
        ("… random search pays there", _paid(tried, "search")),
        ("… the best rate alone pays there", _paid(tried, "rate")),
        ("first advice pays, of all faulty runs", _paid(faulty, "advice")),
        ("… one random change", _paid(faulty, "random")),
        ("… random search", _paid(faulty, "search")),
        ("… the best rate alone", _paid(faulty, "rate")),
    ]
    for other in CHANGES[1:]:
        both = [row for row in tried if other in row]
        better = share(sum(_more(row, "advice", other) for row in both), len(both))
        worse = share(sum(_more(row, other, "advice") for row in both), len(both))
        what = {"random": "random change", "search": "random search", "rate": "best rate"}[other]
        lines.append((f"advice's loss is lower than of {what} (by 2 %), where tried", better))
        lines.append(("… higher", worse))
    head = (
        f"{len(faulty_cases)} cases, {len(faulty)} runs; {len(healthy)} healthy, {len(well)} runs"
    )
    return [f"## {title}", "", *table((head, "share"), lines)]


def _kinds(faulty_cases: dict[str, list[Row]]) -> list[str]:
    by_kind: dict[str, list[Row]] = defaultdict(list)
    for name, rows in faulty_cases.items():
        by_kind[CASES[name].expected[0]] += rows
    lines = [
        (
            f"`{kind}`",
            *(f"{sum(map(hit, rows))} of {len(rows)}" for hit in (named_first, named)),
            *(paid_of(rows, change) for change in CHANGES),
        )
        for kind, rows in by_kind.items()
    ]
    header = ("planted", "named first", "named", "advice pays", "random change", "random search")
    return ["## By fault", "", *table((*header, "rate"), lines)]


def advised(row: Row) -> str:
    if "raised" in row:
        return f"an error: {row['raised']}"
    if row["words"]:
        return "in words"
    return f"`{row['advice']['change']}`" if row["findings"] else "none"


def _misses(faulty_cases: dict[str, list[Row]]) -> list[str]:
    unnamed, unpaid = [], []
    for name, rows in faulty_cases.items():
        wrong = [row for row in rows if not named_first(row)]
        if wrong:
            ranks = ["not at all" if not named(row) else f"as no. {_rank(row)}" for row in wrong]
            said = ", ".join(f"{what} {times}×" for what, times in Counter(ranks).items())
            unnamed.append((name, f"{len(wrong)} of {len(rows)}", said))
        bad = [
            row
            for row in rows
            if not row["words"] and not row.get("advice", {"pays": True})["pays"]
        ]
        if bad:
            advice = ", ".join(sorted(set(map(advised, bad))))
            unpaid.append((name, f"{len(bad)} of {len(rows)}", advice))
    return [
        "## Misses",
        "",
        *table(("not named first", "runs", "named"), unnamed),
        *table(("first advice does not pay", "runs", "advice"), unpaid),
    ]


def _rank(row: Row) -> int:
    expected = CASES[row["name"]].expected
    return 1 + next(i for i, (name, _) in enumerate(row["findings"]) if name in expected)
