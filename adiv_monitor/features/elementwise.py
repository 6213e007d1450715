"""Elementwise gains γ⊙x̂ + δ of normalisers: per feature i, φ = [x̂_i, 1], scale x̂_i² + 1.

The rule recomputes x̂ for the chosen rows only; of the whole input it reads no more than the
statistics that the normaliser itself uses.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from adiv_monitor.features.features import DenseFeatures
from adiv_monitor.features.registry import channels_second, register_features
from adiv_monitor.features.rows import Rows, exact


def _gain(normalised: Tensor, bias: Tensor | None) -> DenseFeatures:
    ones = None if bias is None else normalised.new_ones(normalised.shape[0])
    return DenseFeatures(normalised[..., None], ones)


def _normalised_dims_last(module: nn.LayerNorm | nn.RMSNorm, tensor: Tensor) -> Tensor:
    return tensor.flatten(-len(module.normalized_shape))


@register_features(nn.LayerNorm, kind="gain", layout=_normalised_dims_last)
def layer_norm(module: nn.LayerNorm, rows: Rows, input: Tensor) -> DenseFeatures:
    """x̂ = (x − mean) / √(var + ε) over the normalised dimensions."""
    x = rows.take(_normalised_dims_last(module, input))
    return _gain(functional.layer_norm(x, x.shape[1:], eps=module.eps), module.bias)


@register_features(nn.RMSNorm, kind="gain", layout=_normalised_dims_last)
def rms_norm(module: nn.RMSNorm, rows: Rows, input: Tensor) -> DenseFeatures:
    """x̂ = x / √(mean x² + ε) over the normalised dimensions."""
    # With eps=None torch takes the smallest number of the dtype it computes in: the input's.
    eps = torch.finfo(input.dtype).eps if module.eps is None else module.eps
    x = rows.take(_normalised_dims_last(module, input))
    return _gain(functional.rms_norm(x, x.shape[1:], eps=eps), None)


@register_features(nn.GroupNorm, kind="gain", layout=channels_second)
def group_norm(module: nn.GroupNorm, rows: Rows, input: Tensor) -> DenseFeatures:
    """x̂ = (x − mean) / √(var + ε) over each sample's groups of channels."""
    batch, channels = input.shape[:2]
    grouped = exact(input).reshape(batch, module.num_groups, -1)
    variance, mean = torch.var_mean(grouped, dim=2, correction=0)
    repeats = channels // module.num_groups
    sample = rows.positions(input.device)[0]
    mean = mean.repeat_interleave(repeats, dim=1)[sample]
    deviation = (variance + module.eps).sqrt().repeat_interleave(repeats, dim=1)[sample]
    return _gain((rows.take(input.movedim(1, -1)) - mean) / deviation, module.bias)


def _refuse_synchronised(module: nn.SyncBatchNorm) -> str:
    return "SyncBatchNorm's statistics belong to all ranks; they are not at hand on one"


register_features(nn.SyncBatchNorm, refuse=_refuse_synchronised)(_gain)


@register_features(_BatchNorm, kind="gain", layout=channels_second)
def batch_norm(module: _BatchNorm, rows: Rows, input: Tensor) -> DenseFeatures:
    """x̂ = (x − mean) / √(var + ε) per channel, of the batch, or the running ones in evaluation."""
    if module.training or module.running_mean is None or module.running_var is None:
        dims = [0, *range(2, input.dim())]
        variance, mean = torch.var_mean(exact(input), dim=dims, correction=0)
    else:
        variance, mean = exact(module.running_var), exact(module.running_mean)
    x = rows.take(input.movedim(1, -1))
    return _gain((x - mean) / (variance + module.eps).sqrt(), module.bias)
