"""The measures: what one optimizer step does to a layer's activations, against what it should do.

A layer that is linear in its parameters gives, for every *row* r (one use of its weights: a sample,
a token, a patch), the output z_r = Θ φ_r with features φ_r. Gradient descent on Θ wants to move
z_r by −η g_r, g_r = ∂L/∂z_r (*ideal*), but really moves it by −η Σ_k M_rk g_k, M = ΦΦᵀ (paper,
eqns 46 and 54). The functions below compare the two. They know nothing of modules or hooks.

Matrices are laid out as (rows, groups, n_out): a grouped layer is a set of independent layers, each
with its own Φ, so that D, the diagonal of M, is one number per row and group. A plain layer is one
group; an elementwise gain has one group per feature, each with one output.

    G      ∂L/∂z on the rows, in the units of the gradient that the optimizer saw
    e      = M G = Φ (∂L/∂Θ)ᵀ: what a plain gradient step would do, per unit of learning rate
    d      = −Φ ΔΘᵀ: what the optimizer's step did, as a descent direction
    scale  = ‖φ_r‖², the diagonal of M; ‖x‖² + 1 for an affine layer (eqn 11)

Nearly all measures follow from dot products, taken once (`dots.py`); the argument `d_G` is d_r·g_r
of every row, `G_G` is ‖g_r‖², and so on. Every result is one value per layer (or per row), for any
number of layers at once: stacked in the first dimensions, or a single one without them. Nothing
waits for the device. A vector of length zero has no direction: its cosine is NaN. Tensors are
float32 or float64.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

_MAX_ENTRIES = 2_048
_WIDE = 4_096  # the norm adds one by one, which costs precision where there are many

PerLayer = Float[Tensor, "*layers"]
PerRow = Float[Tensor, "*layers rows"]
PerGroup = Float[Tensor, "*layers rows groups"]


def row_dots(a: Float[Tensor, "*rows n"], b: Float[Tensor, "*rows n"]) -> Float[Tensor, "*rows"]:
    """a_r·b_r of every row."""
    dots: Tensor = torch.linalg.vecdot(a, b)
    return dots


def row_squares(a: Float[Tensor, "*rows n"]) -> Float[Tensor, "*rows"]:
    """‖a_r‖² of every row."""
    if a.shape[-1] > _WIDE:
        return row_dots(a, a)
    norms: Tensor = torch.linalg.vector_norm(a, dim=-1)  # makes no matrix of products
    return norms.square()


def cosine(a_b: PerLayer, a_a: PerLayer, b_b: PerLayer) -> PerLayer:
    """cos(a, b) = ⟨a, b⟩ / (‖a‖ ‖b‖), in [−1, 1], from the three dot products."""
    # Two divisions: the product of two small norms may underflow where neither norm does.
    return a_b / a_a.sqrt() / b_b.sqrt()


# --- one layer, one step ---------------------------------------------------------------------


def update_cosine(d_G: PerRow, d_d: PerRow, G_G: PerRow) -> PerLayer:
    """cos(d, G), in [−1, 1]; 1: the step moved the activations exactly downhill."""
    return cosine(d_G.sum(-1), d_d.sum(-1), G_G.sum(-1))


def gradient_cosine(e_G: PerRow, e_e: PerRow, G_G: PerRow) -> PerLayer:
    """cos(e, G), in [−1, 1]: `update_cosine` of a plain gradient step."""
    return cosine(e_G.sum(-1), e_e.sum(-1), G_G.sum(-1))


def diagonal_cosine(own_G: PerRow, own_own: PerRow, G_G: PerRow) -> PerLayer:
    """cos(D G, G), in [0, 1]: what the row scales alone cost; exactly 1 if they are all equal.

    Args:
        own_G: (D G)_r·g_r of every row.
        own_own: ‖(D G)_r‖².
        G_G: ‖g_r‖².
    """
    return cosine(own_G.sum(-1), own_own.sum(-1), G_G.sum(-1))


def interference_ratio(rest_rest: PerRow, own_own: PerRow) -> PerLayer:
    """‖e − D G‖ / ‖D G‖, ≥ 0: what the other rows do to a row, against what it does (eqn 49).

    Args:
        rest_rest: ‖(e − D G)_r‖² of every row.
        own_own: ‖(D G)_r‖².
    """
    return rest_rest.sum(-1).sqrt() / own_own.sum(-1).sqrt()


def row_cosine(d_G: PerRow, d_d: PerRow, G_G: PerRow) -> PerRow:
    """cos(d_r, g_r) of every row, in [−1, 1]; NaN where g_r or d_r is zero."""
    return cosine(d_G, d_d, G_G)


def rows_without_gradient(G_G: PerRow) -> PerLayer:
    """How many rows have g_r = 0: padding, masked tokens, dead units."""
    return (G_G == 0).sum(-1).to(G_G.dtype)


def harmed_fraction(d_G: PerRow, G_G: PerRow) -> PerLayer:
    """Share of the rows with d_r·g_r < 0, in [0, 1]: this step of this layer raises their loss.

    Rows whose g_r is zero are left out; NaN if no row has a gradient.
    """
    return (d_G < 0).sum(-1).to(d_G.dtype) / (G_G != 0).sum(-1)


def scale_mean(scale: PerGroup) -> PerLayer:
    """Mean of ‖φ_r‖², ≥ 0: the common part of the divergence, which one learning rate can mend."""
    return scale.mean((-2, -1))


def scale_cv(scale: PerGroup) -> PerLayer:
    """std(‖φ_r‖²) / mean(‖φ_r‖²), ≥ 0: the part that differs between rows; 0 if corrected."""
    mean = scale.mean((-2, -1), keepdim=True)
    return (scale - mean).square().mean((-2, -1)).sqrt() / mean[..., 0, 0]


def scale_max(scale: PerGroup) -> PerLayer:
    """Largest ‖φ_r‖²; NaN without rows."""
    if scale.shape[-2] == 0:
        return scale.new_full(scale.shape[:-2], torch.nan)
    return scale.amax((-2, -1))


def of_scale(scale: PerGroup) -> dict[str, Tensor]:
    """The measures of ‖φ_r‖², and the entries that its quantiles are taken of."""
    return {
        "scale_mean": scale_mean(scale),
        "scale_cv": scale_cv(scale),
        "scale_max": scale_max(scale),
        "scale_entries": thinned(scale),
    }


def bias_share(A_A: PerRow, B_B: PerRow) -> PerLayer:
    """‖B‖ / (‖A‖ + ‖B‖), in [0, 1]: the bias's share of the update (the paper's responsibility).

    Args:
        A_A: ‖A_r‖², A = Φ_W ΔΘ_Wᵀ; 0 where no weight is trained.
        B_B: ‖B_r‖², B = φ_b ⊗ ΔΘ_b; 0 where there is no bias.
    """
    a, b = A_A.sum(-1).sqrt(), B_B.sum(-1).sqrt()
    return b / (a + b)


def effective_lr(d_G: PerRow, G_G: PerRow) -> PerLayer:
    """⟨d, G⟩ / ‖G‖²: the learning rate at which the activations really move downhill.

    η (‖x‖² + 1) for one row under plain gradient descent; defined for any optimizer. Its spread
    between layers is what a per-layer learning rate could mend.
    """
    return d_G.sum(-1) / G_G.sum(-1)


def update_ratio(d_d: PerRow, z_z: PerRow) -> PerLayer:
    """‖Δz‖ / ‖z‖ over the same rows, z before the step, ≥ 0: how far one step moves activations."""
    return (d_d.sum(-1) / z_z.sum(-1)).sqrt()


def descent(d_G: PerRow) -> PerLayer:
    """Σ_r d_r·g_r: first-order decrease of the loss by this layer's step.

    Equal to −⟨∂L/∂Θ, ΔΘ⟩ when all rows are looked at. With the gradient that the optimizer saw: of
    a clipped one it is smaller than the loss's own decrease by the clipping factor.
    """
    return d_G.sum(-1)


# --- the ceiling -----------------------------------------------------------------------------


def attainable_cosine(
    gram: Float[Tensor, "groups n n"],
    cross: Float[Tensor, "groups n n_out"],
    G_norm: Float[Tensor, ""],
) -> Float[Tensor, ""]:
    """‖P_Φ G‖ / ‖G‖, in [0, 1]: the best cosine with G that any ΔΘ can reach.

    P_Φ projects on the columns of Φ: ‖P_Φ G‖² = tr(Cᵀ S⁻¹ C), S = ΦᵀΦ and C = ΦᵀG, on the space
    where S is not zero up to rounding.

    Args:
        gram: S, over all rows.
        cross: C, over all rows.
        G_norm: ‖G‖ over all rows.
    """
    values, vectors, kept = _spectrum(gram)
    squares = (vectors.mT @ cross).square() / torch.where(kept, values, 1)[..., None]
    attained: Tensor = (squares * kept[..., None]).sum().sqrt()
    return attained / G_norm


def attainable_cosine_of_rows(
    phi: Float[Tensor, "rows groups n_feat"], G: Float[Tensor, "rows groups n_out"]
) -> Float[Tensor, ""]:
    """`attainable_cosine` from Φ and G themselves, cheaper when rows < n_feat.

    Eigenvectors of ΦΦᵀ (rows × rows) with an eigenvalue span the columns of Φ.
    """
    phi, blocks = phi.transpose(0, 1), G.transpose(0, 1)
    _, vectors, kept = _spectrum(phi @ phi.mT)
    attained: Tensor = torch.linalg.vector_norm((vectors.mT @ blocks) * kept[..., None])
    whole: Tensor = torch.linalg.vector_norm(blocks)
    return attained / whole


def _spectrum(gram: Float[Tensor, "groups n n"]) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvalues, eigenvectors, and which eigenvalues are not zero: above n·ε·λ_max."""
    values, vectors = torch.linalg.eigh(gram)
    return values, vectors, values > gram.shape[-1] * torch.finfo(gram.dtype).eps * values[..., -1:]


# --- the parameter step: dot products of vectors that hold all parameters of the layer ---------


def parameter_cosine(u_gamma: PerLayer, u_u: PerLayer, gamma_gamma: PerLayer) -> PerLayer:
    """cos(u, −γ), in [−1, 1]: the optimizer's update u against the raw gradient γ it saw."""
    return -cosine(u_gamma, u_u, gamma_gamma)


def projection_cosine(a_u: PerLayer, a_a: PerLayer, u_u: PerLayer) -> PerLayer:
    """cos(a, u), in [−1, 1]: the applied update a against the optimizer's u.

    They differ when code rescales, clips, projects or averages the weights after the step. Near 0
    the projection made the update orthogonal; below 0 it fights it.
    """
    return cosine(a_u, a_a, u_u)


def applied_cosine(a_gamma: PerLayer, a_a: PerLayer, gamma_gamma: PerLayer) -> PerLayer:
    """cos(a, −γ), in [−1, 1]: what was applied, after every projection, against the gradient."""
    return -cosine(a_gamma, a_a, gamma_gamma)


# --- distributions over rows: quantiles are taken on the host ------------------------------------


def thinned(values: PerGroup) -> Float[Tensor, "*layers entries"]:
    """At most 2,048 entries: of every so many rows all groups (of one row, if these are more)."""
    step = -(-values.shape[-2] * values.shape[-1] // _MAX_ENTRIES)
    return values[..., :: max(step, 1), :].flatten(-2)


def quantiles(
    values: Float[np.ndarray, "*layers entries"], levels: Sequence[float]
) -> Float[np.ndarray, "*layers levels"]:
    """Quantiles with linear interpolation; NaN counts as larger than every number.

    All NaN without entries.
    """
    ordered = np.sort(values, axis=-1)
    return _interpolated(ordered, np.full((*values.shape[:-1], 1), values.shape[-1]), levels)


def quantiles_of_numbers(
    values: Float[np.ndarray, "*layers entries"], levels: Sequence[float]
) -> Float[np.ndarray, "*layers levels"]:
    """`quantiles` of the entries that are not NaN."""
    ordered = np.sort(values, axis=-1)  # NaN last
    return _interpolated(ordered, (ordered == ordered).sum(-1, keepdims=True), levels)


def _interpolated(
    ordered: Float[np.ndarray, "*layers entries"],
    counts: Int[np.ndarray, "*layers 1"],
    levels: Sequence[float],
) -> Float[np.ndarray, "*layers levels"]:
    """Quantiles of the first so many entries."""
    if ordered.shape[-1] == 0:
        return np.full((*ordered.shape[:-1], len(levels)), np.nan)
    last = np.maximum(counts - 1, 0)
    at = last * np.asarray(levels)
    low = at.astype(np.int64)
    lower = np.take_along_axis(ordered, low, -1)
    upper = np.take_along_axis(ordered, np.minimum(low + 1, last), -1)
    weight = at - low
    with np.errstate(invalid="ignore"):  # infinities
        between = lower + weight * (upper - lower)
    return np.where((weight == 0) | (lower == upper), lower, between)
