"""Elementwise gains γ⊙x̂ + δ of normalisers: per feature i, φ = [x̂_i, 1], scale x̂_i² + 1.

The rules recompute x̂ for the chosen rows only; they read the whole input only for the statistics
that the normaliser itself uses.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from adiv_monitor.features.features import DenseFeatures
from adiv_monitor.features.rows import (
    Rows,
    compute_dtype,
    hooks_keep,
    to_compute_dtype,
    to_device,
)
from adiv_monitor.features.uses import FunctionCall, Use, channels_second, uses

# Autograd nodes that save the mean and 1/√(var + ε) for the backward pass; names begin so.
_KEEP_MOMENTS = ("NativeBatchNorm", "CudnnBatchNorm", "NativeGroupNorm")


def gain(
    call: FunctionCall,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalised: Callable[[Rows], Tensor],
    *,
    dims: int = 0,
) -> Use | None:
    """Return the use of γ and δ in γ⊙x̂ + δ; None if it is a weight that is standardised.

    Args:
        call: the call.
        input: x.
        weight: γ.
        bias: δ.
        normalised: returns x̂ of the chosen rows.
        dims: the number of dimensions, the last ones, that are normalised together; 0: channels are
            in the second dimension.
    """
    if call.of_model(input):
        return None

    def layout(tensor: Tensor) -> Tensor:
        return tensor.flatten(-dims) if dims else channels_second(tensor)

    def features(rows: Rows) -> DenseFeatures:
        return DenseFeatures(normalised(rows).flatten(1)[..., None], None if bias is None else 1.0)

    return Use("gain", weight, bias, features, layout=layout)


@uses("layer_norm")
def layer_norm(
    call: FunctionCall,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Use | None:
    """x̂ = (x − mean) / √(var + ε) over the normalised dimensions."""

    def normalised(rows: Rows) -> Tensor:
        return functional.layer_norm(rows.take(input), normalized_shape, eps=eps)

    return gain(call, input, weight, bias, normalised, dims=len(normalized_shape))


@uses("rms_norm")
def rms_norm(
    call: FunctionCall,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Use | None:
    """x̂ = x / √(mean x² + ε) over the normalised dimensions."""
    # With eps=None torch takes the smallest number of the dtype it computes in: the input's.
    constant = torch.finfo(input.dtype).eps if eps is None else eps

    def normalised(rows: Rows) -> Tensor:
        return functional.rms_norm(rows.take(input), normalized_shape, eps=constant)

    return gain(call, input, weight, None, normalised, dims=len(normalized_shape))


@uses("group_norm")
def group_norm(
    call: FunctionCall,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Use | None:
    """x̂ = (x − mean) / √(var + ε) over each sample's groups of channels."""
    kept = _kept_moments(call.result)

    def normalised(rows: Rows) -> Tensor:
        batch, channels = input.shape[:2]
        of_group = input.shape[1:].numel() // num_groups  # told, as a batch may be empty
        moments = kept or _moments(input.reshape(1, batch * num_groups, of_group), eps)
        sample = to_device(rows.positions[0], input.device)
        of_rows = torch.stack(moments).view(2, batch, num_groups)[:, sample]
        of_channels = of_rows.repeat_interleave(channels // num_groups, 2)
        return _normalised(rows.take(channels_second(input)), *of_channels)

    return gain(call, input, weight, bias, normalised)


@uses("instance_norm")
def instance_norm(
    call: FunctionCall,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Use | None:
    """x̂ = (x − mean) / √(var + ε) per sample and channel, or with the running statistics."""
    if use_input_stats:
        return group_norm(call, input, input.shape[1], weight, bias, eps)
    return batch_norm(call, input, running_mean, running_var, weight, bias, False, 0.0, eps)


@uses("batch_norm")
def batch_norm(
    call: FunctionCall,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Use | None:
    """x̂ = (x − mean) / √(var + ε) per channel, of the batch; running ones in evaluation."""
    kept = _kept_moments(call.result)

    def moments() -> tuple[Tensor, Tensor]:
        if not training and running_mean is not None and running_var is not None:
            reciprocal = (to_compute_dtype(running_var) + eps).rsqrt()
            return to_compute_dtype(running_mean), reciprocal
        return kept or _moments(input.flatten(2) if input.dim() > 2 else input[..., None], eps)

    def normalised(rows: Rows) -> Tensor:
        return _normalised(rows.take(channels_second(input)), *moments())

    return gain(call, input, weight, bias, normalised)


def _kept_moments(result: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return mean and 1/√(var + ε) that the function saved; None if saved-tensor hooks are on."""
    node: Any = result.grad_fn
    if node is None or not node.name().startswith(_KEEP_MOMENTS) or hooks_keep():
        return None
    mean, reciprocal = node._saved_result1, node._saved_result2
    # In pure half precision, the saved statistics are rounded to half precision as well.
    return (mean, reciprocal) if mean.dtype == compute_dtype(result) else None


def _normalised(x: Tensor, mean: Tensor, reciprocal: Tensor) -> Tensor:
    return (x - mean).mul_(reciprocal)


def _moments(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return mean and 1/√(var + ε), over all but the second of three dimensions."""
    if not x.numel():  # torch would warn
        return x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])
    variance, mean = torch.var_mean(to_compute_dtype(x), (0, 2), correction=0)
    return mean, (variance + eps).rsqrt()
