"""The fault benchmark: planted faults and healthy runs, judged with several seeds, as one table.

    python tests/audit/fault_benchmark/benchmark.py [--seeds 5] [--first-seed 0]
        [--only NAME …] [--one-in 4] [--jobs 2] [--parts audit] [--rows FILE]

Each row of the results is written to a file at once, and rows that the file has are not computed
again, so an interrupted benchmark continues. Of its parts, `audit` audits every run, and tries
the advice (`judge.py`). `names` only audits, in a third of the time. `reports` trains every run
under the monitor, for the verdicts from its reports alone (`reports.py`); without other parts it
has a table of its own (`verdicts.py`).
"""

import argparse
import json
import multiprocessing
import shlex
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[2]))  # where the package of this is
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # and what writes tables

from audit.fault_benchmark import reported_page, verdicts
from audit.fault_benchmark.cases import CASES, HEALTHY
from audit.fault_benchmark.judge import diagnosed, judge
from audit.fault_benchmark.page import page
from audit.fault_benchmark.reported import HELD_OUT, REPORTED, SET_BY, TWINS
from audit.fault_benchmark.reports import reported
from write_up import hardware

Task = tuple[str, str, int]  # part, name, seed
BEDS = {**HEALTHY, **CASES}
OTHERS = {**TWINS, **REPORTED}  # bugs that people report, and the same runs without them
HALVES = {
    "all": OTHERS,
    "set-by": {case.name for case in SET_BY} | {case.twin.name for case in SET_BY},
}
HALVES["held-out"] = {case.name for case in HELD_OUT} | {case.twin.name for case in HELD_OUT}
PARTS = {"audit": judge, "names": diagnosed, "reports": reported}


def tasks(
    parts: list[str], only: list[str], seeds: range, half: str | None, one_in: int = 1
) -> Iterator[Task]:
    beds = BEDS if half is None else {name: OTHERS[name] for name in OTHERS if name in HALVES[half]}
    for seed in seeds:
        for part in parts:
            for name in list(beds)[::one_in]:
                if not only or any(each in name for each in only):
                    yield part, name, seed


def done(task: Task) -> dict[str, Any]:
    """Return the row of one task."""
    torch.set_num_threads(1)
    part, name, seed = task
    bed = (BEDS | OTHERS)[name]
    began = time.perf_counter()
    row = PARTS[part](bed, seed)
    seconds = round(time.perf_counter() - began, 2)
    return {"part": part, "name": name, "seed": seed, **row, "seconds": seconds}


def read(file: Path) -> dict[Task, dict[str, Any]]:
    lines = file.read_text().splitlines() if file.exists() else []
    rows = [json.loads(line) for line in lines]
    return {(row["part"], row["name"], row["seed"]): row for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[], help="names that hold one of these")
    parser.add_argument("--one-in", type=int, default=1, help="take every n-th run only")
    parser.add_argument(
        "--reported", choices=HALVES, help="bugs that people report, in their place"
    )
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["audit"])
    parser.add_argument("--rows", type=Path, default=Path("runs/fault-benchmark.jsonl"))
    given = parser.parse_args()

    seeds = range(given.first_seed, given.first_seed + given.seeds)
    wanted = list(tasks(given.parts, given.only, seeds, given.reported, given.one_in))
    rows = read(given.rows)
    given.rows.parent.mkdir(parents=True, exist_ok=True)
    left = [task for task in wanted if task not in rows]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.jobs, spawn) as pool, given.rows.open("a") as file:
        futures = [pool.submit(done, task) for task in left]
        for number, future in enumerate(as_completed(futures)):
            row = future.result()
            rows[row["part"], row["name"], row["seed"]] = row
            print(json.dumps(row), file=file, flush=True)
            print(f"{number + 1}/{len(left)} {row['part']} {row['name']} {row['seconds']} s")
    of_reports = given.parts == ["reports"]
    tell = verdicts.page if of_reports else reported_page.page if given.reported else page
    print(f"`python tests/audit/fault_benchmark/benchmark.py {shlex.join(sys.argv[1:])}`")
    print(f"torch {torch.__version__}; {hardware()}.\n")
    print(tell([rows[task] for task in wanted]))


if __name__ == "__main__":
    main()
