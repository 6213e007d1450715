"""The move of a layer's rows that a change of its parameters causes."""

from typing import TypeGuard

from torch import Tensor

from adiv_monitor.capture.selection import Layer
from adiv_monitor.features.features import DenseFeatures, Features

# The numbers of products that a CPU and a GPU do in the time that the check of γ takes.
_AS_CHECK, _AS_LAUNCHES = 2**25, 2**30


def gram_is_less(features: Features, layer: Layer, G: Tensor) -> TypeGuard[DenseFeatures]:
    """Return whether e = (ΦΦᵀ)G of R rows is less work than Φγᵀ: R·R(P + N) products for R·P·N.

    It equals e only if all rows are seen and γ = GᵀΦ.
    """
    if not layer.is_direct or not isinstance(features, DenseFeatures):  # γ is JᵀGᵀΦ
        return False
    rows, outputs = G.shape
    width = sum(layer.sizes) / outputs if outputs else 0
    saved = rows * (width * outputs - rows * (width + outputs))
    return saved > (_AS_LAUNCHES if G.is_cuda else _AS_CHECK) and features.has_gram
