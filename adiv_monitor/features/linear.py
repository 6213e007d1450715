"""Affine maps: φ(x) = [x, 1], scale ‖x‖² + 1 (paper, eqn 11)."""

from torch import Tensor

from adiv_monitor.features.features import DenseFeatures
from adiv_monitor.features.rows import Rows, exact_type
from adiv_monitor.features.uses import FunctionCall, Use, uses
from adiv_monitor.features.whole import Whole, squares


@uses("linear")
def linear(
    call: FunctionCall, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Use | None:
    """Z = x Wᵀ + b: one row per sample or token."""
    return affine(input, weight, bias)


def affine(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    transposed: bool = False,
    part: str = "",
    outputs: tuple[int, int] | None = None,
) -> Use:
    """An affine map of the last dimension of x.

    Args:
        x: the input.
        weight: (outputs, inputs).
        bias: (outputs,).
        transposed: the weight is (inputs, outputs).
        part: see `Use`.
        outputs: its first output among those of the result, and how many; None: all.
    """
    of_bias = None if bias is None else 1.0

    def features(rows: Rows) -> DenseFeatures:
        return DenseFeatures(rows.take(x)[:, None], of_bias, transposed=transposed)

    def whole() -> Whole:
        flat = x.reshape(-1, x.shape[-1])
        return Whole(squares(flat), of_bias or 0.0, flat.sum(0, dtype=exact_type(flat)))

    def layout(tensor: Tensor) -> Tensor:
        return tensor if outputs is None else tensor.narrow(-1, *outputs)

    return Use("linear", weight, bias, features, layout, whole, part=part)


@uses("matmul", "__matmul__", "mm")
def product(call: FunctionCall, input: Tensor, mat2: Tensor) -> Use | None:
    """Z = x W with a matrix of weights, (inputs, outputs)."""
    if call.of_model(mat2) and not call.of_model(input) and mat2.dim() == 2:
        return affine(input, mat2, None, transposed=True)
    return None


@uses("addmm")
def added_product(
    call: FunctionCall,
    input: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Use | None:
    """Z = x W + b with a matrix of weights, (inputs, outputs)."""
    plain = beta == alpha == 1 and call.of_model(mat2) and not call.of_model(mat1)
    has_bias = call.of_model(input)
    return affine(mat1, mat2, input if has_bias else None, transposed=True) if plain else None
