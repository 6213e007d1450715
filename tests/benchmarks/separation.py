"""The measures that separate faulty runs from healthy ones: candidates for a dashboard's front.

    python tests/benchmarks/separation.py [--seeds 1] [--write FILE]

Every run of the audit's fault benchmark, healthy or with a planted fault, is watched for as many
steps as an audit takes. For each measure, the layers' typical values (medians over the measured
steps; maps only) are reduced to their smallest, median and largest. A fault shows in such an end if
that lies outside all healthy runs' values. Faults that no measure of a step could show (parameters
that the optimizer does not hold, labels that belong to other inputs) are included. The second table
shows a dashboard's findings for each run, from its reports alone.
"""

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

sys.path.append(str(Path(__file__).parents[1]))  # location of the fault benchmark's package

from audit.fault_benchmark.cases import CASES, HEALTHY
from audit.fault_benchmark.run import STEPS

from adiv_monitor.audit.experiments.observe import observe
from adiv_monitor.diagnosis import diagnose
from adiv_monitor.diagnosis.readings import by_layer
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.diagnosis.running import Running
from adiv_monitor.report import MEASURES

ENDS = {"smallest": min, "median": median, "largest": max}
Ends = dict[tuple[str, str], float]


class Watched(NamedTuple):
    """One run.

    Attributes:
        ends: (measure, end) → value over its layers.
        names: findings from the reports alone, to act on or to watch.
        audits: findings of the audit's rules, which also see the rest of the run, without trials.
    """

    ends: Ends
    names: frozenset[str]
    audits: frozenset[str]


def watched(name: str, seed: int) -> Watched:
    run = {**HEALTHY, **CASES}[name].build(seed)
    record = observe(run.setup(STEPS, seed), every_n_steps=STEPS // 10)
    running = Running()
    for report in record.reports:
        running.add(report)
    names = frozenset(f.name for f in running.findings() if f.strength != "note")
    return Watched(typical_ends(record), names, frozenset(f.name for f in diagnose(record)))


def typical_ends(record: Record) -> Ends:
    found = {}
    for measure in MEASURES:
        values = [typical.value for typical in by_layer(record, measure).values()]
        for end, of in ENDS.items():
            if values:
                found[measure, end] = of(values)
    return found


def findings(runs: dict[str, list[Watched]]) -> list[str]:
    """Return how often reports alone find the faults, and how often they find others."""
    healthy = [run for name in HEALTHY for run in runs.get(name, [])]
    faulty = [(run, CASES[name].expected) for name in CASES for run in runs.get(name, [])]

    def share(of: Iterable[object], whole: int) -> str:
        return f"{sum(map(bool, of))} of {whole}"

    return [
        "| found in the reports alone, to act on or to watch | runs |",
        "| --- | --- |",
        f"| something, in healthy runs | {share((r.names for r in healthy), len(healthy))} |",
        f"| something, in faulty runs | {share((r.names for r, _ in faulty), len(faulty))} |",
        "| … the planted fault, or what is right in its place | "
        f"{share((r.names.intersection(expected) for r, expected in faulty), len(faulty))} |",
        "| … what the audit's rules, which see more, don't find | "
        f"{share((r.names - r.audits for r, _ in faulty), len(faulty))} |",
    ]


def table(runs: dict[str, list[Watched]]) -> list[str]:
    """Return a row per measure and end, sorted by the number of faults that show."""
    healthy = [run.ends for name in HEALTHY for run in runs.get(name, [])]
    faulty = [run.ends for name in CASES for run in runs.get(name, [])]
    rows = []
    for key in sorted({key for ends in healthy for key in ends}):
        values = [ends[key] for ends in healthy if key in ends]
        low, high = min(values), max(values)
        read = [ends.get(key, math.nan) for ends in faulty]
        told = sum(value < low or value > high for value in read)
        rows.append((told, key, low, median(values), high))
    rows.sort(key=lambda row: (-row[0], row[1]))
    lines = ["| measure | end over layers | faulty runs outside | healthy: least | median | most |"]
    lines += ["| --- | --- | --- | --- | --- | --- |"]
    for told, (measure, end), low, middle, high in rows:
        cells = (
            measure,
            end,
            f"{told} of {len(faulty)}",
            f"{low:.3g}",
            f"{middle:.3g}",
            f"{high:.3g}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    runs = defaultdict(list)
    for name in (*HEALTHY, *CASES):
        for seed in range(given.seeds):
            runs[name].append(watched(name, seed))
            print(name, seed, file=sys.stderr, flush=True)
    command = f"python tests/benchmarks/separation.py --seeds {given.seeds}"
    head = ["# Which measures tell faulty runs from healthy ones", "", f"`{command}`", ""]
    head += [
        f"{len(HEALTHY)} healthy and {len(CASES)} faulty runs, {given.seeds} seed(s), CPU.",
        "",
    ]
    text = "\n".join([*head, *findings(runs), "", *table(runs)]) + "\n"
    print(text)
    if given.write:
        given.write.write_text(text)


if __name__ == "__main__":
    main()
