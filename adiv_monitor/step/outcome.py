"""Readings from the numbers on the host, with notes for the reader."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from adiv_monitor.capture.selection import listed
from adiv_monitor.maths.estimates import Estimate
from adiv_monitor.maths.readings import Measured, measure
from adiv_monitor.maths.sums import StepSums
from adiv_monitor.report import MEASURES, LayerReading, StepReport
from adiv_monitor.step import finite
from adiv_monitor.step.attention_outcome import attention_outcome
from adiv_monitor.step.gradient_check import earlier_share, settled
from adiv_monitor.step.rank_contribution import Facts, RankContribution
from adiv_monitor.step.run_history import RunHistory

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
def understand(
    part: RankContribution, history: RunHistory, fail: Callable[[str, Exception], None]
) -> StepReport:
    """Return the report of a step, with its readings and notes on them.

    Args:
        part: contribution of one rank, or merged contribution of all.
        history: run history; gradients that hold more than their rows are recorded there.
        fail: called with each layer that can't be measured, and the exception.
    """
    if part.refused:
        return replace(part.report, notes=(*part.report.notes, *part.refused))
    facts, sums = part.facts, part.sums if part.is_settled else settled(part.sums)
    measured = measure(
        sums,
        updated=facts.updated,
        has_applied=facts.has_applied,
        gradient_lost=facts.gradient_lost,
    )
    reasons = [
        "more" if holds_more else str(reason)
        for holds_more, reason in zip(measured.holds_more, sums.layers["reason"], strict=True)
    ]
    if "more" in reasons:  # a forgotten `zero_grad()` would show in all layers
        reasons = ["more" if reason == "earlier" else reason for reason in reasons]
    readings = _readings(sums, measured, facts)
    distrusted = (p for p, of in zip(sums.paths, reasons, strict=True) if of not in ("", "seems"))
    history.distrusted.update(distrusted)
    if not part.is_settled:  # ranks would not agree on what they check
        history.checks(sums, reasons, doubted=bool(measured.suspected.any()))
    lost = {}
    for i, error in measured.lost.items():
        fail(f"layer '{sums.paths[i]}'", error)
        lost[sums.paths[i]] = f"measuring it failed: {type(error).__name__}: {error}"
    attention, of_attention = attention_outcome(part.attention, part.no_attention)
    notes = (
        *part.report.notes,
        *finite.notes(readings),
        *_from_rows(sums.paths, reasons),
        *_unforeseen(facts, sums.paths),
        *_without_active(readings),
        *_without_gradient(sums),
        *_rounded(sums),
        *of_attention,
    )
    # The sum of gradients that were zeroed one by one, as of single samples, is none of the last.
    zeroed = 0 if "more" in reasons else part.report.zeroed_passes
    return replace(
        part.report,
        layers=readings,
        unsupported={**part.report.unsupported, **lost},
        notes=notes,
        attention=attention,
        zeroed_passes=zeroed,
    )


def _unforeseen(facts: Facts, paths: Sequence[str]) -> list[str]:
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


def _from_rows(every: Sequence[str], reasons: Sequence[str]) -> list[str]:
    """Return one sentence for each reason why readings use rows alone."""
    notes = []
    for reason, sentence in _FROM_ROWS.items():
        paths = [path for path, found in zip(every, reasons, strict=True) if found == reason]
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


def _without_gradient(sums: StepSums) -> list[str]:
    if not sums.was_zeroed.any():
        return []
    paths = listed([sums.paths[i] for i in np.flatnonzero(sums.was_zeroed)])
    return [f"The gradient of {paths} was set to zero after the backward pass."]


def _rounded(sums: StepSums) -> list[str]:
    moves, layers = sums.moves, sums.layers
    r_r, z_z, d_d = (
        np.bincount(moves["layer"], moves[name], len(layers)) for name in ("r_r", "z_z", "d_d")
    )
    # The rounding error of a difference of two such numbers is 0.3 of their last digit.
    lost = (layers["moved"] > 0) & (d_d != 0) & (r_r < layers["precision"] ** 2 * z_z)
    if not lost.any():
        return []
    return [
        f"The real change of {listed([sums.paths[i] for i in np.flatnonzero(lost)])} is lost in "
        "rounding, or hardly larger: realised_cosine and single_layer_share are missing or too "
        "near to 0 there, and first_order_error is missing or too large."
    ]


def _readings(sums: StepSums, found: Measured, facts: Facts) -> dict[str, LayerReading]:
    """Return the readings of all layers."""
    if not sums.paths:
        return {}
    if facts.gradient_lost:  # γ as it was read is not the gradient that the optimizer saw
        for name in ("parameter_cosine", "applied_cosine", "descent"):
            found.values.pop(name, None)
    elif facts.updated and not facts.weights_changed and not facts.has_applied:  # a = u
        one = np.where(sums.layers["w_w"] > 0, 1.0, np.nan)
        every = np.arange(found.count)
        found.put(every, {"projection_cosine": Estimate(one, np.zeros_like(one))})
        found.values["applied_cosine"] = found.values["parameter_cosine"]
    names = [name for name in found.values if name in MEASURES]
    numbers = np.array([found.values[name] for name in names]).transpose(2, 1, 0).tolist()
    levels = {name: of.tolist() for name, of in found.quantiles.items()}
    layers = sums.layers
    # The factor must not include the averaging by the backward passes themselves.
    factor = np.where(layers["gamma_gamma"] > 0, layers["factor"] / layers["averaged"], np.nan)
    readings = {}
    for i, (path, about) in enumerate(zip(sums.paths, sums.about, strict=True)):
        if i in found.lost:
            continue
        values, errors, known = (dict(zip(names, of, strict=True)) for of in numbers[i])
        own = {n: v for n, v in values.items() if known[n] and n not in about.undefined}
        spread = {n: tuple(of[i]) for n, of in levels.items() if known[f"{n}_p50"]}
        readings[path] = LayerReading(
            kind=about.kind,
            rows_seen=int(sums.seen[i]),
            rows_total=int(layers["total"][i]),
            rows_without_gradient=int(found.idle_seen[i]),
            gradient_factor=float(factor[i]),
            features=about.features,
            non_finite=() if found.is_finite[i] else finite.non_finite(sums, i),
            earlier_share=earlier_share(sums, i),
            module=about.module,
            standard_error={n: errors[n] for n in own if errors[n]},
            **{f"{name}_quantiles": of for name, of in spread.items()},
            **own,
        )
    return readings
