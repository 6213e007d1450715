"""`make gpu` without a GPU, at tiny sizes: all code runs, nothing is measured."""

import json
import os
import subprocess
import sys
from pathlib import Path

import expected
import gpu
import pytest


@pytest.mark.slow
def test_every_part_runs_and_is_written_up(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="without Triton there are no kernels")
    without_gpu = {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, gpu.__file__, "--write", str(tmp_path), "--tiny"]
    ran = subprocess.run(command, env=os.environ | without_gpu, capture_output=True, text=True)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-5_000:]
    rows = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    ends = {row["part"]: row["end"] for row in rows if "end" in row}
    assert list(ends) == list(gpu.PARTS)
    assert all(end.startswith("finished") for end in ends.values()), ends
    assert not any(row.get("failed") for row in rows)
    page = (tmp_path / "gpu.md").read_text()
    assert all(f"\n## {name}\n" in page for name in gpu.PARTS)
    assert "of a trial: no measurements" in page


def test_the_table_of_what_is_possible_is_that_of_the_code() -> None:
    assert (gpu.RESULTS / "expected-gpu.md").read_text() == expected.table()
    least = [expected.ratio(*shape, "own products") for shape in expected.GOALS]
    assert least == pytest.approx([1.029, 1.071, 1.092], abs=5e-4)
    shares = [expected.par(*shape, "column") for shape in expected.GOALS]
    assert shares == pytest.approx([0.94, 0.97, 0.97], abs=5e-3)
