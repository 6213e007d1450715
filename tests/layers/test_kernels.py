"""The Triton kernels, run by Triton's interpreter in a separate process.

Triton decides at a kernel's first import whether it is compiled or interpreted. The environment
variable must be set before then, and must not affect the other tests.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="without Triton there are no kernels")
HERE = Path(__file__).parent
PARTS = ("rows", "patches", "operators", "forms", "strides")
FILES = [HERE / f"interpreted_{part}.py" for part in PARTS]


def test_in_the_interpreter(whole):
    options = ["--whole"] if whole else []
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *FILES],
        cwd=HERE.parents[1],
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
        },
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout[-10_000:] + finished.stderr[-2_000:]
    assert " skipped" not in finished.stdout, finished.stdout
