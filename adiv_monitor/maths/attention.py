"""The attention measures, from sums over the scores of every sample and head (spec, section 5).

    G = ∂L/∂Y of the scores Y_ts = q_t·k_s     d = −ΔY of the step     e = ΔY of a gradient, M G
    D_ts = ‖∂Y_ts/∂Θ‖²                          the attention scale, the diagonal of M

All scores of one sample take the place of a row. Each head is measured like a layer of its own, and
all heads together like one more layer. Measures of the scales of some scores have a standard error.
Only active scores count, g ≠ 0: masked scores are not. Where g is not known, neither are the
cosines. Float64, on the host.
"""

from typing import Any

import numpy as np
from jaxtyping import Float

from adiv_monitor.maths import measures
from adiv_monitor.maths.attention_sums import AttentionSums, ScaleSums, combined
from adiv_monitor.maths.estimates import Estimate, PerLayer, PerRow, Sample, Sum, over_rows
from adiv_monitor.maths.sums import Array
from adiv_monitor.report import AttentionReading


def attention_cosine(d_G: Sum, d_d: Sum, G_G: Sum, sample: Sample) -> Estimate:
    """cos(−vec ΔY, vec G), in [−1, 1]; 1: the step moved the scores exactly downhill."""
    return measures.update_cosine(d_G, d_d, G_G, sample)


def attention_gradient_cosine(e_G: Sum, e_e: Sum, G_G: Sum, sample: Sample) -> Estimate:
    """Return the `attention_cosine` that a plain gradient step would have."""
    return measures.gradient_cosine(e_G, e_e, G_G, sample)


def attention_scale_mean(scales: ScaleSums[Array], rest: float) -> Estimate:
    """Mean of D_ts over the active scores, ≥ 0; NaN where there are none.

    Args:
        scales: sums of every head (or all heads), (heads, samples).
        rest: share of all scores whose scale was not computed.
    """
    mean, _, of_mean, _ = _moments(scales)
    return Estimate(mean[:, 0], _error(of_mean, rest))


def attention_scale_cv(scales: ScaleSums[Array], rest: float) -> Estimate:
    """std(D_ts) / mean(D_ts) over the active scores, ≥ 0, minus its bias of order 1/samples.

    Arguments are those of `attention_scale_mean`.
    """
    mean, variance, of_mean, of_variance = _moments(scales)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = np.sqrt(variance) / mean
        # d log cv = dv/2v − dm/m, of every sample
        m = of_mean / mean
        v = np.where(variance > 0, of_variance / variance, 0.0)
        # The second-order terms, as in `measures.scale_cv_of_rows`.
        lacking = np.where(variance > 0, (m / value) ** 2, 0.0)
        bias = _variance(m**2 - v * m / 2 - v**2 / 8 - lacking / 2, rest)
    known = np.where(np.isfinite(bias), bias, 0.0)  # of one sample it is not
    return Estimate(value[:, 0] * (1 - known), _error(value * (v / 2 - m), rest))


def _moments(scales: ScaleSums[Array]) -> tuple[Array, Array, Array, Array]:
    """Return mean and variance of D_ts, (heads, 1), and each sample's influence on them."""
    with np.errstate(divide="ignore", invalid="ignore"):
        count, total, square = (
            x.mean(1, keepdims=True) for x in (scales.count, scales.sum, scales.square)
        )
        mean = total / count
        variance = np.maximum(square / count - mean**2, 0.0)
        of_mean = (scales.sum - mean * scales.count) / count
        rest = (mean**2 - variance) * scales.count
        of_variance = (scales.square - 2 * mean * scales.sum + rest) / count
    return mean, variance, of_mean, of_variance


def _error(influence: PerRow, rest: float) -> PerLayer:
    """Return the standard error of a ratio of means over samples; 0 if `rest` is 0."""
    error: PerLayer = np.sqrt(_variance(influence**2, rest))
    return error


def _variance(products: PerRow, rest: float) -> PerLayer:
    """Return the covariance of two means over samples, given products of influences; 0: known."""
    samples = products.shape[1]
    if not rest:
        return np.zeros(len(products))
    if samples < 2:
        return np.full(len(products), np.nan)
    found: PerLayer = rest * products.sum(1) / (samples * (samples - 1))
    return found


def attention_reading(sums: AttentionSums[Array]) -> AttentionReading:
    """Return the measures of one attention that are known, of all heads together and of each."""
    found: dict[str, Estimate] = {}
    samples = len(sums.G_G if sums.scale is None else sums.scale.count)
    if sums.G_G is not None:
        squares = _heads(sums.G_G)
        sample = Sample(np.full(len(squares), float(samples)), squares != 0)
        G_G = over_rows(squares, sample)
        moves = (attention_gradient_cosine, sums.e), (attention_cosine, sums.d)
        for cosine, move in moves:
            if move is not None:
                own = [over_rows(_heads(x), sample) for x in (move.G, move.square)]
                found[cosine.__name__] = cosine(*own, G_G, sample)
    if sums.scale is not None:
        of_heads = combined(lambda x: _heads(x) if x.ndim else x, sums.scale)
        rest = 1 - sums.scale.share
        found["attention_scale_mean"] = attention_scale_mean(of_heads, rest)
        found["attention_scale_cv"] = attention_scale_cv(of_heads, rest)
    values: dict[str, Any] = {name: float(estimate.value[0]) for name, estimate in found.items()}
    return AttentionReading(
        samples_seen=samples,
        samples_total=samples,
        standard_error={n: float(e.error[0]) for n, e in found.items() if e.error[0]},
        heads={n: tuple(e.value[1:].tolist()) for n, e in found.items()},
        heads_standard_error={
            n: tuple(e.error[1:].tolist()) for n, e in found.items() if e.error[1:].any()
        },
        **values,
    )


def _heads(sums: Float[Array, "samples heads"]) -> Float[Array, "layers samples"]:
    """Arrange the sums as `estimates` expects layers: all heads together, then each head."""
    return np.concatenate([sums.sum(1, keepdims=True), sums], 1).T
