"""Findings for readings that pictures draw outside the healthy range, so that both agree."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

from adiv_monitor.diagnosis.course import fell, is_long_enough, is_measure
from adiv_monitor.diagnosis.finding import Advice, Evidence, Finding, Strength
from adiv_monitor.diagnosis.health import GRADIENT, HEALTH, value_of
from adiv_monitor.diagnosis.phases import (
    LOOK_AGAIN,
    RISES_YET,
    at_peak,
    decayed_since,
    learning_rate,
    still_rises,
)
from adiv_monitor.diagnosis.readings import Typical, heard, maps, of_same_rows, readings, these
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.diagnosis.rules.remedies import usual_factor

# Findings that already report a measure; a layer that one of them names is not reported again.
SPEAK_OF: Mapping[str, tuple[str, ...]] = {
    "update_ratio": ("uneven-rates", "rate-too-high", "rate-too-low", "dead-units", "vanishing"),
    GRADIENT: ("vanishing", "exploding", "dead-units"),
    "idle_share": ("dead-units",),
    "scale_cv": ("row-spread",),
    "projection_cosine": ("projection-fights",),
}
OF_MOVES = frozenset(SPEAK_OF["update_ratio"])
# Measures that indicate faults. Zero-gradient rows may be padding, and corrected layers a choice.
_TELL_FAULTS = ("update_ratio", GRADIENT, "projection_cosine")
_SEVERAL = 3  # fewest reports that show what is typical
_WORDS: Mapping[tuple[str, bool], str] = {  # (measure, whether it is too large) → words
    ("update_ratio", True): "in a typical step, the activations of {} move by more than {} "
    "times their length",
    (GRADIENT, False): "the gradient at {} is less than {} times that at the last layer",
    (GRADIENT, True): "the gradient at {} is more than {} times that at the last layer",
    ("idle_share", True): "the gradient is zero for a share of more than {1} of the rows of {0} "
    "(padding, masked tokens, dead units)",
    ("scale_cv", True): "the row scales of {} have a standard deviation of more than {} times "
    "their mean",
    ("projection_cosine", False): "the change of the weights of {} has a cosine below {} with the "
    "optimizer's update",
}


def outside_healthy(record: Record, found: Sequence[Finding]) -> Iterator[Finding]:
    """Find layers whose typical readings are outside of the limits, unless others report them.

    If learning rates were tried, the loss itself has decided, and nothing is reported.

    Args:
        record: The record of a run.
        found: The findings of the other rules.
    """
    if record.rates:
        return
    spoken_for = {
        measure: {layer for f in found if f.name in names for layer in f.layers or ("*",)}
        for measure, names in SPEAK_OF.items()
    }
    outside = {
        (measure, is_high): {p: t for p, t in layers.items() if p not in spoken_for[measure]}
        for measure, health in HEALTH.items()
        if health.knots and "*" not in spoken_for.get(measure, ())
        for is_high, layers in zip((False, True), _outside(record, measure), strict=True)
    }
    if outside.pop(("update_ratio", False), None) is not None:
        yield from _of_moves(record, spoken_for["update_ratio"])
    # A value that can't be, such as a cosine above 1, has no words.
    if said := {place: seen for place, seen in outside.items() if seen and place in _WORDS}:
        yield _outside_healthy(record, said)
    yield from _decayed(record)


def _of_moves(record: Record, spoken_for: Collection[str]) -> Iterator[Finding]:
    """Find layers that hardly move, typically or lately, grouped by the possible reason."""
    low, limit = HEALTH["update_ratio"].healthy[0], limits(record, "update_ratio")[0]
    moves = (typical_values(at_peak(record), "update_ratio"), _lately(record))
    little = {
        path: move
        for of_layers in moves
        for path, move in of_layers.items()
        if move.below(low) and path not in spoken_for
    }
    unmoved = {path: typical for path, typical in little.items() if typical.value == 0}
    if is_long_enough(record) and not fell(record):
        settled = {}  # little movement before the loss has fallen is no state at the end
    else:
        settled = {p: little[p] for p in _moved_at_first(record, little) if p not in unmoved}
    if unmoved:
        yield _does_not_move(record, tuple(unmoved))
    rest = {p: t for p, t in little.items() if p not in unmoved and p not in settled}
    if still := {path: move for path, move in rest.items() if move.below(limit)}:
        yield _stands_still(record, still)
    if settled:
        yield _settled(record, settled)
    if silent := tuple(path for path in _silent(record) if path not in spoken_for):
        yield _tells_nothing(record, silent)


def limits(record: Record, measure: str) -> tuple[float, float]:
    """Return the limits of typical readings beyond which layers are reported.

    They are the ends of the healthy range if the loss does not fall. If it falls, a reading outside
    the range is unusual, but does no harm that shows: AdamW with its default learning rate moves
    layers of small networks that learn well by 0.001 to 0.009. Then only readings beyond the ends
    of the colour scale are reported. If the loss is not known, the same holds for layers that move
    little, for measures that do not indicate faults, and as long as fewer than three measured steps
    show what is typical.
    """
    health = HEALTH[measure]
    falls, is_known = fell(record), is_long_enough(record)
    (low, high), (far_low, far_high) = health.healthy, health.far
    if is_known:
        return (far_low, far_high) if falls else (low, high)
    if len(record.reports) < _SEVERAL:
        return far_low, far_high
    return (
        far_low if measure == "update_ratio" or measure not in _TELL_FAULTS else low,
        high if measure in _TELL_FAULTS else far_high,
    )


def _outside(record: Record, measure: str) -> tuple[dict[str, Typical], dict[str, Typical]]:
    """Return layers typically below, and above, the limits by two standard errors."""
    low, high = limits(record, measure)
    typically = typical_values(at_peak(record), measure)
    below = {path: value for path, value in typically.items() if value.below(low)}
    spared = set()
    if measure == GRADIENT and below:
        spared |= below.keys() - heard(record, record.reports[0]).keys()
        # Queries and keys get little while attention is even, and the values beside them more.
        paths, last = list(typically), record.reports[-1].layers
        for i, path in enumerate(paths):
            near = [p for p in paths[max(i - 2, 0) : i + 3] if p not in below]
            if path in below and any(of_same_rows(last, path, other) for other in near):
                spared.add(path)
    return (
        {path: value for path, value in below.items() if path not in spared},
        {path: value for path, value in typically.items() if value.above(high)},
    )


def _lately(record: Record) -> dict[str, Typical]:
    """Return the typical moves in the last quarter of the steps at peak; {}: too few are known."""
    reports = at_peak(record).reports
    begin = reports[-1].step - (reports[-1].step - reports[0].step) / 4 if reports else 0
    last = tuple(report for report in reports if report.step >= begin)
    if len(last) < _SEVERAL:
        return {}
    return typical_values(replace(record, reports=last), "update_ratio")


def _silent(record: Record) -> Iterator[str]:
    """Yield maps that the optimizer stepped, but whose movement no step could measure."""
    told = typical_values(record, "update_ratio")
    for path in maps(record):
        of_layer = readings(record, path).values()
        if path not in told and all(
            r.update_ratio is not None and math.isnan(r.update_ratio) and not r.non_finite
            for r in of_layer
        ):
            yield path


def typical_values(record: Record, measure: str) -> dict[str, Typical]:
    """Return layer → typical reading of a measure of the pictures, its median over the steps."""
    seen: dict[str, list[tuple[float, float, int]]] = {}
    for report in record.reports:
        for path, value in value_of(record, report, measure).items():
            if math.isfinite(value):
                error = report.layers[path].standard_error.get(measure, 0.0)
                seen.setdefault(path, []).append((value, error, report.step))
    return {
        path: Typical(median(v for v, _, _ in x), median(e for _, e, _ in x), x[0][2])
        for path, x in seen.items()
    }


def _strength(record: Record) -> Strength:
    """Return "note" if the loss falls, or need not: the state may be meant; else "watch"."""
    if not is_long_enough(record) or not record.losses:
        return "watch"
    return "note" if fell(record) or not is_measure(record) else "watch"


def _stands_still(record: Record, layers: Mapping[str, Typical]) -> Finding:
    paths = tuple(sorted(layers, key=lambda path: layers[path].value))
    health = HEALTH["update_ratio"]
    least, most = layers[paths[0]].value, layers[paths[-1]].value
    moves = f"{least:.3g}" if len(paths) == 1 else f"{least:.3g} to {most:.3g}"
    typically = typical_values(at_peak(record), "update_ratio")
    is_new = any(not typically[path].below(health.healthy[0]) for path in paths)
    lately = " of the last quarter" if is_new else ""
    said = (
        f"In a typical step{lately}, the activations of {these(record, paths)} move by {moves} "
        "times their length. Healthy layers that train from scratch move by at least "
        f"{health.healthy[0]:g}."
    )
    strength = _strength(record)
    advice: tuple[Advice, ...] = (
        Advice(f"use a learning rate {_times(layers):g} times as high, for these layers or for "
               "all (adiv-audit tries higher ones)"),
        Advice("change nothing, if pretrained weights should stay close to their values"),
    )  # fmt: skip
    if still_rises(record.reports):
        strength, advice = "note", (Advice(LOOK_AGAIN),)
        said += RISES_YET
    elif strength == "note":
        said += " The loss still falls: in fine-tuning, layers need not move far."
    return Finding(
        "stands-still",
        paths,
        strength,
        tuple(Evidence("update_ratio", layers[p].value, health.healthy[0], p) for p in paths[:5]),
        advice,
        said,
        since=min((t.since for t in layers.values() if t.since is not None), default=None),
    )


def _times(layers: Mapping[str, Typical]) -> float:
    """Return the factor on the learning rate at which these layers would move like healthy ones."""
    return max(3.0, usual_factor(move.value for move in layers.values()) or 0.0)


def _tells_nothing(record: Record, paths: tuple[str, ...]) -> Finding:
    return Finding(
        "stands-still",
        paths,
        _strength(record),
        (),
        (Advice("check whether gradients are zero, or are cleared before the step"),),
        f"The move of the activations of {these(record, paths)} is not known: in no measured step "
        "were both their gradients and their outputs nonzero.",
    )


def _does_not_move(record: Record, paths: tuple[str, ...]) -> Finding:
    return Finding(
        "stands-still",
        paths,
        _strength(record),
        tuple(Evidence("update_ratio", 0.0, HEALTH["update_ratio"].healthy[0], p)
              for p in paths[:5]),
        (
            Advice("give these layers' parameters a learning rate above zero, unless they should "
                   "not be trained"),
        ),
        f"The steps do not move the activations of {these(record, paths)} at all: the learning "
        "rate is zero, or other code resets the weights.",
        since=_low_since(record, paths),
    )  # fmt: skip


def _settled(record: Record, layers: Mapping[str, Typical]) -> Finding:
    paths = tuple(sorted(layers, key=lambda path: layers[path].value))
    low = HEALTH["update_ratio"].healthy[0]
    return Finding(
        "settled",
        paths,
        "note",
        tuple(Evidence("update_ratio", layers[p].value, low, p) for p in paths[:5]),
        (),
        f"The activations of {these(record, paths)} first moved as far as in healthy layers, and "
        f"later by less than {low:g} times their length in a typical step. That is usual as a loss "
        "falls.",
        since=_low_since(record, paths),
    )


def _low_since(record: Record, paths: Sequence[str]) -> int | None:
    """Return the first of the last measured steps in all of which these layers hardly move."""
    low, since = HEALTH["update_ratio"].healthy[0], None
    for report in reversed(at_peak(record).reports):
        values = value_of(record, report, "update_ratio")
        if any(values.get(path, low) >= low for path in paths):
            break
        since = report.step
    return since


def _moved_at_first(record: Record, layers: Collection[str]) -> list[str]:
    """Return layers with healthy movement in a step of the first quarter at the peak.

    One such step is enough, so that the result hardly depends on how many steps are measured.
    """
    reports = at_peak(record).reports
    end = reports[0].step + (reports[-1].step - reports[0].step) / 4 if reports else 0
    low, high = HEALTH["update_ratio"].healthy
    moved = {
        path
        for report in reports
        if report.step <= end
        for path, value in value_of(record, report, "update_ratio").items()
        if low <= value <= high
    }
    return [path for path in layers if path in moved]


def _outside_healthy(
    record: Record, outside: Mapping[tuple[str, bool], Mapping[str, Typical]]
) -> Finding:
    said, evidence = [], []
    for (measure, is_high), layers in outside.items():
        limit = limits(record, measure)[is_high]
        paths = sorted(layers, key=lambda path: layers[path].value, reverse=is_high)
        said.append(_WORDS[measure, is_high].format(these(record, paths), f"{limit:g}"))
        evidence += [Evidence(measure, layers[p].value, limit, p) for p in paths[:3]]
    faulty = any(measure in _TELL_FAULTS for measure, _ in outside)
    return Finding(
        "outside-healthy",
        tuple(dict.fromkeys(path for layers in outside.values() for path in layers)),
        _strength(record) if faulty else "note",
        tuple(evidence),
        (Advice("run adiv-audit: it looks for the cause, and tries fixes"),),
        "Some readings typically lie outside the healthy range: " + "; ".join(said) + ".",
    )


def _decayed(record: Record) -> Iterator[Finding]:
    """Find layers that pictures draw as still only since the learning rate has decayed."""
    since = decayed_since(record.reports)
    if since is None:
        return
    health = HEALTH["update_ratio"]
    first, last = record.reports[0], record.reports[-1]
    now = [v for v in value_of(record, last, "update_ratio").values() if math.isfinite(v)]
    if not any(value < health.healthy[0] for value in now):
        return
    peak = max(learning_rate(report) or 0.0 for report in record.reports)
    share = (learning_rate(last) or 0.0) / peak
    yield Finding(
        "rate-decayed",
        (),
        "note",
        (Evidence("learning rate over its peak", share, step=last.step),),
        (),
        f"Since step {since:,}, the learning rate is below half of its peak (at step "
        f"{last.step:,} it is {share:.3g} times the peak), so the layers move less. The findings "
        "use the steps near the peak.",
        since=max(since, first.step),
    )
