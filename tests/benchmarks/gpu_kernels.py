"""Speeds of a GPU and of the kernels on it: a copy's bandwidth, a plain layer's operations.

All data are random, because products of zeros run faster. Kernels whose data could stay in the L2
cache, or which take no longer than their launch, are timed in a CUDA graph over several data sets.
"""

import math
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from expected import GOALS, ratio
from timing import Step, copies, here, in_a_graph, seconds, take_turns
from torch import Tensor

ROUNDS, SMALL = 15, 100  # SMALL: number of near-empty launches in a row


def calibration(tiny: bool, emit: Callable[..., None]) -> None:
    """Measure a copy's bandwidth and a plain layer's speed; derive the corrected layers' cost."""
    device = here()
    x = torch.randn(2**10 if tiny else 2**27, device=device).bfloat16()
    y = torch.empty_like(x)
    bandwidth = 4 * x.numel() / middle(lambda: y.copy_(x), device)
    size = f"copy of {2 * x.numel() / 2**20:.0f} MiB, read and written"
    emit(what=size, measured=f"{bandwidth / 1e12:.2f} TB/s")
    rates = {}
    for shape in GOALS:
        rows, n_in, n_out = (n // 128 for n in shape) if tiny else shape
        taken = middle(plain_step(rows, n_in, n_out, device), device)
        # less the bias's own pass over the output's gradient
        products = taken - 2 * rows * n_out / bandwidth
        rates[shape] = 6 * rows * n_in * n_out / products
        shown = f"{1e6 * taken:.0f} µs, {rates[shape] / 1e12:.0f} TFLOP/s"
        emit(what=f"nn.Linear {shape} bf16, forward and backward", measured=shown)
    little = torch.zeros(32, device=device)
    launch = middle(in_a_graph([lambda: little.add_(1)] * SMALL), device) / SMALL
    emit(what="launch of nearly nothing, in a graph", measured=f"{1e6 * launch:.2f} µs")
    for shape, flops in rates.items():
        given = {"flops": flops, "bandwidth": bandwidth, "launch": launch}
        ways = {"norm-like": "norm-like", "affine-like": "column", "its bias by a pass": "pass"}
        costs = {name: f"{ratio(*shape, way, **given):.3f}" for name, way in ways.items()}
        emit(**{"then expected of": str(shape)}, **costs)


def middle(step: Step, device: str) -> float:
    """Return the median time of one call."""
    step()
    return statistics.median(seconds(step, device) for _ in range(ROUNDS))


def plain_step(rows: int, n_in: int, n_out: int, device: str) -> Step:
    """Return a step of forward and backward of `nn.Linear` in bf16."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).bfloat16()

    x, w, b = (random(*s).requires_grad_() for s in ((rows, n_in), (n_out, n_in), (n_out,)))
    g = random(rows, n_out)
    return lambda: torch.autograd.grad(F.linear(x, w, b), (x, w, b), g)


def row_kernels(tiny: bool, emit: Callable[..., None]) -> None:
    """Return every kernel's bandwidth as a share of a copy's: median over rounds [quartiles]."""
    device = here()
    for title, kernels in kernels_by_data(device, tiny):
        steps, moved = {}, {}
        for name, (size, make) in kernels.items():
            sets = copies(size)
            try:
                steps[name] = in_a_graph([make() for _ in range(sets)])
            except Exception as cause:  # the other kernels may still be measured
                emit(kernel=name, on=title, failed=repr(cause.__cause__ or cause)[:300])
                continue
            moved[name] = size * sets
        times = take_turns(steps, 2 if tiny else ROUNDS, device)
        reference = [moved["copy"] / t for t in times["copy"]]
        for name, taken in times.items():
            rates = [moved[name] / t for t in taken]
            shares = [rate / copy for rate, copy in zip(rates, reference, strict=True)]
            low, mid, high = statistics.quantiles(shares, n=4)
            emit(
                kernel=name,
                on=title,
                **{"TB/s": f"{statistics.median(rates) / 1e12:.2f}"},
                **{"share of a copy's bandwidth": f"{mid:.2f} [{low:.2f}, {high:.2f}]"},
            )


# By kernel: the bytes that it must move, and functions that make one data set and the call.
Kernels = dict[str, tuple[int, Callable[[], Step]]]


def kernels_by_data(device: str, tiny: bool) -> Iterator[tuple[str, Kernels]]:
    """Yield the title of a data set, and the kernels on it; the first is a copy."""
    shapes = ((16384, 4096), (65536, 1000), (65536, 1001))
    for count, width in ((8, 16), (8, 17)) if tiny else shapes:
        yield f"{count} × {width} bf16", row_steps(count, width, device)
    images, channels = (2, 16) if tiny else (512, 256)
    for size in (3,) if tiny else (32, 14, 7):
        for layout in (torch.contiguous_format, torch.channels_last):
            shape = (images, channels, size, size)

            def make(shape: Any = shape, layout: Any = layout) -> Tensor:
                x = torch.randn(shape, device=device).bfloat16()
                return x.to(memory_format=layout).flatten(2)

            order = "last" if layout == torch.channels_last else "first"
            title = f"{images} × {channels} × {size}×{size} bf16, channels {order}"
            yield title, channel_steps(2 * math.prod(shape), make)


def row_steps(count: int, width: int, device: str) -> Kernels:
    """Return the kernels over rows, and those over channels of the same numbers."""
    from adiv_layers.forms import Correction
    from adiv_layers.kernels import rows

    def x() -> Tensor:
        return torch.randn(count, width, device=device).bfloat16()

    def room() -> Tensor:
        return torch.empty(count, 8 * (width // 8 + 1), device=device).bfloat16()

    def factor() -> Tensor:
        return torch.rand(count, device=device)

    form = {"form": Correction(1.0, 1.0, 1.0, 1.0)}
    back = {**form, "is_unit": True}

    def backward() -> Step:
        return partial(rows.unit_rows_backward, x(), x(), factor(), None, x(), **back)

    size = 2 * count * width
    kernels = channel_steps(size, lambda: x().t().unsqueeze(0))
    return kernels | {
        "unit_rows": (2 * size, lambda: partial(rows.unit_rows, x(), factor(), x(), **form)),
        "unit_rows with a column": (
            2 * size,
            lambda: partial(rows.unit_rows, x(), factor(), room(), column=1.0, **form),
        ),
        "unit_rows_backward": (3 * size, backward),
    }


def channel_steps(size: int, make: Callable[[], Tensor]) -> Kernels:
    """Return a copy and the kernels over channels: (images, channels, positions), `size` bytes."""
    from adiv_layers.forms import Correction
    from adiv_layers.kernels import channels

    def factor(x: Tensor) -> Tensor:
        return torch.rand(x.shape[0], 1, x.shape[2], device=x.device)

    def copy() -> Step:
        x = make()
        return partial(torch.empty_like(x).copy_, x)

    def gate_of_a_bias() -> Step:
        x = make()
        bias = torch.randn(1, x.shape[1], 1, device=x.device).to(x.dtype).expand_as(x)
        return partial(channels.gate, x, bias, None, factor(x), total=True)

    def gate() -> Step:
        x = make()
        form = Correction(1.0, 1.0, 1.0, 1.0)
        given = x, make(), torch.empty_like(x), factor(x)
        return partial(channels.gate, *given, total=True, form=form)

    def blend() -> Step:
        x = make()
        return partial(channels.blend, x, torch.empty_like(x), factor(x), make(), None)

    def square_sum() -> Step:
        x = make()
        return partial(channels.square_sum, x, factor(x))

    return {
        "copy": (2 * size, copy),
        "gate of a bias": (size, gate_of_a_bias),
        "gate": (3 * size, gate),
        "blend": (3 * size, blend),
        "square_sum": (size, square_sum),
    }
