"""The two linear maps whose outputs are scaled, rows and patches, and their memory layouts.

The kernels use the shape (images, channels, positions). Rows are one image, whose positions are the
rows; the positions of a convolution are all spatial positions. Triton is imported when a factor is
first computed.
"""

from collections.abc import Sequence
from typing import NamedTuple

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


def space_out(space: list[int], geometry: Sequence[int]) -> list[int]:
    """Return the spatial sizes of a convolution's output.

    geometry: kernel size, stride, padding, dilation, each of the length of `space`.
    """
    n = len(space)
    kernel, stride, padding, dilation = (geometry[i * n : (i + 1) * n] for i in range(4))
    return [
        (space[i] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1
        for i in range(n)
    ]


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

    kernel_size: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
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
        return cls(list(weight.shape[2:]), list(stride), list(padding), list(dilation), groups)

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

        space, geometry = _three(list(x.shape[2:]), 1), self._geometry()
        q = x.new_empty((len(x), self.groups, *space), dtype=accumulation_dtype(x.dtype))
        channels.square_sum(x.flatten(2), q.flatten(2))
        factor = q.new_empty(len(x), self.groups, *space_out(space, geometry))
        patch.box(q, factor, geometry=geometry, form=form, squared=squared)
        return factor.flatten(2)

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

        space, geometry = _three(list(x.shape[2:]), 1), self._geometry()
        spread = c.new_empty(*c.shape[:2], *space)
        c = c.view(*c.shape[:2], *space_out(space, geometry))
        patch.box_transposed(c, spread, geometry=geometry)
        return spread.flatten(2)

    def _geometry(self) -> tuple[int, ...]:
        return (
            *_three(self.kernel_size, 1),
            *_three(self.stride, 1),
            *_three(self.padding, 0),
            *_three(self.dilation, 1),
        )

    def _settings(self) -> tuple[list[int], list[int], list[int], bool, list[int], int]:
        """Return the settings of PyTorch's convolution, including those of the transposed one."""
        none = [0] * len(self.stride)
        return self.stride, self.padding, self.dilation, False, none, self.groups


def _three(sizes: list[int], missing: int) -> list[int]:
    """Extend sizes to three dimensions, by leading ones."""
    return [missing] * (3 - len(sizes)) + sizes
