"""The tutorial runs from the first to the last cell, as it is read."""

import os
from pathlib import Path

import pytest
from blocks import ROOT

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
for package in ("matplotlib", "sklearn"):
    pytest.importorskip(package)

NOTEBOOK = ROOT / "docs" / "tutorial.ipynb"


@pytest.mark.slow
def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a kernel of its own; its cells hold what they claim by `assert`."""
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(ROOT / "layers"))))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    assert pictures(notebook) == pictures(nbformat.read(NOTEBOOK, as_version=4)) == 2


def pictures(notebook: "nbformat.NotebookNode") -> int:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return sum("image/png" in output.get("data", ()) for output in outputs)


def test_its_outputs_are_those_of_its_code() -> None:
    """Every cell was run once, in the order in which they stand, and none failed."""
    cells = [c for c in nbformat.read(NOTEBOOK, as_version=4).cells if c.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [o for cell in cells for o in cell.outputs if o.output_type == "error"]
