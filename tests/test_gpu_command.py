"""`make gpu` without a GPU, at tiny sizes: all code runs, nothing is measured."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import expected
import gpu
import gpu_monitor
import pytest

BROKEN = [name for name in gpu.PARTS if name.startswith(("monitor", "check", "tests"))]


def command(folder: Path, *options: str, path: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command in an environment without a GPU."""
    paths = os.pathsep.join(filter(None, [path, *sys.path]))
    environment = os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
    arguments = [sys.executable, gpu.__file__, "--write", str(folder), *options]
    return subprocess.run(arguments, env=environment, capture_output=True, text=True)


def rows(folder: Path) -> dict[str, list[dict[str, str]]]:
    """Return the rows on disk by part."""
    found = defaultdict(list)
    for line in (folder / "gpu.jsonl").read_text().splitlines():
        record = json.loads(line)
        found[record["part"]].append(record)
    return found


@pytest.mark.slow
def test_two_broken_parts_leave_what_the_others_found(tmp_path: Path) -> None:
    """Without torchvision the monitor's parts and tests fail, and what all others find is whole."""
    pytest.importorskip("triton", reason="without Triton there are no kernels")
    (tmp_path / "torchvision.py").write_text("raise ImportError('broken, by a test')")
    finished = command(tmp_path, "--tiny", path=str(tmp_path))
    shown = finished.stdout[-5_000:] + finished.stderr[-5_000:]
    assert finished.returncode != 0, shown
    assert f"failed: {', '.join(BROKEN)}" in finished.stderr, shown
    found = rows(tmp_path)
    assert list(found) == list(gpu.PARTS)
    for name in gpu.PARTS:
        if name not in BROKEN:
            assert found[name][-1]["end"].startswith("finished"), shown
            assert not any("failed" in row for row in found[name]), shown
            continue
        assert found[name][-1]["end"].startswith("failed: exit status 1")
        if name.startswith("monitor"):
            assert found[name][-2]["failed"] == "ImportError: broken, by a test"
    assert len(found["rows"]) == 1 + 2 * 8 + 2 * 5 + 1  # every kernel over rows and over images
    for name, mode in (("layers", "eager"), ("layers-compiled", "compiled")):
        assert {r["mode"] for r in found[name] if "mode" in r} == {mode}
    page = (tmp_path / "gpu.md").read_text()
    assert all(f"\n## {name}\n" in page for name in gpu.PARTS)
    assert "of a trial: no measurements" in page
    assert "failed: ImportError: broken, by a test" in page


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
    for column in ("layers", "kernels", "waits for the device", "of a measured one"):
        assert (column in columns) is not compiled
    assert ("more than plain, µs per layer" in columns) is not compiled
    if not compiled:
        assert {row["layers"] for row in found if "layers" in row} == {12}


def test_the_table_of_what_is_possible_is_that_of_the_code() -> None:
    assert (gpu.RESULTS / "expected-gpu.md").read_text() == expected.table()
    least = [expected.ratio(*shape, "own products") for shape in expected.GOALS]
    assert least == pytest.approx([1.029, 1.071, 1.092], abs=5e-4)
    shares = [expected.par(*shape, "column") for shape in expected.GOALS]
    assert shares == pytest.approx([0.94, 0.97, 0.97], abs=5e-3)
