"""Convolutions and transposed convolutions: φ(x) = [patch, 1] per group, scale ‖patch‖² + 1.

Only the patches of sampled rows are gathered, from windows of the padded input, which are views.
Lengths of all rows are sums over windows of one channel, or those of the input where a patch is one
position.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch import Tensor
from torch.nn import functional

from adiv_monitor.features.features import DenseFeatures
from adiv_monitor.features.rows import Rows, Whole, norms, squares, to_compute_dtype
from adiv_monitor.features.uses import FunctionCall, Use, uses


@dataclass(frozen=True)
class Geometry:
    """The positions that a convolution reads; one entry of each tuple per spatial dimension.

    Attributes:
        kernel: size of the kernel.
        stride: step between outputs.
        padding: number of entries added on the left and on the right.
        dilation: step between the entries of a patch.
        groups: number of groups of channels, each with its own patches.
        channels: number of input channels of a group.
        spacing: step between the inputs, with zeros in between; empty: 1 each.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int
    channels: int
    spacing: tuple[int, ...] = ()

    @property
    def by_position(self) -> bool:
        """Whether every patch is the input at the output's position: kernel and stride 1."""
        once = all(n == 1 for n in (*self.kernel, *self.stride, *self.spacing))
        return once and not any(map(any, self.padding))

    def spatial_last(self, tensor: Tensor) -> Tensor:
        """Move the channels of (batch, channels, *spatial) or (channels, *spatial) last."""
        return tensor.movedim(-1 - len(self.kernel), -1)

    def batched(self, tensor: Tensor) -> Tensor:
        """Return (batch, channels, *spatial); a single sample gets a batch dimension."""
        return tensor[None] if tensor.dim() == len(self.kernel) + 1 else tensor


def geometry_of(
    weight: Tensor,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Geometry:
    """Return the geometry of a convolution, from its arguments in torch's order."""
    kernel = tuple(weight.shape[2:])
    steps, dilations = repeated(stride, len(kernel)), repeated(dilation, len(kernel))
    sides = _sides(padding, kernel, dilations)
    return Geometry(kernel, steps, sides, dilations, groups, weight.shape[1])


@uses("conv1d", "conv2d", "conv3d")
def convolution(
    call: FunctionCall,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Use:
    """Z = W patch + b at every output position, each of which is a row."""
    geometry = geometry_of(weight, stride, padding, dilation, groups)
    return patchwise(geometry, input, weight, bias)


def patchwise(geometry: Geometry, input: Tensor, weight: Tensor, bias: Tensor | None) -> Use:
    """Return the use of an affine map of every patch."""
    of_bias = None if bias is None else 1.0

    def features(rows: Rows) -> DenseFeatures:
        return DenseFeatures(patches(geometry, input, rows), of_bias)

    def whole(rows: Rows) -> Whole | None:
        if geometry.groups > 1:
            return None
        x = geometry.batched(input)
        lengths = norms(x, 1) if geometry.by_position else patch_squares(geometry, x).sqrt_()
        return Whole(lengths.flatten(), of_bias or 0.0)

    def times(v: Tensor) -> Tensor:
        return patch_products(geometry, geometry.batched(input), v)

    return Use("convolution", weight, bias, features, geometry.spatial_last, whole, times=times)


@uses("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def transposed_convolution(
    call: FunctionCall,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> Use:
    """Z = W patch + b: a patch has the inputs that reach the output position, and zeros.

    This is a convolution, with the flipped kernel, of the input with zeros in between.
    """
    kernel = tuple(weight.shape[2:])
    n = len(kernel)
    dilations, steps, cut = (repeated(value, n) for value in (dilation, stride, padding))
    sides = tuple(
        (d * (k - 1) - p, outputs - 1 - step * (inputs - 1) + p)
        for d, k, p, step, outputs, inputs in zip(
            dilations, kernel, cut, steps, call.result.shape[-n:], input.shape[-n:], strict=True
        )
    )
    once, channels = (1,) * n, len(weight) // groups
    geometry = Geometry(kernel, once, sides, dilations, groups, channels, spacing=steps)

    def turned(tensor: Tensor) -> Tensor:
        by_group = tensor.flip(tuple(range(2, 2 + n))).reshape(groups, channels, -1, *kernel)
        return by_group.transpose(1, 2).flatten(0, 1)

    return replace(patchwise(geometry, input, weight, bias), shaped=turned, form="transposed")


def repeated(value: Any, dims: int) -> tuple[int, ...]:
    """Return one number per dimension, from one number or one per dimension."""
    if isinstance(value, int):
        return (value,) * dims
    values = tuple(map(int, value))
    return values * dims if len(values) == 1 else values


def _sides(
    padding: str | int | Sequence[int], kernel: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    if padding == "same":
        extents = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return tuple((extent // 2, extent - extent // 2) for extent in extents)
    each = (0,) * len(kernel) if padding == "valid" else repeated(padding, len(kernel))
    return tuple((side, side) for side in each)


def patch_squares(geometry: Geometry, x: Tensor) -> Tensor:
    """Return ‖patch‖², (batch, *positions), of one group: sums of Σ x² over windows."""
    sums = _padded(geometry, squares(x, 1)[:, None])
    return _windows(geometry, sums).sum(tuple(range(-len(geometry.kernel), 0))).squeeze(1)


def patch_products(geometry: Geometry, input: Tensor, v: Tensor) -> Tensor:
    """Return the products of all patches of one group with vectors, (batch, *positions, m).

    Args:
        geometry: the positions of the patches.
        input: the input, (batch, channels, *spatial).
        v: (patch size, m).
    """
    convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[len(geometry.kernel) - 1]
    x, kernels = to_compute_dtype(input), v.mT.reshape(-1, geometry.channels, *geometry.kernel)
    made = convolve(_padded(geometry, x), kernels, None, geometry.stride, 0, geometry.dilation)
    return made.movedim(1, -1)


def patches(geometry: Geometry, input: Tensor, rows: Rows) -> Tensor:
    """Return the patches of the chosen rows, (rows, groups, channels of a group × kernel)."""
    per_output = geometry.channels * prod(geometry.kernel)
    if geometry.by_position:
        taken = rows.take(geometry.spatial_last(input))
        return taken.reshape(len(taken), geometry.groups, per_output)
    batched = geometry.batched(input)
    # (batch, *positions, *kernel, channels)
    windows = _windows(geometry, _padded(geometry, batched)).movedim(1, -1)
    taken = rows.take(windows if input is batched else windows[0]).flatten(1, -2)
    return taken.transpose(1, 2).reshape(len(taken), geometry.groups, per_output)


def _padded(geometry: Geometry, x: Tensor) -> Tensor:
    """Return the input with padding, and with zeros between its entries."""
    if any(step > 1 for step in geometry.spacing):
        sizes = [(n - 1) * step + 1 for n, step in zip(x.shape[2:], geometry.spacing, strict=True)]
        spaced = x.new_zeros(*x.shape[:2], *sizes)
        steps = tuple(slice(None, None, step) for step in geometry.spacing)
        spaced[(slice(None), slice(None), *steps)] = x
        x = spaced
    pad = [side for sides in reversed(geometry.padding) for side in sides]
    return functional.pad(x, pad) if any(pad) else x


def _windows(geometry: Geometry, x: Tensor) -> Tensor:
    """Return a view of the padded input as (batch, channels, *positions, *kernel)."""
    for d, (size, stride, dilation) in enumerate(
        zip(geometry.kernel, geometry.stride, geometry.dilation, strict=True), 2
    ):
        x = x.unfold(d, dilation * (size - 1) + 1, stride)[..., ::dilation]
    return x
