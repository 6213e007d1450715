"""The fault benchmark's verdicts from reports alone, as Markdown."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from audit.fault_benchmark.cases import CASES, HEALTHY
from write_up import table

Row = dict[str, Any]
STRENGTHS = ("act", "watch", "note", "nothing", "refused")


def strength(verdict: Row) -> str:
    """Return the strongest finding, as in the headline."""
    found = [strong for _, strong in verdict["findings"]]
    return found[0] if found else "nothing"


def state(row: Row) -> str:
    """Return how the loss changed."""
    if "refused" in row:
        return "not trained"
    if not row["finite"]:
        return "not finite"
    return "falls" if row["fell"] else "does not fall"


def page(rows: Iterable[Row]) -> str:
    """Return the tables for rows of `benchmark.py --parts reports`."""
    rows, lines = list(rows), []
    for verdict, words in (("known", "With the loss"), ("unknown", "Without it")):
        lines += [f"## {words}", "", *_counts(rows, verdict)]
    lines += [*_healthy(rows), *_missed(rows)]
    return "\n".join(lines).rstrip() + "\n"


def _counts(rows: list[Row], verdict: str) -> list[str]:
    counts: dict[tuple[str, str, str], Counter[str]] = {}
    for row in rows:
        bed = {**HEALTHY, **CASES}[row["name"]]
        faulty = "healthy" if row["name"] in HEALTHY else "faulty"
        said = "refused" if "refused" in row else strength(row[verdict])
        for kind in ("all", bed.kind):
            counts.setdefault((faulty, kind, state(row)), Counter())[said] += 1
    order = sorted(counts, key=lambda key: (key[0] == "faulty", key[1] != "all", key))
    found = [(*key, *(counts[key][each] or "–" for each in STRENGTHS)) for key in order]
    return table(("run", "network", "its loss", *STRENGTHS), found)


def _healthy(rows: list[Row]) -> list[str]:
    """Return the healthy runs with a finding."""
    found = [
        (row["name"], row["seed"], state(row), _said(row["known"]), _said(row["unknown"]))
        for row in rows
        if row["name"] in HEALTHY and (row["known"]["findings"] or row["unknown"]["findings"])
    ]
    header = ("run", "seed", "its loss", "with the loss", "without it")
    return ["## Healthy runs of which something is said", "", *table(header, found)]


def _missed(rows: list[Row]) -> list[str]:
    """Return the faulty runs without a finding although the loss is known."""
    seeds: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        if row["name"] in CASES and "known" in row and strength(row["known"]) == "nothing":
            seeds.setdefault((row["name"], state(row)), []).append(row["seed"])
    found = [(*key, ", ".join(map(str, of))) for key, of in seeds.items()]
    return [
        "## Faulty runs of which nothing is said, the loss being known",
        "",
        *table(("run", "its loss", "seeds"), found),
    ]


def _said(verdict: Row) -> str:
    return "<br>".join(verdict["said"]) or "–"
