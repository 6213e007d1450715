"""The attention measures, from sums over the scores of every sample and head (spec, section 5).

    G = ∂L/∂Y of the scores Y_ts = q_t·k_s     d = −ΔY of the step     e = ΔY of a gradient, M G
    D_ts = ‖∂Y_ts/∂Θ‖²                          the attention scale, the diagonal of M

All scores of one sample take the place of a row. Each head is measured like a layer of its own, and
all heads together like one more layer. The samples may be a subset of the probe, so every measure
has a standard error. Only active scores count, g ≠ 0: masked scores are not. Where g is not known,
neither are the cosines. Float64, on the host.
"""

from typing import Any

import numpy as np
from jaxtyping import Float

from adiv_monitor.maths import measures
from adiv_monitor.maths.attention_sums import AttentionSums, ScaleSums, map_samples
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
    with np.errstate(divide="ignore", invalid="ignore"):
        mean, _ = _moments(scales)
        influence = (scales.sum - mean[:, None] * scales.count) / _per_sample(scales)
    return Estimate(mean, _error(influence, rest))


def attention_scale_cv(scales: ScaleSums[Array], rest: float) -> Estimate:
    """std(D_ts) / mean(D_ts) over the active scores, ≥ 0, minus its bias of order 1/samples.

    Arguments are those of `attention_scale_mean`.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        mean, variance = (moment[:, None] for moment in _moments(scales))
        value = np.sqrt(variance) / mean
        # d log cv = dv/2v − dm/m, of every sample
        of_mean = (scales.sum - mean * scales.count) / mean / _per_sample(scales)
        deviation = scales.square - 2 * mean * scales.sum + (mean**2 - variance) * scales.count
        of_variance = np.where(variance > 0, deviation / variance, 0.0) / _per_sample(scales)
        influence = value * (of_variance / 2 - of_mean)
        # The second-order terms, as in `measures.scale_cv_of_rows`.
        second = of_mean**2 - of_variance * of_mean / 2 - of_variance**2 / 8
        lacking = np.where(variance > 0, (of_mean / value) ** 2, 0.0)
        bias = _variance(second - lacking / 2, rest)
    known = np.where(np.isfinite(bias), bias, 0.0)  # of one sample it is not
    return Estimate(value[:, 0] * (1 - known), _error(influence, rest))


def _moments(scales: ScaleSums[Array]) -> tuple[PerLayer, PerLayer]:
    """Return the mean and the variance of D_ts."""
    count = scales.count.sum(1)
    mean = scales.sum.sum(1) / count
    return mean, np.maximum(scales.square.sum(1) / count - mean**2, 0.0)


def _per_sample(scales: ScaleSums[Array]) -> Float[np.ndarray, "layers 1"]:
    """Return the mean number, per sample, of active scores whose scale was computed."""
    found: np.ndarray = scales.count.mean(1, keepdims=True)
    return found


def _error(influence: PerRow, rest: float) -> PerLayer:
    """Return the standard error of a ratio of means over samples; 0 if `rest` is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
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
    rows, (seen, heads), total = map_samples(sums, _heads), sums.shape, sums.samples
    found: dict[str, Estimate] = {}
    if rows.G_G is not None:
        sample = Sample(np.full(heads + 1, float(total)), rows.G_G != 0)
        G_G = over_rows(rows.G_G, sample)
        moves = (attention_gradient_cosine, rows.e), (attention_cosine, rows.d)
        for cosine, move in moves:
            if move is not None:
                own = over_rows(move.G, sample), over_rows(move.square, sample)
                found[cosine.__name__] = cosine(*own, G_G, sample)
    if rows.scale is not None:
        rest = 1 - rows.scale.share * seen / total
        found["attention_scale_mean"] = attention_scale_mean(rows.scale, rest)
        found["attention_scale_cv"] = attention_scale_cv(rows.scale, rest)
    values: dict[str, Any] = {name: float(estimate.value[0]) for name, estimate in found.items()}
    return AttentionReading(
        samples_seen=seen,
        samples_total=total,
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
