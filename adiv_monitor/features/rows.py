"""The rows of a layer in one call: a sample of them, and the lengths of all of them.

Rows are sampled only for measures that need more than the lengths of features and gradients, which
one cheap pass over each yields.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

Index = np.ndarray[Any, np.dtype[np.int64]]
Keys = np.ndarray[Any, np.dtype[np.float64]]
HOST = torch.device("cpu")
SLOW = ("cpu",)  # devices on which NumPy is faster for some norms and dot products


@dataclass(frozen=True, eq=False)
class Rows:
    """A sample of the rows of a layer in one call.

    Positions are drawn and computed on the host, and copied to the device once per call.

    Attributes:
        shape: the output's shape without its channels: (B,) or (B, T) for a linear layer,
            (B, H, W) for a convolution.
        chosen: sorted positions (rows,) in the flattened `shape`; None: all rows.
        device: device of the tensors from which rows are gathered.
        keys: random key (rows,) of each row, if the rows were drawn (`capture/sampling.py`).
        bound: every row of the call with a smaller key was chosen.
    """

    shape: tuple[int, ...]
    chosen: Index | None = None
    device: torch.device = HOST
    keys: Keys = field(default_factory=lambda: np.empty(0))
    bound: float = math.inf

    @cached_property
    def total(self) -> int:
        """Number of all rows of the call."""
        return math.prod(self.shape)

    def take(self, tensor: Tensor) -> Tensor:
        """Gather the rows of a tensor shaped (*shape, channels...) into (rows, channels...).

        The result is float32, or float64 if the tensor is.
        """
        return to_compute_dtype(self.copied(tensor))

    def copied(self, tensor: Tensor) -> Tensor:
        """Gather the rows of a tensor as `take` does, in its own precision.

        Only the chosen rows are read: no copy of the whole tensor, however it is strided.
        """
        rest = tensor.shape[len(self.shape) :]
        if self.chosen is None:  # a copy, which training does not change in place
            return tensor.clone(memory_format=torch.contiguous_format).view(self.total, *rest)
        if tensor.is_contiguous():
            return tensor.view(self.total, *rest).index_select(0, self.flat)
        return tensor[tuple(self._on_device)]

    @property
    def count(self) -> int:
        """Number of chosen rows."""
        return self.total if self.chosen is None else len(self.chosen)

    @cached_property
    def positions(self) -> tuple[Index, ...]:
        """The index of every row in each dimension of `shape`, on the host."""
        chosen = np.arange(self.total) if self.chosen is None else self.chosen
        return np.unravel_index(chosen, self.shape) if self.shape else (chosen,)

    @cached_property
    def flat(self) -> Tensor:
        """The chosen positions in the flattened `shape`, on the device."""
        assert self.chosen is not None
        return to_device(self.chosen, self.device)

    @cached_property
    def _on_device(self) -> Tensor:
        return to_device(np.stack(self.positions), self.device)


@dataclass(frozen=True)
class Whole:
    """The length of the features of all rows of one call.

    Attributes:
        norm: ‖φ_W‖ of every row.
        bias_square: φ_b², one number for all rows; 0 without a trained bias.
        trained: 0 for rows without trained weights (padding tokens), which count as zero-gradient
            rows, else 1; None if all are trained.
        loads: the number of rows of each expert; None without experts.
    """

    norm: Float[Tensor, " rows"]
    bias_square: float = 0.0
    trained: Float[Tensor, " rows"] | None = None
    loads: Int[Tensor, " experts"] | None = None


def contracted(
    products: Float[Tensor, "*rows m"], gradient: Float[Tensor, "*rows channels"]
) -> Float[Tensor, "channels m"]:
    """Return Σ_r g_r (φ_r·v) of some rows from the products φ_r·v, in their precision.

    A gradient with the channels first in memory is not copied.
    """
    if gradient.dim() < 3 or gradient.is_contiguous():
        gradient = gradient.reshape(1, -1, gradient.shape[-1])
    else:
        gradient = gradient.flatten(1, -2)
    products = products.reshape(len(gradient), -1, products.shape[-1])
    dim = int(len(gradient) == 1)
    most = gradient.shape[dim]
    if gradient.dtype != products.dtype:  # cast in parts
        most = _MOST * most // max(1, gradient.numel())
    parts = (torch.split(x, max(1, most), dim) for x in (gradient, products))
    return reduce(torch.add, map(_product, *parts))


def _product(gradient: Tensor, products: Tensor) -> Tensor:
    found = gradient.to(products.dtype).mT @ products
    return found[0] if len(found) == 1 else found.sum(0)


_MOST = 2**24  # entries of a temporary tensor


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array from the host to a device, without waiting for the device."""
    return torch.from_numpy(array).to(device, non_blocking=True)


def to_compute_dtype(tensor: Tensor) -> Tensor:
    """Cast to the precision of the measures: float32, or float64 if the tensor is float64."""
    dtype = tensor.dtype
    return tensor if dtype is torch.float32 or dtype is torch.float64 else tensor.float()


def wide(tensor: Tensor) -> Tensor:
    """Return the tensor in a precision in which long sums of alike numbers do not drift."""
    return tensor if tensor.device.type == "mps" else tensor.double()


def shares_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors share storage, so that a write to one may change the other."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def behind_view(output: Tensor) -> Tensor:
    """Return the tensor of which the output is a view of all entries, or else the output itself.

    A change of a view in place, such as by `relu_`, replaces the view's node in the graph, and then
    hooks on the view are not called; those on the tensor that it views are.
    """
    base = output._base
    if base is None or base.is_leaf or type(base) is not Tensor or base.layout != torch.strided:
        return output
    alike = base.is_contiguous() and base.numel() == output.numel()
    whole = alike and torch.ops.aten.is_non_overlapping_and_dense(output)
    return base if whole else output


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of measures of a tensor: float32, or float64 if the tensor is float64."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def joined(parts: list[Tensor]) -> Tensor:
    """Concatenate the parts; return a single part without a copy."""
    return torch.cat(parts) if parts[1:] else parts[0]


def dots(a: Tensor, b: Tensor) -> Tensor:
    """Return Σ a b over the last dimension, of tensors in the precision of the measures."""
    if _vecdot is None or a.device.type not in SLOW or a.shape[-1] < _LONG:
        found: Tensor = torch.linalg.vecdot(a, b)
        return found
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.asarray(_vecdot(a.numpy(), b.numpy())))


# On a CPU, NumPy is faster for dot products from this length on; it has them since version 2.
_vecdot, _LONG = getattr(np, "vecdot", None), 128


def norms(x: Tensor, dim: int = -1) -> Tensor:
    """Return √Σ x² over one dimension in the precision of the measures, without a copy of x."""
    is_slow = x.dim() > 2 and x.device.type in SLOW and x.stride(dim) > 1
    if is_slow and x.dtype == compute_dtype(x):
        array = x.detach().movedim(dim, -1).numpy()
        return torch.from_numpy(np.asarray(np.einsum("...n,...n->...", array, array))).sqrt_()
    found: Tensor = torch.linalg.vector_norm(x, dim=dim, dtype=compute_dtype(x))
    return found


def squares(x: Tensor, dim: int = -1) -> Tensor:
    """Return Σ x² over one dimension in the precision of the measures, without a copy of x."""
    if x.shape[dim] == 1:  # as of each channel of a depthwise convolution
        return to_compute_dtype(x).square().squeeze(dim)
    return norms(x, dim).square_()
