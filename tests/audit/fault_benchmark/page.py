"""The fault benchmark's results as Markdown: totals, every case, misses, healthy runs."""

import math
import platform
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from audit.fault_benchmark.cases import CASES, DROPPED, HEALTHY, UNSEEN
from audit.fault_benchmark.course import FACTORS
from audit.fault_benchmark.run import LONGER, STEPS
from write_up import hardware, table

import adiv_monitor

Row = dict[str, Any]
CHANGES = ("advice", "random", "search", "rate")

INTRODUCTION = f"""
Runs with a planted fault, and healthy ones, by which the audit is judged: each is built from a
seed, audited for {STEPS} steps, and its first advice is tried on *another* seed for {LONGER} steps.
Losses are means of the last quarter of the steps. A change pays if the loss is lower by more than
two standard errors and by 2 % of itself.

- **advice**: the first of the first finding that a run can try, at the learning rate that its
  trial found best. Where the first finding's advice is in words only ("hand the parameters to the
  optimizer" where no fix can; or of all that a run can try, the audit's own short runs say that it
  does not pay), nothing is tried, and that is counted apart.
- **random change**: a fix drawn from all that apply, to all layers, at the learning rate that a
  trial of the same length found best.
- **random search**: random changes, tried until as many short runs are spent as the audit spent on
  its trials; the best is kept if it paid. For every fifth seed.
- **rate**: the best of the learning rates that the audit tried, and nothing else.

± is the standard error of a binomial share; runs of one case are alike, so the true one is larger.

What is said of these runs by the monitor's reports alone, which see less, is
[counted apart](../tests/benchmarks/results/verdicts.md).

Most cases were there while rules and thresholds were made, with other seeds. Some networks, data
and strengths were not: their totals stand by themselves below.
"""

OTHERS = """
What others report, comparable in kind only, since faults, frameworks and criteria differ:
AUTOTRAINER fixed 10 of 30 faults in an independent study, random search 17, HEBO and BOHB 19 each;
on its own set it claims 98 % of 422 and 82 % gained five points. DeepDiagnosis gave the right fix
in 28 of 52 programs (UMLAUT 15 of 30, AUTOTRAINER 8 of 40) and raised alarms on 68 of 188 healthy
runs (36 %).
"""


LIMITS = """
## Limits

**Shuffled labels** can't be told, by any audit, from inputs that say nothing. An audit sees samples
(x, y) alone. If labels were shuffled, y is independent of x, and the samples' distribution is
p(x)·p(y). If nothing was shuffled but x has no information on y, it is p(x)·p(y) as well: whatever
is computed from the samples, a model's whole training included, is distributed alike in both, so
no rule is right more often in one than it is wrong in the other. What can be told is that no
relation was found, which a hard task and a short run give, too: so the finding is `loss-stuck`, to
be watched, and says that a few samples are learnt by heart, which rules out most other causes.
Where labels are unevenly frequent the loss falls to their entropy, and nothing is said.

**Adversarial losses** are only told apart, not judged: of their learning rates, and of what is
learnt, nothing is said.

Some healthy runs are of kinds in which the audit once raised false alarms (separate queries, keys
and values, an unused pooler, layers registered in another order than they run in, two players,
padded batches). Rules were set right by them, so they are counted among what is not unseen.
"""


def page(rows: Iterable[Row], arguments: Sequence[str]) -> str:
    """All of it. Rows as `benchmark.py` makes them."""
    parts: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        parts[row["part"]][row["name"]].append(row)
    faulty_cases = {name: found for name, found in parts["audit"].items() if name in CASES}
    healthy = {name: found for name, found in parts["audit"].items() if name in HEALTHY}
    lines = [
        "# Fault benchmark",
        "",
        f"`python tests/audit/fault_benchmark/benchmark.py {shlex.join(arguments)}`",
        "",
        f"adiv-monitor {adiv_monitor.__version__}, torch {torch.__version__}, Python "
        f"{platform.python_version()}; {hardware()}.",
        INTRODUCTION,
        *_totals("Totals", faulty_cases, healthy),
        *_totals(
            "Of these, what no rule was set by",
            {name: found for name, found in faulty_cases.items() if name in UNSEEN},
            {name: found for name, found in healthy.items() if name in UNSEEN},
        ),
        OTHERS,
        *_kinds(faulty_cases),
        *_cases(faulty_cases),
        *_misses(faulty_cases),
        *_healthy(healthy, parts["sweep"]),
        *_validity(parts["course"]),
        LIMITS,
    ]
    return "\n".join(lines).rstrip() + "\n"


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


def _of(rows: Iterable[Row], change: str) -> str:
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
            *(_of(rows, change) for change in CHANGES),
        )
        for kind, rows in by_kind.items()
    ]
    header = ("planted", "named first", "named", "advice pays", "random change", "random search")
    return ["## By fault", "", *table((*header, "rate"), lines)]


def _cases(faulty_cases: dict[str, list[Row]]) -> list[str]:
    lines = []
    for name, rows in faulty_cases.items():
        case, n = CASES[name], len(rows)
        first = Counter(row["findings"][0][0] if row["findings"] else "nothing" for row in rows)
        advice = Counter(map(_advice, rows)).most_common(1)[0][0]
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
                _of(rows, "advice"),
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


def _advice(row: Row) -> str:
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
        bad = [row for row in rows if not row["words"] and not row["advice"]["pays"]]
        if bad:
            advice = ", ".join(sorted(set(map(_advice, bad))))
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
