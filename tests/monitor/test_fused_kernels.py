"""The monitor's Triton kernels, run by Triton's interpreter in a separate process.

The process is separate for the reason given in tests/layers/test_kernels.py. The kernels are also
compiled for a GPU that need not be there, as in tests/layers/test_targets.py.
"""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

compiler = pytest.importorskip("triton.compiler", reason="without Triton there are no kernels")
HERE = Path(__file__).parent
LAYERS = HERE.parent / "layers"


def run(*command: str, **environment: str) -> str:
    paths = [str(LAYERS), *sys.path]
    kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    finished = subprocess.run(
        [sys.executable, *command],
        cwd=HERE.parents[1],
        env={**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), **environment},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout[-10_000:] + finished.stderr[-5_000:]
    return finished.stdout


def test_in_the_interpreter(whole: bool) -> None:
    options = ["-q", "-p", "no:cacheprovider", *(["--whole"] if whole else [])]
    script = str(HERE / "interpreted_monitor.py")
    output = run("-m", "pytest", *options, script, TRITON_INTERPRET="1")
    assert " passed" in output and " skipped" not in output, output


@pytest.mark.slow
@pytest.mark.skipif(
    "constexprs" not in inspect.signature(compiler.ASTSource).parameters,
    reason="this Triton compiles ahead of time by another interface",
)
def test_kernels_compile_well(tmp_path: Path) -> None:
    """For an H100, kernels do not spill, and at least two programs of 8 warps fit side by side.

    No offset is multiplied in 32 bits. Programs on all 132 multiprocessors compute moments, and
    prefetch the next tile meanwhile.
    """
    output = run(str(HERE / "compile_monitor.py"), TRITON_CACHE_DIR=str(tmp_path))
    found = json.loads(output)
    assert len(found) == 21
    for case, usage in found.items():
        assert usage["spilled"] == 0, (case, usage)
        assert usage["registers"] * usage["threads"] <= 2**15, (case, usage)
        assert usage["narrow_products"] == [], case
        if case in ("moments, images", "moments, rows"):
            assert usage["programs"] >= 132 and usage["copies"] > 0, (case, usage)
