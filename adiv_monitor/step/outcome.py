"""Readings from the numbers on the host, with notes for the reader."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from adiv_monitor.capture.selection import listed
from adiv_monitor.maths.estimates import Mask
from adiv_monitor.maths.readings import Measured, measure
from adiv_monitor.maths.sums import Array, StepSums
from adiv_monitor.report import MEASURES, LayerReading, StepReport
from adiv_monitor.step import finite
from adiv_monitor.step.attention_outcome import attention_outcome
from adiv_monitor.step.gradient_check import earlier_share, foreign_share, settled
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
_GRADIENT_LOST = (
    "The optimizer changed .grad during its step, unlike before: parameter_cosine, applied_cosine "
    "and descent are missing for {}; from the next report on they are there."
)
_UPDATE_LOST = (
    "The weights changed after the optimizer's step, unlike before: projection_cosine and "
    "applied_cosine are missing for {}; from the next report on they are there."
)
_IDLE = (
    "All sampled rows of {} have a zero gradient, but other rows do not: measures that need rows "
    "are missing there. A larger max_rows samples some of the others."
)
_ZEROED = "The gradient of {} was set to zero after the backward pass."
_ROUNDED = (
    "The real change of {} is lost in rounding, or hardly larger: realised_cosine and "
    "single_layer_share are missing or too near to 0 there, and first_order_error is missing or "
    "too large."
)


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
    turn = part.report.turn
    report = replace(part.report, turn=turn and replace(turn, elements=part.elements))
    if part.refused:
        return replace(report, notes=(*report.notes, *part.refused))
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
    readings = _readings(sums, measured, facts, reasons)
    distrusted = (p for p, of in zip(sums.paths, reasons, strict=True) if of not in ("", "seems"))
    history.distrusted.update(distrusted)
    if not part.is_settled:  # ranks would not agree on what they check
        history.checks(sums, reasons, doubted=bool(measured.suspected.any()))
    lost = {}
    for i, error in measured.lost.items():
        fail(f"layer '{sums.paths[i]}'", error)
        lost[sums.paths[i]] = f"measuring it failed: {type(error).__name__}: {error}"
    attention, of_attention = attention_outcome(part.attention, part.no_attention)
    paths = sums.paths
    update_lost = facts.weights_changed and not facts.has_applied
    notes = [*report.notes, *finite.notes(readings)]
    for reason, sentence in _FROM_ROWS.items():
        sentence += ". Their readings are estimated from rows alone."
        notes += _told(sentence, paths, [of == reason for of in reasons])
    notes += _told(_GRADIENT_LOST, paths, [facts.gradient_lost] * len(paths))
    notes += _told(_UPDATE_LOST, paths, [update_lost] * len(paths))
    notes += _told(_IDLE, paths, _is_idle(sums, measured))
    notes += _told(_ZEROED, paths, sums.was_zeroed)
    notes += _told(_ROUNDED, paths, _is_rounded(sums))
    # The sum of gradients that were zeroed one by one, as of single samples, is none of the last.
    zeroed = 0 if "more" in reasons else report.zeroed_passes
    return replace(
        report,
        layers=readings,
        unsupported={**report.unsupported, **lost},
        notes=(*notes, *of_attention),
        attention=attention,
        zeroed_passes=zeroed,
        rescaled=tuple(p for p, of in zip(paths, reasons, strict=True) if of == "apart"),
    )


def _told(sentence: str, paths: Sequence[str], which: Iterable[bool]) -> list[str]:
    """Return a note on some of the layers, if there are any."""
    named = [path for path, is_so in zip(paths, which, strict=True) if is_so]
    return [sentence.format(listed(named))] if named else []


def _is_idle(sums: StepSums, found: Measured) -> Mask:
    """Return whether all sampled rows have a zero gradient, but others do not."""
    some = (found.idle_seen == sums.seen) & (sums.seen < sums.layers["total"])
    share = found.values["idle_share"][0] if sums.paths else np.zeros(0)
    is_idle: Mask = some & (share < 1) & ~np.isnan(_factors(sums))
    return is_idle


def _is_rounded(sums: StepSums) -> Mask:
    """Return whether the realised move is not far above its rounding."""
    moves, layers = sums.moves, sums.layers
    r_r, z_z, d_d = (
        np.bincount(moves["layer"], moves[name], len(layers)) for name in ("r_r", "z_z", "d_d")
    )
    # The rounding error of a difference of two such numbers is 0.3 of their last digit.
    found: Mask = (layers["moved"] > 0) & (d_d != 0) & (r_r < layers["precision"] ** 2 * z_z)
    return found


def _factors(sums: StepSums) -> Array:
    """Return the factors of the gradients, without the averaging by the backward passes."""
    layers = sums.layers
    return np.where(layers["gamma_gamma"] > 0, layers["factor"] / layers["averaged"], np.nan)


def _readings(
    sums: StepSums, found: Measured, facts: Facts, reasons: Sequence[str]
) -> dict[str, LayerReading]:
    """Return the readings of all layers."""
    if not sums.paths:
        return {}
    if facts.gradient_lost:  # γ as it was read is not the gradient that the optimizer saw
        for name in ("parameter_cosine", "applied_cosine", "descent"):
            found.values.pop(name, None)
    names = [name for name in found.values if name in MEASURES]
    numbers = np.array([found.values[name] for name in names]).transpose(2, 1, 0).tolist()
    levels = {name: of.tolist() for name, of in found.quantiles.items()}
    factors, readings = _factors(sums), {}
    for i, (path, about) in enumerate(zip(sums.paths, sums.about, strict=True)):
        if i in found.lost:
            continue
        values, errors, known = (dict(zip(names, of, strict=True)) for of in numbers[i])
        own = {n: v for n, v in values.items() if known[n] and n not in about.undefined}
        spread = {n: tuple(of[i]) for n, of in levels.items() if known[f"{n}_p50"]}
        readings[path] = LayerReading(
            kind=about.kind,
            rows_seen=int(sums.seen[i]),
            rows_total=int(sums.layers["total"][i]),
            rows_without_gradient=int(found.idle_seen[i]),
            gradient_factor=float(factors[i]),
            features=about.features,
            non_finite=() if found.is_finite[i] else finite.non_finite(sums, i),
            earlier_share=earlier_share(sums, i),
            foreign_share=foreign_share(sums, i) if reasons[i] == "more" else 0.0,
            module=about.module,
            standard_error={n: errors[n] for n in own if errors[n]},
            scale_quantiles=spread.get("scale", ()),
            row_cosine_quantiles=spread.get("row_cosine", ()),
            **own,
        )
    return readings
