"""Compile every kernel as its launcher would, for a GPU that need not be there.

The arguments are the target, and n to compile every n-th case besides the first of each kernel.
Prints one JSON object. It has for each case what `compiled_code` reads in it, the numbers of
full-width loads and stores and their minima, and instructions per element. test_targets.py runs it
without Triton's interpreter.
"""

import itertools
import json
import sys

import torch
import triton
import triton.language as tl
from adiv_layers.forms import Correction
from adiv_layers.kernels import channels, launch, patch, rows, small
from compiled_code import amd_usage, instructions, narrow_products, nvidia_usage
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
POINTERS = {torch.float64: "*fp64", torch.float32: "*fp32", torch.bfloat16: "*bf16"}
POINTERS |= {torch.float16: "*fp16", torch.int64: "*i64"}
UNIT = Correction(1.0, 1.0, 1.0, 1.0)
launches = []


def record(starter, *tensors):
    kernel, _, numbers, constants, _ = starter.launch
    launches.append((kernel, (*tensors, *numbers), constants))


launch._Starter._load = record
launch._multiprocessors = lambda _: 132  # those of an H100


def empty(*shape, dtype):
    return torch.empty(*shape, dtype=dtype, device="meta")


def row_cases(dtype, wide, widths):
    """Launch the row kernels; yield name, full-width reads and writes, and bytes per access.

    Rows of x̂ with a column start at other offsets than those of x, unless the width is a multiple
    of 8.
    """
    for width in widths:
        alike = int(width % 8 == 0)
        x, r = empty(8192, width, dtype=dtype), empty(8192, dtype=wide)
        settings = {"form": UNIT}
        rows.unit_rows(x, r, x, **settings)
        yield f"unit_rows {width}", 1, 1, 16
        rows.unit_rows(x, r, None, **settings)
        yield f"unit_rows, factor alone {width}", 1, 0, 16
        rows.unit_rows(empty(8192, width + 1, dtype=dtype)[:, 1:], r, x, **settings)
        yield f"unit_rows of unaligned rows {width}", 0, 1, 16
        room = empty(8192, (width // 8 + 1) * 8, dtype=dtype)
        rows.unit_rows(x, r, room, column=1.0, **settings)
        yield f"unit_rows with a column {width}", alike, 1, 16
        shift = {"form": UNIT, "is_unit": True}
        gamma = empty(4, 8192, dtype=wide)
        rows.unit_rows_backward(x, x, r, gamma, x, **shift)
        yield f"unit_rows_backward {width}", 2, 1, 16
        rows.unit_rows_backward(x, room[:, :width], r, gamma, x, **shift)
        yield f"unit_rows_backward with a column {width}", 1 + alike, 1, 16
        if width <= 4099:
            rows.pack(empty(512, width, dtype=dtype), empty(512, dtype=dtype), room)
            yield f"pack {width}", alike, 1, 16


def linear_cases(dtype, wide, widths):
    """Launch the kernels over channels for rows of outputs."""
    for width in widths:
        access = 2 ** min(4, ((width & -width) * dtype.itemsize).bit_length() - 1)
        x = empty(8192, width, dtype=dtype).t().unsqueeze(0)
        yield from channel_cases(f"rows of {width}", x, dtype, wide, access)


def conv_cases(dtype, wide):
    """Launch the kernels over channels for both layouts of images; some sizes are small and odd."""
    for size, access in ((32, 16), (14, 8), (7, 2)):
        x = empty(128, 64, size * size, dtype=dtype)
        yield from channel_cases(f"contiguous {size}×{size}", x, dtype, wide, access)
        x = empty(128, size * size, 64, dtype=dtype).transpose(1, 2)
        yield from channel_cases(f"channels last {size}×{size}", x, dtype, wide, 16)


def channel_cases(name, x, dtype, wide, access):
    r = empty(x.shape[0], 1, x.shape[2], dtype=wide)
    bias = empty(1, x.shape[1], 1, dtype=dtype).expand_as(x)
    if name.startswith("rows"):
        channels.gate(x, bias, None, r, total=True)
        yield f"gate, bias, {name}", 1, 0, access
    channels.gate(x, x, x, r, total=True, form=UNIT)
    yield f"gate, {name}", 2, 1, access
    slipped = empty(x.numel() + 1, dtype=dtype)[1:].as_strided(x.shape, x.stride())
    channels.gate(slipped, slipped, x, r, total=True, form=UNIT)
    yield f"gate, begins anywhere, {name}", 0, 0, 0
    channels.blend(x, x, r, x, None, gain=-1.0)
    yield f"blend, {name}", 2, 1, access
    channels.square_sum(x, r)
    yield f"square_sum, {name}", 1, 0, access
    channels.add_up(empty(528, x.shape[1], dtype=wide), empty(x.shape[1], dtype=dtype))
    yield f"add_up, {name}", 0, 0, 0


def patch_cases(wide):
    """Launch the box filters, which move too little data to require wide loads."""
    q = empty(128, 1, 1, 32, 32, dtype=wide)
    # kernel size, stride, padding, dilation
    for geometry in ((1, 3, 3, 1, 1, 1, 0, 1, 1, 1, 1, 1), (2, 3, 3, 2, 2, 2, 1, 4, 4, 2, 2, 2)):
        patch.box(q, q, geometry=geometry, form=UNIT)
        yield f"box {geometry}", 0, 0, 0
        patch.box_transposed(q, q, geometry=geometry)
        yield f"box_transposed {geometry}", 0, 0, 0


def small_cases(dtype):
    """Launch the kernels for few rows and a small weight, too small to require wide loads."""
    for count, n_in, n_out in ((32, 3072, 32), (32, 32, 10), (64, 512, 512), (5, 100, 33)):
        x, w, z = (empty(*s, dtype=dtype) for s in ((count, n_in), (n_out, n_in), (count, n_out)))
        y, r, b = empty(count, n_out, dtype=torch.float32), empty(count, dtype=torch.float32), w[0]
        small.small_forward(x, w, w[:, 0], z, y, UNIT)
        if n_in > small.INPUTS:
            yield f"small finish {count} {n_in} {n_out}", 0, 0, 0
        yield f"small forward {count} {n_in} {n_out}", 0, 0, 0
        small.small_backward(z, x, w, y, r, x, w, b, form=UNIT)
        yield f"small backward {count} {n_in} {n_out}", 0, 0, 0


def cases():
    single, half = torch.float32, torch.bfloat16
    yield (
        half,
        row_cases(
            half, single, (17, 64, 101, 768, 1000, 1001, 1004, 4096, 4099, 16384, 16385, 65536)
        ),
    )
    yield half, linear_cases(half, single, (1000, 1001, 4096))
    yield half, conv_cases(half, single)
    yield half, small_cases(half)
    yield single, small_cases(single)
    yield single, row_cases(single, single, (1001, 4099, 16384))
    yield single, patch_cases(single)
    yield torch.float64, row_cases(torch.float64, torch.float64, (101, 1001, 8192, 65536))


def build(kernel, arguments, options, target):
    """Compile a launch, specialised as by Triton's runtime.

    None and 1 are constants, multiples of 16 are marked as divisible, integers beyond 32 bits get
    64.
    """
    values = dict(zip(kernel.arg_names, arguments, strict=False)) | options
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            value = value.value if isinstance(value, tl.constexpr) else value
            signature[parameter.name], constants[(i,)] = "constexpr", value
            continue
        pointer = isinstance(value, torch.Tensor)
        if pointer or isinstance(value, float):
            signature[parameter.name] = POINTERS[value.dtype] if pointer else "fp32"
        else:
            signature[parameter.name] = "i32" if value < 2**31 else "i64"
        if not isinstance(value, float) and (value.data_ptr() if pointer else value) % 16 == 0:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    settings = {"num_warps": options.get("num_warps", 4), "enable_fp_fusion": True}
    return triton.compile(source, target, settings)


def main(name, each):
    target, usage = TARGETS[name], nvidia_usage if name.startswith("sm") else amd_usage
    found, numbers, known = {}, itertools.count(), set()
    for dtype, launched in cases():
        for case, loads, stores, access in launched:
            kernel, arguments, options = launches.pop()
            if next(numbers) % each and kernel in known:
                continue
            known.add(kernel)
            shape = [options[k] for k in ("ROWS", "POSITIONS", "BLOCK", "CHANNELS") if k in options]
            threads = target.warp_size * options.get("num_warps", 4)
            elements = torch.Size(shape).numel() / threads
            moved = int(elements * dtype.itemsize)
            compiled = build(kernel, arguments, options, target)
            used = usage(compiled)
            counted = name == "sm_90" and case.startswith("unit_rows")
            found[f"{case}, {dtype}"] = used | {
                "loads": used["loads"][access],
                "stores": used["stores"][access],
                "least_loads": loads * moved // max(access, 1),
                "least_stores": stores * moved // max(access, 1),
                "instructions": instructions(compiled) / elements if counted else None,
                "threads": threads,
                "narrow_products": narrow_products(compiled.asm["ttir"]),
            }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
