"""The attention measures, from sums over the scores of every sample and head (spec, section 5).

    G = ∂L/∂Y of the scores Y_ts = q_t·k_s     d = −ΔY of the step     e = ΔY of a gradient, M G
    D_ts = ‖∂Y_ts/∂Θ‖²                          the attention scale, the diagonal of M

All scores of one sample take the place of a row. Each head is measured like a layer of its own, and
all heads together like one more layer. Scales that random moves tell have a standard error. Only
active scores count, g ≠ 0: masked scores are not. Where g is not known, neither are the cosines.
Float64, on the host.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float

from adiv_monitor.maths import measures
from adiv_monitor.maths.attention_sums import AttentionSums, combined
from adiv_monitor.maths.estimates import Estimate, Sample, Sum, jackknifed, over_rows
from adiv_monitor.maths.sums import Array
from adiv_monitor.report import AttentionReading


def attention_cosine(d_G: Sum, d_d: Sum, G_G: Sum, sample: Sample) -> Estimate:
    """cos(−vec ΔY, vec G), in [−1, 1]; 1: the step moved the scores exactly downhill."""
    return measures.update_cosine(d_G, d_d, G_G, sample)


def attention_gradient_cosine(e_G: Sum, e_e: Sum, G_G: Sum, sample: Sample) -> Estimate:
    """Return the `attention_cosine` that a plain gradient step would have."""
    return measures.gradient_cosine(e_G, e_e, G_G, sample)


def attention_scale_mean(sums: AttentionSums[Array]) -> Estimate:
    """Mean of D_ts over the active scores, ≥ 0; NaN where there are none.

    Args:
        sums: sums of every head (or all heads), (heads, samples, …).
    """
    return _jackknifed(sums, lambda mean, square: mean)


def attention_scale_cv(sums: AttentionSums[Array]) -> Estimate:
    """std(D_ts) / mean(D_ts) over the active scores, ≥ 0.

    The square is free of bias of order 1/estimates. Its estimate may be negative; the measure is 0
    then, with an error that is not.

    Arguments are those of `attention_scale_mean`.
    """
    squared = _jackknifed(sums, lambda mean, square: square / mean**2 - 1)
    value = np.sqrt(np.maximum(squared.value, 0))
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.fmin(squared.error / (2 * value), np.sqrt(squared.error))
    return Estimate(value, error)


def attention_looks(spread: Float[Array, "heads samples 7"]) -> dict[str, Array]:
    """Return the measures of where the attention looks, by name, of heads: `AttentionSums.spread`.

    - attention_logit_max: largest Y_ts·scale + mask, over the queries that see two keys or more.
    - attention_logit_step: the same times the last digit of 1 in the dtype of q and k: the step
      between the numbers of that dtype at the largest logit, or up to twice it.
    - attention_query_norm, attention_key_norm: largest ‖q_t‖ and ‖k_s‖, ≥ 0, of all: no logit
      exceeds their product by the scale.
    - attention_entropy: mean of −Σ_s P_ts ln P_ts / ln n_t, in [0, 1], n_t the keys that query t
      sees, two or more. 1: a query looks at all keys alike; 0: at a single one.
    - attention_first_share: mean of P_t1, in [0, 1]: the share that the first key gets.

    All are NaN where no query sees two keys.
    """
    names = ("logit_max", "logit_step", "query_norm", "key_norm", "entropy", "first_share")
    with np.errstate(divide="ignore", invalid="ignore"):
        count = spread[..., 6].sum(1, keepdims=True)
        means = spread[..., 4:6].sum(1) / count
        values = np.where(count > 0, np.concatenate([spread[..., :4].max(1), means], 1), np.nan)
    return {f"attention_{name}": value for name, value in zip(names, values.T, strict=True)}


def _jackknifed(sums: AttentionSums[Array], of: Callable[[Array, Array], Array]) -> Estimate:
    """Return a function of the means of D_ts and D_ts², with its error over the estimates."""
    with np.errstate(divide="ignore", invalid="ignore"):
        count, n = sums.count.sum(1)[:, None], sums.scale.shape[2]
        means = [x.sum(1) / count for x in (sums.scale, sums.scale_square)]
        whole = of(*(x.mean(1) for x in means))
        without = of(*((x.sum(1, keepdims=True) - x) / (n - 1) for x in means))
    every = Sample(np.full(len(whole), float(n)), np.ones((len(whole), n), bool))
    return jackknifed(whole, without, np.full(len(whole), float(n == 1)), every)  # one is exact


def attention_reading(sums: AttentionSums[Array]) -> AttentionReading:
    """Return the measures of one attention that are known, of all heads together and of each."""
    samples, found = len(sums.count), dict[str, Estimate]()
    sums = combined(_heads, sums)
    if (squares := sums.G_G) is not None:
        sample = Sample(np.full(len(squares), float(samples)), squares != 0)
        G_G = over_rows(squares, sample)
        moves = (attention_gradient_cosine, sums.e), (attention_cosine, sums.d)
        for cosine, move in moves:
            if move is not None:
                of_move, own = (over_rows(x, sample) for x in np.moveaxis(move, 2, 0))
                found[cosine.__name__] = cosine(of_move, own, G_G, sample)
    found["attention_scale_mean"] = attention_scale_mean(sums)
    found["attention_scale_cv"] = attention_scale_cv(sums)
    if (spread := sums.spread) is not None:
        spread[0, :, :4] = spread[1:, :, :4].max(0)  # the largest of all heads, not their sum
        exact = np.zeros(len(spread))
        found |= {name: Estimate(x, exact) for name, x in attention_looks(spread).items()}
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


def _heads(sums: Float[Array, "samples heads *more"]) -> Float[Array, "layers samples *more"]:
    """Arrange the sums as `estimates` expects layers: all heads together, then each head."""
    if sums.ndim < 2:
        return sums
    return np.concatenate([sums.sum(1, keepdims=True), sums], 1).swapaxes(0, 1)
