"""torch's own attention: its projections, which it packs into one product.

`multi_head_attention_forward` is Python and is opened (`capture/forwards.py`), so that what it
calls is seen like any other call.
"""

import torch
from torch import Tensor, nn

from adiv_monitor.features.functions.linear import affine
from adiv_monitor.features.uses import FunctionCall, Use, uses


@uses("multi_head_attention_forward.linear")
def projection(
    call: FunctionCall, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> list[Use]:
    """Queries, keys and values apart, each an affine map of its own, and the output's."""
    packed = weight if weight._base is None else weight._base
    width = packed.shape[1]
    if packed.shape[0] != 3 * width:
        return [affine(input, weight, bias)]
    first = (weight.storage_offset() - packed.storage_offset()) // (width * width)
    with torch.enable_grad():  # else they would not be known as views of what is trained
        weights = weight.split(width)  # type: ignore[no-untyped-call]
        biases = [None] * len(weights)
        if bias is not None:
            biases = bias.split(width)  # type: ignore[no-untyped-call]
    return [
        affine(input, weights[i], biases[i], part="qkv"[first + i], outputs=(i * width, width))
        for i in range(len(weights))
    ]


def part_of(module: nn.Module, name: str) -> str:
    """What a parameter of torch's attention, where it is not packed, projects; "" for others."""
    separate = isinstance(module, nn.MultiheadAttention) and name.endswith("_proj_weight")
    return name[0] if separate and name[1] == "_" else ""
