"""What the corrected linear layers must cost on a GPU at least, from bytes and operations.

x, y, w: bytes of input, output and weight. A plain layer costs its three products and one pass over
the output's gradient for its bias. Dividing the input reads x, writes x̂, reads u and x̂ and writes
the input's gradient: 5x. The affine-like bias rides in the product as one more column, at the price
of a copy of the weight, 2w, and of one more step of the product's sum; or is added behind it, 2y.
Its gradient's pass over y is the plain layer's own. Dividing the output costs 4x + 4y.

With products of cuBLAS none of the 5x can go: the forward product needs x̂ in memory, and a row's
u·x̂, without which no part of its gradient is known, is complete only after the product that made u.
Less takes products of one's own, which scale what they load and what they store: x + y.

    python tests/benchmarks/expected.py > tests/benchmarks/results/expected-gpu.md
"""

STEP = 64  # inputs that a product sums over at once
FLOPS, BANDWIDTH, CACHE = 790e12, 4.3e12, 50 * 2**20  # assumed of an H200, bf16
GOALS = {(8192, 4096, 4096): 1.06, (8192, 1024, 4096): 1.06, (65536, 768, 3072): 1.10}


def ratio(
    rows: int,
    n_in: int,
    n_out: int,
    way: str,
    *,
    flops: float = FLOPS,
    bandwidth: float = BANDWIDTH,
    itemsize: int = 2,
    cached: int = 0,
) -> float:
    """Forward and backward of a corrected layer as a multiple of `nn.Linear`, nothing overlapping.

    Args:
        rows: of the input.
        n_in: numbers in a row of the input.
        n_out: numbers in a row of the output.
        way: "norm-like" (5x), "column" (5x + 2w), "pass" (5x + 2y), "output" (4x + 4y),
            "own products" (x + y).
        flops: operations per second of the products.
        bandwidth: bytes per second of a copy, read and written.
        itemsize: bytes of a number.
        cached: passes over the input that the L2 cache spares.
    """
    x, y, w = (itemsize * size for size in (rows * n_in, rows * n_out, n_in * n_out))
    moved = {"norm-like": 5 * x, "column": 5 * x + 2 * w, "pass": 5 * x + 2 * y}
    moved |= {"output": 4 * x + 4 * y, "own products": x + y}
    step = 2 * rows * STEP * n_out / flops if way == "column" else 0.0
    plain = 6 * rows * n_in * n_out / flops + y / bandwidth
    return 1.0 + ((moved[way] - cached * x) / bandwidth + step) / plain


TEXT = f"""\
# What the bytes allow on a GPU

Computed, not measured: forward and backward in bf16 at {FLOPS / 1e12:.0f} TFLOP/s and
{BANDWIDTH / 1e12:.1f} TB/s, nothing overlapping, as a multiple of `nn.Linear`. Why these bytes and
not less: tests/benchmarks/expected.py.

- u from L2: the product that makes u leaves all of it in a cache of {CACHE >> 20} MiB, and the next
  kernel finds it there. A dash: u is larger than that.
- Own products: norm and scaling inside the products' loops, at the rate of cuBLAS: the least that
  is possible without a cache.

| rows, n_in → n_out | goal | norm-like | u from L2 | affine-like | u from L2 | own products |
| --- | --- | --- | --- | --- | --- | --- |
"""


def table() -> str:
    """What the goals ask for and what the bytes allow."""
    lines = []
    for shape, goal in GOALS.items():
        rows, n_in, n_out = shape
        cells = [f"{rows}, {n_in} → {n_out}", f"{goal:.2f}"]
        for way in ("norm-like", "column"):
            fits = 2 * rows * n_in <= CACHE
            cells += [f"{ratio(*shape, way):.3f}"]
            cells += [f"{ratio(*shape, way, cached=1):.3f}" if fits else "–"]
        lines.append(f"| {' | '.join(cells)} | {ratio(*shape, 'own products'):.3f} |")
    return TEXT + "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
