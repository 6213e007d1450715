"""The figures on the pages are those of the runs that are kept."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("scipy")
pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

import alignments_report
import constants
import convolutional
import depth
import fair_report
import headlines
import normalisers
import optimizers
import patches
import projections
import readings_report
import table
import transformer
import tuned_report
import widths_report

ROOT = Path(__file__).parents[2]
RESULTS = headlines.RESULTS
WRITTEN = (ROOT / "docs" / "paper.md", RESULTS / "README.md", ROOT / "docs" / "alignment.md")
Runs = list[dict[str, Any]]
QUESTIONS = {f"convolutional-{x}": question for x, question in convolutional.QUESTIONS.items()}
for module in (depth, normalisers, optimizers, patches, transformer):
    QUESTIONS[module.__name__] = module.QUESTION
PAGES: dict[str, Callable[[Runs], str]] = {
    "table1": table.text,
    "widths": lambda runs: widths_report.text(runs, 2),
    "fig4": lambda runs: widths_report.text(runs, 2),
    "readings": readings_report.text,
    "projections": projections.text,
    **dict.fromkeys(("alignments", "alignments-2000"), alignments_report.text),
    "constants": lambda runs: constants.text(runs, headlines.runs("alignments")),
    **{name: partial(tuned_report.text, question) for name, question in QUESTIONS.items()},
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_computed_from_its_runs(name: str) -> None:
    runs: Runs = json.loads((RESULTS / f"{name}.json").read_text())
    assert PAGES[name](runs) == (RESULTS / f"{name}.md").read_text()


@pytest.mark.parametrize("name", sorted(p.stem for p in RESULTS.glob("fair*.md")))
def test_a_fair_test_is_computed_from_its_runs(name: str) -> None:
    page = fair_report.text(headlines.runs(f"{name}-tuning"), headlines.runs(name))
    assert page == (RESULTS / f"{name}.md").read_text()


def test_every_headline_is_on_a_page_as_it_is_computed() -> None:
    """A difference may be said without its plus sign: better by so many points."""
    written = " ".join(" ".join(page.read_text().split()) for page in WRITTEN)
    found = list(headlines.headlines())
    assert len(found) > 40
    lost = [(what, f) for what, f in found if f not in written and f.lstrip("+") not in written]
    assert lost == []
