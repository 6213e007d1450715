"""The fault benchmark's results as tables: totals, by fault, each run that failed."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from audit.fault_benchmark.cases import CASES, HEALTHY, UNSEEN
from audit.fault_benchmark.reported import HELD_OUT, REPORTED, SET_BY, TWINS
from audit.fault_benchmark.run import Case
from write_up import table

Row = dict[str, Any]
BEDS = {**HEALTHY, **CASES, **TWINS, **REPORTED}
GROUPS = {
    "Planted faults": CASES.keys() | HEALTHY.keys(),
    "Of these, the cases that no rule was made with": UNSEEN,
    "Reported bugs that rules were set by": {x.name for c in SET_BY for x in (c, c.twin)},
    "Reported bugs, held out": {x.name for c in HELD_OUT for x in (c, c.twin)},
}
CHANGES = {"advice": "first advice", "random": "one random change", "rate": "the best rate alone"}


def page(rows: Sequence[Row]) -> str:
    """Return the tables for rows of `benchmark.py`."""
    if any("known" in row or "refused" in row for row in rows):
        return "\n".join(_of_reports(rows))
    faulty = [row for row in rows if isinstance(BEDS[row["name"]], Case)]
    well = [row for row in rows if row not in faulty]
    lines = []
    for title, names in GROUPS.items():
        some, healthy = ([row for row in part if row["name"] in names] for part in (faulty, well))
        if some:
            head = f"{len(some)} faulty runs, {len(healthy)} healthy"
            lines += [f"## {title}", "", *table((head, "share"), _totals(some, healthy))]
    return "\n".join([*lines, *_kinds(faulty), *_failed(rows)])


def share(found: Sequence[bool]) -> str:
    if not found:
        return "–"
    p, of = sum(found) / len(found), len(found)
    return f"{100 * p:.0f} % ± {100 * math.sqrt(p * (1 - p) / of):.0f} ({sum(found)} of {of})"


def rank(row: Row) -> int | None:
    """Return the place of the planted fault among the findings, from 1."""
    expected = BEDS[row["name"]].expected
    return next((i for i, (name, _) in enumerate(row["findings"], 1) if name in expected), None)


def alarmed(row: Row) -> bool:
    return any(strength == "act" for _, strength in row["findings"])


def _pays(rows: Sequence[Row], change: str) -> list[bool]:
    return [row[change]["pays"] for row in rows if change in row]


def _totals(faulty: Sequence[Row], well: Sequence[Row]) -> list[tuple[str, str]]:
    first = [row for row in faulty if rank(row) == 1]
    tried = [row for row in faulty if not row["words"]]
    literally = [row.get("literally", row["advice"])["pays"] for row in faulty if "advice" in row]
    return [
        ("planted fault named first", share([row in first for row in faulty])),
        (
            "… and with strength act",
            share([row in first and row["findings"][0][1] == "act" for row in faulty]),
        ),
        ("planted fault named at all", share([rank(row) is not None for row in faulty])),
        ("healthy runs with an alarm (a finding to act on)", share(list(map(alarmed, well)))),
        ("first advice is in words only", share([row["words"] for row in faulty])),
        *((f"{said} pays, where that can be tried", share(_pays(tried, change)))
          for change, said in CHANGES.items()),
        *((f"{said} pays, of all faulty runs", share(_pays(faulty, change)))
          for change, said in CHANGES.items()),
        ("first advice pays, of all, words applied literally", share(literally)),
    ]  # fmt: skip


def _kinds(faulty: Sequence[Row]) -> list[str]:
    kinds: dict[str, list[Row]] = defaultdict(list)
    for row in faulty:
        kinds[BEDS[row["name"]].expected[0]].append(row)
    lines = []
    for kind, rows in kinds.items():
        ranks = list(map(rank, rows))
        counts = [[at == 1 for at in ranks], [at is not None for at in ranks]]
        counts += [_pays(rows, change) for change in CHANGES]
        lines.append((f"`{kind}`", *(f"{sum(found)} of {len(found)}" for found in counts)))
    header = ("planted", "named first", "named", *(f"{said} pays" for said in CHANGES.values()))
    return ["## By fault", "", *table(header, lines)]


def _failed(rows: Sequence[Row]) -> list[str]:
    """Return a line of each run whose fault is not named first, whose advice fails, or an alarm."""
    lines = []
    for row in rows:
        bed = BEDS[row["name"]]
        is_case = isinstance(bed, Case)
        done = row.get("literally", row.get("advice", {"change": "–", "pays": True}))
        if (rank(row) == 1 and done["pays"]) if is_case else not alarmed(row):
            continue
        said = ", ".join(f"{name} ({strength})" for name, strength in row["findings"])
        planted = bed.expected[0] if is_case else "nothing"
        found = row.get("raised") or said or "nothing"
        lines.append((row["name"], row["seed"], planted, found, done["change"]))
    header = ("not named first, not mended, or alarmed", "seed", "planted", "found")
    return ["## Single runs", "", *table((*header, "first advice"), lines)]


def _of_reports(rows: Sequence[Row]) -> list[str]:
    """Return what reports alone say at most, with and without the loss, by what the loss does."""
    counts: Counter[tuple[str, ...]] = Counter()
    for row in rows:
        run = "faulty" if isinstance(BEDS[row["name"]], Case) else "healthy"
        loss = "falls" if row.get("fell") else "does not fall"
        for words in ("known", "unknown"):
            found = row[words]["findings"] if words in row else [("", "refused")]
            strongest = found[0][1] if found else "nothing"
            counts[run, loss, words, strongest] += 1
    header = ("run", "its loss", "which is", "said at most", "runs")
    return table(header, [(*key, counts[key]) for key in sorted(counts)])
