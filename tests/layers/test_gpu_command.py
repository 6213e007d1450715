"""`make gpu`, tried without a GPU: every part runs, nothing is measured, and nothing stops it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "tests" / "benchmarks"
PARTS = ["tests", "calibration", "rows", "layers", "layers-compiled", "monitor", "demo"]


def gpu(*arguments):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_every_part_is_tried_in_order(tmp_path):
    pytest.importorskip("triton", reason="without Triton there are no kernels")
    finished = gpu("--dry", "--write", tmp_path / "gpu.md")
    assert finished.returncode == 0, finished.stdout[-5_000:] + finished.stderr[-2_000:]
    text = (tmp_path / "gpu.md").read_text()
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings == [f"## {part}" for part in PARTS]
    assert text.count("no GPU: not measured; Python") == len(PARTS)  # with device and versions
    sections = dict(zip(PARTS, text.split("\n## ")[1:], strict=True))
    assert "test_gpu.py: " in sections["tests"]
    assert sections["rows"].count("| not measured |") > 30
    assert "| 8192, 4096 → 4096, CUDA | all | eager, graph | not measured" in sections["layers"]
    assert "--rounds" in sections["monitor"] and "--max-epochs" in sections["demo"]


def test_one_part_replaces_its_own_section_and_no_other(tmp_path):
    target = tmp_path / "gpu.md"
    target.write_text("# Measured on a GPU\n\n## tests\n\nas they were\n\n## calibration\n\nold\n")
    assert gpu("--dry", "--only", "calibration", "--write", target).returncode == 0
    text = target.read_text()
    assert "as they were" in text and "old" not in text
    assert "## demo\n\nnot measured" in text
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        f"## {part}" for part in PARTS
    ]


def test_without_a_gpu_nothing_is_measured_and_all_of_it_said(tmp_path):
    finished = gpu("--only", "calibration", "--only", "rows", "--write", tmp_path / "gpu.md")
    assert finished.returncode != 0
    assert (tmp_path / "gpu.md").read_text().count("no GPU here: not measured") == 2


def test_the_least_costs_are_those_of_the_design(benchmarks):
    """Passes counted by hand, at 790 TFLOP/s and 4.3 TB/s."""
    from expected import ratio

    rates = {"flops": 790e12, "bandwidth": 4.3e12}
    assert ratio(8192, 4096, 4096, "norm-like", **rates) == pytest.approx(1.074, abs=5e-4)
    assert ratio(8192, 4096, 4096, "column", **rates) == pytest.approx(1.094, abs=5e-4)
    assert ratio(65536, 768, 3072, "column", **rates) == pytest.approx(1.120, abs=5e-4)
    assert ratio(65536, 768, 3072, "pass", **rates) == pytest.approx(1.240, abs=5e-4)
    # with a pass for the bias, dividing the output pays from twice as many inputs as outputs on
    for n_in, cheaper in ((2100, "output"), (1900, "pass")):
        costs = {way: ratio(4096, n_in, 1000, way, **rates) for way in ("output", "pass")}
        assert min(costs, key=costs.__getitem__) == cheaper


def test_the_table_of_what_bytes_allow_is_that_of_the_code(benchmarks):
    from expected import GOALS, ratio, table

    assert (BENCHMARKS / "results" / "expected-gpu.md").read_text() == table()
    least = [ratio(*shape, "own products") for shape in GOALS]
    assert least == pytest.approx([1.029, 1.071, 1.092], abs=5e-4)
