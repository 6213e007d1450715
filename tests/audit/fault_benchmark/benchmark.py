"""The fault benchmark: planted faults and healthy runs, judged with several seeds, as one table.

    python tests/audit/fault_benchmark/benchmark.py [--seeds 5] [--first-seed 0]
        [--only NAME …] [--reported] [--jobs 2] [--part audit] [--rows FILE]

Each row of the results is written to a file at once, and rows that the file has are not computed
again, so an interrupted benchmark continues. `--part audit` audits every run, and tries the advice
(`judge.py`). `names` only audits, in a third of the time. `reports` trains every run under the
monitor, for the verdicts from its reports alone (`reports.py`). `--reported` takes bugs that people
report, in place of the planted faults.
"""

import argparse
import json
import multiprocessing
import shlex
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[2]))  # where the package of this is
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # and what writes tables

from audit.fault_benchmark.cases import CASES, HEALTHY
from audit.fault_benchmark.judge import diagnosed, judge
from audit.fault_benchmark.page import BEDS, page
from audit.fault_benchmark.reported import REPORTED, TWINS
from audit.fault_benchmark.reports import reported
from write_up import hardware

Task = tuple[str, str, int]  # part, name, seed
PARTS = {"audit": judge, "names": diagnosed, "reports": reported}


def done(task: Task) -> dict[str, Any]:
    """Return the row of one task."""
    torch.set_num_threads(1)
    part, name, seed = task
    return {"part": part, "name": name, "seed": seed, **PARTS[part](BEDS[name], seed)}


def read(file: Path) -> dict[Task, dict[str, Any]]:
    lines = file.read_text().splitlines() if file.exists() else []
    rows = [json.loads(line) for line in lines]
    return {(row["part"], row["name"], row["seed"]): row for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[""], help="names that hold one of these")
    parser.add_argument("--reported", action="store_true", help="bugs that people report")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--part", choices=PARTS, default="audit")
    parser.add_argument("--rows", type=Path, default=Path("runs/fault-benchmark.jsonl"))
    given = parser.parse_args()

    beds = {**TWINS, **REPORTED} if given.reported else {**HEALTHY, **CASES}
    names = [name for name in beds if any(part in name for part in given.only)]
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    wanted = [(given.part, name, seed) for seed in seeds for name in names]
    rows = read(given.rows)
    given.rows.parent.mkdir(parents=True, exist_ok=True)
    left = [task for task in wanted if task not in rows]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.jobs, spawn) as pool, given.rows.open("a") as file:
        futures = [pool.submit(done, task) for task in left]
        for number, future in enumerate(as_completed(futures), start=1):
            row = future.result()
            rows[row["part"], row["name"], row["seed"]] = row
            print(json.dumps(row), file=file, flush=True)
            print(f"{number}/{len(left)} {row['name']}", file=sys.stderr)
    print(f"`python tests/audit/fault_benchmark/benchmark.py {shlex.join(sys.argv[1:])}`\n")
    print(f"torch {torch.__version__}; {hardware()}.\n")
    print(page([rows[task] for task in wanted]))


if __name__ == "__main__":
    main()
