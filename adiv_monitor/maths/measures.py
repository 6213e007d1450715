"""The measures: the effect of one optimizer step on a layer's activations, against the ideal one.

A layer that is linear in its parameters gives, for every *row* r (one use of its weights: a sample,
a token, a patch), the output z_r = Θ φ_r with features φ_r. The ideal step of gradient descent
would move z_r by −η g_r, g_r = ∂L/∂z_r, but the step on Θ moves it by −η Σ_k M_rk g_k, M = ΦΦᵀ
(paper, eqns 46 and 54). The functions below compare the two, independently of modules and hooks.

    G      ∂L/∂z of all rows, in the units of the gradient that the optimizer saw
    e      = M G = Φ (∂L/∂Θ)ᵀ: the move of a plain gradient step, per unit of learning rate
    d      = −Φ ΔΘᵀ: the move of the optimizer's step, as a descent direction
    r      = z before − z after the step, all layers having moved: the realised move
    scale  = ‖φ_r‖², the diagonal D of M; ‖x‖² + 1 for an affine layer (eqn 11)

A grouped layer is a set of independent layers, each with its own Φ: D is one number per row and
group; an elementwise gain has one group per feature. Only *active* rows count, g_r ≠ 0.

Nearly all measures follow from sums over the rows: the argument `d_G` is Σ_r d_r·g_r = ⟨d, G⟩,
`G_G` is ‖G‖², and so on, each exact or estimated from sampled rows (`estimates.py`). A vector of
length zero has no direction: a measure that needs one is NaN. Many layers at once, float64.
"""

import numpy as np

from adiv_monitor.maths.estimates import (
    Estimate,
    PerLayer,
    PerRow,
    Sample,
    Sum,
    jackknifed,
    mean_of_active,
    product,
    share_error,
)
from adiv_monitor.maths.sums import Array

# --- one layer, one step: the activations ----------------------------------------------------


def update_cosine(d_G: Sum, d_d: Sum, G_G: Sum, sample: Sample) -> Estimate:
    """cos(d, G), in [−1, 1]; 1: the step moved the activations exactly downhill."""
    return _cosine(d_G, d_d, G_G, sample)


def gradient_cosine(e_G: Sum, e_e: Sum, G_G: Sum, sample: Sample) -> Estimate:
    """cos(e, G), in [−1, 1]: `update_cosine` of a plain gradient step."""
    return _cosine(e_G, e_e, G_G, sample)


def diagonal_cosine(own_G: Sum, own_own: Sum, G_G: Sum, sample: Sample) -> Estimate:
    """cos(D G, G), in [0, 1]: the effect of the row scales alone; exactly 1 if all are equal."""
    return _cosine(own_G, own_own, G_G, sample)


def _cosine(a_b: Sum, a_a: Sum, b_b: Sum, sample: Sample) -> Estimate:
    value, error = product(a_b, [(a_a, -0.5), (b_b, -0.5)], sample)
    return Estimate(np.clip(value, -1, 1), error)


def interference_ratio(rest_rest: Sum, own_own: Sum, sample: Sample) -> Estimate:
    """‖e − D G‖ / ‖D G‖, ≥ 0: a row's move by the other rows against its own (eqn 49)."""
    return product(_one(sample), [(rest_rest, 0.5), (own_own, -0.5)], sample)


def effective_lr(d_G: Sum, G_G: Sum, sample: Sample) -> Estimate:
    """⟨d, G⟩ / ‖G‖²: the learning rate at which the activations move downhill.

    η (‖x‖² + 1) for one row under plain gradient descent; defined for any optimizer. A per-layer
    learning rate could fix its spread between layers.
    """
    return product(d_G, [(G_G, -1)], sample)


def update_ratio(d_d: Sum, z_z: Sum, sample: Sample) -> Estimate:
    """‖Δz‖ / ‖z‖ over the same rows, z before the step, ≥ 0: how far one step moves activations."""
    return product(_one(sample), [(d_d, 0.5), (z_z, -0.5)], sample)


def bias_share(A_A: Sum, B_B: Sum, sample: Sample) -> Estimate:
    """‖B‖ / (‖A‖ + ‖B‖), in [0, 1]: the bias's share of the update (the paper's responsibility).

    A = Φ_W ΔΘ_Wᵀ, B = φ_b ⊗ ΔΘ_b.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        # The ratio of the smaller norm to the larger, so that one of them may be zero.
        by_weight = product(_one(sample), [(A_A, 0.5), (B_B, -0.5)], sample)
        by_bias = product(_one(sample), [(B_B, 0.5), (A_A, -0.5)], sample)
        small = A_A.total < B_B.total
        ratio = np.where(small, by_weight.value, by_bias.value)
        error = np.where(small, by_weight.error, by_bias.error) / (1 + ratio) ** 2
        return Estimate(np.where(small, 1 / (1 + ratio), ratio / (1 + ratio)), error)


def descent(d_G: Sum, sample: Sample) -> Estimate:
    """⟨d, G⟩: first-order decrease of the loss by this layer's step, −⟨∂L/∂Θ, ΔΘ⟩.

    The gradient is the one that the optimizer saw: if it was clipped, the result is smaller than
    the loss's own decrease by the clipping factor.
    """
    return product(d_G, [], sample)


def realised_cosine(r_G: Sum, r_r: Sum, G_G: Sum, sample: Sample) -> Estimate:
    """cos(r, G), in [−1, 1], r = −(z after the step − z); 1: the realised move is downhill.

    z after the step is that of the same forward pass with the new weights: all layers before this
    one have moved as well (spec, section 4).
    """
    return _cosine(r_G, r_r, G_G, sample)


def single_layer_share(r_d: Sum, r_r: Sum, d_d: Sum, sample: Sample) -> Estimate:
    """cos(r, d), in [−1, 1]: how much of the realised move is this layer's own step.

    1 for a layer whose inputs have not changed, such as the first.
    """
    return _cosine(r_d, r_r, d_d, sample)


def first_order_error(b_b: Sum, r_r: Sum, sample: Sample) -> Estimate:
    """2 ‖r − 2h‖ / ‖r‖, ≥ 0, h = the move of half the step: how far z is from linear in the step.

    With z(t) for the weights θ + t Δθ of the whole network, r − 2h = −z″/4 + O(‖Δθ‖³). So this is
    ‖Δz − J Δθ‖ / ‖Δz‖ with J = ∂z/∂θ, the relative error of the first-order approximation of the
    whole step, up to terms of the next order. 0 where z is linear in the weights.
    """
    value, error = product(_one(sample), [(b_b, 0.5), (r_r, -0.5)], sample)
    return Estimate(2 * value, 2 * error)


def row_cosines(d_G: PerRow, d_d: PerRow, G_G: PerRow) -> PerRow:
    """cos(d_r, g_r) of every row, in [−1, 1]; NaN where g_r or d_r is zero or overflows."""
    return _of_squares(d_G, d_d, G_G)


def row_cosine_mean(cosines: PerRow, sample: Sample, rounding: PerLayer) -> Estimate:
    """Mean of the row cosines, in [−1, 1].

    Where the cosines of all sampled rows are equal, or all are ±1 (as in a layer with one output),
    the error is that of a share of rows: a few equal rows say little about the others.

    Args:
        cosines: cosines of the sampled rows; NaN without a direction.
        sample: the sampled rows.
        rounding: largest difference of cosines that count as equal.
    """
    counted = ~np.isnan(cosines)
    value, error = mean_of_active(cosines, counted, sample)
    count, within = counted.sum(1), rounding[:, None]
    of_negative = share_error((cosines < 0).sum(1), count, sample)
    with np.errstate(invalid="ignore"):
        off = np.where(counted, np.abs(cosines - value[:, None]), 0.0)
        alike = (off <= within).all(1)
        at_ends = (~counted | (np.abs(cosines) >= 1 - within)).all(1)
    least = np.where(alike | at_ends, 2 * of_negative, 0.0)
    return Estimate(value, np.where(np.isnan(error), error, np.maximum(error, least)))


def harmed_fraction(d_G: PerRow, sample: Sample, d_d: Sum) -> Estimate:
    """Share of the active rows with d_r·g_r < 0, in [0, 1]: this step raises their loss.

    NaN if no row is active, if the step moved nothing, or where numbers are not finite.
    """
    harmed = (d_G < 0) & sample.active
    value, _ = mean_of_active(harmed.astype(np.float64), sample.active, sample)
    error = share_error(harmed.sum(1), sample.active.sum(1), sample)
    unknown = (d_d.total == 0) | np.isnan(d_G).any(1)
    return Estimate(np.where(unknown, np.nan, value), error)


def idle_share(sample: Sample, active: PerLayer) -> Estimate:
    """Share of zero-gradient rows, in [0, 1]: their gradient is exactly zero. NaN without rows.

    Args:
        sample: the sampled rows.
        active: number of active rows among all; NaN where it is known from the sample only.
    """
    seen = sample.active.sum(1)
    with np.errstate(invalid="ignore"):
        share = np.where(np.isnan(active), seen / sample.seen, active / sample.total)
    error = share_error(seen, sample.seen, sample)
    return Estimate(1 - share, np.where(np.isnan(active), error, 0.0))


# --- the row scales --------------------------------------------------------------------------


def scale_mean(sums: Sum, count: Sum, sample: Sample) -> Estimate:
    """Mean of ‖φ_r‖², ≥ 0: the common part of the divergence, which one learning rate can fix.

    Args:
        sums: Σ_r ‖φ_r‖², over groups too.
        count: number of summed scales.
        sample: the sampled rows.
    """
    return product(sums, [(count, -1)], sample)


def scale_cv(squared: PerLayer, sums: PerLayer, count: PerLayer) -> PerLayer:
    """std(‖φ_r‖²) / mean(‖φ_r‖²), ≥ 0: the divergence that differs by row; 0 if corrected.

    Args:
        squared: Σ (‖φ_r‖² − their mean)².
        sums: Σ ‖φ_r‖².
        count: number of summed scales.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        cv: PerLayer = np.sqrt(squared * count) / sums
    return cv


def scale_cv_of_rows(
    sums: PerRow, squares: PerRow, groups: PerLayer, pivot: PerLayer, sample: Sample
) -> Estimate:
    """Estimate `scale_cv` from sampled rows, by the jackknife.

    Args:
        sums: Σ (‖φ_r‖² − pivot) over the row's groups.
        squares: Σ (‖φ_r‖² − pivot)² over the row's groups.
        groups: number of groups.
        pivot: a number near the scales of each layer, against cancellation.
        sample: the sampled rows.
    """
    rows = sample.active
    with np.errstate(divide="ignore", invalid="ignore"):

        def cv(total: Array, squared: Array, n: Array, pivot: Array) -> Array:
            shift = total / n
            spread: Array = np.sqrt(np.maximum(squared / n - shift**2, 0)) / (pivot + shift)
            return spread

        sums, squares = (np.where(rows, x, 0.0) / groups[:, None] for x in (sums, squares))
        n, total, squared = rows.sum(1), sums.sum(1), squares.sum(1)
        rest = (total[:, None] - sums, squared[:, None] - squares, n[:, None] - 1.0)
        whole, without = cv(total, squared, n, pivot), cv(*rest, pivot[:, None])
        return jackknifed(whole, without, sample.seen / np.maximum(sample.total, 1), sample)


def scale_max_of_rows(largest: PerRow, sample: Sample) -> Estimate:
    """Largest ‖φ_r‖² of the sampled rows, which the largest of all rows may exceed.

    No sample determines by how much: the error is NaN, or 0 if all rows were sampled. The value is
    NaN without active rows.
    """
    top = np.where(sample.active, largest, -np.inf).max(1, initial=-np.inf)
    found = np.where(sample.active.any(1), top, np.nan)
    return Estimate(found, np.where(sample.variance_share == 0, 0.0, np.nan))


def common_share(products: PerRow, squares: PerRow, count: PerLayer, sample: Sample) -> Estimate:
    """‖mean_r φ_W,r‖² / mean_r ‖φ_W,r‖², in [0, 1]: how much of the rows is one common vector.

    That vector is the mean feature, through which each row disturbs every other. Centring the
    inputs would remove it (spec, "The mean feature"). From sampled rows, by the jackknife. NaN if
    no row is active.

    Args:
        products: φ_r·Σ_k φ_k over the sampled active rows.
        squares: ‖φ_r‖².
        count: N, number of active rows among all.
        sample: the sampled rows.
    """
    rows = sample.active
    with np.errstate(divide="ignore", invalid="ignore"):

        def share(together: Array, alone: Array, n: Array, count: Array) -> Array:
            # Pairs of different rows tell the mean's length; each row's own square comes on top.
            pairs = np.where(n > 1, (together - alone) / ((n - 1) * alone), 0.0)
            found: Array = pairs + (1 - pairs) / np.maximum(count, n)
            return found

        products, squares = (np.where(rows, x, 0.0) for x in (products, squares))
        n, together, alone = rows.sum(1), products.sum(1), squares.sum(1)
        # Without a row, its products with the others are missing twice.
        rest = (together[:, None] - 2 * products + squares, alone[:, None] - squares)
        whole = share(together, alone, n, count)
        without = share(*rest, n[:, None] - 1.0, count[:, None])
        value, error = jackknifed(whole, without, n / np.maximum(count, n), sample)
    return Estimate(np.where(alone > 0, np.clip(value, 0, 1), np.nan), error)


# --- sizes -----------------------------------------------------------------------------------


def activation_rms(z_z: Sum, count: Sum, width: PerLayer, sample: Sample) -> Estimate:
    """‖z‖ / √(N n), ≥ 0: root mean square of the outputs, of N active rows of n entries."""
    return _rms(z_z, count, width, sample)


def activation_gradient_rms(G_G: Sum, count: Sum, width: PerLayer, sample: Sample) -> Estimate:
    """‖G‖ / √(N n), ≥ 0: root mean square of ∂L/∂z, in the units of G."""
    return _rms(G_G, count, width, sample)


def _rms(x_x: Sum, count: Sum, width: PerLayer, sample: Sample) -> Estimate:
    value, error = product(_one(sample), [(x_x, 0.5), (count, -0.5)], sample)
    return Estimate(value / np.sqrt(width), error / np.sqrt(width))


def activation_max(largest: PerRow, sample: Sample) -> Estimate:
    """Largest |entry| of z of the sampled rows, ≥ 0; its error is that of `scale_max_of_rows`."""
    return scale_max_of_rows(largest, sample)


def activation_kurtosis(
    fourth: Sum, z_z: Sum, count: Sum, width: PerLayer, sample: Sample
) -> Estimate:
    """mean(z⁴) / mean(z²)² over all entries, ≥ 1: 3 if normal, large if a few hold most of ‖z‖.

    About zero, not about the mean.
    """
    value, error = product(fourth, [(z_z, -2), (count, 1)], sample)
    return Estimate(value * width, error * width)


def zero_share(zeros: Sum, count: Sum, width: PerLayer, sample: Sample) -> Estimate:
    """Share of the entries of G that are exactly zero, in [0, 1]: units that are shut.

    Where the sampled rows are all alike, its error is that of a share of rows that none of them is.
    """
    value, error = product(zeros, [(count, -1)], sample)
    of_another = share_error(np.zeros_like(value), sample.active.sum(1), sample)
    return Estimate(value / width, np.where(error == 0, of_another, error / width))


def silent_share(silent: PerLayer, width: PerLayer, sample: Sample) -> Estimate:
    """Share of the units n with g_rn = 0 in all sampled rows, in [0, 1]: these never fired.

    Its error is that of `scale_max_of_rows`: in rows that were not sampled some may have.
    """
    return scale_max_of_rows((silent / width)[:, None] * sample.active, sample)


def weight_update_ratio(u_u: PerLayer, theta_theta: PerLayer) -> PerLayer:
    """‖ΔΘ‖ / ‖Θ‖, ≥ 0, Θ before the step; NaN where all weights are zero."""
    return _root(u_u, theta_theta)


def update_rms(u_u: PerLayer, size: PerLayer, rate: PerLayer) -> PerLayer:
    """‖ΔΘ‖ / (√size η), ≥ 0: root mean square of the update, per unit of learning rate."""
    return _root(u_u, size * rate**2)


def unchanged_share(changed: PerLayer, reached: PerLayer) -> PerLayer:
    """Share of the parameters with a nonzero gradient that the step did not change, in [0, 1].

    Where weights are kept in half precision, small updates are rounded away.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        share: PerLayer = 1 - changed / reached
        return share


def _root(squares: PerLayer, by: PerLayer) -> PerLayer:
    with np.errstate(divide="ignore", invalid="ignore"):
        found: PerLayer = np.where(by > 0, np.sqrt(squares / by), np.nan)
        return found


# --- experts -----------------------------------------------------------------------------------


def expert_load_max(rows: Array) -> float:
    """Rows of the fullest expert over those of the mean one, from 1 to the number of experts."""
    return float(rows.max() / rows.mean())


def expert_load_cv(rows: Array) -> float:
    """Spread, std / mean, of the experts' rows, ≥ 0; 0: all have equally many."""
    return float(rows.std() / rows.mean())


def idle_expert_share(rows: Array) -> float:
    """Share of the experts without rows, in [0, 1]."""
    return float((rows == 0).mean())


# --- the parameter step: dot products of vectors that hold all parameters of the layer ---------


def parameter_cosine(u_gamma: PerLayer, u_u: PerLayer, gamma_gamma: PerLayer) -> PerLayer:
    """cos(u, −γ), in [−1, 1]: the optimizer's update u against the raw gradient γ it saw."""
    return -_of_vectors(u_gamma, u_u, gamma_gamma)


def projection_cosine(a_u: PerLayer, a_a: PerLayer, u_u: PerLayer) -> PerLayer:
    """cos(a, u), in [−1, 1]: the applied update a against the optimizer's u.

    They differ when code rescales, clips, projects or averages the weights after the step. Near 0
    the applied update is orthogonal to the optimizer's; below 0 it points against it.
    """
    return _of_vectors(a_u, a_a, u_u)


def applied_cosine(a_gamma: PerLayer, a_a: PerLayer, gamma_gamma: PerLayer) -> PerLayer:
    """cos(a, −γ), in [−1, 1]: the applied update, after every projection, against the gradient."""
    return -_of_vectors(a_gamma, a_a, gamma_gamma)


def _of_vectors(a_b: PerLayer, a_a: PerLayer, b_b: PerLayer) -> PerLayer:
    cosines: PerLayer = np.clip(_of_squares(a_b, a_a, b_b), -1, 1)
    return cosines


def _of_squares(a_b: PerRow, a_a: PerRow, b_b: PerRow) -> PerRow:
    """Return a·b / (‖a‖ ‖b‖); NaN where a square overflowed."""
    with np.errstate(divide="ignore", invalid="ignore"):
        # Ratios: exactly 1 where a = b, while the product of two small squares may underflow.
        cosines: PerRow = a_b / a_a / np.sqrt(b_b / a_a)
        return np.where(np.isinf(a_a) | np.isinf(b_b), np.nan, cosines)


def _one(sample: Sample) -> Sum:
    return Sum(np.ones_like(sample.total), np.zeros(sample.active.shape))
