"""The packed projections of `torch.nn.MultiheadAttention`.

`multi_head_attention_forward` is a Python function and is opened (`capture/forwards.py`), so that
the functions it calls are captured like any others.
"""

import torch
from torch import Tensor, nn

from adiv_monitor.features.functions.linear import affine
from adiv_monitor.features.uses import FunctionCall, Use, uses


@uses("multi_head_attention_forward.linear")
def projection(
    call: FunctionCall, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> list[Use]:
    """Return an affine map each for queries, keys and values, or the output projection's."""
    packed = weight if weight._base is None else weight._base
    width = packed.shape[1]
    if packed.shape[0] != 3 * width:
        return [affine(input, weight, bias)]
    first = (weight.storage_offset() - packed.storage_offset()) // (width * width)
    with torch.enable_grad():  # so that autograd knows them as views of a trained parameter
        weights = weight.split(width)  # type: ignore[no-untyped-call]
        biases = [None] * len(weights)
        if bias is not None:
            biases = bias.split(width)  # type: ignore[no-untyped-call]
    return [
        affine(input, weights[i], biases[i], part="qkv"[first + i], outputs=(i * width, width))
        for i in range(len(weights))
    ]


def part_of(module: nn.Module, name: str) -> str:
    """Return "q", "k" or "v" for an unpacked projection of torch's attention; "" for others."""
    separate = isinstance(module, nn.MultiheadAttention) and name.endswith("_proj_weight")
    return name[0] if separate and name[1] == "_" else ""
