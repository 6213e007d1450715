"""Elementwise gains γ⊙x̂ + δ of normalisers: per feature i, φ = [x̂_i, 1], scale x̂_i² + 1.

The rules recompute x̂ for the chosen rows only; they read the whole input only for the statistics
that the normaliser itself uses.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from adiv_monitor.features.features import DenseFeatures
from adiv_monitor.features.rows import Rows, compute_dtype, joined, to_compute_dtype, to_device
from adiv_monitor.features.uses import FunctionCall, Use, channels_second, uses
from adiv_monitor.features.whole import LateScales, hooks_keep, in_parts

# Autograd nodes that save the batch's mean and 1/√(var + ε) for the backward pass.
_KEEP_MOMENTS = ("NativeBatchNormBackward0", "CudnnBatchNormBackward0")


def gain(
    weight: Tensor | None,
    bias: Tensor | None,
    normalised: Callable[[Rows], Tensor],
    every: Callable[..., Iterable[Tensor]],
    reads: Sequence[Tensor],
    layout: Callable[[Tensor], Tensor] = channels_second,
) -> Use:
    """Return the use of γ and δ in γ⊙x̂ + δ.

    Args:
        weight: γ.
        bias: δ.
        normalised: returns x̂ of the chosen rows (rows, channels).
        every: yields x̂ of all rows, in parts shaped like those of the input, from `reads`.
        reads: the tensors that `every` takes.
        layout: see `Use`.
    """

    def features(rows: Rows) -> DenseFeatures:
        return DenseFeatures(normalised(rows)[..., None], None if bias is None else 1.0)

    def scales(*tensors: Tensor) -> Iterator[Tensor]:
        for part in every(*tensors):
            yield layout(part).square()

    def late() -> LateScales:
        return LateScales(scales, reads, 1.0)

    return Use("gain", weight, bias, features, layout=layout, late=late)


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
    if call.of_model(input):  # a weight that is standardised
        return None

    def layout(tensor: Tensor) -> Tensor:
        return tensor.flatten(-len(normalized_shape))

    def normalised(rows: Rows) -> Tensor:
        x = rows.take(layout(input))
        return functional.layer_norm(x, x.shape[1:], eps=eps)

    def every(x: Tensor) -> Iterator[Tensor]:
        for part in in_parts(x, len(normalized_shape)):
            yield functional.layer_norm(to_compute_dtype(part), normalized_shape, eps=eps)

    return gain(weight, bias, normalised, every, [input], layout)


@uses("rms_norm")
def rms_norm(
    call: FunctionCall,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Use | None:
    """x̂ = x / √(mean x² + ε) over the normalised dimensions."""
    if call.of_model(input):  # a weight that is standardised
        return None
    # With eps=None torch takes the smallest number of the dtype it computes in: the input's.
    constant = torch.finfo(input.dtype).eps if eps is None else eps

    def layout(tensor: Tensor) -> Tensor:
        return tensor.flatten(-len(normalized_shape))

    def normalised(rows: Rows) -> Tensor:
        x = rows.take(layout(input))
        return functional.rms_norm(x, x.shape[1:], eps=constant)

    def every(x: Tensor) -> Iterator[Tensor]:
        for part in in_parts(x, len(normalized_shape)):
            yield functional.rms_norm(to_compute_dtype(part), normalized_shape, eps=constant)

    return gain(weight, None, normalised, every, [input], layout)


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
    if call.of_model(input):  # a weight that is standardised
        return None

    def normalised(rows: Rows) -> Tensor:
        batch, channels = input.shape[:2]
        of_group = input.shape[1:].numel() // num_groups  # told, as a batch may be empty
        moments = torch.stack(_moments(input.reshape(1, batch * num_groups, of_group)))
        sample = to_device(rows.positions[0], input.device)
        of_rows = moments.view(3, batch, num_groups)[:, sample]
        of_channels = of_rows.repeat_interleave(channels // num_groups, 2)
        return _normalised(rows, input, eps, *of_channels)

    def every(x: Tensor) -> Iterator[Tensor]:
        for part in in_parts(x):
            yield functional.group_norm(to_compute_dtype(part), num_groups, eps=eps)

    return gain(weight, bias, normalised, every, [input])


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
    if call.of_model(input):  # a weight that is standardised
        return None
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
    if call.of_model(input):  # a weight that is standardised
        return None

    if training or running_mean is None or running_var is None:
        return _by_batch(call.result, input, weight, bias, eps)
    return _by_running(input, running_mean, running_var, weight, bias, eps)


def _by_running(
    input: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Use:
    """Return the use of γ and δ where the running statistics normalise."""

    def normalised(rows: Rows) -> Tensor:
        shift = torch.zeros_like(running_mean)
        return _normalised(rows, input, eps, running_mean, shift, running_var)

    def every(x: Tensor, mean: Tensor, variance: Tensor) -> Iterator[Tensor]:
        mean = to_compute_dtype(mean)
        reciprocal = (to_compute_dtype(variance) + eps).rsqrt()
        return _parts_normalised(x, mean, torch.zeros_like(mean), reciprocal)

    return gain(weight, bias, normalised, every, [input, running_mean, running_var])


def _by_batch(
    result: Tensor, input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Use:
    """Return the use of γ and δ where the batch's own statistics normalise."""
    kept = _kept_moments(result)
    shifts: list[Tensor] = []  # the rounding error of the saved mean

    def normalised(rows: Rows) -> Tensor:
        if kept is None:
            return _normalised(rows, input, eps, *_moments(_by_channel(input)))
        mean, reciprocal = kept
        shifts.append(_parts_mean(_by_channel(input), mean))
        return rows.take(input.movedim(1, -1)).sub_(mean).sub_(shifts[-1]).mul_(reciprocal)

    def every(x: Tensor) -> Iterator[Tensor]:
        if kept is None:
            mean, shift, variance = _moments(_by_channel(x))
            reciprocal = (variance + eps).rsqrt()
        else:
            mean, reciprocal = kept
            shift = shifts[0] if shifts else _parts_mean(_by_channel(x), mean)
        return _parts_normalised(x, mean, shift, reciprocal)

    return gain(weight, bias, normalised, every, [input])


def _parts_normalised(
    x: Tensor, mean: Tensor, shift: Tensor, reciprocal: Tensor
) -> Iterator[Tensor]:
    """Yield (x − mean − shift) · reciprocal per channel, part by part."""
    across = (-1, *(1,) * (x.dim() - 2))
    mean, shift, reciprocal = mean.view(across), shift.view(across), reciprocal.view(across)
    for part in in_parts(x):
        yield (to_compute_dtype(part) - mean).sub_(shift).mul_(reciprocal)


def _by_channel(input: Tensor) -> Tensor:
    """Return the input as (batch, channels, positions)."""
    return input.flatten(2) if input.dim() > 2 else input[..., None]


def _normalised(
    rows: Rows, input: Tensor, eps: float, pivot: Tensor, shift: Tensor, variance: Tensor
) -> Tensor:
    """Return x̂ of the rows; the pivot is subtracted first, against cancellation."""
    x = rows.take(input.movedim(1, -1)).sub_(pivot)
    if shift.dim() == 1:  # the statistics are the same for all rows
        shift, variance = shift.to(x.dtype), variance.to(x.dtype)
        return functional.batch_norm(x, shift, variance, eps=eps)
    return x.sub_(shift).mul_((to_compute_dtype(variance) + eps).rsqrt())


def _kept_moments(result: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the batch's mean and 1/√(var + ε) that batch_norm saved; None if unavailable.

    They are unavailable if saved-tensor hooks are active.
    """
    node: Any = result.grad_fn
    if node is None or node.name() not in _KEEP_MOMENTS or not node._saved_training:
        return None
    if hooks_keep():
        return None
    mean, reciprocal = node._saved_result1, node._saved_result2
    # In pure half precision, the saved statistics are rounded to half precision as well.
    return (mean, reciprocal) if mean.dtype == compute_dtype(result) else None


def _parts_mean(x: Tensor, pivot: Tensor) -> Tensor:
    """Return mean − pivot over all but the second of three dimensions: a mean's rounding error."""
    means = [(to_compute_dtype(part) - pivot[:, None]).mean(2) for part in in_parts(x)]
    return joined(means).mean(0)


def _moments(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a pivot, mean − pivot and variance, over all but the second of three dimensions.

    The pivot is the first entry, which is near the mean. Ten times as fast as `var_mean` on a CPU.
    """
    pivot = to_compute_dtype(x[:1, :, :1].sum((0, 2)))  # a sum, as an empty batch has no entry
    means, norms = [], []
    for part in in_parts(x):
        part = to_compute_dtype(part) - pivot[:, None]
        means.append(part.mean(2))
        norms.append(torch.linalg.vector_norm(part, dim=2))
    shift = joined(means).mean(0)
    norm = torch.linalg.vector_norm(joined(norms), dim=0)
    variance = norm.square().div_(len(x) * x.shape[2]).sub_(shift.square())
    return pivot, shift, variance
