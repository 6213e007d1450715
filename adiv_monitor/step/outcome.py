"""Readings from the numbers on the host, with notes for the reader."""

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from adiv_monitor.capture.selection import listed
from adiv_monitor.maths.readings import Judged, LayerMeasures, measure
from adiv_monitor.maths.sums import (
    REALISED,
    Array,
    LayerSums,
    Vector,
    column_of,
    factor_of,
)
from adiv_monitor.report import MEASURES, LayerReading, StepReport
from adiv_monitor.step import finite
from adiv_monitor.step.attention_outcome import attention_outcome
from adiv_monitor.step.gradient_check import earlier_share, settled, was_zeroed
from adiv_monitor.step.rank_contribution import Facts, RankContribution
from adiv_monitor.step.run_history import RunHistory

# Reasons that say that γ is not the gradient of the loss; with the others it is, or may be.
_NOT_THE_LOSSES = ("weighed", "earlier", "apart")
# Reasons why the parameters' sums do not apply to the rows, so that all is estimated from rows.
_FROM_ROWS = {
    "ranks": "Rows of {} are missing from other ranks",
    "shared": "The weights of {} are used by other layers too",
    "apart": (
        "The gradients of the parameters of {} were multiplied by different factors (each clipped "
        "by itself?)"
    ),
    "earlier": (
        "The gradient of {} holds more than these rows: it was not zero before their backward pass "
        "(was `zero_grad()` forgotten, or did another loss, such as a penalty, go backward first?)"
    ),
    "more": (
        "The gradient of {} holds more than these rows, or something else (a penalty in the loss, "
        "a use outside the layer's forward pass, the gradient of an earlier step that "
        "`zero_grad()` did not clear, an edit?); `descent` counts the whole gradient"
    ),
    "seems": "The gradient of {} seems to hold more than these rows; the next report will say",
}


@np.errstate(all="ignore")  # the readings report numbers that are not finite
def understand(part: RankContribution, history: RunHistory) -> StepReport:
    """Return the report of a step, with its readings and notes on them.

    Args:
        part: contribution of one rank, or merged contribution of all.
        history: run history; gradients that hold more than their rows are recorded there.
    """
    if part.refused:
        return replace(part.report, notes=(*part.report.notes, *part.refused))
    facts = part.facts
    layers = part.layers if part.is_settled else settled(part.layers)
    judged = {path: _judged(layer, facts) for path, layer in layers.items()}
    measured = measure(judged)
    kept = {path: of.layer for path, of in judged.items()}
    reasons = {path: of.layer.evidence.reason for path, of in judged.items()}
    reasons |= {path: "more" for path, found in measured.items() if found.holds_more}
    if "more" in reasons.values():  # a forgotten `zero_grad()` would show in all layers
        reasons = {path: "more" if of == "earlier" else of for path, of in reasons.items()}
    readings = {p: _reading(layer, measured[p], facts) for p, layer in kept.items()}
    history.distrusted |= {path for path, reason in reasons.items() if reason not in ("", "seems")}
    if not part.is_settled:  # ranks would not agree on what they check
        doubted = any(found.suspected for found in measured.values())
        history.checks(layers, reasons, doubted=doubted)
    attention, of_attention = attention_outcome(part.attention, part.no_attention)
    notes = (
        *part.report.notes,
        *finite.notes(readings),
        *_from_rows(reasons),
        *_unforeseen(facts, list(kept)),
        *_without_active(readings),
        *_without_gradient(kept),
        *_rounded(kept),
        *of_attention,
    )
    # The sum of gradients that were zeroed one by one, as of single samples, is none of the last.
    zeroed = 0 if "more" in reasons.values() else part.report.zeroed_passes
    return replace(
        part.report, layers=readings, notes=notes, attention=attention, zeroed_passes=zeroed
    )


def _judged(layer: LayerSums[Array], facts: Facts) -> Judged:
    """Return a layer with what its parameters' products tell about its rows."""
    seen, dots = layer.evidence, layer.dots
    own_gamma = own_w = math.nan
    if seen.reason != "shared":
        own_gamma, own_w = dots.gamma_gamma, math.nan if dots.w_gamma is None else dots.w_gamma
    if seen.reason in _NOT_THE_LOSSES:
        own_w = math.nan  # −⟨γ, ΔΘ⟩ is not the descent of the loss, which only the rows know
    exact = not seen.reason and not facts.gradient_lost
    is_checked = seen.equations is not None
    return Judged(layer, exact, is_checked, own_gamma, own_w)


def _unforeseen(facts: Facts, paths: list[str]) -> list[str]:
    """Return notes on measures that are missing because this step was not like earlier ones."""
    notes = []
    if facts.gradient_lost:
        notes.append(
            "The optimizer changed .grad during its step, unlike before: parameter_cosine, "
            f"applied_cosine and descent are missing for {listed(paths)}; from the next report on "
            "they are there."
        )
    if facts.weights_changed and not facts.has_applied:
        notes.append(
            "The weights changed after the optimizer's step, unlike before: projection_cosine "
            f"and applied_cosine are missing for {listed(paths)}; from the next report on "
            "they are there."
        )
    return notes


def _from_rows(reasons: Mapping[str, str]) -> list[str]:
    """Return one sentence for each reason why readings use rows alone."""
    notes = []
    for reason, sentence in _FROM_ROWS.items():
        paths = [path for path, found in reasons.items() if found == reason]
        if paths:
            notes.append(
                sentence.format(listed(paths)) + ". Their readings are estimated from rows alone."
            )
    return notes


def _without_active(readings: Mapping[str, LayerReading]) -> list[str]:
    paths = [
        path
        for path, reading in readings.items()
        if reading.rows_without_gradient == reading.rows_seen < reading.rows_total
        if reading.idle_share is not None and reading.idle_share < 1
        if not math.isnan(reading.gradient_factor)
    ]
    if not paths:
        return []
    return [
        f"All sampled rows of {listed(paths)} have a zero gradient, but other rows do not: "
        "measures that need rows are missing there. A larger max_rows samples some of the others."
    ]


def _without_gradient(layers: Mapping[str, LayerSums[Array]]) -> list[str]:
    paths = [path for path, layer in layers.items() if was_zeroed(layer)]
    if not paths:
        return []
    return [f"The gradient of {listed(paths)} was set to zero after the backward pass."]


def _rounded(layers: Mapping[str, LayerSums[Array]]) -> list[str]:
    paths = []
    for path, layer in layers.items():
        if layer.realised is not None:
            squares = [
                layer.realised.products[:, column_of(REALISED, v, v)].sum()
                for v in (Vector.MOVED, Vector.Z, Vector.D)
            ]
            # The rounding error of a difference of two such numbers is 0.3 of their last digit.
            if squares[2] and squares[0] < layer.evidence.precision**2 * squares[1]:
                paths.append(path)
    if not paths:
        return []
    return [
        f"The real change of {listed(paths)} is lost in rounding, or hardly larger: "
        "realised_cosine and single_layer_share are missing or too near to 0 there, and "
        "first_order_error is missing or too large."
    ]


def _reading(layer: LayerSums[Array], found: LayerMeasures, facts: Facts) -> LayerReading:
    about, dots = layer.about, layer.dots
    values = dict(found.values)
    if facts.gradient_lost:  # γ as it was read is not the gradient that the optimizer saw
        for name in ("parameter_cosine", "applied_cosine", "descent"):
            values.pop(name, None)
    elif facts.updated and not facts.weights_changed and not facts.has_applied:  # a = u
        values["projection_cosine"] = 1.0 if (dots.w_w or 0.0) > 0 else math.nan
        values["applied_cosine"] = values["parameter_cosine"]
    for name in about.undefined:
        values.pop(name, None)
    # The factor must not include the averaging by the backward passes themselves.
    factor = factor_of(layer) / layer.evidence.averaged
    return LayerReading(
        kind=about.kind,
        rows_seen=layer.sampled.seen,
        rows_total=layer.sampled.total,
        rows_without_gradient=found.idle_seen,
        gradient_factor=factor if dots.gamma_gamma > 0 else math.nan,
        features=about.features,
        non_finite=() if found.is_finite else finite.non_finite(layer),
        earlier_share=earlier_share(layer.evidence),
        module=about.module,
        standard_error={name: error for name, error in found.errors.items() if name in values},
        scale_quantiles=found.quantiles.get("scale", ()),
        row_cosine_quantiles=found.quantiles.get("row_cosine", ()),
        **{name: value for name, value in values.items() if name in MEASURES},
    )
