"""Convolutions: φ(x) = [patch, 1] per group, scale ‖patch‖² + 1.

Only the patches of the chosen rows are gathered; the input is neither unfolded nor padded as a
whole. Padding is an index map: it says from where each element of a patch is read.
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
    dims = len(module.kernel_size)
    if input.dim() == dims + 1:  # no batch dimension
        input = input[None]
        rows = Rows((1, *rows.shape), rows.index)
    memory, strides = _memory(input), input.stride()
    # Offsets into memory, in the smallest type that will do: they outweigh what they gather.
    dtype = torch.int32 if len(memory) < 2**31 else torch.int64
    sample, *outputs = (position.to(dtype) for position in rows.positions(input.device))
    offset = torch.zeros(1, dtype=dtype, device=input.device)  # (rows, *kernel)
    inside: Tensor | None = None
    for d, output in enumerate(outputs):
        reach = torch.arange(module.kernel_size[d], dtype=dtype, device=input.device)
        reach = reach * module.dilation[d]
        left, right = _padding(module, d)
        position, valid = output[:, None] * module.stride[d] - left + reach, None
        if left or right:
            position, valid = _read_from(position, input.shape[2 + d], module.padding_mode)
        offset = offset + _along(position * strides[2 + d], d, dims)
        if valid is not None:
            valid = _along(valid, d, dims)
            inside = valid if inside is None else inside & valid
    channel = torch.arange(input.shape[1], dtype=dtype, device=input.device) * strides[1]
    plane = (sample * strides[0])[:, None] + channel  # (rows, in_channels)
    offset = plane[..., None] + offset.flatten(1)[:, None]  # (rows, in_channels, kernel volume)
    gathered = exact(memory.index_select(0, offset.view(-1))).view(offset.shape)
    if inside is not None:
        gathered *= inside.flatten(1)[:, None].to(gathered.dtype)
    return gathered.reshape(len(sample), module.groups, weights_per_output(module))


def _memory(tensor: Tensor) -> Tensor:
    """The stretch of memory in which a tensor lies, to be indexed by its strides."""
    if tensor.numel() == 0:
        return tensor.reshape(-1)
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((last + 1,), (1,))


def _along(index: Tensor, d: int, dims: int) -> Tensor:
    """An index (rows, kernel_size[d]) shaped to broadcast in (rows, *kernel_size)."""
    kernel = (index.shape[1] if axis == d else 1 for axis in range(dims))
    return index.reshape(index.shape[0], *kernel)


def _padding(module: Conv, d: int) -> tuple[int, int]:
    """Left and right padding; torch keeps these pairs for "same" too, last dimension first."""
    at = 2 * (len(module.kernel_size) - 1 - d)
    left, right = module._reversed_padding_repeated_twice[at : at + 2]
    return int(left), int(right)


def weights_per_output(module: Conv) -> int:
    """How many weights act on a patch: channels of a group × kernel volume."""
    return module.in_channels // module.groups * torch.Size(module.kernel_size).numel()


def _read_from(position: Tensor, size: int, padding_mode: str) -> tuple[Tensor, Tensor | None]:
    """Where in 0..size−1 each padded position is read from, and which ones are not zero."""
    if padding_mode == "zeros":
        inside = (position >= 0) & (position < size)
        return position.clamp(0, size - 1), inside
    if padding_mode == "circular":
        return position % size, None
    if padding_mode == "replicate":
        return position.clamp(0, size - 1), None
    position = position.abs()  # reflect: about the first element, then about the last
    return torch.where(position >= size, 2 * (size - 1) - position, position), None
