"""The demo as its users run it, on the wine data and on tiny files in the other data's formats."""

import contextlib
import importlib.util
import io
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
from PIL import Image

pytest.importorskip("pytorch_lightning")
pytest.importorskip("sklearn")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from adiv_monitor.audit.report import AuditReport

ROOT = Path(__file__).parents[2]


def loaded() -> ModuleType:
    """Return the demo as a module, with two seeds instead of five."""
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.SEEDS = 2
    return module


class Story(NamedTuple):
    """The results of a run of the demo."""

    text: str
    folder: Path
    report: AuditReport


def told(folder: Path, *arguments: str) -> Story:
    """Run the demo in a folder; its logs go to runs/ in it."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["demo.py", *arguments])
        loaded().main()
    (runs,) = (folder / "runs").iterdir()
    report = AuditReport.from_json((runs / "audit" / "report.json").read_text())
    return Story(out.getvalue(), runs, report)


def accuracies(text: str) -> dict[str, list[float]]:
    """Return percentages for the raw and the standardised inputs from the sweeps' last table."""
    rows = re.findall(r"^(raw|standardised) +([\d.]+%.*)$", text, flags=re.MULTILINE)
    return {name: [float(cell.rstrip("%")) for cell in row.split()] for name, row in rows}


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, whole: bool) -> Story:
    """Run the demo on the wine data; without `--whole` for one epoch instead of 40."""
    return told(tmp_path_factory.mktemp("demo"), *([] if whole else ["--max-epochs", "1"]))


@pytest.mark.slow
def test_no_learning_rate_does_what_the_audits_first_advice_does(story: Story) -> None:
    found = accuracies(story.text)
    assert {name: len(row) for name, row in found.items()} == {"raw": 9, "standardised": 9}
    raw = found["raw"]
    assert max(raw) + 20 < max(found["standardised"])
    assert max(raw[0], raw[-1]) < max(raw), "lower and higher learning rates were tried, too"
    finding = story.report.findings[0]
    assert (finding.name, finding.strength) == ("input-scale", "act")
    first, *others = finding.advice
    assert first.fix == "standardise-inputs"
    assert first.trial is not None and first.trial.pays and first.trial.beats_rate
    tried = [other.trial for other in others if other.fix is not None]
    assert tried, "the audit can do others, too"
    assert all(trial is not None and trial.loss > first.trial.loss for trial in tried)
    assert story.report.verdict in " ".join(story.text.split())


@pytest.mark.slow
def test_what_it_leaves_and_the_docs_show(story: Story) -> None:
    for path in ("audit/report.html", "raw.html", "standardised.html"):
        assert f"runs/{story.folder.name}/{path}" in story.text
        assert (story.folder / path).exists()
    tags = EventAccumulator(str(story.folder / "raw")).Reload().Tags()
    assert {"loss", "adiv.update_ratio/net.input"} <= set(tags["scalars"])
    assert "adiv/overview" in tags["images"]
    page = (ROOT / "docs" / "demo.md").read_text()
    printed = [line.rstrip() for line in story.text.splitlines()]
    sweeps, table = (
        text.splitlines()
        for text in re.findall(r"```text\n(.*?)\n```", page, flags=re.DOTALL)
        if "raw" in text
    )
    assert sweeps[0] in printed
    rows = re.compile(r"^\w+, (?:raw|standardised)\b")
    named = [[m[0] for line in some if (m := rows.match(line))] for some in (table, printed)]
    assert len(named[0]) == 6 and named[0] == named[1]


def pictures(root: Path, *classes: str) -> None:
    for name in classes:
        (root / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(root / name / "0.jpg")


def test_folders_must_hold_the_same_classes(tmp_path: Path) -> None:
    pictures(tmp_path / "pictures" / "train", "cat", "dog")
    pictures(tmp_path / "pictures" / "test", "cat", "emu")
    with pytest.raises(SystemExit, match=r"'cat', 'dog'.*'cat', 'emu'"):
        told(tmp_path, "--dataset", "imagefolder", "--root", "pictures")


def test_a_dataset_of_files_needs_their_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        told(tmp_path, "--dataset", "cifar10")
    assert "--dataset cifar10 needs --root" in capsys.readouterr().err
