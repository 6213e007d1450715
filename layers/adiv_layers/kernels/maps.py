"""The two linear maps whose outputs are scaled, rows and patches, and their memory layouts.

The kernels use the shape (images, channels, positions). Rows are one image, whose positions are the
rows; the positions of a convolution are all spatial positions. Triton is imported when a factor is
first computed.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from adiv_layers.forms import Correction, accumulation_dtype


def columns(rows: Tensor) -> Tensor:
    """View rows (..., features) as (1, features, rows)."""
    rows = rows if rows.dim() == 2 else rows.reshape(-1, rows.shape[-1])
    count, width = rows.shape
    along, across = rows.stride()
    return rows.as_strided((1, width, count), (0, across, along))


def spread(bias: Tensor, columns: Tensor) -> Tensor:
    """View a bias as the same numbers in all of these columns."""
    return bias.as_strided(columns.shape, (0, bias.stride(0), 0))


class Sizes(NamedTuple):
    """Sizes of a convolution in three dimensions; missing ones come first, of one position.

    Attributes:
        space: of the input.
        out: of the output.
        geometry: kernel size, stride, padding and dilation, three numbers each.
    """

    space: tuple[int, ...]
    out: tuple[int, ...]
    geometry: tuple[int, ...]


class Rows:
    """The linear map of every row of x: Wx + b."""

    def view(self, x: Tensor) -> Tensor:
        """View an input or output as (images, channels, positions)."""
        return columns(x)

    def restore(self, view: Tensor, output: Tensor) -> Tensor:
        """Return a view of the output, or of a tensor like it, in the output's own shape."""
        return view.squeeze(0).t().reshape(output.shape)

    def factor(self, x: Tensor, form: Correction, squared: bool = False) -> Tensor:
        """Return the factor f of every row: see `rows.factor_of`."""
        from adiv_layers.kernels import rows

        flat = rows.rows_of(x)
        factor = flat.new_empty((1, 1, flat.shape[0]), dtype=accumulation_dtype(x.dtype))
        rows.unit_rows(flat, factor, None, form=form, squared=squared)
        return factor

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Apply the map."""
        return F.linear(x, weight, bias)

    def backward(
        self, h: Tensor, x: Tensor, weight: Tensor, needed: tuple[bool, ...]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return gradients of x and W, if needed, from the gradient h of the output."""
        dx = h @ weight if needed[0] else None
        if not needed[1]:
            return dx, None
        return dx, h.reshape(-1, h.shape[-1]).t() @ x.reshape(-1, x.shape[-1])

    def spread(self, c: Tensor, x: Tensor) -> Tensor:
        """Return the sum at every input of c over the outputs that use it: for rows, c itself."""
        return c


class Patches(NamedTuple):
    """The linear map of every patch of x: a convolution with equal padding at both ends."""

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @classmethod
    def of(
        cls,
        weight: Tensor,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
    ) -> "Patches":
        """Return those of a convolution with this weight and geometry."""
        kernel = tuple(weight.shape[2:])
        return cls(kernel, tuple(stride), tuple(padding), tuple(dilation), groups)

    def suits(self, x: Tensor, weight: Tensor) -> bool:
        """Return whether x is a batch with wide groups: narrow ones leave most of a tile empty."""
        width = min(weight.shape[1], weight.shape[0] // self.groups)
        return x.dim() == weight.dim() and (self.groups == 1 or width >= 8)

    def view(self, x: Tensor) -> Tensor:
        """View an input or output as (images, channels, positions)."""
        return x.flatten(2)

    def restore(self, view: Tensor, output: Tensor) -> Tensor:
        """Return a view of the output, or of a tensor like it, in the output's own shape."""
        return view.view(output.shape)

    def factor(self, x: Tensor, form: Correction, squared: bool = False) -> Tensor:
        """Return the factor f of every patch: see `rows.factor_of`."""
        from adiv_layers.kernels import channels, patch

        sizes, images, flat = _sizes(self, x.shape[2:]), x.shape[0], x.flatten(2)
        shape = (images, self.groups, flat.shape[2])
        q = x.new_empty(shape, dtype=accumulation_dtype(x.dtype))
        channels.square_sum(flat, q)
        factor = q.new_empty((images, self.groups, prod(sizes.out)))
        patch.box(q, factor, sizes=sizes, form=form, squared=squared)
        return factor

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Apply the map."""
        return torch.convolution(x, weight, bias, *self._settings())

    def backward(
        self, h: Tensor, x: Tensor, weight: Tensor, needed: tuple[bool, ...]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return gradients of x and W, if needed, from the gradient h of the output."""
        dx, dw, _ = torch.ops.aten.convolution_backward(
            h, x, weight, None, *self._settings(), (*needed, False)
        )
        return dx, dw

    def spread(self, c: Tensor, x: Tensor) -> Tensor:
        """Return the sum at every input position of c over the patches that contain it."""
        from adiv_layers.kernels import patch

        sizes = _sizes(self, x.shape[2:])
        spread = c.new_empty((*c.shape[:2], prod(sizes.space)))
        patch.box_transposed(c, spread, sizes=sizes)
        return spread

    def _settings(self) -> tuple[Any, ...]:
        """Return the settings of PyTorch's convolution, including those of the transposed one."""
        none = (0,) * len(self.stride)
        return self.stride, self.padding, self.dilation, False, none, self.groups


@lru_cache
def _sizes(patches: Patches, space: torch.Size) -> Sizes:
    """Return the sizes of a convolution over this space."""
    numbers = zip(space, *patches[:4], strict=True)
    out = tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in numbers)
    missing = 3 - len(space)
    of_each = zip(patches[:4], (1, 1, 0, 1), strict=True)
    geometry = (n for own, one in of_each for n in ((one,) * missing + own))
    return Sizes((1,) * missing + tuple(space), (1,) * missing + out, tuple(geometry))
