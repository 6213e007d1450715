"""All that is to be measured on a GPU, one part after the other, into one results file.

Nothing stops it: a part that fails or runs out of its ten minutes says so in its section, and the
next one runs. A part run alone replaces its own section of the file.

    python tests/benchmarks/gpu.py [--only PART ...] [--dry] [--write FILE]
"""

import argparse
import datetime
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_kernels import calibration, row_kernels

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests" / "benchmarks" / "results" / "gpu.md"
MINUTES = 9.5  # of every part
NOT_MEASURED = "not measured"


def command(*arguments: str) -> list[str]:
    """What a Python script printed, as far as it came."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "layers"), *sys.path]),
        "PYTHONUNBUFFERED": "1",
    }
    shown = "python " + " ".join(arguments)
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=MINUTES * 60)
        end = "" if process.returncode == 0 else f"failed: exit status {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
        end = f"failed: not finished after {MINUTES} minutes; the rest is {NOT_MEASURED}"
    # Headings of its own become deeper ones, as sections begin with two signs.
    lines = [f"`{shown}`", "", *(re.sub("^#", "###", line) for line in output.splitlines())]
    if end:
        lines += ["", end, "", "```", *errors.splitlines()[-40:], "```"]
    return lines


def tests(dry: bool) -> list[str]:
    how = ("-qq", "--collect-only") if dry else ("-q", "-ra")
    files = ("tests/layers/test_gpu.py", "tests/monitor/test_gpu.py")
    return fenced(command("-m", "pytest", *how, *files))


def layers(dry: bool) -> list[str]:
    return _layers("eager,graph", dry)


def layers_compiled(dry: bool) -> list[str]:
    return _layers("eager,compiled", dry)


def _layers(modes: str, dry: bool) -> list[str]:
    options = ("--device", "cuda", "--modes", modes)
    if not dry:
        return command("tests/benchmarks/layers.py", *options)
    if torch.cuda.is_available():
        return command("tests/benchmarks/layers.py", "--quick", *options)
    return command("tests/benchmarks/layers.py", *options)  # says what is not measured


def monitor(dry: bool) -> list[str]:
    options = ("--help",) if dry else ("--rounds", "30", "--threads", "1")
    return command("tests/benchmarks/monitor.py", *options)


def demo(dry: bool) -> list[str]:
    return fenced(command("examples/demo.py", *(("--help",) if dry else ())))


def fenced(lines: list[str]) -> list[str]:
    return [*lines[:2], "```", *lines[2:], "```"]


PARTS: dict[str, Callable[[bool], list[str]]] = {
    "tests": tests,
    "calibration": calibration,
    "rows": row_kernels,
    "layers": layers,
    "layers-compiled": layers_compiled,
    "monitor": monitor,
    "demo": demo,
}


def device() -> str:
    if not torch.cuda.is_available():
        return f"no GPU: {NOT_MEASURED}"
    found = torch.cuda.get_device_properties(0)
    return f"{found.name}, {found.multi_processor_count} multiprocessors"


def versions() -> str:
    try:
        import triton

        compiler = f"Triton {triton.__version__}"
    except ImportError:
        compiler = "no Triton"
    cuda = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    return f"Python {platform.python_version()}, torch {torch.__version__}, {compiler}, {cuda}"


def section(name: str, dry: bool) -> tuple[str, bool]:
    """The section of one part, and whether all went well."""
    start = time.perf_counter()
    try:
        lines = PARTS[name](dry)
    except Exception as cause:  # whatever it is, the other parts are to run
        lines = [f"failed: {cause!r}"]
    seconds = time.perf_counter() - start
    stamp = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    kind = "dry run" if dry else "run"
    head = f"{stamp}, {kind} of {seconds:.0f} s; {device()}; {versions()}."
    good = not any(line.startswith("failed: ") for line in lines)
    return "\n".join([f"## {name}", "", head, "", *lines]), good


def merged(old: str, new: dict[str, str]) -> str:
    """The results file with new sections, and of the other parts those that it had."""
    found = {s.split("\n", 1)[0].removeprefix("## "): s for s in re.split(r"\n(?=## )", old)}
    known = {name: text.strip() for name, text in found.items()} | new
    sections = (known.get(name, f"## {name}\n\n{NOT_MEASURED}") for name in PARTS)
    return "\n\n".join(["# Measured on a GPU", *sections]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PARTS, action="append", help="this part; may be repeated")
    parser.add_argument("--dry", action="store_true", help="try everything, measure nothing")
    parser.add_argument("--write", type=Path, help=f"results file; {RESULTS.name} unless dry")
    arguments = parser.parse_args()
    target = arguments.write or (None if arguments.dry else RESULTS)
    failed = []
    for name in arguments.only or PARTS:
        text, good = section(name, arguments.dry)
        print(text, flush=True)
        failed += [] if good else [name]
        if target is not None:
            target.write_text(merged(target.read_text() if target.exists() else "", {name: text}))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
