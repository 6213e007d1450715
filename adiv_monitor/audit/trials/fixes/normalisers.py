"""Normalisers without parameters that stand in front of a linear layer or a convolution."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor, nn
from torch.nn import functional

Normaliser = Callable[[nn.Module, Tensor], Tensor]


def layer_norm(layer: nn.Module, x: Tensor) -> Tensor:
    """Return (x − mean)/std over a row's features; for convolutions, over a whole sample."""
    return functional.layer_norm(x, _normalised_shape(layer, x))


def rms_norm(layer: nn.Module, x: Tensor) -> Tensor:
    """Return x·√n/‖x‖ over a row's n features; for convolutions, over a whole sample."""
    return functional.rms_norm(x, _normalised_shape(layer, x))


def batch_norm(layer: nn.Module, x: Tensor) -> Tensor:
    """Return (x − mean)/std of every feature, or channel, over the batch's rows, as in training.

    Raises:
        ValueError: There is only one row.
    """
    if dims := _dims(layer):
        batched = x[None] if x.dim() == dims + 1 else x
        return functional.batch_norm(batched, None, None, training=True).reshape(x.shape)
    rows = x.reshape(-1, x.shape[-1])
    return functional.batch_norm(rows, None, None, training=True).reshape(x.shape)


def _normalised_shape(layer: nn.Module, x: Tensor) -> list[int]:
    dims = _dims(layer)
    return list(x.shape[-dims - 1 :])


def _dims(layer: nn.Module) -> int:
    """Return the number of spatial dimensions; 0 for a linear layer."""
    return len(layer.kernel_size) if isinstance(layer, nn.modules.conv._ConvNd) else 0


NORMALISERS: Mapping[str, Normaliser] = MappingProxyType(
    {"layer norm": layer_norm, "rms norm": rms_norm, "batch norm": batch_norm}
)
