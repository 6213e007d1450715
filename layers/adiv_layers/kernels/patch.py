# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Kernels over the patches of a convolution: a box filter without channels, and its transpose.

‖patch‖² is a box filter of q = Σ_c x², so no patch is ever unfolded. The maps have one value per
position and stay in cache. Their values are summed exactly as stored, whereas a convolution with
ones could round them to TF32. One and two dimensions are treated as three with leading ones.
"""

import triton
import triton.language as tl
from torch import Tensor

from adiv_layers.forms import Correction
from adiv_layers.kernels.launch import Launch, divide_up, launches
from adiv_layers.kernels.maps import Sizes
from adiv_layers.kernels.rows import factor_constants, factor_of

_BLOCK = 256


@triton.jit
def box_kernel(
    q,
    factor,
    elements,
    depth_in,
    height_in,
    width_in,
    depth_out,
    height_out,
    width_out,
    depth,
    height,
    width,
    depth_stride,
    height_stride,
    width_stride,
    depth_padding,
    height_padding,
    width_padding,
    depth_dilation,
    height_dilation,
    width_dilation,
    GAIN: tl.constexpr,
    CONSTANT: tl.constexpr,
    FLOOR: tl.constexpr,
    SQUARED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the factor of every patch, whose ‖patch‖² is Σ_patch q: see `rows.factor_of`."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < elements
    x = (index % width_out) * width_stride - width_padding
    rest = index // width_out
    y = (rest % height_out) * height_stride - height_padding
    rest = rest // height_out
    z = (rest % depth_out) * depth_stride - depth_padding
    volume = rest // depth_out
    square = tl.zeros((BLOCK,), factor.dtype.element_ty)
    zk = z
    for _ in range(depth):
        z_in = inside & (zk >= 0) & (zk < depth_in)
        yj = y
        for _ in range(height):
            y_in = z_in & (yj >= 0) & (yj < height_in)
            line = ((volume * depth_in + zk) * height_in + yj) * width_in
            xi = x
            for _ in range(width):
                mask = y_in & (xi >= 0) & (xi < width_in)
                square += tl.load(q + line + xi, mask=mask, other=0.0)
                xi += width_dilation
            yj += height_dilation
        zk += depth_dilation
    f = factor_of(square, GAIN, CONSTANT, FLOOR, SQUARED)
    tl.store(factor + index, f, mask=inside)


@triton.jit
def box_transposed_kernel(
    c,
    spread,
    elements,
    depth_in,
    height_in,
    width_in,
    depth_out,
    height_out,
    width_out,
    depth,
    height,
    width,
    depth_stride,
    height_stride,
    width_stride,
    depth_padding,
    height_padding,
    width_padding,
    depth_dilation,
    height_dilation,
    width_dilation,
    BLOCK: tl.constexpr,
):
    """Write boxᵀ(c): at an input position, Σ of c over the patches that contain it."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < elements
    x = index % width_in + width_padding
    rest = index // width_in
    y = rest % height_in + height_padding
    rest = rest // height_in
    z = rest % depth_in + depth_padding
    volume = rest // depth_in
    total = tl.zeros((BLOCK,), spread.dtype.element_ty)
    zk = z
    for _ in range(depth):
        zo = zk // depth_stride
        z_in = inside & (zk >= 0) & (zo * depth_stride == zk) & (zo < depth_out)
        yj = y
        for _ in range(height):
            yo = yj // height_stride
            y_in = z_in & (yj >= 0) & (yo * height_stride == yj) & (yo < height_out)
            line = ((volume * depth_out + zo) * height_out + yo) * width_out
            xi = x
            for _ in range(width):
                xo = xi // width_stride
                mask = y_in & (xi >= 0) & (xo * width_stride == xi) & (xo < width_out)
                total += tl.load(c + line + xo, mask=mask, other=0.0)
                xi -= width_dilation
            yj -= height_dilation
        zk -= depth_dilation
    tl.store(spread + index, total, mask=inside)


@launches
def box(
    q: Tensor, factor: Tensor, *, sizes: Sizes, form: Correction, squared: bool = False
) -> Launch:
    """Fill `factor` (images, groups, positions) from q, the same of the input, both contiguous."""
    constants = {**factor_constants(form, factor, squared), "BLOCK": _BLOCK}
    numbers = (factor.numel(), *sizes.space, *sizes.out, *sizes.geometry)
    return Launch(box_kernel, (divide_up(factor.numel(), _BLOCK),), numbers, constants)


@launches
def box_transposed(c: Tensor, spread: Tensor, *, sizes: Sizes) -> Launch:
    """Fill `spread` (images, groups, positions) from c, the same of the output, both contiguous."""
    numbers = (spread.numel(), *sizes.space, *sizes.out, *sizes.geometry)
    grid = (divide_up(spread.numel(), _BLOCK),)
    return Launch(box_transposed_kernel, grid, numbers, {"BLOCK": _BLOCK})
