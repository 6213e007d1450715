"""Convolutions: φ(x) = [patch, 1] per group, scale ‖patch‖² + 1.

Only the patches of the chosen rows are gathered; the input is neither unfolded nor padded. Padding
is an index map: it says from where each element of a patch is read.
"""

import torch
from torch import Tensor, nn

from adiv_monitor.features.features import DenseFeatures
from adiv_monitor.features.registry import register_features
from adiv_monitor.features.rows import Rows, exact

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d


def spatial_last(module: Conv, tensor: Tensor) -> Tensor:
    """The layout of (batch, channels, *spatial) and of (channels, *spatial)."""
    return tensor.movedim(-1 - len(module.kernel_size), -1)


@register_features(nn.Conv1d, nn.Conv2d, nn.Conv3d, kind="convolution", layout=spatial_last)
def convolution(module: Conv, rows: Rows, input: Tensor) -> DenseFeatures:
    """Z = W patch + b at every output position; weights are shared by all positions."""
    phi = patches(module, rows, input)
    return DenseFeatures(phi, None if module.bias is None else phi.new_ones(len(phi), 1))


def patches(module: Conv, rows: Rows, input: Tensor) -> Tensor:
    """The receptive fields of the chosen rows, (rows, groups, channels of a group × kernel)."""
    if input.dim() == len(module.kernel_size) + 1:  # no batch dimension
        input = input[None]
        rows = Rows((1, *rows.shape), rows.index)
    sample, pixel, outside = _read_from(module, rows, input)
    channels, pixels = input.shape[1], input.shape[2:].numel()
    by_pixel = input.flatten(2).transpose(1, 2)  # (batch, pixels, channels)
    if input.numel() <= pixel.numel() * channels:
        # The patches overlap so much that the input is the smaller one: first lay it out pixel by
        # pixel, so that whole rows of memory can be gathered.
        index = (sample * pixels + pixel).view(-1)
        gathered = by_pixel.reshape(-1, channels).index_select(0, index)
        gathered = gathered.view(*pixel.shape, channels)
    else:
        gathered = by_pixel[sample, pixel]
    if outside is not None:
        gathered.masked_fill_(outside[..., None], 0)
    by_channel = exact(gathered).transpose(1, 2)  # (rows, channels, kernel volume)
    return by_channel.reshape(len(pixel), module.groups, weights_per_output(module))


def _read_from(module: Conv, rows: Rows, input: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """From where each element of a patch is read: sample (rows, 1), pixel (rows, kernel volume).

    And which of them lie outside the input and are zero; None if none can.
    """
    sample, *outputs = rows.positions(input.device)
    pixel = torch.zeros_like(sample)[:, None]
    outside = torch.zeros_like(pixel, dtype=torch.bool)
    zeros = module.padding_mode == "zeros" and any(module._reversed_padding_repeated_twice)
    # Dimension by dimension, the last one running fastest. What is computed for all outputs is
    # small, since it is one-dimensional; rows then pick theirs.
    for d, output in enumerate(outputs):
        size, (left, right) = input.shape[2 + d], _padding(module, d)
        start = torch.arange(rows.shape[1 + d], device=input.device) * module.stride[d] - left
        reach = torch.arange(module.kernel_size[d], device=input.device) * module.dilation[d]
        position = start[:, None] + reach  # (outputs, kernel)
        if zeros:
            beyond = (position < 0) | (position >= size)
            outside = (outside[..., None] | beyond[output][:, None]).flatten(1)
        if left or right:
            position = _pad(position, size, module.padding_mode)
        pixel = (pixel[..., None] * size + position[output][:, None]).flatten(1)
    return sample[:, None], pixel, outside if zeros else None


def _padding(module: Conv, d: int) -> tuple[int, int]:
    """Left and right padding; torch keeps these pairs for "same" too, last dimension first."""
    at = 2 * (len(module.kernel_size) - 1 - d)
    left, right = module._reversed_padding_repeated_twice[at : at + 2]
    return int(left), int(right)


def weights_per_output(module: Conv) -> int:
    """How many weights act on a patch: channels of a group × kernel volume."""
    return module.in_channels // module.groups * torch.Size(module.kernel_size).numel()


def _pad(position: Tensor, size: int, mode: str) -> Tensor:
    """Where in 0..size−1 each padded position is read from; anywhere, if it is zero instead."""
    if mode == "circular":
        return position % size
    if mode == "reflect":  # about the first element, then about the last
        position = position.abs()
        return torch.where(position >= size, 2 * (size - 1) - position, position)
    return position.clamp(0, size - 1)
