"""Bugs planted into a ResNet-18, a GPT of 4.9 M and a GRU of 1 M parameters, from the command line.

    python tests/benchmarks/larger_faults.py [--only resnet] [--threads 2] [--write FILE]

Each run is a process of its own: what it names first, with what strength, how long it took on the
clock, and the processor's time. It is right if the planted cause is named first, or if there is
nothing to act on where none is planted. On a busy machine the clock says more than the audit takes.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from write_up import heading, parser, table, write

HERE = Path(__file__).parent


class Planted(NamedTuple):
    """A run of the command.

    Attributes:
        model: function of `larger_models`.
        data: likewise.
        loss: likewise; "": the default.
        expected: the finding; "": none that acts.
    """

    model: str
    data: str
    loss: str
    expected: str


RUNS = [
    Planted("gru_not_batch_first", "sequences", "", "samples-mixed"),
    Planted("gpt_without_a_mask", "text", "by_word", "future-leak"),
    Planted("resnet_listed", "images", "", "hidden-parameters"),
    Planted("gru_first_output", "sequences", "", "input-partly-ignored"),
    Planted("gpt", "text_not_moved", "by_word", "target-is-input"),
    Planted("resnet_softmax", "images", "", "double-softmax"),
    Planted("gpt_heads_by_view", "text", "by_word", "reshape-scrambles"),
    Planted("resnet_frozen_statistics", "images", "", "left-in-eval"),
    Planted("gru", "sequences", "", ""),
    Planted("gpt", "text", "by_word", ""),
    Planted("resnet", "images", "", ""),
]


def audited(run: Planted, threads: int, steps: int) -> list[str]:
    """One row of the table."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "adiv_monitor", f"larger_models:{run.model}", "--data",
                   f"larger_models:{run.data}", "--steps", str(steps), "--out", out]  # fmt: skip
        command += ["--loss", f"larger_models:{run.loss}"] if run.loss else []
        paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "OMP_NUM_THREADS": str(threads),
        }
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(command, env=environment, cwd=HERE, capture_output=True, text=True)
        took = time.perf_counter() - began
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
        report = json.loads((Path(out) / "report.json").read_text())
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    said = [f"{finding['name']} ({finding['strength']})" for finding in report["findings"]]
    acts = any(finding["strength"] == "act" for finding in report["findings"])
    first = next((finding["name"] for finding in report["findings"]), "")
    right = first == run.expected if run.expected else not acts
    millions = report["record"]["facts"]["parameters"] / 1e6
    return [f"`{run.model}`", f"{millions:.2f} M", f"`{run.data}`", run.expected or "nothing",
            ", ".join(said[:3]) or "nothing", "yes" if right else "no", f"{took:.0f}",
            f"{processor:.0f}"]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--only", default="", help="models whose names begin so")
    given = arguments.parse_args(argv)
    runs = [run for run in RUNS if run.model.startswith(given.only)]
    rows: list[list[str]] = []
    header = ("model", "parameters", "data", "planted", "found", "right", "seconds",
              "processor seconds")  # fmt: skip
    text = ""
    for run in runs[: 1 if given.quick else None]:
        rows.append(audited(run, given.threads, 2 if given.quick else 60))
        print(" | ".join(rows[-1]), flush=True)
        lines = heading("Bugs in larger networks", __file__, given) + table(header, rows)
        text = write(lines, given.write)
    print(text)


if __name__ == "__main__":
    main()
