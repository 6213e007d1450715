"""Convolutions: φ(x) = [patch, 1] per group, scale ‖patch‖² + 1.

Only the patches of the chosen rows are gathered; the input is neither unfolded nor padded, and only
copied where it is smaller than its patches. Padding is an index map: it says from where each
element of a patch is read.
"""

from math import prod

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
    sample, pixel, outside = _sources(module, rows, input)
    channels, sizes = input.shape[1], input.shape[2:]
    by_pixel = input.movedim(1, -1)  # (batch, *spatial, channels)
    if input.numel() <= pixel.numel() * channels:
        # The patches overlap so much that the input is the smaller one: first lay it out pixel by
        # pixel, and one of zeros, so that whole rows of memory can be gathered.
        memory = input.new_empty(len(input) * sizes.numel() + 1, channels)
        memory[:-1].view(by_pixel.shape).copy_(by_pixel)
        memory[-1] = 0
        index = sample * sizes.numel() + pixel
        if outside is not None:
            index.masked_fill_(outside, len(memory) - 1)
        gathered = memory.index_select(0, index.view(-1)).view(*pixel.shape, channels)
    else:
        gathered = by_pixel[(sample, *torch.unravel_index(pixel, sizes))]
        if outside is not None:
            gathered.masked_fill_(outside[..., None], 0)
    by_channel = exact(gathered).transpose(1, 2)  # (rows, channels, kernel volume)
    return by_channel.reshape(len(pixel), module.groups, weights_per_output(module))


def _sources(module: Conv, rows: Rows, input: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Where the rows' patches are read from: sample (rows, 1), pixel (rows, kernel volume).

    And which elements lie outside the input and are zero, (rows, kernel volume); None if none can.
    """
    shape, sizes = rows.shape[1:], input.shape[2:]
    area = prod(shape)
    index = torch.arange(rows.total, device=input.device) if rows.index is None else rows.index
    sample, output = (index // area)[:, None], index % area
    if area >= len(index):
        return sample, *_pixels(module, output, shape, sizes)
    # Less work: the patches of one sample, which are those of all samples.
    every = torch.arange(area, device=input.device)
    pixel, outside = _pixels(module, every, shape, sizes)
    outside = None if outside is None else outside.index_select(0, output)
    return sample, pixel.index_select(0, output), outside


def _pixels(
    module: Conv, outputs: Tensor, shape: tuple[int, ...], sizes: tuple[int, ...]
) -> tuple[Tensor, Tensor | None]:
    """Which pixel each element of a patch is read from, (outputs, kernel volume).

    And which of them lie outside the input and are zero; None if none can.

    Args:
        module: the convolution.
        outputs: positions in the flattened output of one sample.
        shape: the output's spatial shape.
        sizes: the input's spatial shape.
    """
    pixel = torch.zeros_like(outputs)[:, None]
    outside = torch.zeros_like(pixel, dtype=torch.bool)
    zeros = module.padding_mode == "zeros" and any(module._reversed_padding_repeated_twice)
    # Dimension by dimension, the last one running fastest.
    for d, size in enumerate(sizes):
        left, right = _padding(module, d)
        start = outputs // prod(shape[d + 1 :]) % shape[d] * module.stride[d] - left
        reach = torch.arange(module.kernel_size[d], device=outputs.device) * module.dilation[d]
        position = start[:, None] + reach  # (outputs, kernel)
        if zeros:
            beyond = (position < 0) | (position >= size)
            outside = (outside[..., None] | beyond[:, None]).flatten(1)
        if left or right:
            position = _pad(position, size, module.padding_mode)
        pixel = (pixel[..., None] * size + position[:, None]).flatten(1)
    return pixel, outside if zeros else None


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
