"""What making a weight of parameters does to the scales of its rows.

A gradient step moves a weight Θ = f(θ) by JJᵀ(GᵀΦ), J = ∂Θ/∂θ. Only where JJᵀ = 1 is that a plain
step of Θ itself, with scales ‖φ_r‖²: a mask keeps the length of the gradient, and yet some entries
of φ_r do not act. Where JJᵀ is a diagonal matrix, scales are those of `MadeFeatures`. Elsewhere a
row's own part is not known, and nothing is said of it.

Which of the three it is follows from JJᵀv of two random v (R. Freivalds 1977). It is decided on the
host, so that no device is waited for.
"""

from collections.abc import Callable, Sequence
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from adiv_monitor.capture.weights.derived import Derived
from adiv_monitor.capture.weights.pieces import Source
from adiv_monitor.features.features import Features
from adiv_monitor.features.made import MadeFeatures, Squared
from adiv_monitor.features.uses import as_it_is
from adiv_monitor.maths.records import replaced
from adiv_monitor.maths.sums import Array, LayerSums, Made, Vector
from adiv_monitor.step.plain_step import Change, WeightVersion, act, added

# Entries of JJᵀ below this share of the largest are held against that: they may be its rounding.
_SMALL = 0.01


class Gain(Enum):
    """What JJᵀ is: 1, another diagonal matrix, or neither, which is not known."""

    ONE = 0
    DIAGONAL = 1
    UNKNOWN = 2


def with_own_scales(
    versions: Sequence[WeightVersion],
    changed: Sequence[Change],
    features: Features,
    generator: np.random.Generator,
) -> tuple[MadeFeatures, Made[Tensor]]:
    """The features with the scales that they have if each JJᵀ is a diagonal matrix.

    Args:
        versions: as calls made the weight, with the rows of each.
        changed: a change of weight and bias for each.
        features: of all rows.
        generator: the source of chance.

    Returns:
        The features; and for each making, of all entries, how far JJᵀ is at most from 1, and from a
        diagonal matrix, in units of what rounding may do; and minus the least entry of its
        diagonal, less what may be rounding.
    """
    gains, told = [], []
    for (layer, _), (of_weight, of_bias) in zip(versions, changed, strict=True):
        weight, of_its_gain = _probed(layer.weight, of_weight, layer.shaped, generator)
        bias, of_its_bias = _probed(layer.bias, of_bias, as_it_is, generator)
        gains.append((weight, bias))
        numbers = torch.stack([n for n in (of_its_gain, of_its_bias) if n is not None]).amax(0)
        # Where they are made of the same, JJᵀ is none of each alone: neither 1 nor diagonal.
        told.append(numbers + torch.inf if _overlap(layer.weight, layer.bias) else numbers)
    squares = features.squared() if isinstance(features, Squared) else None
    own = None if squares is None else added(*act(versions, gains, squares))
    return MadeFeatures(features, own), Made(torch.stack(told), features.groups)


def _probed(
    source: Source | None,
    like: Tensor | None,
    shaped: Callable[[Tensor], Tensor],
    generator: np.random.Generator,
) -> tuple[Tensor | None, Tensor | None]:
    """The diagonal of JJᵀ in the shape that features expect; and numbers as `with_own_scales`."""
    if source is None or like is None:
        return None, None
    if not isinstance(source, Derived):  # its entries are entries of parameters
        return torch.ones_like(like), None
    chance = torch.Generator(like.device).manual_seed(int(generator.integers(2**62)))

    def draw(made: Tensor) -> Tensor:  # no entry near zero, by which it is divided
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
    """How far two ways of computing what is made may be apart, relative to it."""
    return 1e-9 if made.dtype == torch.float64 else 1e-4


def _overlap(weight: Source | None, bias: Source | None) -> bool:
    """Whether they are made of the same, so that JJᵀ is none of each alone."""
    if weight is None or bias is None:
        return False
    return not set(weight.pieces).isdisjoint(bias.pieces)


def gain_of(made: Made[Array] | None) -> Gain:
    """What JJᵀ is of all ways in which a layer's weight and bias were made."""
    if made is None:
        return Gain.ONE
    not_one, not_diagonal, _ = made.deviations.max(0)
    if not_one <= 1:
        return Gain.ONE
    return Gain.DIAGONAL if not_diagonal <= 1 else Gain.UNKNOWN


def resolved(layer: LayerSums[Array]) -> LayerSums[Array]:
    """The layer with the scales that its rows have, or without any."""
    made, totals = layer.made, layer.totals
    if made is None:
        return layer
    gain = gain_of(made)
    if gain is Gain.ONE:
        return _with_one_scale(layer) if made.groups == 1 else layer
    if gain is Gain.UNKNOWN:
        layer = _without_own_part(layer)
    if totals is not None:  # a pass over all rows told other scales
        totals = replaced(totals, own_G=None, own_own=None, scales=None)
    attainable = layer.attainable if reaches_all(made) else None
    return replaced(layer, totals=totals, attainable=attainable)


def _with_one_scale(layer: LayerSums[Array]) -> LayerSums[Array]:
    """The same for all outputs of a row, as of a weight that is a parameter."""
    blocks = layer.blocks
    if blocks is None:
        return layer
    scale = blocks.pivot.reshape(-1)[:1] + blocks.sums / blocks.groups
    return replaced(layer, scale=scale, blocks=None)


def _without_own_part(layer: LayerSums[Array]) -> LayerSums[Array]:
    """Without what a row does to itself."""
    kept = [i for i, v in enumerate(layer.vectors) if v not in (Vector.OWN, Vector.REST)]
    return replaced(
        layer,
        vectors=tuple(layer.vectors[i] for i in kept),
        products=layer.products[:, kept][:, :, kept],
        scale=None,
        blocks=None,
    )


def reaches_all(made: Made[Array] | None) -> bool:
    """Whether the parameters can move the weight in every direction, as far as that is known."""
    gain = gain_of(made)
    if made is not None and gain is Gain.DIAGONAL:
        _, _, minus_least = made.deviations.max(0)
        return bool(minus_least < 0)
    return gain is Gain.ONE
