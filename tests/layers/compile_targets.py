"""Compile every kernel as its launcher would start it, for a GPU that need not be there.

Prints one JSON object: for each case registers, spilled bytes or registers, and how many 128-bit
loads and stores there are and at least have to be. Run by test_targets.py, not interpreted.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from adiv_layers.kernels import channels, patch, rows
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
POINTERS = {torch.float64: "*fp64", torch.float32: "*fp32", torch.bfloat16: "*bf16"}
launches = []


def record(kernel, grid, anchor, *arguments, **options):
    launches.append((kernel, arguments, options))


rows.run = channels.run = patch.run = record


def empty(*shape, dtype):
    return torch.empty(*shape, dtype=dtype, device="meta")


def row_cases(dtype, wide, widths):
    """Launch row kernels; yield name and how many operands are read and written in full."""
    for width in widths:
        x, r = empty(8192, width, dtype=dtype), empty(8192, 1, dtype=wide)
        rows.unit_rows(x, r, x, 1.0, 1e-24, False)
        yield f"unit_rows {width}", 1, 1
        rows.unit_rows_backward(x, x, r, r, x, 0.0, True)
        yield f"unit_rows_backward {width}", 2, 1


def channel_cases(dtype, wide):
    """Launch the kernels over channels, for rows and for both layouts of a convolution."""
    layouts = {
        "rows": empty(8192, 4096, dtype=dtype).t().unsqueeze(0),
        "contiguous": empty(128, 64, 1024, dtype=dtype),
        "channels last": empty(128, 1024, 64, dtype=dtype).transpose(1, 2),
    }
    for name, x in layouts.items():
        r = empty(x.shape[0], 1, x.shape[2], dtype=wide)
        bias = empty(1, x.shape[1], 1, dtype=dtype).expand_as(x)
        channels.gate(x, r, bias, scaled=None, total=True)
        yield f"gate, bias, {name}", 1, 0
        channels.gate(x, r, x, scaled=x, total=True, curved=True)
        yield f"gate, {name}", 2, 1
        channels.blend(x, x, r, x, sign=-1.0)
        yield f"blend, {name}", 2, 1
        channels.square_sum(x, r)
        yield f"square_sum, {name}", 1, 0


def patch_cases(wide):
    """Launch the box filters; they move too little to ask for wide loads."""
    q, geometry = empty(128, 1, 1, 32, 32, dtype=wide), [1, 3, 3, 1, 1, 1, 0, 1, 1, 1, 1, 1]
    patch.box(q, q, geometry, 1.0, 1e-24)
    yield "box", 0, 0
    patch.box_transposed(q, q, geometry)
    yield "box_transposed", 0, 0


def cases():
    single = torch.float32
    yield torch.bfloat16, row_cases(torch.bfloat16, single, (64, 768, 4096, 16384, 65536))
    yield torch.bfloat16, channel_cases(torch.bfloat16, single)
    yield single, row_cases(single, single, (16384,))
    yield single, patch_cases(single)
    yield torch.float64, row_cases(torch.float64, torch.float64, (8192, 65536))


def build(kernel, arguments, options, target):
    """Specialise as the runtime does: None and 1 are constants, multiples of 16 are known to be."""
    values = dict(zip(kernel.arg_names, arguments, strict=False)) | options
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[parameter.name], constants[(i,)] = "constexpr", value
            continue
        pointer = isinstance(value, torch.Tensor)
        signature[parameter.name] = POINTERS[value.dtype] if pointer else "i32"
        if pointer or value % 16 == 0:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    settings = {"num_warps": options.get("num_warps", 4), "enable_fp_fusion": True}
    return triton.compile(source, target, settings)


def nvidia_usage(compiled):
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        command = [str(tool), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {key: int(n) for key, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    ptx = compiled.asm["ptx"]
    return {
        "registers": used["REG"],
        "spilled": used["STACK"] + used["LOCAL"],
        "loads": len(re.findall(r"ld\.global\S*\.(?:v4\.b32|v2\.b64)", ptx)),
        "stores": len(re.findall(r"st\.global\S*\.(?:v4\.b32|v2\.b64)", ptx)),
    }


def amd_usage(compiled):
    text = compiled.asm["amdgcn"]
    used = {key: int(n) for key, n in re.findall(r"\.(vgpr_count|\w+_spill_count):\s*(\d+)", text)}
    return {
        "registers": used["vgpr_count"],
        "spilled": used["vgpr_spill_count"] + used["sgpr_spill_count"],
        "loads": len(re.findall(r"load_dwordx4", text)),
        "stores": len(re.findall(r"store_dwordx4", text)),
    }


def main(name):
    target, usage = TARGETS[name], nvidia_usage if name.startswith("sm") else amd_usage
    found = {}
    for dtype, launched in cases():
        for case, loads, stores in launched:
            kernel, arguments, options = launches.pop()
            shape = [options[k] for k in ("ROWS", "POSITIONS", "BLOCK", "CHANNELS") if k in options]
            threads = target.warp_size * options.get("num_warps", 4)
            vectors = int(torch.Size(shape).numel()) * dtype.itemsize // threads // 16
            found[f"{case}, {dtype}"] = usage(build(kernel, arguments, options, target)) | {
                "least_loads": loads * vectors,
                "least_stores": stores * vectors,
            }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
