"""Statistics of a kernel's compiled code: registers, spills, memory accesses."""

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path


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


def dumped(compiled, option):
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        command = [str(tool), option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def instructions(compiled):
    """Count the instructions for an NVIDIA GPU, which takes a second."""
    text = dumped(compiled, "-sass")
    return len(re.findall(r"^\s+/\*[\da-f]{4}\*/\s+(?!NOP)", text, re.MULTILINE))


def nvidia_usage(compiled):
    text = dumped(compiled, "-res-usage")
    used = {key: int(n) for key, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    ptx = compiled.asm["ptx"]
    return {
        "registers": used["REG"],
        "spilled": used["STACK"] + used["LOCAL"],
        "loads": accesses(ptx, "ld"),
        "stores": accesses(ptx, "st"),
    }


def accesses(ptx, kind):
    """Count the accesses of a thread to global memory by bytes per instruction."""
    found = re.findall(rf"{kind}\.global\S*?(?:\.v(\d))?\.b(\d+)", ptx)
    counts = Counter(int(count or 1) * int(bits) // 8 for count, bits in found)
    if kind == "ld":  # and of its asynchronous copies
        ahead = re.findall(r"cp\.async\.c[ag]\.shared\.global .*\], 0x([\da-f]+)", ptx)
        counts.update(int(size, 16) for size in ahead)
    return counts


def amd_usage(compiled):
    text = compiled.asm["amdgcn"]
    used = {key: int(n) for key, n in re.findall(r"\.(vgpr_count|\w+_spill_count):\s*(\d+)", text)}
    sizes = {"dwordx4": 16, "dwordx2": 8, "dword": 4, "ushort": 2, "short": 2, "short_d16": 2}
    moved = {
        kind: Counter(sizes.get(size, 0) for size in re.findall(rf"_{kind}_(\w+)", text))
        for kind in ("load", "store")
    }
    return {
        "registers": used["vgpr_count"],
        "spilled": used["vgpr_spill_count"] + used["sgpr_spill_count"],
        "loads": moved["load"],
        "stores": moved["store"],
    }
