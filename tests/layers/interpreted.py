"""Helpers of the interpreted tests: kernels on CPU tensors, and checks of their results.

Import it before anything of `adiv_layers.kernels`, with TRITON_INTERPRET=1 in the environment.
"""

import contextlib
import mmap
import os

import torch
import triton.language as tl
from adiv_layers.kernels import choice, launch
from triton.runtime import interpreter

assert os.environ.get("TRITON_INTERPRET") == "1", "these tests are run by test_kernels.py"

choice.DEVICES.add("cpu")


class Forgetful(dict):
    """Keeps nothing, so that every launch is planned anew: tests change the tiles."""

    def __setitem__(self, key, value):
        pass


launch._starters = Forgetful()

_convert = interpreter._convert_float


def _convert_float(data, source, target, *rest):
    """Round float32 to bfloat16 to nearest, as a GPU does; Triton's interpreter truncates."""
    if (source, target) != (tl.float32, tl.bfloat16):
        return _convert(data, source, target, *rest)
    return torch.tensor(data).bfloat16().view(torch.int16).numpy().view("uint16")


interpreter._convert_float = _convert_float

_create_dot = interpreter.InterpreterBuilder.create_dot


def _create_dot_of_bfloat16(self, a, b, d, *rest):
    """Multiply bfloat16 values as numbers; Triton's interpreter multiplies their bits."""
    if a.dtype == b.dtype == tl.bfloat16:
        wide = [(t.data.astype("uint32") << 16).view("float32") for t in (a, b)]
        a, b = (interpreter.TensorHandle(data, tl.float32) for data in wide)
    return _create_dot(self, a, b, d, *rest)


interpreter.InterpreterBuilder.create_dot = _create_dot_of_bfloat16

FLOAT32, FLOAT64, BFLOAT16, FLOAT16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
DTYPES = [FLOAT64, FLOAT32, BFLOAT16, FLOAT16]


@contextlib.contextmanager
def plain():
    """Replace every kernel by its plain PyTorch expression."""
    choice.DEVICES.discard("cpu")
    try:
        yield
    finally:
        choice.DEVICES.add("cpu")


@contextlib.contextmanager
def poisoned(monkeypatch):
    """Fill the memory that kernels are to write with NaN."""

    def full(name):
        made = getattr(torch.Tensor, name)

        def new(self, *size, **options):
            return made(self, *size, **options).fill_(float("nan"))

        return new

    with monkeypatch.context() as patch:
        for name in ("new_empty", "new_empty_strided"):
            patch.setattr(torch.Tensor, name, full(name))
        yield


def far_apart(values, strides):
    """Return the values with strides of any size; untouched memory is not allocated."""
    last = sum((n - 1) * stride for n, stride in zip(values.shape, strides, strict=True))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = mmap.mmap(-1, (last + 1) * values.element_size(), flags)
    return (
        torch.frombuffer(memory, dtype=values.dtype).as_strided(values.shape, strides).copy_(values)
    )


def relative_error(actual, expected):
    """Return the relative 2-norm of the difference, with 0/0 = 0; NaN if any entry is NaN."""
    expected = expected.double()
    difference = (actual.double() - expected).norm()
    return (difference / expected.norm()).item() if difference != 0 else 0.0


def outputs_and_gradients(function, inputs, upstream, dtype=None):
    """Return all outputs, then the gradients of all inputs for `upstream`, computed in a dtype."""
    inputs = [t.detach().to(dtype or t.dtype).requires_grad_() for t in inputs]
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    pairs = [(z, g.to(z.dtype)) for z, g in zip(outputs, upstream, strict=True) if g is not None]
    zs, gs = zip(*pairs, strict=True)
    return [*outputs, *torch.autograd.grad(zs, inputs, gs)]


def check(function, reference, inputs, upstream, dtype):
    """Compare a function with its reference in float64: outputs and all gradients.

    The relative 2-norm of the error is at most 1e-12 in float64 and 1e-6 in float32, and in half
    precision at most twice that of the plain expression in that dtype.
    """
    inputs = [t.to(dtype) for t in inputs]
    upstream = [None if g is None else g.to(dtype) for g in upstream]
    truth = outputs_and_gradients(reference, inputs, upstream, FLOAT64)
    found = outputs_and_gradients(function, inputs, upstream)
    with plain():
        simple = outputs_and_gradients(function, inputs, upstream)
    for i, (actual, expression, expected) in enumerate(zip(found, simple, truth, strict=True)):
        assert actual.shape == expected.shape, i
        assert actual.dtype == expression.dtype, i
        error, usual = relative_error(actual, expected), relative_error(expression, expected)
        eps = torch.finfo(dtype).eps
        usual = max(usual, eps if actual.numel() < 8 else eps / 4)  # few may be exact by chance
        allowed = {FLOAT64: 1e-12, FLOAT32: 1e-6}.get(dtype, 2 * usual)
        assert error <= allowed, f"result {i}: error {error:.2e}, allowed {allowed:.2e}"
