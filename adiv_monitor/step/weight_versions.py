"""Scales of rows whose weight is computed from parameters.

A gradient step moves a weight Θ = f(θ) by JJᵀ(GᵀΦ), J = ∂Θ/∂θ. Only if JJᵀ = 1 is that a plain step
of Θ itself, with scales ‖φ_r‖²: a mask, for example, keeps the gradient's norm, but some entries of
φ_r have no effect. If JJᵀ is diagonal, a row alone moves its own output n by Σ_p a_np φ_rp² g_rn,
with JJᵀ's entries a_np: that is the scale. Otherwise a row's own part of its move is unknown, and
its measures are missing.

JJᵀv for two random v determines which of the three holds (R. Freivalds 1977). The host decides
that later, so that it does not wait for the device.
"""

from collections.abc import Callable, Sequence
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from adiv_monitor.capture.weights.derived import Derived
from adiv_monitor.capture.weights.pieces import Source
from adiv_monitor.features.features import Features
from adiv_monitor.features.uses import as_it_is
from adiv_monitor.maths.records import replaced
from adiv_monitor.maths.sums import Array, LayerSums, Made, Vector, pairs_of
from adiv_monitor.step.row_moves import Change, WeightVersion, act, added

# Entries of JJᵀ below this share of the largest are compared with that: they may be its rounding.
_SMALL = 0.01


class Gain(Enum):
    """The form of JJᵀ: 1, another diagonal matrix, or unknown."""

    ONE = 0
    DIAGONAL = 1
    UNKNOWN = 2


def with_own_scales(
    versions: Sequence[WeightVersion],
    changed: Sequence[Change],
    features: Features,
    generator: np.random.Generator,
) -> tuple[Tensor | None, Made[Tensor]]:
    """Return the scales that rows have if each JJᵀ is a diagonal matrix; None: unknown.

    Args:
        versions: versions of the weight, with the rows of each.
        changed: a change of weight and bias for each version.
        features: features of all rows.
        generator: random generator.

    Returns:
        The scales, and three numbers for each version: the largest deviation of JJᵀ from 1, and
        from a diagonal matrix, over all entries in units of the rounding error; and the negative of
        its least diagonal entry, plus the rounding error.
    """
    gains, told = [], []
    for (layer, _), (of_weight, of_bias) in zip(versions, changed, strict=True):
        weight, of_its_gain = _probed(layer.weight, of_weight, layer.shaped, generator)
        bias, of_its_bias = _probed(layer.bias, of_bias, as_it_is, generator)
        gains.append((weight, bias))
        numbers = torch.stack([n for n in (of_its_gain, of_its_bias) if n is not None]).amax(0)
        # If weight and bias share parameters, their joint JJᵀ is neither 1 nor diagonal.
        told.append(numbers + torch.inf if _overlap(layer.weight, layer.bias) else numbers)
    squares = features.squared()
    own = None if squares is None else added(*act(versions, gains, squares))
    return own, Made(torch.stack(told), features.groups)


def _probed(
    source: Source | None,
    like: Tensor | None,
    shaped: Callable[[Tensor], Tensor],
    generator: np.random.Generator,
) -> tuple[Tensor | None, Tensor | None]:
    """Return JJᵀ's diagonal in the features' shape, and the numbers of `with_own_scales`."""
    if source is None or like is None:
        return None, None
    if not isinstance(source, Derived):  # the weight's entries are entries of parameters
        return torch.ones_like(like), None
    chance = torch.Generator(like.device).manual_seed(int(generator.integers(2**62)))

    def draw(made: Tensor) -> Tensor:  # entries are divisors, so none is near zero
        v = torch.rand(made.shape, generator=chance, dtype=made.dtype, device=made.device)
        return v + torch.where(v < 0.5, -1.5, 0.5)

    (v, moved), (other_v, other_moved) = source.probed(draw)
    gain, other = moved / v, other_moved / other_v
    size = gain.abs() + _SMALL * gain.abs().amax()
    numbers = [
        (gain - 1).abs().amax() / _rounding(gain),
        torch.where(size > 0, (gain - other).abs() / size, 0).amax() / _rounding(gain),
        _SMALL * _rounding(gain) * gain.abs().amax() - gain.amin(),
    ]
    return shaped(gain), torch.stack(numbers)


def _rounding(made: Tensor) -> float:
    """Return the largest relative difference by rounding of two ways to compute the weight."""
    return 1e-9 if made.dtype == torch.float64 else 1e-4


def _overlap(weight: Source | None, bias: Source | None) -> bool:
    """Whether weight and bias are computed from common parameters."""
    if weight is None or bias is None:
        return False
    return not set(weight.pieces).isdisjoint(bias.pieces)


def gain_of(made: Made[Array] | None) -> Gain:
    """Return the form of JJᵀ over all versions of a layer's weight and bias."""
    if made is None:
        return Gain.ONE
    not_one, not_diagonal, _ = made.deviations.max(0)
    if not_one <= 1:
        return Gain.ONE
    return Gain.DIAGONAL if not_diagonal <= 1 else Gain.UNKNOWN


def resolved(layer: LayerSums[Array]) -> LayerSums[Array]:
    """Return the layer with the scales that its rows have, or without scales."""
    made, totals = layer.made, layer.totals
    if made is None:
        return layer
    gain = gain_of(made)
    if gain is Gain.ONE:
        return _with_one_scale(layer) if made.groups == 1 else layer
    if gain is Gain.UNKNOWN:
        layer = _without_own_part(layer)
    if totals is not None:  # the pass over all rows summed other scales
        totals = replaced(totals, own_G=None, own_own=None, scales=None)
    attainable = layer.attainable if reaches_all(made) else None
    return replaced(layer, totals=totals, attainable=attainable)


def _with_one_scale(layer: LayerSums[Array]) -> LayerSums[Array]:
    """Return the layer with one scale per row, as for a weight that is a parameter."""
    blocks = layer.blocks
    if blocks is None:
        return layer
    scale = blocks.pivot.reshape(-1)[:1] + blocks.sums / blocks.groups
    return replaced(layer, scale=scale, blocks=None)


def _without_own_part(layer: LayerSums[Array]) -> LayerSums[Array]:
    """Return the layer without scales and the parts of e by them."""
    vectors = tuple([v for v in layer.vectors if v not in (Vector.OWN, Vector.REST)])
    computed = pairs_of(layer.vectors)
    return replaced(
        layer,
        vectors=vectors,
        products=layer.products[:, [computed.index(pair) for pair in pairs_of(vectors)]],
        scale=None,
        blocks=None,
    )


def reaches_all(made: Made[Array] | None) -> bool:
    """Whether the parameters are known to be able to move the weight in every direction."""
    gain = gain_of(made)
    if made is not None and gain is Gain.DIAGONAL:
        _, _, minus_least = made.deviations.max(0)
        return bool(minus_least < 0)
    return gain is Gain.ONE
