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
    ones = None if bias is None else normalised.new_ones(len(normalised), 1)
    return DenseFeatures(normalised[..., None], ones)


def _normalised_dims_last(module: nn.LayerNorm | nn.RMSNorm, tensor: Tensor) -> Tensor:
    return tensor.flatten(-len(module.normalized_shape))


@register_features(nn.LayerNorm, kind="gain", layout=_normalised_dims_last)
def layer_norm(module: nn.LayerNorm, rows: Rows, input: Tensor) -> DenseFeatures:
    """x̂ = (x − mean) / √(var + ε) over the normalised dimensions."""
    x = rows.take(_normalised_dims_last(module, input))
    return _gain(functional.layer_norm(x, x.shape[1:], eps=module.eps), module.bias)


@register_features(nn.RMSNorm, kind="gain", layout=_normalised_dims_last)
def rms_norm(module: nn.RMSNorm, rows: Rows, x: Tensor) -> DenseFeatures:
    """x̂ = x / √(mean x² + ε) over the normalised dimensions."""
    # With eps=None torch takes the smallest number of the dtype it computes in: the input's.
    eps = torch.finfo(x.dtype).eps if module.eps is None else module.eps
    taken = rows.take(_normalised_dims_last(module, x))
    return _gain(functional.rms_norm(taken, taken.shape[1:], eps=eps), None)


@register_features(nn.GroupNorm, kind="gain", layout=channels_second)
def group_norm(module: nn.GroupNorm, rows: Rows, input: Tensor) -> DenseFeatures:
    """x̂ = (x − mean) / √(var + ε) over each sample's groups of channels."""
    batch, channels = input.shape[:2]
    mean, square = _moments(input.reshape(batch, module.num_groups, -1))
    repeats = channels // module.num_groups
    sample = rows.positions(input.device)[0]
    reciprocal = (square - mean.square() + module.eps).rsqrt()
    mean, reciprocal = (t.repeat_interleave(repeats, dim=1)[sample] for t in (mean, reciprocal))
    return _gain(_normalise(rows.take(input.movedim(1, -1)), mean, reciprocal), module.bias)


def _refuse_synchronised(module: nn.SyncBatchNorm) -> str:
    return "SyncBatchNorm's statistics belong to all ranks; they are not at hand on one"


register_features(nn.SyncBatchNorm, refuse=_refuse_synchronised)(_gain)


@register_features(_BatchNorm, kind="gain", layout=channels_second)
def batch_norm(module: _BatchNorm, rows: Rows, input: Tensor) -> DenseFeatures:
    """x̂ = (x − mean) / √(var + ε) per channel, of the batch, or the running ones in evaluation."""
    if module.training or module.running_mean is None or module.running_var is None:
        means, squares = _moments(input.reshape(*input.shape[:2], -1))
        mean = means.mean(dim=0)
        variance = squares.mean(dim=0) - mean.square()
    else:
        variance, mean = exact(module.running_var), exact(module.running_mean)
    reciprocal = (variance + module.eps).rsqrt()
    return _gain(_normalise(rows.take(input.movedim(1, -1)), mean, reciprocal), module.bias)


def _normalise(x: Tensor, mean: Tensor, reciprocal: Tensor) -> Tensor:
    """(x − mean) · reciprocal in place, as precise as if x were float64."""
    rounded = mean.to(x.dtype)
    rest = (mean - rounded).to(x.dtype)
    return x.sub_(rounded).sub_(rest).mul_(reciprocal.to(x.dtype))


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Means of x and of x² over the last dimension, in float64 since they will be subtracted.

    Faster than `var_mean` on the CPU all the same.
    """
    norm = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)
    return x.mean(dim=-1, dtype=torch.float64), norm.square() / x.shape[-1]
