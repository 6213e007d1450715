"""The attention measures, from sums over the scores of every sample and head (spec, section 5).

    G = ∂L/∂Y of the scores Y_ts = q_t·k_s     d = −ΔY of the step     e = ΔY of a gradient, M G
    D_ts = ‖∂Y_ts/∂Θ‖²                          the attention scale, the diagonal of M

What a row is to a layer, all scores of one sample are here; each head is looked at like a layer of
its own, and all of them together like one more. Samples are a choice, so that every measure has a
standard error. Only active scores count, g ≠ 0: what a mask hides is idle. Float64, on the host.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from adiv_monitor.maths import measures
from adiv_monitor.maths.estimates import Estimate, PerLayer, PerRow, Sample, Sum, over_rows
from adiv_monitor.report import AttentionReading

PerHead = Float[np.ndarray, "samples heads"]


def attention_cosine(d_G: Sum, d_d: Sum, G_G: Sum, sample: Sample) -> Estimate:
    """cos(−vec ΔY, vec G), in [−1, 1]; 1: the step moved the scores exactly downhill."""
    return measures.update_cosine(d_G, d_d, G_G, sample)


def attention_gradient_cosine(e_G: Sum, e_e: Sum, G_G: Sum, sample: Sample) -> Estimate:
    """`attention_cosine` of a plain gradient step."""
    return measures.gradient_cosine(e_G, e_e, G_G, sample)


def attention_scale_mean(scales: "Scales") -> Estimate:
    """Mean of D_ts over the active scores, ≥ 0; NaN where there are none."""
    with np.errstate(divide="ignore", invalid="ignore"):
        influence = (scales.sums - scales.shift[:, None] * scales.count) / scales.per_sample
    return Estimate(scales.pivot + scales.shift, _error(influence, scales.rest))


def attention_scale_cv(scales: "Scales") -> Estimate:
    """std(D_ts) / mean(D_ts) over the active scores, ≥ 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = scales.pivot + scales.shift
        value = np.sqrt(scales.variance) / mean
        # d log cv = dv/2v − dm/m, of every sample
        of_mean = (scales.sums - scales.shift[:, None] * scales.count) / mean[:, None]
        deviation = (
            scales.squares
            - 2 * scales.shift[:, None] * scales.sums
            + (scales.shift**2 - scales.variance)[:, None] * scales.count
        )
        spread = scales.variance[:, None]
        of_variance = np.where(spread > 0, deviation / spread, 0.0)
        influence = value[:, None] * (of_variance / 2 - of_mean) / scales.per_sample
    return Estimate(value, _error(influence, scales.rest))


@dataclass(frozen=True)
class Scales:
    """The attention scales of some scores: of every head (or all), sample by sample.

    Attributes:
        pivot: p, a number near them.
        count: how many of the scores looked at are active.
        sums: Σ (D_ts − p) over those.
        squares: Σ (D_ts − p)² over those.
        rest: share of all scores that were not looked at.
    """

    pivot: float
    count: PerRow
    sums: PerRow
    squares: PerRow
    rest: float

    @property
    def per_sample(self) -> Float[np.ndarray, "layers 1"]:
        """Active scores of a sample, on average."""
        found: np.ndarray = self.count.mean(1, keepdims=True)
        return found

    @property
    def shift(self) -> PerLayer:
        """The mean of D_ts − p."""
        with np.errstate(invalid="ignore"):
            found: PerLayer = self.sums.sum(1) / self.count.sum(1)
        return found

    @property
    def variance(self) -> PerLayer:
        """Of D_ts."""
        with np.errstate(invalid="ignore"):
            second = self.squares.sum(1) / self.count.sum(1)
            found: PerLayer = np.maximum(second - self.shift**2, 0.0)
        return found


def _error(influence: PerRow, rest: float) -> PerLayer:
    """Of a ratio of means over samples; 0 where the rest of the scores is none."""
    samples = influence.shape[1]
    if not rest:
        return np.zeros(len(influence))
    with np.errstate(divide="ignore", invalid="ignore"):
        squares = (influence**2).sum(1)
        error: PerLayer = np.sqrt(rest * squares / np.float64(samples * (samples - 1)))
    return error


def attention_reading(sums: Mapping[str, PerHead], samples_total: int) -> AttentionReading:
    """The measures of one attention.

    Args:
        sums: by name, of every sample looked at and every head: `G_G` = ‖g‖², `e_G`, `e_e`, with an
            optimizer `d_G` and `d_d`, and where the scale could be told `scale_count`, `scale_sum`
            = Σ (D − p), `scale_square` = Σ (D − p)², `scale_pivot` = p, and `scale_share`, the
            share of these samples' scores that they are of.
        samples_total: how many samples there are to choose from.
    """
    # Layers of the estimates: all heads together, then one after the other.
    rows = {
        name: np.concatenate([part.sum(1, keepdims=True), part], 1).T
        for name, part in sums.items()
        if part.ndim == 2
    }
    samples = len(sums["G_G"])
    sample = Sample(np.full(len(rows["G_G"]), float(samples_total)), rows["G_G"] != 0)
    total = {name: over_rows(part, sample) for name, part in rows.items()}
    found = {
        "attention_gradient_cosine": attention_gradient_cosine(
            total["e_G"], total["e_e"], total["G_G"], sample
        )
    }
    if "d_d" in total:
        found["attention_cosine"] = attention_cosine(
            total["d_G"], total["d_d"], total["G_G"], sample
        )
    if "scale_pivot" in sums:
        scales = Scales(
            pivot=float(sums["scale_pivot"]),
            count=rows["scale_count"],
            sums=rows["scale_sum"],
            squares=rows["scale_square"],
            rest=1 - float(sums["scale_share"]) * samples / samples_total,
        )
        found["attention_scale_mean"] = attention_scale_mean(scales)
        found["attention_scale_cv"] = attention_scale_cv(scales)
    values: dict[str, Any] = {name: float(estimate.value[0]) for name, estimate in found.items()}
    return AttentionReading(
        samples_seen=samples,
        samples_total=samples_total,
        standard_error={n: float(e.error[0]) for n, e in found.items() if e.error[0]},
        heads={n: tuple(e.value[1:].tolist()) for n, e in found.items()},
        heads_standard_error={
            n: tuple(e.error[1:].tolist()) for n, e in found.items() if e.error[1:].any()
        },
        **values,
    )
