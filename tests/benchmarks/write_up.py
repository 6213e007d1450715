"""The form of a benchmark's results: command, versions, hardware, tables; as Markdown."""

import argparse
import os
import platform
import shlex
from collections.abc import Sequence
from pathlib import Path

import torch

import adiv_monitor


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark."""
    made = argparse.ArgumentParser(description=description.partition("\n")[0])
    made.add_argument("--threads", type=int, default=torch.get_num_threads())
    made.add_argument("--quick", action="store_true", help="as small as can be: does it still run?")
    made.add_argument("--write", type=Path, help="write the results to this file as well")
    return made


def heading(title: str, script: str, arguments: argparse.Namespace) -> list[str]:
    """Return the heading: command, versions and hardware."""
    given = [
        part
        for name, value in vars(arguments).items()
        if name != "write" and value not in (None, False)
        for part in _spelled(name, value)
    ]
    return [
        f"# {title}",
        "",
        f"`python tests/benchmarks/{Path(script).name} {shlex.join(given)}`",
        "",
        f"adiv-monitor {adiv_monitor.__version__}, torch {torch.__version__}, Python "
        f"{platform.python_version()}; {hardware()}, {torch.get_num_threads()} thread(s).",
        "",
    ]


def _spelled(name: str, value: object) -> list[str]:
    option = "--" + name.replace("_", "-")
    if value is True:
        return [option]
    return [option, *map(str, value)] if isinstance(value, list) else [option, str(value)]


def hardware() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"CPU {name}, {os.cpu_count()} cores"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(map(str, line)) + " |" for line in lines] + [""]


def write(lines: Sequence[str], to: Path | None) -> str:
    """Return the text, and write it to the file, if there is one; called after every model."""
    text = "\n".join(lines).rstrip() + "\n"
    if to is not None:
        to.write_text(text)
    return text
