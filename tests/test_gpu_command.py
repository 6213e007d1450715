"""`make gpu` without a GPU, at tiny sizes: all code runs, nothing is measured."""

import json
import os
import subprocess
import sys
from pathlib import Path

import expected
import gpu
import gpu_monitor
import pytest

BROKEN = [name for name in gpu.PARTS if name.startswith(("monitor", "check", "tests"))]


@pytest.mark.slow
def test_two_broken_parts_leave_what_the_others_found(tmp_path: Path) -> None:
    """Without torchvision the monitor's parts and tests fail, and what all others find is whole."""
    pytest.importorskip("triton", reason="without Triton there are no kernels")
    (tmp_path / "torchvision.py").write_text("raise ImportError('broken, by a test')")
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    without_gpu = os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, gpu.__file__, "--write", str(tmp_path), "--tiny"]
    finished = subprocess.run(command, env=without_gpu, capture_output=True, text=True)
    shown = finished.stdout[-5_000:] + finished.stderr[-5_000:]
    assert finished.returncode != 0, shown
    assert f"failed: {', '.join(BROKEN)}" in finished.stderr, shown
    rows = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    ends = {row["part"]: row["end"] for row in rows if "end" in row}
    assert list(ends) == list(gpu.PARTS)
    for name, end in ends.items():
        assert end.startswith("failed: exit status 1" if name in BROKEN else "finished"), shown
    assert {row["part"] for row in rows if "failed" in row} <= set(BROKEN), shown
    assert len([row for row in rows if row["part"] == "rows"]) == 28  # every kernel
    page = (tmp_path / "gpu.md").read_text()
    assert all(f"\n## {name}\n" in page for name in gpu.PARTS)
    assert "of a trial: no measurements" in page
    assert "failed: ImportError: broken, by a test" in page


OF_EAGER = {"layers", "kernels", "waits for the device", "of a measured one"}
OF_EAGER |= {"more than plain, µs per layer"}


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_monitor_part(compiled: bool) -> None:
    (task,) = gpu_monitor.TINY
    found: list[dict[str, object]] = []
    gpu_monitor.measure(task, compiled, True, lambda **row: found.append(row))
    steps = [row["step"] for row in found if "x plain" in row]
    mode = "compiled" if compiled else "eager"
    both = [f"{mode}, not measured", f"{mode}, measured"]
    assert steps == both + ([] if compiled else ["eager, plain again"])
    columns = {column for row in found for column in row}
    assert columns & OF_EAGER == (set() if compiled else OF_EAGER)
    assert {row["layers"] for row in found if "layers" in row} == (set() if compiled else {12})


def test_the_table_of_what_is_possible_is_that_of_the_code() -> None:
    assert (gpu.RESULTS / "expected-gpu.md").read_text() == expected.table()
    least = [expected.ratio(*shape, "own products") for shape in expected.GOALS]
    assert least == pytest.approx([1.029, 1.071, 1.092], abs=5e-4)
    shares = [expected.par(*shape, "column") for shape in expected.GOALS]
    assert shares == pytest.approx([0.94, 0.97, 0.97], abs=5e-3)
