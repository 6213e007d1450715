"""Readings from the numbers on the host, with notes for the reader."""

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from adiv_monitor.capture.selection import listed
from adiv_monitor.maths.attention import attention_reading
from adiv_monitor.maths.estimates import Mask
from adiv_monitor.maths.readings import Measured, measure
from adiv_monitor.maths.sums import Array, StepSums
from adiv_monitor.report import MEASURES, LayerReading, StepReport
from adiv_monitor.step.messages import RankContribution
from adiv_monitor.step.own_measures import values_of
from adiv_monitor.step.run_history import RunHistory

# Where the loss is unknown, a smaller factor on the gradient may be that of an AMP scaler.
_SMALLEST_CLIP = 1e-3
# The last readings of a layer that are kept: a spike may be found in the fourth step after it.
_KEPT = 6
_FASTER = 2.0  # times its usual update: the layers that a spike names
# Times the growth of the median layer's weights since the last report.
_GREW = 1.5
_ALONE = "Their readings are estimated from rows alone."
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
    "seems": "The gradient of {} seems to hold more than these rows; a later report will say",
}
_IDLE = (
    "All sampled rows of {} have a zero gradient, but other rows do not: measures that need rows "
    "are missing there. A larger max_rows samples some of the others."
)
_ZEROED = "The gradient of {} was set to zero after the backward pass."
_ROUNDED_AWAY = (
    "Most weights of {} that have a gradient did not change, because the step is below their last "
    "digit. If the optimizer steps copies of higher precision, then what reports say of the update "
    "and of its moves is true of the rounded weights alone."
)
_ROUNDED = (
    "The real change of {} is lost in rounding, or hardly larger: realised_cosine and "
    "single_layer_share are missing or too near to 0 there, and first_order_error is missing or "
    "too large."
)


@np.errstate(all="ignore")  # the readings report numbers that are not finite
def understand(part: RankContribution, history: RunHistory) -> StepReport:
    """Return the report of a step, with its readings and notes on them.

    Args:
        part: contribution of one rank, or merged contribution of all, in the units of the
            optimizer's gradient.
        history: run history.
    """
    sums, report = part.sums, part.report
    if part.refused:
        return replace(report, notes=(*report.notes, *part.refused))
    updated = report.optimizer != ""
    rates = np.array([report.learning_rate(path) for path in sums.paths])
    measured = measure(sums, updated=updated, rates=rates)
    paths, reasons = sums.paths, sums.layers["reason"].tolist()
    if "more" in reasons:  # a forgotten `zero_grad()` would show in all layers
        reasons = ["more" if reason == "earlier" else reason for reason in reasons]
    broken = _non_finite(sums)
    norms = _norms(sums, report, updated=updated)
    after, before = norms["gradient_norm"], norms["unclipped_gradient_norm"]
    if after is not None and before is not None:
        history.clipped[bool(after < (1 - sums.tolerance.max()) * before)] += 1
    clipped = history.clipped[True] / history.clipped.total() if history.clipped else None
    verbs = {what: "are" if what.endswith("s") else "is" for what in broken}
    told = [
        *((f"The {what} of {{}} {verbs[what]} not finite.", of) for what, of in broken.items()),
        *((f"{why}. {_ALONE}", np.array(reasons, "<U8") == of) for of, why in _FROM_ROWS.items()),
        (_IDLE, _is_idle(sums, measured)),
        (_ZEROED, sums.was_zeroed),
        (_ROUNDED, _is_rounded(sums)),
        (
            _ROUNDED_AWAY,
            (sums.layers["w_w"] > 0) & (2 * sums.layers["changed"] < sums.layers["reached"]),
        ),
    ]
    notes = [*report.notes]
    for sentence, which in told:
        if which.any():
            notes.append(sentence.format(listed([paths[i] for i in np.flatnonzero(which)])))
    # The sum of gradients that were zeroed one by one, as of single samples, is none of the last.
    zeroed = 0 if "more" in reasons else report.zeroed_passes
    layers = _readings(sums, measured, broken)
    for path, reading in layers.items():
        history.readings.setdefault(path, deque(maxlen=_KEPT)).append((report.step, reading))
    return replace(
        report,
        layers=layers,
        spikes=tuple(
            replace(s, layers=_moved_most(s.step, history, layers)) for s in report.spikes
        ),
        notes=(*notes, *_unattended(part.no_attention)),
        attention={path: attention_reading(of) for path, of in part.attention.items()},
        zeroed_passes=zeroed,
        rescaled=tuple(p for p, of in zip(paths, reasons, strict=True) if of == "apart"),
        **norms,
        clipped_share=clipped,
    )


def _moved_most(
    step: int, history: RunHistory, now: Mapping[str, LayerReading]
) -> dict[str, float]:
    """Return how many times as far as before a step layers move, if more than twice.

    The worst come first, before them layers whose weights grew far more than those of the others:
    they were changed in between, whatever their updates.
    """

    def factors(measure: str) -> dict[str, float]:
        pairs = {p: (getattr(now[p], measure), getattr(before[p], measure)) for p in both}
        return {p: a / b for p, (a, b) in pairs.items() if a is not None and b and a / b >= 0}

    every = history.readings.items()
    before = {path: x for path, several in every for at, x in several if at < step}
    both = [path for path in now if path in before]
    updates, weights = factors("update_norm"), factors("weight_norm")
    usual = _GREW * median(weights.values() or [1.0])
    grown = {path: factor for path, factor in weights.items() if factor > usual}
    order = sorted(grown, key=lambda path: -grown[path])
    faster = {path for path, factor in updates.items() if factor > _FASTER}
    order += sorted(faster - grown.keys(), key=lambda path: -updates[path])
    return {path: max(updates.get(path, 0.0), grown.get(path, 0.0)) for path in order}


def _norms(sums: StepSums, report: StepReport, *, updated: bool) -> dict[str, Any]:
    """Return norms over the parameters of all layers, those of several layers counted once."""
    layers, gamma = sums.layers, sums.layers["once_gamma"]
    factor = np.where(gamma > 0, layers["gradient_factor"], np.inf)
    factor *= _loss_scale(report.loss_gradients, factor.min(initial=np.inf))
    squares = {
        "gradient_norm": gamma,
        "unclipped_gradient_norm": gamma / factor**2,
        "update_norm": layers["once_w"] if updated else np.full(len(layers), np.nan),
    }
    found = {name: float(np.sqrt(of.sum())) for name, of in squares.items()}
    return {name: norm if sums.paths and norm == norm else None for name, norm in found.items()}


def _loss_scale(gradients: Sequence[float], factor: float) -> float:
    """Return the number by which an AMP scaler multiplied the loss, given that on the gradient.

    Where the loss of each of several passes is divided by their number, it is the sum.
    """
    if not gradients:
        return math.nan if factor < _SMALLEST_CLIP else 1.0
    scales = (sum(gradients), max(gradients)) if max(gradients) > 1 else ()
    return next((scale for scale in scales if scale * factor < 1.01), 1.0)


def _is_idle(sums: StepSums, found: Measured) -> Mask:
    """Return whether all sampled rows have a zero gradient, but others do not."""
    some = (sums.active == 0) & (sums.seen < sums.layers["total"])
    share = found.values["idle_share"][0] if sums.paths else np.zeros(0)
    is_idle: Mask = some & (share < 1) & ~np.isnan(sums.layers["gradient_factor"])
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


def _non_finite(sums: StepSums) -> dict[str, Mask]:
    """Return for each kind of tensor in which layers it holds NaN, inf, or overflows.

    A sum of squares is finite only if each of its terms is. The features, the gradient and the
    parameters' update are summed over all rows or entries; the outputs over the sampled rows.
    """
    of, rows, groups = sums.layers, sums.rows, sums.layers["groups"][sums.rows["layer"]]

    def broken(values: Array) -> Mask:
        return np.logical_not(np.isfinite(values))

    several = broken(rows["mean"]) | broken(rows["off"])
    of_scales = (broken(rows["scale"]) & (groups > 0)) | (several & (groups > 1))
    of_all = broken(of["gamma_gamma"]) | (broken(of["G_G"]) & ~np.isnan(of["active"]))
    return {
        "inputs": (sums.total(of_scales) > 0) | (broken(of["scale_sum"]) & of["knows_scales"]),
        "outputs": sums.total(broken(rows["z_z"])) > 0,
        "gradient": (sums.total(broken(rows["G_G"])) > 0) | of_all,
        "update": broken(of["w_w"]) | broken(of["a_a"]),
    }


def _readings(
    sums: StepSums, found: Measured, broken: Mapping[str, Mask]
) -> dict[str, LayerReading]:
    """Return the readings of all layers, with the measures of the user's own, by path."""
    if not sums.paths:
        return {}
    names = [name for name in found.values if name in MEASURES]
    numbers = np.array([found.values[name] for name in names]).transpose(2, 1, 0).tolist()
    idle, readings = sums.seen - sums.active, {}
    reasons, others = (sums.layers[name].tolist() for name in ("reason", "other_share"))
    for i, (path, about) in enumerate(zip(sums.paths, sums.about, strict=True)):
        values, errors, known = (dict(zip(names, of, strict=True)) for of in numbers[i])
        own = {n: v for n, v in values.items() if known[n] and n not in about.undefined}
        readings[path] = LayerReading(
            kind=about.kind,
            rows_seen=int(sums.seen[i]),
            rows_total=int(sums.layers["total"][i]),
            rows_without_gradient=int(idle[i]),
            gradient_factor=float(sums.layers["gradient_factor"][i]),
            features=about.features,
            non_finite=tuple(what for what, which in broken.items() if which[i]),
            earlier_share=others[i] if reasons[i] == "earlier" else 0.0,
            foreign_share=others[i] if reasons[i] == "more" else 0.0,
            module=about.module,
            standard_error={n: errors[n] for n in own if errors[n]},
            own=values_of(sums, i) if about.own else {},
            **own,
        )
    return readings


def _unattended(refused: Mapping[str, str]) -> list[str]:
    """Return notes on attentions without a record, from the reason why, by path."""
    paths = defaultdict(list)
    for path, reason in refused.items():
        paths[reason].append(path or "the model itself")
    return [f"Attention of {listed(of)} is not measured: {why}." for why, of in paths.items()]
