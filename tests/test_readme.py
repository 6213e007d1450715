"""README: its code blocks run as they stand, and its figures are those of the docs."""

import re
from inspect import signature
from pathlib import Path

import blocks
import pytest
from blocks import ROOT

from adiv_monitor import Monitor

README = ROOT / "README.md"


def test_every_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pytorch_lightning")
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)  # Trainers make folders for their logs
    assert len(blocks.python_blocks(README)) == 3
    blocks.run(README, blocks.names())
    assert list(Path("runs/mine").iterdir()), "the first block leaves a dashboard"


def test_every_link_leads_to_a_file() -> None:
    links = re.findall(r"\]\(([^)#\s]+)", README.read_text())
    files = [link for link in links if "://" not in link]
    assert len(files) > 10
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_how_often_the_audit_is_right_is_what_the_benchmark_counted() -> None:
    """Runs, faults, first findings and healthy runs, by the totals of the fault benchmark."""
    text = " ".join(README.read_text().split())
    told = re.search(
        r"(\d+) faults were planted in small networks, each in two runs. The first finding was "
        r"the planted fault in (\d+) of (\d+) runs \((\d+) %\), and in (\d+) of the (\d+) runs "
        r"with faults and networks that the rules were not made with \((\d+) %\). In (\d+) "
        r"healthy runs there was nothing to act on",
        text,
    )
    assert told
    page = (ROOT / "docs" / "fault-benchmark.md").read_text()
    totals = page[page.index("## Totals") : page.index("## Of these")]
    cases = re.search(r"\| (\d+) cases, (\d+) runs; \d+ healthy, (\d+) runs", totals)
    first = re.search(r"named first \| (\d+) %.*\((\d+) of", totals)
    alarms = re.search(r"healthy runs with an alarm.*\((\d+) of", totals)
    assert cases and first and alarms
    unseen = re.search(
        r"named first \| (\d+) % ± \d+ \((\d+) of (\d+)\)", page[page.index("## Of these") :]
    )
    assert unseen and alarms[1] == "0"
    counted = (cases[1], first[2], cases[2], first[1], *unseen.group(2, 3, 1), cases[3])
    assert told.groups() == counted


def test_what_it_costs_is_what_the_monitor_keeps_to() -> None:
    told = re.search(r"At most ([\d.]+) % of the training time", README.read_text())
    assert told and float(told[1]) / 100 == signature(Monitor).parameters["max_overhead"].default


def test_the_audit_that_it_shows_is_the_one_of_the_docs() -> None:
    shown = re.search(r"```text\n(\$ adiv-audit .*?)```", README.read_text(), re.DOTALL)
    assert shown
    lines = (ROOT / "docs" / "audit.md").read_text().splitlines()
    assert [line for line in shown[1].splitlines() if line not in lines] == []
