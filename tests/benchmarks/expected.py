"""The least cost of the corrected linear layers on a GPU, from bytes, operations, launches.

x, y, w: bytes of input, output and weight. A plain layer costs its three products and one pass over
the output's gradient for its bias. Dividing the input reads x, writes x̂, reads u and x̂ and writes
the input's gradient: 5x. The affine-like bias is either one more column of the product, at the
price of a copy of the weight, 2w, and of one more step of the product's sum; or it is added after
the product, 2y. Its gradient's pass over y is the plain layer's own. Dividing the output costs 4x +
4y. Every kernel beyond those of the plain layer costs a launch, even one that moves next to
nothing, such as the sum of partial sums of a bias's gradient.

With products of cuBLAS none of the 5x can be saved. The forward product needs x̂ in memory. A row's
u·x̂, which every part of its gradient needs, is complete only after the product that made u. Only
custom products that scale what they load and what they store cost less: x + y. `par` computes how
fast these would have to be.

    python tests/benchmarks/expected.py > tests/benchmarks/results/expected-gpu.md
"""

STEP = 64  # inputs that a product sums over at once
FLOPS, BANDWIDTH, CACHE = 790e12, 4.3e12, 50 * 2**20  # assumed for an H200, bf16
LAUNCH = 2e-6  # assumed: start and end of a kernel, in which nothing else runs
# By way: kernels beyond those of the plain layer (tests/layers/test_launches.py).
LAUNCHES = {"norm-like": 2, "column": 4, "pass": 4, "output": 4, "own products": 0}
GOALS = {(8192, 4096, 4096): 1.06, (8192, 1024, 4096): 1.06, (65536, 768, 3072): 1.10}


def ratio(
    rows: int,
    n_in: int,
    n_out: int,
    way: str,
    *,
    flops: float = FLOPS,
    bandwidth: float = BANDWIDTH,
    launch: float = LAUNCH,
    itemsize: int = 2,
    cached: int = 0,
) -> float:
    """Return the cost of a corrected layer, forward and backward, relative to `nn.Linear`.

    Nothing is assumed to overlap.

    Args:
        rows: rows of the input.
        n_in: numbers in a row of the input.
        n_out: numbers in a row of the output.
        way: "norm-like" (5x), "column" (5x + 2w), "pass" (5x + 2y), "output" (4x + 4y),
            "own products" (x + y).
        flops: operations per second of the products.
        bandwidth: bytes per second of a copy, read and written.
        launch: seconds of a kernel that moves nothing.
        itemsize: bytes of a number.
        cached: passes over the input that the L2 cache spares.
    """
    x, y, w = (itemsize * size for size in (rows * n_in, rows * n_out, n_in * n_out))
    moved = {"norm-like": 5 * x, "column": 5 * x + 2 * w, "pass": 5 * x + 2 * y}
    moved |= {"output": 4 * x + 4 * y, "own products": x + y}
    step = 2 * rows * STEP * n_out / flops if way == "column" else 0.0
    plain = 6 * rows * n_in * n_out / flops + y / bandwidth
    more = (moved[way] - cached * x) / bandwidth + step + LAUNCHES[way] * launch
    return 1.0 + more / plain


def par(rows: int, n_in: int, n_out: int, way: str) -> float:
    """Return the share of cuBLAS's speed at which custom products cost the same; bytes alone."""
    products = 6 * rows * n_in * n_out / FLOPS
    plain = products + 2 * rows * n_out / BANDWIDTH
    one, own = (ratio(rows, n_in, n_out, w, launch=0.0) for w in (way, "own products"))
    return products / (products + (one - own) * plain)


TEXT = f"""\
# What bytes and launches allow on a GPU

Computed, not measured: forward and backward in bf16 at {FLOPS / 1e12:.0f} TFLOP/s and
{BANDWIDTH / 1e12:.1f} TB/s, {1e6 * LAUNCH:.0f} µs for every kernel beyond the plain layer's,
nothing overlapping, as a multiple of `nn.Linear`. Why these bytes and not less:
tests/benchmarks/expected.py. `gpu.py --only calibration` measures the three rates and computes
this anew.

u from L2: the product that makes u leaves all of it in a cache of {CACHE >> 20} MiB, and the next
kernel finds it there. A dash: u is larger than that.

| rows, n_in → n_out | goal | norm-like | u from L2 | affine-like | u from L2 |
| --- | --- | --- | --- | --- | --- |
"""
OWN = """
Products of our own, with norm and scaling inside, would move x + y instead of 5x or more. They are
not worth it: all three would have to reach this share of cuBLAS's rate to cost no more than its
products with kernels around them, which is what there is.

| rows, n_in → n_out | own products at cuBLAS's rate | to beat norm-like | to beat affine-like |
| --- | --- | --- | --- |
"""


def table() -> str:
    """Return the table of goals and possible costs, with cuBLAS's and with custom products."""
    lines, own = [], []
    for shape, goal in GOALS.items():
        rows, n_in, n_out = shape
        title = f"{rows}, {n_in} → {n_out}"
        cells = [title, f"{goal:.2f}"]
        for way in ("norm-like", "column"):
            fits = 2 * rows * n_in <= CACHE
            cells += [f"{ratio(*shape, way):.3f}"]
            cells += [f"{ratio(*shape, way, cached=1):.3f}" if fits else "–"]
        lines.append(f"| {' | '.join(cells)} |")
        shares = [f"{100 * par(*shape, way):.0f} %" for way in ("norm-like", "column")]
        own.append(f"| {title} | {ratio(*shape, 'own products'):.3f} | {' | '.join(shares)} |")
    return "\n".join([TEXT + "\n".join(lines), OWN + "\n".join(own)]) + "\n"


if __name__ == "__main__":
    print(table(), end="")
