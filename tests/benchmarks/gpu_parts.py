"""One part of gpu.py, whose rows go to the file of results as they are found, and to stdout.

No part imports another's modules, so that a missing package stops only the parts that need it.
"""

import argparse
import importlib.util
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu import ROOT, append

Emit = Callable[..., None]


# The tests without which no figure counts: kernels start and are right, alone and in graphs, and a
# measured step waits for nothing.
_FIRST = "triton or graph or two_runs or wait or bfloat16"


def check(tiny: bool, emit: Emit) -> None:
    """Run the most important of the tests that need a GPU."""
    tests(tiny, emit, "-k", _FIRST)


def tests(tiny: bool, emit: Emit, *chosen: str) -> None:
    """Run the tests that need a GPU, in several processes: most of their time is compilation."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # of whatever is installed there
    import pytest

    counts = dict.fromkeys(("passed", "failed", "skipped"), 0)

    class Outcomes:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or report.outcome != "passed":
                counts[report.outcome] += 1
            if report.failed:
                cause = str(report.longrepr).splitlines()[-1:]
                emit(test=report.nodeid, failed=" ".join(cause))

    files = [str(ROOT / "tests" / name / "test_gpu.py") for name in ("layers", "monitor", "paper")]
    # A kernel that does not start warns; warnings of torch or Python are not tested here.
    options = ["-q", "-W", "default", "-W", "error::RuntimeWarning", "-p", "no:cacheprovider"]
    options += ["--continue-on-collection-errors", *chosen]  # a package may be missing there
    if not tiny and importlib.util.find_spec("xdist"):
        options += ["-p", "xdist.plugin", "--numprocesses", "auto"]
    status = pytest.main([*options, *files], plugins=[Outcomes()])
    emit(**counts)
    if status != 0:
        raise RuntimeError(f"pytest: {status!r}")


def calibration(tiny: bool, emit: Emit) -> None:
    from gpu_kernels import calibration

    calibration(tiny, emit)


def rows(tiny: bool, emit: Emit) -> None:
    from gpu_kernels import row_kernels

    row_kernels(tiny, emit)


def layers_in(mode: str) -> Callable[[bool, Emit], None]:
    def layers(tiny: bool, emit: Emit) -> None:
        from layer_contests import CUDA, TINY

        from layers import HEADER, run

        for contest in TINY if tiny else CUDA:
            try:
                for row in run(contest, (mode,), 2 if tiny else None):
                    emit(**dict(zip(HEADER, row, strict=True)))
            except Exception as cause:  # the next contest may be measured all the same
                emit(case=contest.title, failed=short(cause))

    return layers


def monitor_on(tasks: str, compiled: bool = False) -> Callable[[bool, Emit], None]:
    def monitor(tiny: bool, emit: Emit) -> None:
        import gpu_monitor
        from gpu_monitor import measure

        for task in gpu_monitor.TINY if tiny else getattr(gpu_monitor, tasks):
            try:
                measure(task, compiled, tiny, emit)
            except Exception as cause:
                emit(model=task.title, failed=short(cause))

    return monitor


PARTS = {
    "check": check,
    "tests": tests,
    "calibration": calibration,
    "rows": rows,
    "layers": layers_in("eager"),
    "layers-compiled": layers_in("compiled"),
    "monitor": monitor_on("TASKS"),
    "monitor-large": monitor_on("LARGE"),
    "monitor-compiled": monitor_on("TASKS", compiled=True),
    "layers-graph": layers_in("graph"),
}


def short(cause: BaseException) -> str:
    """Shorten a row's values for one table cell."""
    cause = cause.__cause__ or cause
    return f"{type(cause).__name__}: {' '.join(str(cause).split())[:300]}"


def machine() -> dict[str, str]:
    """Return the hardware and the versions."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    found = importlib.util.find_spec("triton")
    triton = importlib.import_module("triton").__version__ if found else "none"
    cuda = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    python = platform.python_version()
    versions = f"Python {python}, torch {torch.__version__}, Triton {triton}, {cuda}"
    return {"device": name, "versions": versions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--run", default="by hand", help="what rows of this run have in common")
    parser.add_argument("--lines", type=Path, default=Path(os.devnull), help="file of the rows")
    arguments = parser.parse_args()

    failed = []

    def emit(**cells: object) -> None:
        failed.append(bool(cells.get("failed")))
        append(arguments.lines, part=arguments.part, run=arguments.run, **cells)
        print(*(f"{name}: {value}" for name, value in cells.items()), sep=" | ", flush=True)

    try:
        if not torch.cuda.is_available():
            if not arguments.tiny:
                raise RuntimeError("no GPU here")
            os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is imported
            torch.set_num_threads(1)
        emit(**machine(), sizes="of a trial: no measurements" if arguments.tiny else "real")
        PARTS[arguments.part](arguments.tiny, emit)
    except Exception as cause:
        emit(failed=short(cause))
        raise
    if any(failed):
        sys.exit("some of it failed")


if __name__ == "__main__":
    main()
