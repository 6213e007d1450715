"""What a change of a layer's parameters does to its rows; the plain gradient step's in two ways."""

from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from adiv_monitor.capture.selection import Layer
from adiv_monitor.features.features import DenseFeatures, Features
from adiv_monitor.features.rows import exact, to_device


def act(
    layer: Layer, features: Features, parts: list[Tensor]
) -> tuple[Tensor | None, Tensor | None]:
    """Φ_W Wᵀ and φ_b ⊗ b, (rows, n_total), for one tensor per trained parameter."""
    tensors = iter(parts)
    weight = None if layer.weight is None else features.by_weight(next(tensors))
    bias = None if layer.bias is None else features.by_bias(next(tensors))
    return weight, bias


def added(by_weight: Tensor | None, by_bias: Tensor | None) -> Tensor:
    """The two together; one of them is there, since a layer trains a weight or a bias."""
    if by_weight is None or by_bias is None:
        lone = by_bias if by_weight is None else by_weight
        assert lone is not None
        return lone
    return by_weight + by_bias


def gram_is_less(features: Features, G: Tensor, gamma: list[Tensor]) -> TypeGuard[DenseFeatures]:
    """Whether e = (ΦΦᵀ)G of R rows is less work than Φγᵀ: R(P + N) < P N.

    It is e only if all rows are seen and γ = GᵀΦ, which `probe` is to show.
    """
    rows, outputs = G.shape
    width = sum(part.numel() for part in gamma) / max(outputs, 1)
    has_gram = isinstance(features, DenseFeatures) and features.has_gram
    return has_gram and rows * (width + outputs) < width * outputs


def probe(
    layer: Layer,
    features: DenseFeatures,
    G: Tensor,
    gamma: list[Tensor],
    generator: np.random.Generator,
) -> Tensor:
    """γv − Gᵀ(Φv) and γv for a random v (R. Freivalds 1977): the first is 0 if γ = GᵀΦ."""
    width = 0 if features.phi is None else features.phi.shape[2]
    drawn = generator.standard_normal(width + (layer.bias is not None))
    v = to_device(drawn, G.device).to(G.dtype)
    left = G.new_zeros(G.shape[1])
    if layer.weight is not None:
        weight = exact(gamma[0])
        left = (weight.t() if features.transposed else weight.reshape(-1, width)) @ v[:width]
    if layer.bias is not None:
        left = left + exact(gamma[-1]) * v[width]
    return torch.stack([torch.addmv(left, G.T, features.times(v), alpha=-1), left])
