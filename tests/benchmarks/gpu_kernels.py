"""Rates of a GPU, and of the kernels on it: a copy's bandwidth, a plain layer's operations."""

import contextlib
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from expected import GOALS, ratio
from torch import Tensor

ROUNDS, CALLS = 15, 20


def calibration(dry: bool) -> list[str]:
    """Bandwidth of a copy, rate of a plain layer, and what the corrected layers then must cost."""
    with on_device(dry) as device:
        x, y = (torch.empty(2**27, device=device, dtype=torch.bfloat16) for _ in range(2))
        copy = seconds(lambda: y.copy_(x))
        times = {shape: seconds(plain_step(*shape, device)) for shape in GOALS}
    lines = ["| what | measured |", "| --- | --- |"]
    if dry:
        return [*lines, *(f"| Linear {shape} | not measured |" for shape in times)]
    bandwidth = 4 * x.numel() / statistics.median(copy)
    lines.append(f"| copy of 256 MiB, read and written | {bandwidth / 1e12:.2f} TB/s |")
    rates = {}
    for shape, taken in times.items():
        rows, n_in, n_out = shape
        # less the bias's own pass over the output's gradient
        products = statistics.median(taken) - 2 * rows * n_out / bandwidth
        rates[shape] = 6 * rows * n_in * n_out / products
        shown = f"{1e6 * statistics.median(taken):.0f} µs, {rates[shape] / 1e12:.0f} TFLOP/s"
        lines.append(f"| nn.Linear {shape} bf16, forward and backward | {shown} |")
    lines += [
        "",
        "At these rates, nothing overlapping, as a multiple of nn.Linear (expected.py):",
        "",
    ]
    lines += ["| rows, n_in, n_out | norm-like | affine-like | its bias by a pass of its own |"]
    lines += ["| --- | --- | --- | --- |"]
    for shape, flops in rates.items():
        ways = ("norm-like", "column", "pass")
        costs = (ratio(*shape, way, flops=flops, bandwidth=bandwidth) for way in ways)
        lines.append(f"| {shape} | " + " | ".join(f"{cost:.3f}" for cost in costs) + " |")
    return lines


def plain_step(rows: int, n_in: int, n_out: int, device: str) -> Callable[[], None]:
    """Forward and backward of `nn.Linear` in bf16."""
    options = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
    x, w, b = (torch.empty(s, **options) for s in ((rows, n_in), (n_out, n_in), (n_out,)))
    g = torch.empty(rows, n_out, device=device, dtype=torch.bfloat16)

    def step() -> None:
        torch.autograd.grad(F.linear(x, w, b), (x, w, b), g)

    return step


def row_kernels(dry: bool) -> list[str]:
    """Every kernel's bandwidth as a share of a copy's: median over rounds [quartiles]."""
    lines = ["| kernel | on | share of a copy's bandwidth |", "| --- | --- | --- |"]
    with on_device(dry) as device:
        for title, name, moved, step in kernel_steps(device):
            if name == "copy":
                reference = [moved / t for t in seconds(step)]
            shares = [moved / t / r for t, r in zip(seconds(step), reference, strict=True)]
            low, middle, high = statistics.quantiles(shares, n=4)
            share = "not measured" if dry else f"{middle:.2f} [{low:.2f}, {high:.2f}]"
            lines.append(f"| {name} | {title} | {share} |")
    return lines


Step = tuple[str, str, int, Callable[[], object]]


def kernel_steps(device: str) -> Iterator[Step]:
    """Title of the data, kernel, bytes that it must move, and the call; a copy comes first."""
    from adiv_layers.kernels import channels, rows

    for count, width in ((16384, 4096), (65536, 1000), (65536, 1001)):
        title = f"{count} × {width} bf16"
        x, y, room = (
            torch.empty(count, w, device=device, dtype=torch.bfloat16)
            for w in (width, width, 8 * (width // 8 + 1))
        )
        f = torch.ones(count, device=device)
        size = 2 * x.numel()
        form = {"gain": 1.0, "constant": 1.0, "floor": 1e-24}
        yield title, "copy", 2 * size, partial(y.copy_, x)
        yield title, "unit_rows", 2 * size, partial(rows.unit_rows, x, f, y, **form)
        column = partial(rows.unit_rows, x, f, room, column=1.0, **form)
        yield title, "unit_rows with a column", 2 * size, column
        settings = {"share": 1.0, "limit": 0.0, "is_unit": True}
        backward = partial(rows.unit_rows_backward, x, y, f, None, x, **settings)
        yield title, "unit_rows_backward", 3 * size, backward
        yield from channel_steps(title, x.t().unsqueeze(0), channels)
    for size in (32, 14, 7):
        for last in (False, True):
            x = torch.empty(512, 256, size, size, device=device, dtype=torch.bfloat16)
            x = x.to(memory_format=torch.channels_last) if last else x
            title = f"512 × 256 × {size}×{size} bf16, channels {'last' if last else 'first'}"
            y = torch.empty_like(x)
            yield title, "copy", 4 * x.numel(), partial(y.copy_, x)
            yield from channel_steps(title, x.flatten(2), channels)


def channel_steps(title: str, x: Tensor, channels: Any) -> Iterator[Step]:
    """The kernels over channels, (images, channels, positions)."""
    f = torch.ones(x.shape[0], 1, x.shape[2], device=x.device)
    other, scaled = torch.empty_like(x), torch.empty_like(x)
    bias = torch.empty(1, x.shape[1], 1, device=x.device, dtype=x.dtype).expand_as(x)
    size = 2 * x.numel()
    yield title, "gate of a bias", size, partial(channels.gate, x, f, bias, total=True)
    settings = {"scaled": scaled, "total": True, "curve": 1.0}
    yield title, "gate", 3 * size, partial(channels.gate, x, f, other, **settings)
    yield title, "blend", 3 * size, partial(channels.blend, scaled, scaled, f, other)
    yield title, "square_sum", size, partial(channels.square_sum, x, f)


def seconds(step: Callable[[], object]) -> list[float]:
    """Times of one call, one per round; without a GPU the step is only called."""
    step()
    if not torch.cuda.is_available():
        return [1.0] * ROUNDS
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(CALLS):
            step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / CALLS / 1e3)
    return times


@contextlib.contextmanager
def on_device(dry: bool) -> Iterator[str]:
    """The GPU; without one a dry run makes no data and starts no kernel."""
    if torch.cuda.is_available():
        yield "cuda"
    elif not dry:
        raise RuntimeError("no GPU here: not measured")
    else:
        from adiv_layers.kernels import channels, rows

        nothing = {"run": lambda *_, **__: None}
        with mock.patch.multiple(channels, **nothing), mock.patch.multiple(rows, **nothing):
            yield "meta"
