"""Compile every kernel as its launcher would, for a GPU that need not be there.

The argument is the target. Prints one JSON object: what the compiled code of each launch uses.
test_targets.py runs it without Triton's interpreter.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from itertools import product
from pathlib import Path

import torch
import triton
import triton.backends.nvidia
import triton.language as tl
from adiv_layers.forms import Correction
from adiv_layers.kernels import channels, launch, maps, patch, rows, small
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
POINTERS = {torch.float64: "*fp64", torch.float32: "*fp32", torch.bfloat16: "*bf16"}
HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64
FORM = Correction(1.0, 1.0, 1.0, 1.0)
UNIT, BACK = {"form": FORM}, {"form": FORM, "is_unit": True}
launches = []


def record(starter, *tensors):
    kernel, _, numbers, constants, _ = starter.launch
    launches.append((kernel, (*tensors, *numbers), constants))


launch._Starter._load = record
launch._multiprocessors = lambda _: 132  # those of an H100


def empty(*shape, dtype):
    return torch.empty(*shape, dtype=dtype, device="meta")


def row_cases(width, dtype, wide):
    """Rows; those with a column begin at other offsets, unless the width is a multiple of 8."""
    alike = int(width % 8 == 0)
    x, r = empty(8192, width, dtype=dtype), empty(8192, dtype=wide)
    room = empty(8192, (width // 8 + 1) * 8, dtype=dtype)
    gamma, slipped = empty(4, 8192, dtype=wide), empty(8192, width + 1, dtype=dtype)[:, 1:]
    yield rows.unit_rows, (x, r, x), UNIT, 1, 1, 16
    yield rows.unit_rows, (x, r, None), UNIT, 1, 0, 16
    yield rows.unit_rows, (slipped, r, x), UNIT, 0, 1, 16
    yield rows.unit_rows, (x, r, room), UNIT | {"column": 1.0}, alike, 1, 16
    yield rows.unit_rows_backward, (x, x, r, gamma, x), BACK, 2, 1, 16
    yield rows.unit_rows_backward, (x, room[:, :width], r, gamma, x), BACK, 1 + alike, 1, 16
    if width <= 4099:
        yield rows.pack, (x[:512], empty(512, dtype=dtype), room), {}, alike, 1, 16


def channel_cases(x, access):
    """Outputs of maps, with the channels in the middle."""
    r = empty(x.shape[0], 1, x.shape[2], dtype=SINGLE)
    bias = empty(1, x.shape[1], 1, dtype=x.dtype).expand_as(x)
    slipped = empty(x.numel() + 1, dtype=x.dtype)[1:].as_strided(x.shape, x.stride())
    if x.stride(1) == 1:
        yield channels.gate, (x, bias, None, r), {"total": True}, 1, 0, access
    curved = {"form": FORM, "total": True}
    yield channels.gate, (x, x, x, r), curved, 2, 1, access
    yield channels.gate, (slipped, slipped, x, r), curved, 0, 0, 0
    yield channels.blend, (x, x, r, x, None), {"gain": -1.0}, 2, 1, access
    yield channels.square_sum, (x, r), {}, 1, 0, access
    yield channels.add_up, (empty(528, x.shape[1], dtype=SINGLE), bias[0, :, 0]), {}, 0, 0, 0


def cases():
    """Yield a function that launches, its arguments, and what it reads and writes in full width.

    Reads and writes are counted in tensors, an access in bytes; 0: too little to ask for.
    """
    for width in (64, 1001, 4096, 4099, 65536):
        yield from row_cases(width, HALF, SINGLE)
    for dtype in (SINGLE, DOUBLE):
        yield from row_cases(1001, dtype, dtype)
    for width, access in ((1001, 2), (4096, 16)):
        yield from channel_cases(empty(8192, width, dtype=HALF).t().unsqueeze(0), access)
    for size, access in ((14, 8), (7, 2)):
        yield from channel_cases(empty(128, 64, size * size, dtype=HALF), access)
        yield from channel_cases(empty(128, size * size, 64, dtype=HALF).transpose(1, 2), 16)
    q = empty(128, 1, 1024, dtype=SINGLE)
    # kernel size, stride, padding, dilation
    for geometry in ((1, 3, 3, 1, 1, 1, 0, 1, 1, 1, 1, 1), (2, 3, 3, 2, 2, 2, 1, 4, 4, 2, 2, 2)):
        sizes = maps.Sizes((1, 32, 32), (1, 32, 32), geometry)
        yield patch.box, (q, q), {"sizes": sizes, **UNIT}, 0, 0, 0
        yield patch.box_transposed, (q, q), {"sizes": sizes}, 0, 0, 0
    for (count, n_in, n_out), dtype in product(((32, 3072, 32), (5, 100, 33)), (HALF, SINGLE)):
        x, w, z = (empty(*s, dtype=dtype) for s in ((count, n_in), (n_out, n_in), (count, n_out)))
        y, r = empty(count, n_out, dtype=SINGLE), empty(count, dtype=SINGLE)
        yield small.small_forward, (x, w, w[:, 0], z, y, FORM), {}, 0, 0, 0
        yield small.small_backward, (z, x, w, y, r, x, w, w[0]), UNIT, 0, 0, 0


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


def narrow_products(code):
    """Return the TTIR lines with a 32-bit product of a launch argument.

    A stride times a position soon exceeds 31 bits, and the product wraps silently. Quotients and
    remainders of arguments are excluded: times their divisor they are no larger than the argument.
    """
    header = re.search(r"tt\.func public @\w+\((.*)", code)[1]
    given = set(re.findall(r"(%\w+): i32", header))
    narrow = []
    kept = r"tt\.(?:splat|expand_dims|broadcast|reshape)|arith\.(?:addi|subi|muli|select)"
    operation = rf"^\s*(%\w+) = ({kept}) (.*?) : (.*)$"
    for line in re.finditer(operation, code, re.MULTILINE):
        name, kind, operands, types = line.groups()
        if given & set(re.findall(r"%\w+", operands)):
            given.add(name)
            if kind == "arith.muli" and "i64" not in types:
                narrow.append(line[0].strip())
    return narrow


def usage(code):
    """Return the bytes of spilled registers, and a thread's loads and stores by their bytes."""
    if "ptx" in code:
        tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(code["cubin"])
            used = subprocess.check_output([tool, "-res-usage", file.name], text=True)
        spilled = re.findall(r"(?:STACK|LOCAL):(\d+)", used)
        found = re.findall(r"(ld|st)\.global\S*?(?:\.v(\d))?\.b(\d+)", code["ptx"])
        moved = [(kind, int(count or 1) * int(bits) // 8) for kind, count, bits in found]
        ahead = re.findall(r"cp\.async\.c[ag]\.shared\.global .*\], 0x([\da-f]+)", code["ptx"])
        moved += [("ld", int(size, 16)) for size in ahead]  # asynchronous copies
    else:
        # Scalar registers spill into vector registers, which is cheap.
        spilled = re.findall(r"vgpr_spill_count:\s*(\d+)", code["amdgcn"])
        sizes = {"dwordx4": 16, "dwordx2": 8, "dword": 4, "ushort": 2, "short": 2, "short_d16": 2}
        found = re.findall(r"(?:global|buffer)_(load|store)_(\w+)", code["amdgcn"])
        moved = [("ld" if kind == "load" else "st", sizes.get(size, 0)) for kind, size in found]
    assert spilled, "the compiler told no spills"
    return sum(map(int, spilled)), Counter(moved)


def main(name):
    found = []
    for launched, given, options, loads, stores, access in cases():
        launched(*given, **options)
        while launches:
            kernel, arguments, settings = launches.pop()
            code = build(kernel, arguments, settings, TARGETS[name]).asm
            spilled, moved = usage(code)
            sizes = [settings.get(k, 1) for k in ("ROWS", "POSITIONS", "BLOCK", "CHANNELS")]
            threads = TARGETS[name].warp_size * settings.get("num_warps", 4)
            accesses = torch.Size(sizes).numel() * given[0].itemsize // threads // max(access, 1)
            shapes = [list(x.shape) for x in given if isinstance(x, torch.Tensor)]
            found.append({
                "case": f"{launched.__name__} {shapes} {given[0].dtype}",
                "spilled": spilled,
                "too_few_wide_loads": max(0, loads * accesses - moved["ld", access]),
                "too_few_wide_stores": max(0, stores * accesses - moved["st", access]),
                "narrow_products": narrow_products(code["ttir"]),
            })  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
