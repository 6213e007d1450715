"""The two linear maps whose outputs are scaled, rows and patches, and where their pieces lie.

The kernels see (images, channels, positions). Rows are one image, whose positions are the rows; of
a convolution the positions are all spatial positions.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from adiv_layers.kernels import library


def columns(rows: Tensor) -> Tensor:
    """Rows (..., features) as (1, features, rows)."""
    return rows.reshape(-1, rows.shape[-1]).t().unsqueeze(0)


class Rows:
    """The linear map of every row of x: Wx + b."""

    def suits(self, x: Tensor, weight: Tensor) -> bool:
        """Whether the kernels are made for this input: always."""
        return True

    def view(self, x: Tensor) -> Tensor:
        """Input or output as the kernels see it."""
        return columns(x)

    def restore(self, view: Tensor, output: Tensor) -> Tensor:
        """A view that was made of the output, or of its like, in the output's own shape."""
        return view.squeeze(0).t().reshape(output.shape)

    def factor(self, x: Tensor, constant: float, floor: float) -> Tensor:
        """Factor r of every row."""
        factor: Tensor = library.row_factor(x, constant, floor, False)
        return factor.view(1, 1, -1)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The map itself."""
        return F.linear(x, weight, bias)

    def backward(
        self, h: Tensor, x: Tensor, weight: Tensor, needed: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of x and W, if needed, where h is the output's."""
        dx = h @ weight if needed[0] else None
        if not needed[1]:
            return dx, None
        return dx, h.reshape(-1, h.shape[-1]).t() @ x.reshape(-1, x.shape[-1])

    def spread(self, c: Tensor, x: Tensor) -> Tensor:
        """What outputs collected for the squares they saw, at the inputs: the rows themselves."""
        return c


class Patches(NamedTuple):
    """The linear map of every patch of x: a convolution with as much padding at either end."""

    kernel_size: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int

    def suits(self, x: Tensor, weight: Tensor) -> bool:
        """Whether x is a batch, and groups wide enough: narrow ones leave most of a tile empty."""
        width = min(weight.shape[1], weight.shape[0] // self.groups)
        return x.dim() == weight.dim() and (self.groups == 1 or width >= 8)

    def view(self, x: Tensor) -> Tensor:
        """Input or output as the kernels see it."""
        return x.flatten(2)

    def restore(self, view: Tensor, output: Tensor) -> Tensor:
        """A view that was made of the output, or of its like, in the output's own shape."""
        return view.view(output.shape)

    def factor(self, x: Tensor, constant: float, floor: float) -> Tensor:
        """Factor r of every patch."""
        space = _three(list(x.shape[2:]), 1)
        volume = x.reshape(*x.shape[:2], *space)
        geometry = self._geometry()
        factor: Tensor = library.patch_factor(volume, self.groups, geometry, constant, floor)
        return factor.flatten(2)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The map itself."""
        return torch.convolution(x, weight, bias, *self._settings())

    def backward(
        self, h: Tensor, x: Tensor, weight: Tensor, needed: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of x and W, if needed, where h is the output's."""
        dx, dw, _ = torch.ops.aten.convolution_backward(
            h, x, weight, None, *self._settings(), (*needed, False)
        )
        return dx, dw

    def spread(self, c: Tensor, x: Tensor) -> Tensor:
        """What patches collected for the squares they saw, at the positions that they hold."""
        space = _three(list(x.shape[2:]), 1)
        geometry = self._geometry()
        volume = c.view(*c.shape[:2], *library.space_out(space, geometry))
        spread: Tensor = library.box_transposed(volume, space, geometry)
        return spread.flatten(2)

    def _geometry(self) -> list[int]:
        return [
            *_three(self.kernel_size, 1),
            *_three(self.stride, 1),
            *_three(self.padding, 0),
            *_three(self.dilation, 1),
        ]

    def _settings(self) -> tuple[list[int], list[int], list[int], bool, list[int], int]:
        """What PyTorch's convolution is told, the transposed one's settings among it."""
        none = [0] * len(self.stride)
        return self.stride, self.padding, self.dilation, False, none, self.groups


def _three(sizes: list[int], missing: int) -> list[int]:
    """The sizes of three dimensions, of which the last ones are given."""
    return [missing] * (3 - len(sizes)) + sizes
