"""A kernel that fails to start leads to one warning with its cause, and to no second attempt."""

import subprocess
import sys
import types
import warnings

import pytest
import torch
from adiv_layers.kernels import launch
from adiv_layers.kernels.choice import kernels_for

ANCHOR = torch.zeros(1)


class Kernel:
    """A stand-in for a Triton kernel that raises its causes one after the other, then starts."""

    def __init__(self, *causes):
        self.causes = list(causes)
        self.attempts = self.started = 0
        self.loaded = False

    def __getitem__(self, grid):
        def start(*_, **__):
            self.attempts += 1
            if self.causes:
                raise self.causes.pop(0)
            self.started += 1

        return start

    def warmup(self, *_, **__):
        return types.SimpleNamespace(module="a module" if self.loaded else None)


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    monkeypatch.setattr(launch, "_broken", set())


def test_what_cannot_be_compiled_is_said_and_not_tried_again():
    kernel = Kernel(RuntimeError("Failed to find C compiler"))
    said = r"(?s)Failed to find C compiler.*from now on"
    with pytest.warns(RuntimeWarning, match=said), pytest.raises(launch.KernelError):
        launch.run(kernel, (1,), ANCHOR, WIDTH=4)
    with pytest.raises(launch.KernelError):
        launch.run(kernel, (1,), ANCHOR, WIDTH=4)
    assert kernel.attempts == 1
    launch.run(kernel, (1,), ANCHOR, WIDTH=8)  # another kernel from the same source
    assert kernel.started == 1


class Anchor:
    """A stand-in for a tensor on a GPU, with the attributes that the launcher reads."""

    is_cuda = True
    device = torch.device("cuda", 0)


def test_nothing_is_loaded_during_capture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_of", lambda _: warnings.catch_warnings())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    kernel = Kernel()
    said = "before the capture"
    with pytest.warns(RuntimeWarning, match=said), pytest.raises(launch.KernelError):
        launch.run(kernel, (1,), Anchor())
    assert kernel.attempts == 0
    kernel = Kernel()
    kernel.loaded = True  # loaded by the warm-up step
    launch.run(kernel, (1,), Anchor())
    assert kernel.started == 1


def test_no_kernels_without_a_gpu():
    assert kernels_for(torch.randn(2, 3)) is None
    assert kernels_for(torch.randn(2, 3), None, torch.randn(3, device="meta")) is None


@pytest.mark.slow
def test_triton_is_not_imported_before_it_is_needed():
    code = (
        "import sys, torch, adiv_layers.functional as f\n"
        "f.affine_like_linear(torch.randn(2, 3), torch.randn(4, 3), torch.randn(4))\n"
        "assert 'adiv_layers.kernels.rows' not in sys.modules\n"
    )
    search = {"PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=search)
