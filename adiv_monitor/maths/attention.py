"""The attention measures, from sums over the scores of every sample and head (spec, section 5).

    G = ∂L/∂Y of the scores Y_ts = q_t·k_s     d = −ΔY of the step     e = ΔY of a gradient, M G
    D_ts = ‖∂Y_ts/∂Θ‖²                          the attention scale, the diagonal of M

All scores of one sample take the place of a row. Each head is measured like a layer of its own, and
all heads together like one more layer. Scales that random moves tell have a standard error. Only
active scores count, g ≠ 0: masked scores are not. Where g is not known, neither are the cosines.
Float64, on the host.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from adiv_monitor.maths import measures
from adiv_monitor.maths.estimates import Estimate, Sample, Sum, jackknifed, over_rows
from adiv_monitor.maths.scores import RECORD
from adiv_monitor.maths.sums import Array
from adiv_monitor.report import AttentionReading

Parts = Mapping[str, Float[Array, "heads samples numbers"]]  # of `RECORD`, of every head (or all)


def attention_cosine(d_G: Sum, d_d: Sum, G_G: Sum, sample: Sample) -> Estimate:
    """cos(−vec ΔY, vec G), in [−1, 1]; 1: the step moved the scores exactly downhill."""
    return measures.update_cosine(d_G, d_d, G_G, sample)


def attention_gradient_cosine(e_G: Sum, e_e: Sum, G_G: Sum, sample: Sample) -> Estimate:
    """Return the `attention_cosine` that a plain gradient step would have."""
    return measures.gradient_cosine(e_G, e_e, G_G, sample)


def attention_scale_mean(parts: Parts) -> Estimate:
    """Mean of D_ts over the active scores, ≥ 0; NaN where there are none.

    Args:
        parts: sums of every head (or all heads), as `RECORD` describes them.
    """
    return _jackknifed(parts, lambda mean, square: mean)


def attention_scale_cv(parts: Parts) -> Estimate:
    """std(D_ts) / mean(D_ts) over the active scores, ≥ 0.

    The square is free of bias of order 1/estimates. Its estimate may be negative; the measure is 0
    then, with an error that is not.

    Arguments are those of `attention_scale_mean`.
    """
    squared = _jackknifed(parts, lambda mean, square: square / mean**2 - 1)
    value = np.sqrt(np.maximum(squared.value, 0))
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.fmin(squared.error / (2 * value), np.sqrt(squared.error))
    return Estimate(value, error)


def attention_looks(spread: Float[Array, "heads samples 7"]) -> dict[str, Array]:
    """Return the measures of where the attention looks, by name, of heads: `Attention.spread`.

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


def _jackknifed(parts: Parts, of: Callable[[Array, Array], Array]) -> Estimate:
    """Return a function of the means of D_ts and D_ts², with its error over the estimates."""
    scale, n = parts["scale"], parts["scale"].shape[2]
    with np.errstate(divide="ignore", invalid="ignore"):
        means = [x.sum(1) / parts["count"].sum(1) for x in (scale, parts["square"])]
        whole = of(*(x.mean(1) for x in means))
        without = of(*((x.sum(1, keepdims=True) - x) / (n - 1) for x in means))
    every = Sample(np.full(len(whole), float(n)), np.ones((len(whole), n), bool))
    is_exact = (scale == scale[..., :1]).all((1, 2))
    return jackknifed(whole, without, is_exact.astype(np.float64), every)


def attention_reading(record: Float[Array, "samples heads numbers"]) -> AttentionReading:
    """Return the measures of one attention that are known, of all heads together and of each.

    Args:
        record: the sums of every sample and head, as `RECORD` describes them.
    """
    samples, found = len(record), dict[str, Estimate]()
    every = np.concatenate([record.sum(1, keepdims=True), record], 1).swapaxes(0, 1)
    ends = np.cumsum([*RECORD.values()])[:-1]
    parts = dict(zip(RECORD, np.split(every, ends, 2), strict=True))
    squares, spread = parts["G_G"][..., 0], parts["spread"]
    spread[0, :, :4] = spread[1:, :, :4].max(0)  # the largest of all heads, not their sum
    sample = Sample(np.full(len(squares), float(samples)), squares != 0)
    G_G = over_rows(squares, sample)
    for cosine, move in ((attention_gradient_cosine, "e"), (attention_cosine, "d")):
        if not np.isnan(parts[move]).all():
            of_move, own = (over_rows(x, sample) for x in np.moveaxis(parts[move], 2, 0))
            found[cosine.__name__] = cosine(of_move, own, G_G, sample)
    found |= {of.__name__: of(parts) for of in (attention_scale_mean, attention_scale_cv)}
    exact = np.zeros(len(spread))
    found |= {name: Estimate(x, exact) for name, x in attention_looks(spread).items()}
    values: dict[str, Any] = {name: float(estimate.value[0]) for name, estimate in found.items()}
    return AttentionReading(
        samples_seen=samples,
        standard_error={n: float(e.error[0]) for n, e in found.items() if e.error[0]},
        heads={n: tuple(e.value[1:].tolist()) for n, e in found.items()},
        heads_standard_error={
            n: tuple(e.error[1:].tolist()) for n, e in found.items() if e.error[1:].any()
        },
        **values,
    )
