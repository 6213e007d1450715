"""Elementwise gains γ⊙x̂ + δ of normalisers: per feature i, φ = [x̂_i, 1], scale x̂_i² + 1.

x̂ is what torch's own function computes without γ and δ: of the chosen rows alone, or of all where
it takes statistics over rows.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from adiv_monitor.features.features import DenseFeatures
from adiv_monitor.features.rows import Rows, to_compute_dtype
from adiv_monitor.features.uses import FunctionCall, Use, channels_second, uses


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

    def normalised(rows: Rows) -> Tensor:
        made = functional.group_norm(to_compute_dtype(input), num_groups, eps=eps)
        return rows.take(channels_second(made))

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

    def normalised(rows: Rows) -> Tensor:
        own = None if training else running_mean, None if training else running_var
        mean, var = (x if x is None else to_compute_dtype(x) for x in own)
        is_own = mean is None or var is None
        made = functional.batch_norm(to_compute_dtype(input), mean, var, training=is_own, eps=eps)
        return rows.take(channels_second(made))

    return gain(call, input, weight, bias, normalised)
