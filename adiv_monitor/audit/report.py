"""The result of an audit: a diagnosis that can be written as pages."""

import os
from dataclasses import dataclass
from pathlib import Path

from adiv_monitor.diagnosis.diagnosis import Diagnosis
from adiv_monitor.files import write_whole
from adiv_monitor.pages import digest, page


@dataclass(frozen=True)
class AuditReport(Diagnosis):
    """What an audit found.

    Attributes:
        findings: strongest first; causes before what follows from them.
        record: what was seen of the run.
    """

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Write report.html, report.json and report.md into a folder, either all three or none.

        Missing folders are made.

        Raises:
            OSError: The folder can't be made or written to.
        """
        texts = {"html": page(self), "json": self.to_json(), "md": digest(self)}
        write_whole({Path(folder) / f"report.{ending}": text for ending, text in texts.items()})
