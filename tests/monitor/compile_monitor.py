"""Compile every kernel of the monitor as its launcher would, for an H100 that need not be there.

Prints one JSON object. It has for each case registers, spilled bytes, threads of a program,
programs, copies ahead, and offsets that are multiplied in 32 bits. test_fused_kernels.py runs it
without Triton's interpreter.
"""

import json
import math
from collections.abc import Iterator
from typing import Any

import torch
from adiv_layers.kernels import launch
from compile_targets import TARGETS, build
from compiled_code import narrow_products, nvidia_usage
from torch import Tensor

from adiv_monitor.kernels import looks, moments, products, steps, totals

launches: list[tuple[Any, Any, Any, Any]] = []


def record(kernel: Any, grid: Any, anchor: Tensor, *arguments: Any, **options: Any) -> None:
    launches.append((kernel, grid, arguments, options))


for room in (looks, moments, products, steps, totals):
    room.run = record
launch._multiprocessors = lambda _: 132  # type: ignore[assignment]


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def cases() -> Iterator[str]:
    """Launch kernels; yield the name of each case."""
    chosen = empty(128, dtype=torch.int64)
    nchw = empty(32, 64, 56, 56).movedim(1, -1)
    odd = empty(16, 33, 7, 7, dtype=torch.bfloat16).movedim(1, -1)
    for name, x in (("rows", empty(2048, 1024)), ("images", nchw)):
        looks.look(x, chosen=chosen, rows=128, squares=True)
        yield f"look, gradient, {name}"
    rows = empty(200_704, 64)
    for name, x, pivots in (("images", nchw, None), ("odd", odd, empty(33)), ("rows", rows, None)):
        moments.normalised_rows(x, pivots, chosen=chosen, rows=128, eps=1e-5)
        yield f"moments, {name}"
        yield f"normalised rows, {name}"
    huge = empty(40_000, 64, 33, 33).movedim(1, -1)  # more entries than 32 bits can count
    looks.look(huge, chosen=chosen, rows=128, squares=True)
    yield "look, gradient, huge"
    long = empty(3, 2_800_000_000)
    looks.look(long, chosen=chosen, rows=3, squares=True)
    yield "look, gradient, long rows"
    looks.look(odd, rows=784)
    yield "look, rows alone"
    looks.look(empty(2048, 1024), squares=True, sums=True)
    yield "look, input"
    for dtype in (torch.float32, torch.bfloat16):
        before, now = (empty(512, 512, 3, 3, dtype=dtype) for _ in range(2))
        steps.step_products(before, now, now)
        yield f"step products, {dtype}"
    for rows, groups, patch, outputs in (
        *((128, 1, 512, 512), (100_000, 1, 64, 8), (128, 768, 1, 1), (128, 8, 72, 16)),
    ):
        G = empty(rows, groups * outputs)
        phi, bias = empty(rows, groups, patch), empty(1, groups * outputs).expand(rows, -1)
        products.row_products(phi, G, empty(()), G, bias, G, G, bias, feature=1.0)
        yield f"row products, {rows} x {groups} x {outputs}"
    products.row_products(phi, G, None, G, None, G, None, None, feature=0.0)
    yield "row products, no step"
    rows_of = empty(3, 32_768)
    totals.totals(rows_of, rows_of, None, bias=1.0)
    yield "totals"
    totals.totals(rows_of, rows_of, rows_of, bias=0.0)
    yield "totals, a bias of every row"


def main() -> None:
    found = {}
    for case in list(cases()):
        kernel, grid, arguments, options = launches.pop(0)
        compiled = build(kernel, arguments, options, TARGETS["sm_90"])
        used = nvidia_usage(compiled)
        found[case] = {
            "registers": used["registers"],
            "spilled": used["spilled"],
            "threads": 32 * options.get("num_warps", 4),
            "programs": math.prod(grid),
            "copies": used["copies"].total(),
            "narrow_products": narrow_products(compiled.asm["ttir"]),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
