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

Nearly all measures follow from dot products of rows, taken once by `row_dots`; an argument `d_G` is
d_r·g_r of every row, `G_G` is ‖g_r‖². Every result is a 0-dimensional tensor (or one value per
row), so that nothing waits for the device. A vector of length zero has no direction: its cosine is
NaN. Tensors are float32 or float64.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

_MAX_SORTED = 2_048

Scalar = Float[Tensor, ""]
Blocks = Float[Tensor, "rows groups n_out"]
PerGroup = Float[Tensor, "rows groups"]
PerRow = Float[Tensor, " rows"]
Vector = Float[Tensor, " _"]  # parts differ in length


def row_dots(a: Float[Tensor, "*rows n"], b: Float[Tensor, "*rows n"]) -> Float[Tensor, "*rows"]:
    """a_r·b_r of every row."""
    dots: Tensor = torch.linalg.vecdot(a, b)
    return dots


def cosine_of_rows(a_b: PerRow, a_a: PerRow, b_b: PerRow) -> Scalar:
    """cos(vec a, vec b) of two matrices, in [−1, 1], from the dot products of their rows."""
    # Two divisions: the product of two small norms may underflow where neither norm does.
    return a_b.sum() / a_a.sum().sqrt() / b_b.sum().sqrt()


# --- one layer, one step ---------------------------------------------------------------------


def update_cosine(d_G: PerRow, d_d: PerRow, G_G: PerRow) -> Scalar:
    """cos(d, G), in [−1, 1]; 1: the step moved the activations exactly downhill."""
    return cosine_of_rows(d_G, d_d, G_G)


def gradient_cosine(e_G: PerRow, e_e: PerRow, G_G: PerRow) -> Scalar:
    """cos(e, G), in [−1, 1]: `update_cosine` of a plain gradient step."""
    return cosine_of_rows(e_G, e_e, G_G)


def diagonal_cosine(scale: PerGroup, G_G: PerGroup) -> Scalar:
    """cos(D G, G), in [0, 1]: what the row scales alone cost; exactly 1 if they are all equal.

    Args:
        scale: ‖φ_r‖².
        G_G: ‖g_r‖², both for every row and group.
    """
    own = scale * G_G
    return cosine_of_rows(own.flatten(), (scale * own).flatten(), G_G.flatten())


def row_cosine(d_G: PerRow, d_d: PerRow, G_G: PerRow) -> PerRow:
    """cos(d_r, g_r) of every row, in [−1, 1]; NaN where g_r or d_r is zero."""
    return d_G / d_d.sqrt() / G_G.sqrt()


def rows_without_gradient(G_G: PerRow) -> Scalar:
    """How many rows have g_r = 0: padding, masked tokens, dead units."""
    return (G_G == 0).sum().to(G_G.dtype)


def harmed_fraction(d_G: PerRow, G_G: PerRow) -> Scalar:
    """Share of the rows with d_r·g_r < 0, in [0, 1]: this step of this layer raises their loss.

    Rows whose g_r is zero are left out; NaN if no row has a gradient.
    """
    return (d_G < 0).sum().to(d_G.dtype) / (G_G != 0).sum()


def scale_mean(scale: PerGroup) -> Scalar:
    """Mean of ‖φ_r‖², ≥ 0: the common part of the divergence, which one learning rate can mend."""
    return scale.mean()


def scale_cv(scale: PerGroup) -> Scalar:
    """std(‖φ_r‖²) / mean(‖φ_r‖²), ≥ 0: the part that differs between rows; 0 if corrected."""
    mean = scale.mean()
    return (scale - mean).square().mean().sqrt() / mean


def scale_max(scale: PerGroup) -> Scalar:
    """Largest ‖φ_r‖²; NaN without rows."""
    return scale.max() if scale.numel() else scale.new_full((), torch.nan)


def interference_ratio(e: Blocks, scale: PerGroup, G: Blocks) -> Scalar:
    """‖e − D G‖ / ‖D G‖, ≥ 0: what the other rows do to a row, against what it does (eqn 49)."""
    own = scale[..., None] * G
    return norm(e - own) / norm(own)


def bias_share(by_weight: Float[Tensor, "..."], by_bias: Float[Tensor, "..."]) -> Scalar:
    """‖B‖ / (‖A‖ + ‖B‖), in [0, 1]: the bias's share of the update (the paper's responsibility).

    Args:
        by_weight: A = Φ_W ΔΘ_Wᵀ; a single 0 where no weight is trained.
        by_bias: B = φ_b ⊗ ΔΘ_b; a single 0 where there is no bias.
    """
    b = norm(by_bias)
    return b / (norm(by_weight) + b)


def effective_lr(d_G: PerRow, G_G: PerRow) -> Scalar:
    """⟨d, G⟩ / ‖G‖²: the learning rate at which the activations really move downhill.

    η (‖x‖² + 1) for one row under plain gradient descent; defined for any optimizer. Its spread
    between layers is what a per-layer learning rate could mend.
    """
    return d_G.sum() / G_G.sum()


def update_ratio(d_d: PerRow, z_z: PerRow) -> Scalar:
    """‖Δz‖ / ‖z‖ over the same rows, z before the step, ≥ 0: how far one step moves activations."""
    return (d_d.sum() / z_z.sum()).sqrt()


def descent(d_G: PerRow) -> Scalar:
    """Σ_r d_r·g_r: first-order decrease of the loss by this layer's step.

    Equal to −⟨∂L/∂Θ, ΔΘ⟩ when all rows are looked at. With the gradient that the optimizer saw: of
    a clipped one it is smaller than the loss's own decrease by the clipping factor.
    """
    return d_G.sum()


# --- the ceiling -----------------------------------------------------------------------------


def attainable_cosine(
    gram: Float[Tensor, "groups n n"], cross: Float[Tensor, "groups n n_out"], G_norm: Scalar
) -> Scalar:
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


def attainable_cosine_of_rows(phi: Float[Tensor, "rows groups n_feat"], G: Blocks) -> Scalar:
    """`attainable_cosine` from Φ and G themselves, cheaper when rows < n_feat.

    Eigenvectors of ΦΦᵀ (rows × rows) with an eigenvalue span the columns of Φ.
    """
    phi, blocks = phi.transpose(0, 1), G.transpose(0, 1)
    _, vectors, kept = _spectrum(phi @ phi.mT)
    return norm((vectors.mT @ blocks) * kept[..., None]) / norm(G)


def _spectrum(gram: Float[Tensor, "groups n n"]) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvalues, eigenvectors, and which eigenvalues are not zero: above n·ε·λ_max."""
    values, vectors = torch.linalg.eigh(gram)
    return values, vectors, values > gram.shape[-1] * torch.finfo(gram.dtype).eps * values[..., -1:]


# --- the parameter step: vectors in parts, one part per parameter of the layer -----------------


def parameter_cosine(u: Sequence[Vector], gamma: Sequence[Vector]) -> Scalar:
    """cos(u, −γ), in [−1, 1]: the optimizer's update u against the raw gradient γ it saw."""
    return -cosine(u, gamma)


def projection_cosine(a: Sequence[Vector], u: Sequence[Vector]) -> Scalar:
    """cos(a, u), in [−1, 1]: the applied update a against the optimizer's u.

    They differ when code rescales, clips, projects or averages the weights after the step. Near 0
    the projection made the update orthogonal; below 0 it fights it.
    """
    return cosine(a, u)


def applied_cosine(a: Sequence[Vector], gamma: Sequence[Vector]) -> Scalar:
    """cos(a, −γ), in [−1, 1]: what was applied, after every projection, against the gradient."""
    return -cosine(a, gamma)


def cosine(a: Sequence[Vector], b: Sequence[Vector]) -> Scalar:
    """Cosine of two vectors in parts."""
    return dot(a, b) / dot(a, a).sqrt() / dot(b, b).sqrt()


def dot(a: Sequence[Vector], b: Sequence[Vector]) -> Scalar:
    """⟨a, b⟩ of two vectors in parts."""
    dots = [torch.dot(p, q) for p, q in zip(a, b, strict=True)]
    return dots[0] if len(dots) == 1 else torch.stack(dots).sum()


def norm(a: Float[Tensor, "..."]) -> Scalar:
    """‖vec a‖."""
    flat = a.reshape(-1)
    return torch.dot(flat, flat).sqrt()


# --- distributions over rows -----------------------------------------------------------------


def quantiles(
    values: Float[Tensor, "rows ..."], levels: tuple[float, ...]
) -> Float[Tensor, " levels"]:
    """Quantiles with linear interpolation; NaN counts as larger than every number.

    Where there are more than 2,048 entries, every so many rows are read (all features of them).
    """
    if values.numel() == 0:
        return values.new_full((len(levels),), torch.nan)
    flat = _thinned(values).sort().values
    low, high, weight = _positions(levels, flat.numel(), flat.dtype, flat.device)
    return torch.lerp(flat[low], flat[high], weight)


def quantiles_of_numbers(values: PerRow, levels: tuple[float, ...]) -> Float[Tensor, " levels"]:
    """`quantiles` of the entries that are not NaN; all NaN if none is left."""
    if values.numel() == 0:
        return values.new_full((len(levels),), torch.nan)
    flat = _thinned(values).sort().values  # NaN last
    last = (flat == flat).sum().sub_(1).clamp_(min=0)
    at = _on_device(levels, flat.dtype, flat.device) * last
    low = at.long()
    high = torch.minimum(low + 1, last)
    return torch.lerp(flat[low], flat[high], at - low)


def _thinned(values: Tensor) -> Tensor:
    return values[:: -(-values.numel() // _MAX_SORTED)].reshape(-1)


@lru_cache
def _positions(
    levels: tuple[float, ...], count: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Between which two sorted entries each level lies, and where."""
    at = _on_device(levels, torch.float64, device) * (count - 1)
    low = at.long()
    return low, (low + 1).clamp(max=count - 1), (at - low).to(dtype)


@lru_cache
def _on_device(levels: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Made once: a copy from the host would wait for the device each time."""
    return torch.tensor(levels, dtype=dtype, device=device)
