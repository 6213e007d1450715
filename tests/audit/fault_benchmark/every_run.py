"""Every run of the fault benchmark as tables: the cases, healthy runs, how faulty ones differ."""

from collections import Counter
from collections.abc import Iterable, Sequence

from audit.fault_benchmark.cases import CASES, DROPPED, HEALTHY
from audit.fault_benchmark.course import FACTORS
from audit.fault_benchmark.page import (
    CHANGES,
    Row,
    advised,
    alarmed,
    by_case,
    head,
    named_first,
    paid_of,
)
from audit.fault_benchmark.run import STEPS
from write_up import table


def every_run(rows: Iterable[Row], arguments: Sequence[str]) -> str:
    """Return all tables for rows of `benchmark.py`."""
    parts = by_case(rows)
    faulty_cases = {name: found for name, found in parts["audit"].items() if name in CASES}
    healthy = {name: found for name, found in parts["audit"].items() if name in HEALTHY}
    lines = [
        *head("Every run of the fault benchmark", arguments),
        "",
        "What is counted, and the totals: [fault benchmark](../../../docs/fault-benchmark.md).",
        "",
        *_cases(faulty_cases),
        *_healthy(healthy, parts["sweep"]),
        *_validity(parts["course"]),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _cases(faulty_cases: dict[str, list[Row]]) -> list[str]:
    lines = []
    for name, rows in faulty_cases.items():
        case, n = CASES[name], len(rows)
        first = Counter(row["findings"][0][0] if row["findings"] else "nothing" for row in rows)
        advice = Counter(map(advised, rows)).most_common(1)[0][0]
        losses = [_median(row["without"] for row in rows if "without" in row)]
        losses += [
            _median(row[change]["loss"] for row in rows if change in row) for change in CHANGES
        ]
        lines.append(
            (
                name + (f" ({case.source})" if case.source else ""),
                ", ".join(f"`{each}`" for each in case.expected),
                f"{sum(map(named_first, rows))} of {n}",
                ", ".join(f"`{found}` {times}" for found, times in first.most_common()),
                advice,
                paid_of(rows, "advice"),
                *losses,
            )
        )
    header = ("case", "right", "named first", "found first", "advice (most often)", "it pays")
    return [
        "## Every case",
        "",
        "Losses are medians over seeds: as it is, with the advice, with a random change, with the "
        "best of a random search, with the best rate alone; inf: not finite.",
        "",
        *table((*header, "loss", "advice", "random", "search", "rate"), lines),
        "### Why more than one name is right",
        "",
        *(f"- {name}: {CASES[name].because}." for name in faulty_cases if CASES[name].because),
        "",
    ]


def _healthy(healthy: dict[str, list[Row]], sweeps: dict[str, list[Row]]) -> list[str]:
    lines = []
    for name in sweeps or healthy:
        rows = healthy.get(name, [])
        acts = Counter(
            found for row in rows for found, strength in row["findings"] if strength == "act"
        )
        watched = Counter(
            found for row in rows for found, strength in row["findings"] if strength == "watch"
        )
        swept = [row["losses"] for row in sweeps.get(name, [])]
        means = [sum(column) / len(swept) for column in zip(*swept, strict=True)]
        lines.append(
            (
                name,
                HEALTHY[name].kind,
                f"{sum(map(alarmed, rows))} of {len(rows)}",
                ", ".join(f"`{found}` {times}" for found, times in acts.most_common()) or "–",
                ", ".join(f"`{found}` {times}" for found, times in watched.most_common()) or "–",
                *(f"{mean:.3g}" if mean > min(means) else f"**{mean:.3g}**" for mean in means),
            )
        )
    header = ("healthy run", "kind", "alarms", "to act on", "to watch")
    rates = [f"rate × {factor:g}" for factor in FACTORS]
    return [
        "## Healthy runs",
        "",
        f"That they are: the mean loss after {STEPS} steps at their learning rate and at others.",
        "",
        *table((*header, *rates), lines),
    ]


def _validity(courses: dict[str, list[Row]]) -> list[str]:
    lines = []
    for name, rows in courses.items():
        if name not in CASES or CASES[name].twin.name not in courses:
            continue
        case = CASES[name]
        twins = {row["seed"]: row for row in courses[case.twin.name]}
        pairs = [(twins[r["seed"]][case.judged_by], r[case.judged_by]) for r in rows]
        worse = sum(faulty_cases > max(1.25 * well, well + 0.01) for well, faulty_cases in pairs)
        lines.append(
            (
                name,
                case.judged_by,
                _median(well for well, _ in pairs),
                _median(faulty_cases for _, faulty_cases in pairs),
                f"{worse} of {len(pairs)}",
            )
        )
    return [
        "## That the faulty runs are worse",
        "",
        f"After {STEPS} steps, without the audit: medians over seeds, and in how many the faulty "
        "run is worse by a quarter. Error: share of wrong answers, or of variance not explained.",
        "",
        *table(("case", "by", "healthy twin", "faulty", "worse"), lines),
        "Tried and left out, since they do not harm, or are not what they were meant to be:",
        "",
        *(f"- {name}: {why}." for name, why in DROPPED.items()),
    ]


def _median(values: Iterable[float]) -> str:
    found = sorted(values)
    return f"{found[len(found) // 2]:.3g}" if found else "–"
