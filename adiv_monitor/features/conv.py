"""Convolutions: φ(x) = [patch, 1] per group, scale ‖patch‖² + 1.

Of sampled rows only their patches are gathered; the input is neither unfolded nor padded. What all
rows say together, scales and mean patch, are sums over windows of one channel or one sample.
"""

from math import prod

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from adiv_monitor.features.features import DenseFeatures
from adiv_monitor.features.registry import register_features
from adiv_monitor.features.rows import Index, Rows, exact, exact_type, to_device
from adiv_monitor.features.whole import Whole, squares

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d


def spatial_last(module: Conv, tensor: Tensor) -> Tensor:
    """The layout of (batch, channels, *spatial) and of (channels, *spatial)."""
    return tensor.movedim(-1 - len(module.kernel_size), -1)


def whole_input(module: Conv, input: Tensor) -> Whole | None:
    """Scales and mean patch of all rows; with groups every row has several: then from samples."""
    if module.groups > 1:
        return None
    return Whole(patch_squares(module, input), float(module.bias is not None), _sum(module, input))


@register_features(
    nn.Conv1d, nn.Conv2d, nn.Conv3d, kind="convolution", layout=spatial_last, whole=whole_input
)
def convolution(module: Conv, rows: Rows, input: Tensor) -> DenseFeatures:
    """Z = W patch + b at every output position; weights are shared by all positions."""
    return DenseFeatures(patches(module, rows, input), None if module.bias is None else 1.0)


def patch_squares(module: Conv, input: Tensor) -> Tensor:
    """‖patch‖² of all rows, (rows,): Σ x² over the channels, summed over windows (groups = 1)."""
    batched = _batched(module, input)
    return _windows(module, squares(batched, 1)[:, None]).sum(_kernel_dims(module)).flatten()


def _sum(module: Conv, input: Tensor) -> Tensor:
    """Sum of all patches, (channels, *kernel)."""
    batched = _batched(module, input)
    of_samples = batched.sum(0, keepdim=True, dtype=exact_type(batched))
    positions = tuple(range(2, 2 + len(module.kernel_size)))
    return _windows(module, of_samples).sum((0, *positions))


def patches(module: Conv, rows: Rows, input: Tensor) -> Tensor:
    """The receptive fields of the chosen rows, (rows, groups, channels of a group × kernel)."""
    per_output = weights_per_output(module)
    if _by_position(module):
        taken = rows.take(spatial_last(module, input))
        return taken.reshape(len(taken), module.groups, per_output)
    batched = _batched(module, input)
    n = len(module.kernel_size)
    if rows.chosen is None:
        # (batch, channels, *positions, *kernel): one copy, rows first
        by_row = _windows(module, batched).movedim(1, 1 + n)
        return exact(by_row.reshape(rows.total, module.groups, per_output))
    shape = rows.shape if input is batched else (1, *rows.shape)
    sample, *start = np.unravel_index(rows.chosen, shape)
    sources, outside = _sources(module, start, tuple(batched.shape[2:]))
    index = np.stack([np.broadcast_to(sample[:, None], sources[0].shape), *sources])
    gathered = batched.movedim(1, -1)[tuple(to_device(index, batched.device))]
    if outside.any():
        inside = torch.from_numpy(~outside).to(batched.device, non_blocking=True)
        gathered = gathered * inside[..., None]
    by_channel = exact(gathered).transpose(1, 2)  # (rows, channels, kernel volume)
    return by_channel.reshape(len(sample), module.groups, per_output)


def _by_position(module: Conv) -> bool:
    """Whether every patch is the input at the output's own position: 1×1, one by one."""
    once = all(k == s == 1 for k, s in zip(module.kernel_size, module.stride, strict=True))
    return once and not any(module._reversed_padding_repeated_twice)


def _batched(module: Conv, input: Tensor) -> Tensor:
    return input[None] if input.dim() == len(module.kernel_size) + 1 else input


def _kernel_dims(module: Conv) -> tuple[int, ...]:
    return tuple(range(-len(module.kernel_size), 0))


def _windows(module: Conv, x: Tensor) -> Tensor:
    """(batch, channels, *positions, *kernel): a view of the padded input, every patch by place."""
    pad = module._reversed_padding_repeated_twice
    if any(pad):
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        x = functional.pad(x, pad, mode=mode)
    n = len(module.kernel_size)
    reach = [d * (k - 1) + 1 for d, k in zip(module.dilation, module.kernel_size, strict=True)]
    outputs = [
        (size - extent) // stride + 1
        for size, extent, stride in zip(x.shape[2:], reach, module.stride, strict=True)
    ]
    steps = x.stride()[2:]
    strides = [step * stride for step, stride in zip(steps, module.stride, strict=True)]
    within = [step * dilation for step, dilation in zip(steps, module.dilation, strict=True)]
    assert len(steps) == n
    return x.as_strided(
        (*x.shape[:2], *outputs, *module.kernel_size), (*x.stride()[:2], *strides, *within)
    )


def _sources(
    module: Conv, outputs: list[Index], sizes: tuple[int, ...]
) -> tuple[list[Index], np.ndarray]:
    """From where each element of a patch is read, per dimension (rows, kernel volume).

    And which of them lie outside the input and are zero.

    Args:
        module: the convolution.
        outputs: the rows' positions in each dimension of the output.
        sizes: the input's spatial shape.
    """
    kernel = np.unravel_index(np.arange(prod(module.kernel_size)), module.kernel_size)
    sources = []
    outside = np.zeros((len(outputs[0]), len(kernel[0])), dtype=bool)
    for d, size in enumerate(sizes):
        left, _ = _padding(module, d)
        start = outputs[d][:, None] * module.stride[d] - left
        position = start + kernel[d] * module.dilation[d]
        if module.padding_mode == "zeros":
            outside |= (position < 0) | (position >= size)
        sources.append(_pad(position, size, module.padding_mode))
    return sources, outside


def _padding(module: Conv, d: int) -> tuple[int, int]:
    """Left and right padding; torch keeps these pairs for "same" too, last dimension first."""
    at = 2 * (len(module.kernel_size) - 1 - d)
    left, right = module._reversed_padding_repeated_twice[at : at + 2]
    return int(left), int(right)


def weights_per_output(module: Conv) -> int:
    """How many weights act on a patch: channels of a group × kernel volume."""
    return module.in_channels // module.groups * prod(module.kernel_size)


def _pad(position: Index, size: int, mode: str) -> Index:
    """Where in 0..size−1 each padded position is read from; anywhere, if it is zero instead."""
    if mode == "circular":
        return position % size
    if mode == "reflect":  # about the first element, then about the last
        position = np.abs(position)
        return np.where(position >= size, 2 * (size - 1) - position, position)
    return np.clip(position, 0, size - 1)
