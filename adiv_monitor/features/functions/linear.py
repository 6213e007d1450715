"""Affine maps: φ(x) = [x, 1], scale ‖x‖² + 1 (paper, eqn 11)."""

import torch
from torch import Tensor, nn

from adiv_monitor.features.features import DenseFeatures
from adiv_monitor.features.rows import Rows, Whole, norms, to_compute_dtype
from adiv_monitor.features.uses import FunctionCall, Use, uses


@uses("linear")
def linear(
    call: FunctionCall, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Use | None:
    """Z = x Wᵀ + b: one row per sample or token."""
    return affine(input, weight, bias) if call.of_model(weight) or bias is not None else None


def affine(
    x: Tensor,
    weight: Tensor | None,
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

    def whole(rows: Rows) -> Whole:
        return Whole(norms(x).flatten(), of_bias or 0.0)

    def times(v: Tensor) -> Tensor:
        return to_compute_dtype(x) @ v

    def layout(tensor: Tensor) -> Tensor:
        return tensor if outputs is None else tensor.narrow(-1, *outputs)

    return Use(
        "linear", weight, bias, features, layout, whole, part=part, form="affine", times=times
    )


@uses("multi_head_attention_forward.linear")
def projection(
    call: FunctionCall, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> list[Use]:
    """Return an affine map each for queries, keys and values, or the output projection's.

    `multi_head_attention_forward` is a Python function and is opened (`capture/forwards.py`), so
    that the functions it calls are captured like any others.
    """
    packed = weight if weight._base is None else weight._base
    width = packed.shape[1]
    if packed.shape[0] != 3 * width:
        return [affine(input, weight, bias)]
    first = (weight.storage_offset() - packed.storage_offset()) // (width * width)
    with torch.enable_grad():  # so that autograd knows them as views of a trained parameter
        weights = weight.split(width)  # type: ignore[no-untyped-call]
        biases = [None] * 3 if bias is None else bias.split(width)  # type: ignore[no-untyped-call]
    return [
        affine(input, weights[i], biases[i], part="qkv"[first + i], outputs=(i * width, width))
        for i in range(len(weights))
    ]


def part_of(module: nn.Module, name: str) -> str:
    """Return "q", "k" or "v" for an unpacked projection of torch's attention; "" for others."""
    separate = isinstance(module, nn.MultiheadAttention) and name.endswith("_proj_weight")
    return name[0] if separate and name[1] == "_" else ""
