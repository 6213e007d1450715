"""The move of a layer's rows that a change of its parameters causes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from adiv_monitor.capture.selection import Layer
from adiv_monitor.features.features import Features
from adiv_monitor.features.rows import joined

# A layer with the weights that some of its calls used, and the number of rows of these calls.
WeightVersion = tuple[Layer, int]
Change = tuple[Tensor | None, Tensor | None]  # of the weight and of the bias; None: not trained


def act(versions: Sequence[WeightVersion], changed: Sequence[Change], features: Features) -> Change:
    """Return Φ_W ΔWᵀ and φ_b ⊗ Δb, each (rows, n_total), for a change of weight and bias."""
    if len(changed) == 1:
        return _acted(changed[0], features)
    device = versions[0][0].parameters[0].device
    parts = torch.split(
        torch.arange(sum(rows for _, rows in versions), device=device), [n for _, n in versions]
    )
    acted = [_acted(c, features.pick(rows)) for c, rows in zip(changed, parts, strict=True)]
    by_weight, by_bias = zip(*acted, strict=True)
    return _of_all(by_weight), _of_all(by_bias)


def _of_all(parts: Sequence[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return joined(present) if present else None


def _acted(change: Change, features: Features) -> Change:
    weight, bias = change
    return (
        None if weight is None else features.by_weight(weight),
        None if bias is None else features.by_bias(bias),
    )


def added(by_weight: Tensor | None, by_bias: Tensor | None) -> Tensor:
    """Return the sum of both; a layer trains a weight or a bias, so at least one is given."""
    if by_weight is None or by_bias is None:
        lone = by_bias if by_weight is None else by_weight
        assert lone is not None
        return lone
    return by_weight + by_bias
