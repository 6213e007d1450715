"""A kernel that fails to start leads to one warning with its cause, and to no second attempt."""

import subprocess
import sys
import types
from contextlib import nullcontext

import pytest
import torch
from adiv_layers.kernels import launch
from adiv_layers.kernels.choice import kernels_for

X = torch.zeros(4)


class Kernel:
    """A stand-in for a Triton kernel that raises its causes one after the other, then starts."""

    arg_names = ("x", "made", "count", "WIDTH", "LAST")

    def __init__(self, *causes, compiled=None):
        self.causes = list(causes)
        self.attempts = self.started = 0
        self.loaded, self.compiled = False, compiled

    def __getitem__(self, grid):
        def start(*_, **__):
            self.attempts += 1
            if self.causes:
                raise self.causes.pop(0)
            self.started += 1
            return self.compiled

        return start

    def warmup(self, *_, **__):
        return types.SimpleNamespace(module="a module" if self.loaded else None)


def starting(kernel, grid=(1,), makes=(), **constants):
    """Return a launch function of this kernel, and the list of tensors that it was planned for."""
    planned = []

    @launch.launches
    def plan(x, *, width=4):
        planned.append(x)
        numbers = {"WIDTH": width, **constants, "num_warps": 4}
        return launch.Launch(kernel, grid, (len(x),), numbers, makes)

    return plan, planned


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    monkeypatch.setattr(launch, "_broken", set())
    monkeypatch.setattr(launch, "_starters", {})


def test_what_cannot_be_compiled_is_said_and_not_tried_again():
    kernel = Kernel(RuntimeError("Failed to find C compiler"))
    start, _ = starting(kernel)
    said = r"(?s)Failed to find C compiler.*from now on"
    with pytest.warns(RuntimeWarning, match=said), pytest.raises(launch.KernelError):
        start(X)
    for x in (X, torch.zeros(5)):  # not for other sizes, either
        with pytest.raises(launch.KernelError):
            start(x)
    assert kernel.attempts == 1
    start(X, width=8)  # another kernel from the same source
    assert kernel.started == 1


def test_tensors_alike_are_planned_once_and_others_anew():
    start, planned = starting(Kernel(), makes=((2, 3), None))
    memory = torch.zeros(40, 8)
    again = [memory[:8, 0], memory[8:16, 0]]  # of one stride, at multiples of 16 bytes
    others = [memory[:9, 0], memory[:8].flatten()[:8], memory[:8, 1], memory[:8, 0].double()]
    for x in again:
        made, none = start(x)
        assert (made.shape, made.dtype, none) == ((2, 3), x.dtype, None)
    assert len(planned) == 1
    for x in others:
        start(x)
    assert len(planned) == 5
    start(again[0], width=8)
    assert len(planned) == 6


def test_no_more_launches_are_kept_than_a_limit(monkeypatch):
    monkeypatch.setattr(launch, "_MOST", 3)
    start, planned = starting(Kernel())
    for size in (1, 2, 3, 4, 1, 4):
        start(torch.zeros(size))
    assert len(planned) == 5


class Driver:
    """A stand-in for Triton's driver."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return f"stream of {device}"


@pytest.mark.parametrize("devices", [1, 2])
def test_from_the_second_time_on_the_compiled_kernel_is_started_directly(devices, monkeypatch):
    """With what Triton's own launcher would give it; of several devices, on the tensors' own."""
    runtime = pytest.importorskip("triton.runtime")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    driver, entered, given = Driver(), [], []
    compiled = types.SimpleNamespace(
        src=types.SimpleNamespace(signature={"x": "*fp32", "WIDTH": "constexpr"}),
        run=lambda *arguments: given.append(arguments),
        function="function",
        packed_metadata="packed",
    )
    monkeypatch.setattr(runtime.driver, "_active", driver)
    monkeypatch.setattr(torch.cuda, "device", lambda index: entered.append(index) or nullcontext())
    kernel = Kernel(compiled=compiled)
    start, _ = starting(kernel, grid=(7, 2), makes=((3,),), LAST=False)
    start(X)
    assert (kernel.attempts, given) == (1, [])
    x = torch.ones(4)
    (made,) = start(x)
    assert kernel.attempts == 1
    assert entered == [0] * (devices - 1)
    expected = [7, 2, 1, "stream of 0", "function", "packed", *[None] * 3, x, made, 4, 4, False]
    assert all(a is b or a == b for a, b in zip(given[0], expected, strict=True))


def test_a_triton_that_passes_no_constants_launches_by_itself():
    """Before Triton 3.3, compiled kernels took other arguments."""
    old = types.SimpleNamespace(src=types.SimpleNamespace(signature={0: "*fp32"}))
    kernel = Kernel(compiled=old)
    start, planned = starting(kernel)
    for _ in range(3):
        start(X)
    assert (kernel.attempts, len(planned)) == (3, 1)


class OnGpu:
    """A stand-in for a tensor on a GPU, with the attributes that the launcher reads."""

    device, shape, dtype = torch.device("cuda", 0), torch.Size((4,)), torch.float32

    def __len__(self):
        return 4

    def stride(self):
        return (1,)

    def data_ptr(self):
        return 16


def test_nothing_is_loaded_during_capture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    kernel = Kernel()
    start, _ = starting(kernel)
    said = "before the capture"
    with pytest.warns(RuntimeWarning, match=said), pytest.raises(launch.KernelError):
        start(OnGpu())
    assert kernel.attempts == 0
    kernel = Kernel()
    kernel.loaded = True  # loaded by the warm-up step
    starting(kernel)[0](OnGpu())
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
