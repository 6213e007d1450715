"""What the corrected linear layers must cost on a GPU at least, from bytes and operations.

x, y, w: bytes of input, output and weight. A plain layer costs its three products and one pass over
the output's gradient for its bias. Dividing the input reads x, writes x̂, reads u and x̂ and writes
the input's gradient: 5x. The affine-like bias rides in the product as one more column, at the price
of a copy of the weight, 2w, and of one more step of the product's sum; or is added behind it, 2y.
Its gradient's pass over y is the plain layer's own. Dividing the output costs 4x + 4y.
"""

STEP = 64  # inputs that a product sums over at once


def ratio(
    rows: int,
    n_in: int,
    n_out: int,
    way: str,
    *,
    flops: float,
    bandwidth: float,
    itemsize: int = 2,
) -> float:
    """Forward and backward of a corrected layer as a multiple of `nn.Linear`, nothing overlapping.

    Args:
        rows: of the input.
        n_in: numbers in a row of the input.
        n_out: numbers in a row of the output.
        way: "norm-like" (5x), "column" (5x + 2w), "pass" (5x + 2y), "output" (4x + 4y).
        flops: operations per second of the products.
        bandwidth: bytes per second of a copy, read and written.
        itemsize: bytes of a number.
    """
    x, y, w = (itemsize * size for size in (rows * n_in, rows * n_out, n_in * n_out))
    moved = {"norm-like": 5 * x, "column": 5 * x + 2 * w, "pass": 5 * x + 2 * y}
    moved["output"] = 4 * x + 4 * y
    step = 2 * rows * STEP * n_out / flops if way == "column" else 0.0
    plain = 6 * rows * n_in * n_out / flops + y / bandwidth
    return 1.0 + (moved[way] / bandwidth + step) / plain
