"""Every kernel compiles for its target GPUs, without one: no spills, wide accesses.

An access takes 16 bytes whatever a row's width. Over channels it takes as many as the sizes divide:
8 at 14×14, 2 at 7×7 and 1,001. No offset is multiplied in 32 bits.
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


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", "sm_100", "gfx942"])
def test_kernels_compile_well(target, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(Path(__file__).with_name("compile_targets.py")), target]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr[-5_000:]
    found = json.loads(finished.stdout)
    assert len(found) > 80
    assert [each for each in found if any(v for k, v in each.items() if k != "case")] == []
