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


# An H200 issues 4 instructions per clock on each of 132 multiprocessors at 1.755 GHz, for 32
# elements each, and moves 4.3e12 bytes per second. A kernel with more instructions per byte is
# bound by them.
INSTRUCTIONS_PER_BYTE = 4 * 32 * 132 * 1.755e9 / 4.3e12
BYTES = {"unit_rows": 4, "unit_rows with a column": 4, "unit_rows of unaligned rows": 4}
BYTES |= {"unit_rows_backward": 6, "unit_rows_backward with a column": 6}
WIDTHS = (1000, 1001, 1004, 4096, 4099)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "each"), [("sm_90", 1), ("sm_100", 3), ("gfx942", 3)])
def test_kernels_compile_well(target, each, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    script = Path(__file__).with_name("compile_targets.py")
    command = [sys.executable, str(script), target, str(each)]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr[-5_000:]
    found = json.loads(finished.stdout)
    assert len(found) > 180 // each
    for case, usage in found.items():
        assert usage["spilled"] == 0, (case, usage)
        # At least two programs of 8 warps or four of 4; an AMD multiprocessor has room for more.
        few = usage["registers"] * usage["threads"] <= 2**14 * 2
        assert few or usage["registers"] <= (128 if target[:2] == "sm" else 160), (case, usage)
        assert usage["loads"] >= usage["least_loads"], (case, usage)
        assert usage["stores"] >= usage["least_stores"], (case, usage)
        assert usage["narrow_products"] == [], case
    if target == "sm_90":
        cases = {
            f"{name} {width}, torch.bfloat16": n for name, n in BYTES.items() for width in WIDTHS
        }
        compiled = found.keys() & cases.keys()
        assert len(compiled) >= len(cases) // each
        for case in compiled:
            needed = found[case]["instructions"]
            assert 0 < needed < cases[case] * INSTRUCTIONS_PER_BYTE, (case, needed)
