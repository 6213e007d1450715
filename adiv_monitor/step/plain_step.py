"""What a change of a layer's parameters does to its rows; the plain gradient step's in two ways."""

from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from adiv_monitor.capture.pieces import Parts
from adiv_monitor.capture.selection import Layer
from adiv_monitor.features.features import DenseFeatures, Features
from adiv_monitor.features.rows import exact, to_device


def act(layer: Layer, features: Features, parts: Parts) -> tuple[Tensor | None, Tensor | None]:
    """Φ_W Wᵀ and φ_b ⊗ b, (rows, n_total), for a change of the layer's pieces."""
    weight, bias = of_layer(layer, parts)
    return (
        None if weight is None else features.by_weight(weight),
        None if bias is None else features.by_bias(bias),
    )


def of_layer(layer: Layer, parts: Parts) -> tuple[Tensor | None, Tensor | None]:
    """How weight and bias change when the layer's pieces do; None for what is not trained."""
    weight = None if layer.weight is None else layer.shaped(layer.weight.of(parts))
    return weight, None if layer.bias is None else layer.bias.of(parts)


def added(by_weight: Tensor | None, by_bias: Tensor | None) -> Tensor:
    """The two together; one of them is there, since a layer trains a weight or a bias."""
    if by_weight is None or by_bias is None:
        lone = by_bias if by_weight is None else by_weight
        assert lone is not None
        return lone
    return by_weight + by_bias


def gram_is_less(features: Features, layer: Layer, G: Tensor) -> TypeGuard[DenseFeatures]:
    """Whether e = (ΦΦᵀ)G of R rows is less work than Φγᵀ: R(P + N) < P N.

    It is e only if all rows are seen and γ = GᵀΦ, which `probe` is to show.
    """
    rows, outputs = G.shape
    entries = sum(piece.value().numel() for piece in layer.pieces)
    width = entries / max(outputs, 1)
    has_gram = isinstance(features, DenseFeatures) and features.has_gram
    return has_gram and rows * (width + outputs) < width * outputs


def probe(
    layer: Layer,
    features: DenseFeatures,
    G: Tensor,
    gamma: Parts,
    generator: np.random.Generator,
) -> Tensor:
    """γv − Gᵀ(Φv) and γv for a random v (R. Freivalds 1977): the first is 0 if γ = GᵀΦ."""
    of_weight, of_bias = of_layer(layer, gamma)
    width = 0 if features.phi is None else features.phi.shape[2]
    drawn = generator.standard_normal(width + (of_bias is not None))
    v = to_device(drawn, G.device).to(G.dtype)
    left = G.new_zeros(G.shape[1])
    if of_weight is not None:
        weight = exact(of_weight)
        left = (weight.t() if features.transposed else weight.reshape(-1, width)) @ v[:width]
    if of_bias is not None:
        left = left + exact(of_bias).reshape(-1) * v[width]
    return torch.stack([torch.addmv(left, G.T, features.times(v), alpha=-1), left])
