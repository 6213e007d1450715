"""Experts in one weight tensor, with rows sorted by expert, as in `grouped_mm`."""

import torch
from torch import Tensor

from adiv_monitor.features.functions.blocks import BlockFeatures, sums_of_blocks
from adiv_monitor.features.functions.products import matmul
from adiv_monitor.features.rows import Rows, to_compute_dtype
from adiv_monitor.features.uses import FunctionCall, Use, uses
from adiv_monitor.features.whole import Whole, squares


@uses("_grouped_mm", "grouped_mm_fallback")
def grouped_product(
    call: FunctionCall,
    input: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> list[Use] | Use | None:
    """z_r = x_r W_e, (experts, inputs, outputs), for the rows from offs[e − 1] up to offs[e].

    The offsets of the experts stay on the device. The function does not write the rows after the
    last expert's; they count as zero-gradient rows.
    """
    if offs is None:
        return matmul(call, input, mat2)
    if call.of_model(input) or not call.of_model(mat2) or (input.dim(), mat2.dim()) != (2, 3):
        return None
    count = len(mat2)
    every = torch.searchsorted(offs, torch.arange(len(input), device=offs.device), right=True)
    nobody = (every == count)[:, None]

    def layout(tensor: Tensor) -> Tensor:
        return tensor.masked_fill(nobody, 0)

    def features(rows: Rows) -> BlockFeatures:
        block = every if rows.chosen is None else every[rows.flat]
        phi = rows.take(input).masked_fill_((block == count)[:, None], 0)
        return BlockFeatures(phi, block, count)

    def whole() -> Whole:
        x = input.masked_fill(nobody, 0)
        return Whole(squares(x), 0.0, sums_of_blocks(to_compute_dtype(x), every, count)[:count])

    return Use("experts", mat2, None, features, layout, whole, shaped=_outputs_first)


@uses("grouped_mm")
def grouped_mm(
    call: FunctionCall,
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> list[Use] | Use | None:
    """Apply `grouped_product` to the function's public name."""
    return grouped_product(call, mat_a, mat_b, offs)


def _outputs_first(weight: Tensor) -> Tensor:
    return weight.mT
