"""Every kernel compiles for the GPUs it is meant for, without one: no spills, wide accesses.

An access takes 16 bytes, or as many as the widths divide: 8 at 14×14, 2 at 7×7 and 1,001.
"""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

compiler = pytest.importorskip("triton.compiler", reason="without Triton there are no kernels")
pytestmark = pytest.mark.skipif(
    "constexprs" not in inspect.signature(compiler.ASTSource).parameters,
    reason="this Triton compiles ahead of time by another interface",
)


@pytest.mark.parametrize("target", ["sm_90", "sm_100", "gfx942"])
def test_kernels_compile_well(target, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    script = Path(__file__).with_name("compile_targets.py")
    command = [sys.executable, str(script), target]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr[-5_000:]
    found = json.loads(finished.stdout)
    assert len(found) > 90
    for case, usage in found.items():
        assert usage["spilled"] == 0, (case, usage)
        # Two programs of 8 warps or four of 4 at least; an AMD multiprocessor has room for more.
        few = usage["registers"] * usage["threads"] <= 2**14 * 2
        assert few or usage["registers"] <= (128 if target[:2] == "sm" else 160), (case, usage)
        assert usage["loads"] >= usage["least_loads"], (case, usage)
        assert usage["stores"] >= usage["least_stores"], (case, usage)
