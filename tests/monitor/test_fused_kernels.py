"""The monitor's Triton kernels compile for a GPU that need not be there.

Triton's interpreter runs them in tests/layers/test_kernels.py.
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
    kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    paths = os.pathsep.join([str(HERE.parent / "layers"), *sys.path])
    finished = subprocess.run(
        [sys.executable, str(HERE / "compile_monitor.py")],
        cwd=HERE.parents[1],
        env={**kept, "PYTHONPATH": paths, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr[-5_000:]
    found = json.loads(finished.stdout)
    assert len(found) == 21
    for case, usage in found.items():
        assert usage["spilled"] == 0, (case, usage)
        assert usage["registers"] * usage["threads"] <= 2**15, (case, usage)
        assert usage["narrow_products"] == [], case
        if case in ("moments, images", "moments, rows"):
            assert usage["programs"] >= 132 and usage["copies"] > 0, (case, usage)
