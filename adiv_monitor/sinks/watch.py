"""The verdict and the newest report of a run under way, in the terminal."""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from adiv_monitor.diagnosis.diagnose import running_headline
from adiv_monitor.diagnosis.running import Running
from adiv_monitor.printable import printable
from adiv_monitor.report import StepReport
from adiv_monitor.sinks.board import said_of

if TYPE_CHECKING:
    from rich.text import Text

_EVERY = 2.0  # seconds
_STYLES = {"act": "bold red", "watch": "yellow", "note": "blue"}


class Watched:
    """A run that is known from the lines that a `JsonlSink` appends.

    Args:
        path: the file, or a folder, of whose `*.jsonl` files the newest is read.

    Raises:
        FileNotFoundError: there is no such file.
    """

    def __init__(self, path: Path) -> None:
        files = [*path.rglob("*.jsonl")] if path.is_dir() else [path]
        if not files or not files[0].is_file():
            raise FileNotFoundError(
                f"watch {path}: got no *.jsonl there, expected the file of a JsonlSink, or a "
                'folder that holds one: Monitor(…, sinks=[JsonlSink("runs/mine.jsonl")])'
            )
        self.file = max(files, key=lambda file: file.stat().st_mtime)
        self.running = Running()
        self._read = 0  # bytes

    def update(self) -> bool:
        """Read the lines that are complete now; return whether there were any.

        Raises:
            ValueError: a line is no report.
        """
        if self.file.stat().st_size < self._read:  # another run writes over it
            self.running, self._read = Running(), 0
        with self.file.open("rb") as file:
            file.seek(self._read)
            lines = [line for line in file if line.endswith(b"\n")]
        for line in lines:
            self.running.add(StepReport.from_dict(json.loads(line)))
            self._read += len(line)
        return bool(lines)

    def text(self) -> "Text":
        """Return verdict, findings and the newest report, as wide as the terminal."""
        from rich.text import Text

        if not self.running.count:
            return Text(printable(f"{self.file}: no report yet"))
        findings = self.running.findings()
        headline = running_headline(findings, self.running.record())
        shown = Text().append(f"{headline}\n", "bold")
        for finding in findings:
            shown.append(f"{said_of(finding)}\n", _STYLES[finding.strength])
        return shown.append(f"\n{self.running.last}")


def watch(argv: Sequence[str]) -> int:
    """Show a run until Ctrl-C; once, if the output is no terminal. Return the exit code."""
    from rich.console import Console
    from rich.live import Live

    asks = argparse.ArgumentParser("adiv-monitor watch", description=__doc__)
    asks.add_argument("run", metavar="RUN_DIR", help="folder with the run's *.jsonl, or the file")
    console = Console()
    try:
        watched = Watched(Path(asks.parse_args(argv).run))
        watched.update()
        if not console.is_terminal:
            print(watched.text())
            return 0
        with Live(watched.text(), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(_EVERY)
                if watched.update():
                    live.update(watched.text(), refresh=True)
    except KeyboardInterrupt:
        return 0
    except (OSError, ValueError) as error:
        print(printable(f"adiv-monitor: {error}"))
        return 2
