"""All GPU measurements: parts, each in a process of its own, within one deadline.

Requires only torch with its Triton, and the imports of adiv_monitor; the tests also require pytest,
and the monitor's cost torchvision.

    python3 tests/benchmarks/gpu.py [--only PART ...] [--minutes 30] [--write FOLDER]
        [--dry-run] [--tiny]

A row is written to FOLDER/gpu.jsonl as soon as it is known, so a part that fails or is stopped
leaves its measurements, and the others run. FOLDER/gpu.md is made from these lines, for a part that
ran more than once from its last run. Lines of several machines can be put into one file; `--only`
without a part makes its page. The parts' output goes to the terminal. --dry-run prints the parts in
order of their worth with their expected times, in commands of less than eight minutes. If a GPU is
there for one of these alone, it is the first:

    python3 tests/benchmarks/gpu.py --minutes 7.6 --only check monitor layers layers-graph \\
        monitor-large monitor-compiled

Other libraries' layers participate where they can be imported, and read "not measured" elsewhere.
Without a registry they can be installed from wheels of another machine's `pip download`:

    python3 -m pip install --no-index --no-deps --target site wheels/*.whl
    PYTHONPATH=site python3 tests/benchmarks/gpu.py --only layers
"""

import argparse
import datetime
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests" / "benchmarks" / "results"
SCRIPT = Path(__file__).with_name("gpu_parts.py")
NOT_MEASURED = "not measured"
EACH_OF_ITS_DAY = """\
Every part was measured on the day that it names, with the code of that day. What is expected of
today's code is computed: of the monitor in `docs/cost.md`, of the layers in `layers/README.md`."""
PATIENCE = 5.0  # seconds to wait for a killed process to end
MINUTES = 7.6  # of a command
# Expected seconds of every part, in the order of their worth, grouped into commands. On an H200
# with 16 cores, all but the last tests took 168 s, calibration 12 s, rows 18 s, four of the layers'
# six contests 66 s, and the monitor 124 s with an older code; the others have not been run.
COMMANDS = (
    {
        "check": 60,
        "monitor": 80,
        "layers": 100,
        "layers-graph": 40,
        "monitor-large": 100,
        "monitor-compiled": 70,
    },
    {"layers-compiled": 330, "calibration": 15, "rows": 25},
    {"tests": 240},
)
PARTS = {name: seconds for parts in COMMANDS for name, seconds in parts.items()}

Record = dict[str, Any]


def plan() -> str:
    """Return the parts in order, with their expected times."""
    lines = []
    for parts in COMMANDS:
        lines.append(
            f"python3 tests/benchmarks/gpu.py --minutes {MINUTES} --only {' '.join(parts)}"
        )
        lines += [f"  {name:<18}{seconds:>5} s" for name, seconds in parts.items()]
        lines.append(f"  {'':<18}{sum(parts.values()):>5} s")
    total = sum(PARTS.values())
    return "\n".join([*lines, f"{'all':<20}{total:>5} s, {total / 60:.0f} minutes"])


def append(lines: Path, **record: object) -> None:
    """Write one record at once, so that no later failure loses it."""
    with lines.open("a") as file:
        file.write(json.dumps(record, ensure_ascii=False) + "\n")


def run_part(name: str, script: Sequence[str], seconds: float, lines: Path) -> bool:
    """Run a part's process for at most this many seconds; return whether it succeeded."""
    run = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="microseconds")
    paths = [str(ROOT), str(ROOT / "layers"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
    }
    command = [sys.executable, *script, "--run", run, "--lines", str(lines.resolve())]
    start = time.perf_counter()
    # In its own process group, with the compilers and pytest workers that it starts.
    process = subprocess.Popen(command, cwd=ROOT, env=environment, preexec_fn=os.setpgrp)
    try:
        status = process.wait(seconds)
        end = f"failed: exit status {status}" if status else "finished"
    except subprocess.TimeoutExpired:
        end = "failed: cut, the rest is " + NOT_MEASURED
    finally:
        kill(process)
    end += f", {time.perf_counter() - start:.0f} s"
    append(lines, part=name, run=run, end=end)
    print(f"{name}: {end}", flush=True)
    return end.startswith("finished")


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its group, which would disturb the next part's times."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # a hanging driver may keep it
        process.wait(PATIENCE)


def page(lines: Iterable[str]) -> str:
    """Return the last run of every part as Markdown."""
    runs: dict[str, dict[str, list[Record]]] = {name: {} for name in PARTS}
    for line in lines:
        record = json.loads(line)
        part, run = record.pop("part"), record.pop("run")
        runs[part].setdefault(run, []).append(record)
    text = ["# Measured on a GPU", "", EACH_OF_ITS_DAY, ""]
    for name, found in runs.items():
        text += [f"## {name}", ""]
        last = max(found, default=None)
        text += section(last, found[last]) if last else [NOT_MEASURED, ""]
    return "\n".join(text).rstrip() + "\n"


def section(run: str, records: list[Record]) -> list[str]:
    """Return a table for adjacent rows with the same columns, and a line for a single column."""
    text = [f"{run[:16].replace('T', ' ')} UTC", ""]
    for columns, group in itertools.groupby(records, key=tuple):
        rows = [[str(v).replace("|", "¦") for v in record.values()] for record in group]
        if len(columns) == 1:
            text += [f"{columns[0]}: {value}" for (value,) in rows]
        else:
            table = [columns, ["---"] * len(columns), *rows]
            text += ["| " + " | ".join(cells) + " |" for cells in table]
        text.append("")
    return text


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=PARTS, metavar="PART", default=list(PARTS))
    parser.add_argument("--minutes", type=float, default=30, help="of all parts together")
    parser.add_argument("--write", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--dry-run", action="store_true", help="what would be run, for how long")
    parser.add_argument("--tiny", action="store_true", help="sizes of a trial, without a GPU too")
    arguments = parser.parse_args(given)
    if arguments.dry_run:
        print(plan())
        return
    arguments.write.mkdir(parents=True, exist_ok=True)
    lines = arguments.write / "gpu.jsonl"
    lines.touch()
    deadline = time.monotonic() + 60 * arguments.minutes
    failed = []
    chosen = [name for name in PARTS if name in arguments.only]
    for place, name in enumerate(chosen):
        # The remaining time is shared by expected times: a slow part leaves the later ones theirs.
        share = PARTS[name] / sum(PARTS[later] for later in chosen[place:])
        script = [str(SCRIPT), name, *(["--tiny"] if arguments.tiny else [])]
        if not run_part(name, script, share * (deadline - time.monotonic()), lines):
            failed.append(name)
        (arguments.write / "gpu.md").write_text(page(lines.read_text().splitlines()))
    if not chosen:
        (arguments.write / "gpu.md").write_text(page(lines.read_text().splitlines()))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    # SIGTERM, as from `timeout`, also ends the running part.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
