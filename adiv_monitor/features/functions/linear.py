"""Affine maps: φ(x) = [x, 1], scale ‖x‖² + 1 (paper, eqn 11)."""

from math import prod
from string import ascii_uppercase

from torch import Tensor

from adiv_monitor.features.features import DenseFeatures
from adiv_monitor.features.functions.contraction import Operand, contraction
from adiv_monitor.features.rows import Rows
from adiv_monitor.features.uses import FunctionCall, Use, uses
from adiv_monitor.features.whole import Whole, squares_and_sum


@uses("linear")
def linear(
    call: FunctionCall, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> list[Use]:
    """Z = x Wᵀ + b: one row per sample or token; x may be the parameter and W data."""
    found = [affine(input, weight, bias)] if call.of_model(weight) or bias is not None else []
    if call.is_weight(input) and call.has_data(weight):
        rows = ascii_uppercase[: input.dim() - 1]
        outputs = "j" if weight.dim() > 1 else ""
        data = [Operand(weight, f"{outputs}k")]
        by_input = contraction(Operand(input, f"{rows}k"), data, rows + outputs)
        found += [] if by_input is None else [by_input]
    return found


def affine(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    part: str = "",
    outputs: tuple[int, int] | None = None,
) -> Use:
    """Return the use of an affine map of the last dimension of x.

    Args:
        x: the input.
        weight: (outputs, inputs).
        bias: (outputs,).
        part: see `Use`.
        outputs: index of its first output in the result, and number of outputs; None: all.
    """
    of_bias = None if bias is None else 1.0

    def features(rows: Rows) -> DenseFeatures:
        return DenseFeatures(rows.take(x)[:, None], of_bias)

    def whole() -> Whole:
        flat = x.reshape(prod(x.shape[:-1]), x.shape[-1])  # −1 fails if there are no columns
        of_rows, total = squares_and_sum(flat)
        return Whole(of_rows, of_bias or 0.0, total)

    def layout(tensor: Tensor) -> Tensor:
        return tensor if outputs is None else tensor.narrow(-1, *outputs)

    return Use("linear", weight, bias, features, layout, whole, part=part, form="affine")
