"""In which state is the run? Other faults lead to these states, so they are asked about last.

Is the learning rate too low; did values become not finite; can the model overfit one batch, and
learn as much as a small network; does the loss fall; do rows interfere? At the very end: which
readings are outside the healthy range that no other finding has named?
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

from adiv_monitor.diagnosis.course import (
    STILL,
    end,
    fell,
    fell_little,
    is_known,
    is_long_enough,
    is_measure,
    may_have_fallen,
    noise,
    rose,
    start,
    tells_nothing,
)
from adiv_monitor.diagnosis.faults.data import BEHIND, EXPLAINS
from adiv_monitor.diagnosis.faults.fault import describe, fault, finds, stepped
from adiv_monitor.diagnosis.faults.numbers import _finding, _not_by_training, _seen
from adiv_monitor.diagnosis.faults.rates import (
    _by_trial,
    _higher,
    _said_of_rates,
    overshoot,
    share_of_fall,
    suffers,
)
from adiv_monitor.diagnosis.faults.remedies import other_rates, usual_factor
from adiv_monitor.diagnosis.finding import STRENGTHS, Advice, Evidence, Finding, Strength
from adiv_monitor.diagnosis.health import GRADIENT, HEALTH, value_of
from adiv_monitor.diagnosis.phases import (
    LOOK_AGAIN,
    RISES_YET,
    at_peak,
    decayed_since,
    learning_rate,
    still_rises,
)
from adiv_monitor.diagnosis.readings import (
    Typical,
    at_first,
    by_layer,
    heard,
    maps,
    named,
    of_same_rows,
    readings,
    these,
    worst_first,
)
from adiv_monitor.diagnosis.record import Record

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
LOW_COSINE = 0.1  # cosine of the gradient step with the ideal one
ROOM = 5.0  # ratio of the ceiling to the cosine: how much better a step could be
# In few steps a higher learning rate gets further, as more steps would, and need not be better in
# the end: AdamW's usual 1e-3 has 0.15 to 0.75 on a small LSTM and GPT; 100 times too low, below
# 0.11.
SHARE_OF_FALL_TOO_LOW_ACT, SHARE_OF_FALL_TOO_LOW_WATCH, SHARE_OF_FALL_TOO_LOW_NOTE = 0.125, 0.5, 0.8
# Typical ‖Δz‖ / ‖z‖ of a step in the layer that moves most. Healthy runs have 0.01 to 0.5.
HARDLY_MOVES = 3e-3
# Share of the first loss that is left after overfitting one small batch.
NOT_BY_HEART = 0.5
_NO_MEASURE = (
    " That is no fault of generative adversarial networks, of reinforcement learning, or of a run "
    "that was resumed."
)
LEAST_STEPS = 50  # fewest steps of the attempt to overfit; slow runs try fewer


@fault("rate-too-low", "Learning rate too low", about="symptom")
def rate_too_low(record: Record) -> Iterator[Finding]:
    """Find a learning rate so low that nothing is learned."""
    if overshoot(record) is not None:
        return
    if record.rates:
        yield from _too_low_by_trial(record)
    else:
        yield from _too_low_by_measures(record)


def _too_low_by_trial(record: Record) -> Iterator[Finding]:
    if (better := _higher(record)) is None:
        return
    factor, trial = better
    share = share_of_fall(record, trial)
    of_shares = SHARE_OF_FALL_TOO_LOW_ACT, SHARE_OF_FALL_TOO_LOW_WATCH, SHARE_OF_FALL_TOO_LOW_NOTE
    limits = dict(zip(STRENGTHS, of_shares, strict=True))
    strength = next((name for name, limit in limits.items() if share < limit), None)
    if strength == "act" and not _moves_little(record):
        strength = "watch"  # a run that is slow at first only looks like that, too
    if strength is not None:
        yield _too_low(strength, _said_of_rates(factor, trial)
            + " So short a run favours high learning rates: compare them in a longer one."
            * (strength != "act"),
            _by_trial(factor, trial, share, limits[strength]),
            [factor, *(f for f in (10.0, 3.0) if f != factor)])  # fmt: skip


def _moves_little(record: Record) -> bool:
    """Return whether the typical layer moves less than in healthy runs, as far as it is known."""
    moves = by_layer(at_peak(record), "update_ratio")
    low = HEALTH["update_ratio"].healthy[0]
    return not moves or median(move.value for move in moves.values()) < low


def _too_low(
    strength: Strength, summary: str, evidence: tuple[Evidence, ...], factors: Sequence[float]
) -> Finding:
    return Finding("rate-too-low", strength, summary, evidence, other_rates(factors),
        "More layers or units do not help: the present ones have not learnt yet."
        * (strength == "act"), against=())  # fmt: skip


def _too_low_by_measures(record: Record) -> Iterator[Finding]:
    moves = by_layer(at_peak(record), "update_ratio")
    if still_rises(record.reports) or (is_long_enough(record) and fell(record)):
        return  # the peak is still to come, or layers need not move near the loss's end
    began = at_first(record, "update_ratio")
    low = HEALTH["update_ratio"].healthy[0]
    if began and not is_long_enough(record) and all(t.value >= low for t in began[0].values()):
        return  # they moved well at first, so the training has probably come to its end
    if moves and all(t.below(HARDLY_MOVES) for t in moves.values()):
        path = worst_first({path: move.value for path, move in moves.items()})[0]
        largest = moves[path].value
        # Reports alone don't distinguish a training that never began from one that has ended.
        unsure = ". That is too little at the beginning of a training, and usual at its end"
        factor = usual_factor([largest]) or 10.0
        yield _too_low("act" if record.is_audited and suffers(record) else "watch",
            f"In a typical step, no layer's activations move by more than {largest:.3g} times "
            f"their length (median over the measured steps, limit {HARDLY_MOVES:g})"
            f"{unsure * (not record.is_audited)}. Such moves are proportional to the learning "
            f"rate: at {factor:g} times this one, the largest would be about "
            f"{largest * factor:.2g}.",
            (Evidence("update_ratio", largest, HARDLY_MOVES, path),),
            [factor, factor / 10 if factor > 10 else 3.0])  # fmt: skip


@finds()
def became_non_finite(record: Record) -> Iterator[Finding]:
    """Find values that became not finite in training; other findings are likely the cause."""
    if _seen(record) and not _not_by_training(record):
        yield _finding(record)


@finds()
def skipped_steps(record: Record) -> Iterator[Finding]:
    """Find steps whose loss was not finite while later losses were: the weights stayed finite."""
    if record.skipped is not None and not _seen(record):
        step, count = record.skipped
        yield Finding("non-finite", "note",
            f"The loss was not finite in {count:,} {'steps' if count > 1 else 'step'}, first at "
            f"step {step:,}, and was finite again later: these steps were skipped, as a gradient "
            "scaler does in half precision.",
            (Evidence("losses that are not finite", float(count), 0.0, step=step),),
            (Advice("look at the batches of these steps, unless a gradient scaler skips them"),),
            since=step)  # fmt: skip


@fault("cannot-overfit", "The model can't overfit one small batch", about="last", certain=True)
def cannot_overfit(record: Record) -> Iterator[Finding]:
    """Find a model that can't even overfit one small batch."""
    trial, first = record.overfit, start(record)
    if trial is None or trial.steps < LEAST_STEPS or not math.isfinite(first):
        return
    if first > 0 and trial.loss / first > NOT_BY_HEART and not tells_nothing(record):
        yield Finding("cannot-overfit", "watch" if trial.falls else "act",
            f"After {trial.steps} steps on one small batch, the loss of this batch is still "
            f"{trial.loss:.3g}"
            + (", and falling: the model overfits it only slowly." if trial.falls else
               ": the model does not overfit it."),
            (Evidence("loss of one small batch", trial.loss, NOT_BY_HEART * first),),
            (Advice("print the inputs and outputs of each function, from one batch to its loss: "
                    "the audit tests for many causes, and found none of them"),),
            "More data do not help a model that can't learn a few samples." * (not trial.falls),
            against=())  # fmt: skip


@fault("behind-reference", "The model learns less than a small network", about="last")
def behind_reference(record: Record) -> Iterator[Finding]:
    """Find a model that explains far less of the labels than a small network does.

    This is a symptom of any fault.
    """
    for fact in record.found_by("behind-reference"):
        # Predictions that are worse than a constant explain nothing: their share is negative.
        reference, own = fact.numbers["reference"], max(0.0, fact.numbers["model"])
        if reference > EXPLAINS and own < BEHIND * reference and not tells_nothing(record):
            yield Finding("behind-reference", "watch",
                f"A small network explains {reference:.0%} of the labels of samples that it was "
                f"not trained on. This model explains {own:.0%} of them, although it was trained "
                "on them. So the fault is in the model, the loss or the optimizer, not in the "
                "data; the audit can't tell in which of them.",
                (Evidence("share of the labels that the model explains", own, BEHIND * reference),),
                (Advice("start from a model, a loss and an optimizer that work on these data, and "
                        "exchange one of them at a time"),),
                "More data do not help: a small network learns from these.",
                against=())  # fmt: skip


@fault("loss-stuck", "The loss does not fall, or hardly", about="symptom", shown_by=is_known)
def loss_stuck(record: Record) -> Iterator[Finding]:
    """Find a loss that does not fall, ends no lower than a constant prediction's, or is unclear.

    A monitor can't know whether a loss is a measure of the training. It is one if it is positive,
    and this optimizer alone trains, from the first step; else the finding is a note. So it is if
    the loss fell a little: much of it may be what no model can predict.
    """
    if not is_long_enough(record) or not math.isfinite(end(record)) or tells_nothing(record):
        return
    no_lower = end(record) > (1 - STILL) * start(record) > 0
    if fell(record) and not no_lower:
        return
    unclear = may_have_fallen(record) and not no_lower
    if unclear and not record.is_audited:
        return
    rises = still_rises(record.reports)
    ends_higher = end(record) > (1 + STILL) * record.losses[0] > 0
    factor = usual_factor(move.value for move in by_layer(at_peak(record), "update_ratio").values())
    factors = [0.1] if ends_higher else [10.0, 0.1] if record.is_audited else []
    if factor is not None and factor > 10:  # layers hardly move, whatever the loss does
        factors = [factor]
    run = "run adiv-audit: it looks for the cause, and tries learning rates"
    advice = other_rates(factors) or (Advice(run),)
    if rises:
        advice = (Advice(LOOK_AGAIN),)
    elif unclear:
        advice = (Advice("train for more steps: the mean over more batches has less noise"),)
    told = record.is_audited or is_measure(record)
    little = not record.is_audited and fell_little(record)
    yield Finding("loss-stuck", "note" if unclear or rises or little or not told else "watch",
        _stuck(record, no_lower=no_lower) + RISES_YET * rises + _NO_MEASURE * (not told),
        (Evidence("loss", end(record), start(record)), *_overfits(record)), advice)  # fmt: skip


def _stuck(record: Record, *, no_lower: bool) -> str:
    course = f"{record.losses[0]:.3g} at first, {end(record):.3g} at the end"
    if may_have_fallen(record) and not no_lower:
        return (
            f"{len(record.losses)} steps do not show whether the loss falls: it is {course}, and "
            f"differs by {noise(record):.3g} from batch to batch."
        )
    said = "does not fall"
    if rose(record):
        said = "rises"
    elif not record.is_audited and fell_little(record):
        said = f"falls by less than {STILL:.0%}"
    elif (fell(record) or may_have_fallen(record)) and start(record) == record.chance:
        said = f"ends no lower than {record.chance:.3g}, the loss of a constant prediction"
    elif fell(record) or may_have_fallen(record):
        said = "ends no lower than it began"
    overfits = " However, the model overfits one small batch." * bool(list(_overfits(record)))
    return f"The loss {said}: {course}.{overfits}"


def _overfits(record: Record) -> Iterator[Evidence]:
    """Yield evidence that the model fits one small batch although it does not fit many."""
    trial = record.overfit
    if trial is not None and trial.loss < NOT_BY_HEART * start(record):
        yield Evidence("loss of one small batch", trial.loss, NOT_BY_HEART * start(record))


@fault(
    "interference",
    "Direction lost to interference between rows",
    shown_by=lambda record: by_layer(record, "attainable_cosine"),
)
def interference(record: Record) -> Iterator[Finding]:
    """Find layers whose gradient step has a low cosine although a better step exists."""
    cosines = by_layer(record, "gradient_cosine")
    ceilings = by_layer(record, "attainable_cosine")
    lost = {
        path: cosine.value
        for path, cosine in cosines.items()
        if path in ceilings
        and cosine.below(LOW_COSINE)
        and ceilings[path].value - 2 * ceilings[path].error > ROOM * abs(cosine.value)
    }
    if lost:
        worst, *_ = layers = tuple(sorted(lost, key=lambda path: lost[path]))
        yield Finding("interference", "note",
            f"In {named(record, worst)}, the rows of a batch disturb each other: a gradient step "
            f"moves the activations with a cosine of {lost[worst]:.3g} to straight downhill, but "
            f"the best possible step reaches {ceilings[worst].value:.3g}.",
            (Evidence("gradient_cosine", lost[worst], LOW_COSINE, worst),
             Evidence("attainable_cosine", ceilings[worst].value, layer=worst)),
            () if _reads_tokens(record) else
            (Advice("add batch normalisation in front of these layers", "batch-norm"),),
            "Corrected layers remove differences in scale, not interference.", layers=layers,
            against=("affine-like", "norm-like"))  # fmt: skip


def _reads_tokens(record: Record) -> bool:
    """Return whether rows may be tokens: batch normalisation would mix later into earlier ones."""
    return any(r.kind == "embedding" for report in record.reports for r in report.layers.values())


describe(
    "outside-healthy",
    "Readings outside the healthy range",
    "states",
    about="symptom",
    shown_by=maps,
)
describe("stands-still", "Layers that hardly move", "states", about="symptom", shown_by=stepped)
describe("settled", "Layers that move less than at first", "states", about="course")
describe("rate-decayed", "The learning rate has decayed", "states", about="course")


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


def _lately(record: Record) -> dict[str, Typical]:
    """Return the typical moves in the last quarter of the steps at peak; {}: too few are known."""
    reports = at_peak(record).reports
    begin = reports[-1].step - (reports[-1].step - reports[0].step) / 4 if reports else 0
    last = tuple(report for report in reports if report.step >= begin)
    enough = len(last) >= _SEVERAL
    return typical_values(replace(record, reports=last), "update_ratio") if enough else {}


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


def _silent(record: Record) -> Iterator[str]:
    """Yield maps that the optimizer stepped, but whose movement no step could measure."""
    told = typical_values(record, "update_ratio")
    for path in maps(record):
        if path not in told and all(
            r.update_ratio is not None and math.isnan(r.update_ratio) and not r.non_finite
            for r in readings(record, path).values()
        ):
            yield path


def _stands_still(record: Record, layers: Mapping[str, Typical]) -> Finding:
    paths = tuple(sorted(layers, key=lambda path: layers[path].value))
    low = HEALTH["update_ratio"].healthy[0]
    least, most = layers[paths[0]].value, layers[paths[-1]].value
    moves = f"{least:.3g}" if len(paths) == 1 else f"{least:.3g} to {most:.3g}"
    typically = typical_values(at_peak(record), "update_ratio")
    is_new = any(not typically[path].below(low) for path in paths)
    lately = " of the last quarter" if is_new else ""
    said = (f"In a typical step{lately}, the activations of {these(record, paths)} move by {moves} "
            "times their length. Healthy layers that train from scratch move by at least "
            f"{low:g}.")  # fmt: skip
    strength = _of_readings(record)
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
    return Finding("stands-still", strength, said,
        _moves({path: layers[path].value for path in paths}), advice, layers=paths,
        since=min((t.since for t in layers.values() if t.since is not None),
                  default=None))  # fmt: skip


def _moves(layers: Mapping[str, float]) -> tuple[Evidence, ...]:
    """Return evidence of the moves of five layers, beside the least healthy move."""
    low = HEALTH["update_ratio"].healthy[0]
    return tuple(Evidence("update_ratio", layers[path], low, path) for path in [*layers][:5])


def _of_readings(record: Record) -> Strength:
    """Return "note" if the loss falls, or need not: the state may be meant; else "watch"."""
    if not is_long_enough(record) or not record.losses:
        return "watch"
    return "note" if fell(record) or not is_measure(record) else "watch"


def _times(layers: Mapping[str, Typical]) -> float:
    """Return the factor on the learning rate at which these layers would move like healthy ones."""
    return max(3.0, usual_factor(move.value for move in layers.values()) or 0.0)


def _tells_nothing(record: Record, paths: tuple[str, ...]) -> Finding:
    return Finding("stands-still", _of_readings(record),
        f"The move of the activations of {these(record, paths)} is not known: in no measured step "
        "were both their gradients and their outputs nonzero.", (),
        (Advice("check whether gradients are zero, or are cleared before the step"),),
        layers=paths)  # fmt: skip


def _does_not_move(record: Record, paths: tuple[str, ...]) -> Finding:
    return Finding("stands-still", _of_readings(record),
        f"The steps do not move the activations of {these(record, paths)} at all: the learning "
        "rate is zero, or other code resets the weights.",
        _moves(dict.fromkeys(paths, 0.0)),
        (Advice("give these layers' parameters a learning rate above zero, unless they should not "
                "be trained"),), layers=paths, since=_low_since(record, paths))  # fmt: skip


def _low_since(record: Record, paths: Sequence[str]) -> int | None:
    """Return the first of the last measured steps in all of which these layers hardly move."""
    low, since = HEALTH["update_ratio"].healthy[0], None
    for report in reversed(at_peak(record).reports):
        values = value_of(record, report, "update_ratio")
        if any(values.get(path, low) >= low for path in paths):
            break
        since = report.step
    return since


def _settled(record: Record, layers: Mapping[str, Typical]) -> Finding:
    paths = tuple(sorted(layers, key=lambda path: layers[path].value))
    low = HEALTH["update_ratio"].healthy[0]
    return Finding("settled", "note",
        f"The activations of {these(record, paths)} first moved as far as in healthy layers, and "
        f"later by less than {low:g} times their length in a typical step. That is usual as a loss "
        "falls.",
        _moves({path: layers[path].value for path in paths}), (), layers=paths,
        since=_low_since(record, paths))  # fmt: skip


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
    return Finding("outside-healthy", _of_readings(record) if faulty else "note",
        "Some readings typically lie outside the healthy range: " + "; ".join(said) + ".",
        tuple(evidence), (Advice("run adiv-audit: it looks for the cause, and tries fixes"),),
        layers=tuple(dict.fromkeys(p for layers in outside.values() for p in layers)))  # fmt: skip


def _decayed(record: Record) -> Iterator[Finding]:
    """Find layers that pictures draw as still only since the learning rate has decayed."""
    if (since := decayed_since(record.reports)) is None:
        return
    first, last = record.reports[0], record.reports[-1]
    now = [v for v in value_of(record, last, "update_ratio").values() if math.isfinite(v)]
    if not any(value < HEALTH["update_ratio"].healthy[0] for value in now):
        return
    peak = max(learning_rate(report) or 0.0 for report in record.reports)
    share = (learning_rate(last) or 0.0) / peak
    yield Finding("rate-decayed", "note",
        f"Since step {since:,}, the learning rate is below half of its peak (at step {last.step:,} "
        f"it is {share:.3g} times the peak), so the layers move less. The findings use the steps "
        "near the peak.",
        (Evidence("learning rate over its peak", share, step=last.step),), (),
        since=max(since, first.step))  # fmt: skip
