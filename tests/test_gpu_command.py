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

OTHERS = [name for name in gpu.PARTS if not name.startswith("monitor")]


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
    """Without torchvision the monitor's parts fail, and the results of all others are complete."""
    pytest.importorskip("triton", reason="without Triton there are no kernels")
    (tmp_path / "torchvision.py").write_text("raise ImportError('broken, by a test')")
    finished = command(tmp_path, "--tiny", path=str(tmp_path))
    shown = finished.stdout[-5_000:] + finished.stderr[-5_000:]
    assert finished.returncode != 0, shown
    assert "failed: monitor, monitor-compiled" in finished.stderr, shown
    found = rows(tmp_path)
    assert list(found) == list(gpu.PARTS)
    for name in OTHERS:
        assert found[name][-1]["end"].startswith("finished"), shown
        assert not any("failed" in row for row in found[name] if name != "tests"), shown
    for name in ("monitor", "monitor-compiled"):
        assert found[name][-2]["failed"] == "ImportError: broken, by a test"
        assert found[name][-1]["end"].startswith("failed: exit status 1")
    assert found["tests"][-2]["skipped"] > 100
    expected_of = [row for row in found["calibration"] if "then expected of" in row]
    assert len(expected_of) == len(expected.GOALS)
    assert len(found["rows"]) == 1 + 2 * 8 + 2 * 5 + 1  # every kernel over rows and over images
    for name, mode in (("layers", "eager"), ("layers-compiled", "compiled")):
        assert "GradientOnlyLinear(batch)" in {r["layer"] for r in found[name] if "layer" in r}
        assert {r["mode"] for r in found[name] if "mode" in r} == {mode}
    captured = {row["layer"]: row for row in found["layers-graph"] if "layer" in row}
    assert "GradientOnlyLinear(batch)" not in captured
    assert captured["Linear"]["x floor"] == "–" and captured["Linear"]["mode"] == "graph"
    assert captured["quack RMSNorm + Linear"]["µs"].startswith("not measured")
    page = (tmp_path / "gpu.md").read_text()
    assert [line for line in page.splitlines() if line.startswith("## ")] == [
        f"## {name}" for name in gpu.PARTS
    ]
    assert "of a trial: no measurements" in page
    assert "failed: ImportError: broken, by a test" in page
    assert "| case | layer | mode | µs | x floor | x 1st peer | x 2nd peer | peak MiB |" in page


@pytest.mark.slow(one_in=2, first=1)
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
    for column in ("layers", "kernels", "copies to the host", "of a measured one"):
        assert (column in columns) is not compiled
    assert ("more than plain, µs per layer" in columns) is not compiled
    if not compiled:
        assert {row["layers"] for row in found if "layers" in row} == {12}


def test_without_a_gpu_nothing_is_measured_and_that_is_said(tmp_path: Path) -> None:
    finished = command(tmp_path, "--only", "calibration")
    assert finished.returncode != 0
    section = (tmp_path / "gpu.md").read_text().split("## calibration")[1].split("## rows")[0]
    assert "failed: RuntimeError: no GPU here" in section and "TB/s" not in section


def test_a_part_that_is_killed_leaves_its_rows(tmp_path: Path) -> None:
    script, lines = tmp_path / "part.py", tmp_path / "gpu.jsonl"
    script.write_text(
        "import os, signal, sys\n"
        f"sys.path.insert(0, {str(Path(gpu.__file__).parent)!r})\n"
        "from gpu import Path, append\n"
        "run, lines = sys.argv[2], Path(sys.argv[4])\n"
        "append(lines, part='rows', run=run, kernel='copy', share='1.00')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert not gpu.run_part("rows", [str(script)], 600, lines)
    assert gpu.run_part("layers", ["-c", ""], 600, lines)
    row, end, other = rows(tmp_path)["rows"] + rows(tmp_path)["layers"]
    assert row["share"] == "1.00" and row["run"] == end["run"]
    assert end["end"].startswith("failed: exit status -9") and other["end"].startswith("finished")


@pytest.mark.slow
def test_a_part_of_which_something_failed_has_not_gone_well(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        f"sys.path.insert(0, {str(Path(gpu.__file__).parent)!r})\n"
        "import gpu_parts\n"
        "def rows(tiny, emit):\n"
        "    emit(kernel='gate', failed='broken|1')\n"
        "    emit(kernel='blend', share='1.00')\n"
        "gpu_parts.PARTS['rows'] = rows\n"
        "gpu_parts.main()\n"
    )
    assert not gpu.run_part("rows", ["-c", script, "rows", "--tiny"], 600, tmp_path / "gpu.jsonl")
    _, gate, blend, end = rows(tmp_path)["rows"]
    assert gate["failed"] == "broken|1" and blend["share"] == "1.00"
    assert end["end"].startswith("failed: exit status 1")
    gpu.main(["--only", "--write", str(tmp_path)])
    assert "| gate | broken¦1 |" in (tmp_path / "gpu.md").read_text()


def test_what_a_part_has_started_ends_with_it(tmp_path: Path) -> None:
    """Processes that a part leaves behind are ended; this one would later write to a pipe."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    left = (
        "import time; pipe = open({!r}, 'w'); print(flush=True);"
        " time.sleep(60); pipe.write('still here')"
    )
    script = (
        "import subprocess, sys\n"
        f"left = [sys.executable, '-c', {left.format(str(pipe))!r}]\n"
        "subprocess.Popen(left, stdout=subprocess.PIPE).stdout.readline()\n"
    )
    assert gpu.run_part("rows", ["-c", script], 600, tmp_path / "gpu.jsonl")
    os.set_blocking(reading, True)
    with os.fdopen(reading) as file:
        assert file.read() == ""


def test_a_part_whose_time_is_up_is_cut(tmp_path: Path) -> None:
    long = ["-c", "import time; time.sleep(60)"]
    assert not gpu.run_part("rows", long, 0.01, tmp_path / "gpu.jsonl")
    (end,) = rows(tmp_path)["rows"]
    assert end["end"].startswith("failed: cut, the rest is not measured")


def test_the_page_has_the_last_run_of_every_part(tmp_path: Path) -> None:
    def record(part: str, run: str, **cells: object) -> None:
        gpu.append(tmp_path / "gpu.jsonl", part=part, run=run, **cells)

    record("rows", "2026-02-01T10:00:00", kernel="copy", share="new")
    record("rows", "2026-01-01T10:00:00", kernel="copy", share="old")
    record("rows", "2026-02-01T10:00:00", kernel="gate", share=0.5)
    record("rows", "2026-02-01T10:00:00", end="finished, 3 s")
    record("layers", "2026-01-01T10:00:00", end="failed: cut")
    gpu.main(["--only", "--write", str(tmp_path)])
    page = (tmp_path / "gpu.md").read_text()
    table = (
        "| kernel | share |\n| --- | --- |\n| copy | new |\n| gate | 0.5 |\n\nend: finished, 3 s"
    )
    assert table in page and "old" not in page
    assert "## layers\n\n2026-01-01 10:00 UTC\n\nend: failed: cut\n" in page
    assert "## monitor\n\nnot measured\n" in page


def test_all_parts_fit_into_half_an_hour(capsys: pytest.CaptureFixture[str]) -> None:
    gpu.main(["--dry-run"])
    plan = capsys.readouterr().out
    for name, seconds in gpu.PARTS.items():
        assert f"  {name:<18}{seconds:>5} s" in plan
    assert sum(gpu.PARTS.values()) < 30 * 60
    for parts in gpu.COMMANDS:  # commands of ten minutes, as in the script's docstring
        assert sum(parts.values()) < 9.5 * 60
        assert f"--minutes 9.5 --only {' '.join(parts)}\n" in plan
        assert f"--minutes 9.5 --only {' '.join(parts)}\n" in gpu.__doc__
    assert list(gpu.PARTS)[-1] == "layers-graph", "captures come last"


def test_the_least_costs_are_those_of_the_design() -> None:
    """The minimal costs equal passes counted by hand, at 790 TFLOP/s and 4.3 TB/s."""
    bytes_alone = {"flops": 790e12, "bandwidth": 4.3e12, "launch": 0.0}

    def ratio(rows: int, n_in: int, n_out: int, way: str) -> float:
        return expected.ratio(rows, n_in, n_out, way, **bytes_alone)

    assert ratio(8192, 4096, 4096, "norm-like") == pytest.approx(1.074, abs=5e-4)
    assert ratio(8192, 4096, 4096, "column") == pytest.approx(1.094, abs=5e-4)
    assert ratio(65536, 768, 3072, "column") == pytest.approx(1.120, abs=5e-4)
    assert ratio(65536, 768, 3072, "pass") == pytest.approx(1.240, abs=5e-4)
    # With a pass for the bias, dividing the output pays if there are at least twice as many inputs
    # as outputs.
    for n_in, cheaper in ((2100, "output"), (1900, "pass")):
        costs = {way: ratio(4096, n_in, 1000, way) for way in ("output", "pass")}
        assert min(costs, key=costs.__getitem__) == cheaper


def test_launches_are_counted_in() -> None:
    """A plain layer of this shape takes 277 µs, launches included."""
    shape = (8192, 1024, 4096)
    for way, kernels in (("norm-like", 2), ("column", 4)):
        more = expected.ratio(*shape, way, launch=2e-6) - expected.ratio(*shape, way, launch=0.0)
        assert more == pytest.approx(kernels * 2 / 277, rel=5e-3)


def test_the_table_of_what_is_possible_is_that_of_the_code() -> None:
    assert (gpu.RESULTS / "expected-gpu.md").read_text() == expected.table()
    least = [expected.ratio(*shape, "own products") for shape in expected.GOALS]
    assert least == pytest.approx([1.029, 1.071, 1.092], abs=5e-4)
    shares = [expected.par(*shape, "column") for shape in expected.GOALS]
    assert shares == pytest.approx([0.94, 0.97, 0.97], abs=5e-3)
