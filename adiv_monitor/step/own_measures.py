"""Measures of the user's own, of the rows of a layer right after the step; ours of spectra, too."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from adiv_monitor.capture.selection import Layer
from adiv_monitor.features.features import DenseFeatures, Features
from adiv_monitor.maths.sums import StepSums

# Products with MᵀM, and after how many of them the vector is scaled again: each may make it as many
# times smaller as M has rows.
_ITERATIONS, _SCALED = 30, 5


class OwnRows(NamedTuple):
    """The sampled rows of a layer whose rows are z = W φ, and its weights, on their device.

    All are copies. φ has no feature for the bias.

    Attributes:
        features: Φ, (rows, inputs).
        gradient: G = ∂L/∂z as the backward pass left it, (rows, outputs).
        output: z before the step, (rows, outputs).
        weight: W before the step, (outputs, inputs).
        update: what the optimizer added to it, (outputs, inputs).
    """

    features: Float[Tensor, "rows inputs"]
    gradient: Float[Tensor, "rows outputs"]
    output: Float[Tensor, "rows outputs"]
    weight: Float[Tensor, "outputs inputs"]
    update: Float[Tensor, "outputs inputs"]


OwnMeasure = Callable[[OwnRows], float | Tensor]  # a number
Kept = tuple[Layer, Tensor, Tensor, Tensor]  # Φ, G, z


def kept(layer: Layer, features: Features, G: Tensor, z: Tensor) -> Kept | None:
    """Return the rows of a layer until the step is taken; None: they are not z = W φ."""
    if not isinstance(features, DenseFeatures) or features.phi is None:
        return None
    if features.groups != 1 or features.transposed:
        return None
    dtype = features.phi.dtype
    return layer, features.phi[:, 0], G.to(dtype), z.to(dtype)


def measured(
    measure: OwnMeasure, of: Kept, taken: Tensor, now: Tensor
) -> tuple[Float[Tensor, ""], Exception | None]:
    """Return a measure of a layer; NaN with the exception that it raised.

    Args:
        measure: the user's function.
        of: the rows.
        taken: the weight before the step minus that after it.
        now: the weight after the step.
    """
    _, phi, G, z = of
    taken = taken.flatten(1)
    W = now.flatten(1).to(taken.dtype)
    try:
        found = measure(OwnRows(phi.clone(), G.clone(), z.clone(), W + taken, -taken))
        value = torch.as_tensor(found, dtype=torch.float64, device=phi.device)
        return value.detach().reshape(()), None
    except Exception as error:
        return torch.tensor(torch.nan, dtype=torch.float64, device=phi.device), error


def values_of(sums: StepSums, layer: int) -> dict[str, float]:
    """Return a layer's measures: the mean over ranks, weighted by the rows that each one got."""
    lines, names = sums.of("own", layer), sums.about[layer].own
    several = {name: lines[lines["number"] == i] for i, name in enumerate(names)}
    return {
        name: float(of["rows"] @ of["value"] / of["rows"].sum())
        for name, of in several.items()
        if len(of)
    }


# --- singular values --------------------------------------------------------------------------


def sigma(M: Float[Tensor, "outputs inputs"]) -> Float[Tensor, ""]:
    """Return σ₁ of a matrix by 30 steps of power iteration, from the same random vector always.

    It is a lower bound, which misses the more the nearer σ₂ is, but then only by the little that
    lies between the two. NaN if the matrix is zero.
    """
    norm = M.norm()
    M = M / norm
    v = torch.randn(M.shape[1], generator=torch.Generator().manual_seed(0)).to(M)
    for i in range(_ITERATIONS):
        v = M.T @ (M @ v)
        if i % _SCALED == 0:
            v = v / v.norm()
    found: Tensor = norm * (M @ v).norm() / v.norm()
    return found


def stable_rank(M: Float[Tensor, "outputs inputs"]) -> Float[Tensor, ""]:
    """Return ‖M‖²/σ₁²: 1 if M is of rank 1, at most its rank."""
    found: Tensor = (M.norm() / sigma(M)).square()
    return found


# The measures of `Monitor(spectral=True)`.
SPECTRAL: dict[str, OwnMeasure] = {
    "update_sigma": lambda rows: sigma(rows.update),
    "update_stable_rank": lambda rows: stable_rank(rows.update),
    "weight_sigma": lambda rows: sigma(rows.weight),
    "weight_stable_rank": lambda rows: stable_rank(rows.weight),
}
