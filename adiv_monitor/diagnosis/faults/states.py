"""In which state is the run? Other faults lead to these states, so they are asked about last.

Is the learning rate too low; did values become not finite; can the model overfit one batch, and
learn as much as a small network; does the loss fall; do rows interfere? At the very end: which
readings are outside the healthy range that no other finding has named?
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

from adiv_monitor.diagnosis import course
from adiv_monitor.diagnosis.faults.data import BEHIND, EXPLAINS
from adiv_monitor.diagnosis.faults.fault import FEWEST_REPORTS, act_if, fault, finds, stepped
from adiv_monitor.diagnosis.faults.inputs import by_training, is_broken, non_finite
from adiv_monitor.diagnosis.faults.rates import (
    better_rate,
    by_trial,
    overshoot,
    said_of_rates,
    share_of_fall,
    suffers,
)
from adiv_monitor.diagnosis.faults.remedies import other_rates, usual_factor
from adiv_monitor.diagnosis.finding import STRENGTHS, Advice, Evidence, Finding, Strength
from adiv_monitor.diagnosis.health import GRADIENT, HEALTH, value_of
from adiv_monitor.diagnosis.readings import (
    Typical,
    at_first,
    at_peak,
    by_layer,
    decayed_since,
    heard,
    learning_rate,
    maps,
    middle,
    named,
    of_same_rows,
    readings,
    still_rises,
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
LOW, HIGH = HEALTH["update_ratio"].healthy
_WORDS: Mapping[tuple[str, bool], str] = {  # (measure, whether it is too large) → words
    ("update_ratio", True): "the activations of {} move by more than {} times their length",
    (GRADIENT, False): "the gradient at {} is less than {} times that at the last layer",
    (GRADIENT, True): "the gradient at {} is more than {} times that at the last layer",
    ("idle_share", True): "more rows of {} than a share of {} have no gradient (padding, masked "
    "tokens, dead units)",
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
RISES_YET = "The learning rate still rises: measurements at its peak will be clearer."
AUDIT = Advice("run adiv-audit: it looks for the cause, and tries fixes")


@fault("rate-too-low", "Learning rate too low", about="symptom")
def rate_too_low(record: Record) -> Iterator[Finding]:
    """Find a learning rate so low that nothing is learned."""
    if overshoot(record) is None:
        yield from (_too_low_by_trial if record.rates else _too_low_by_measures)(record)


def _too_low_by_trial(record: Record) -> Iterator[Finding]:
    if (better := better_rate(record)) is None or better[0] < 1:
        return
    factor, trial = better
    share = share_of_fall(record, trial)
    shares = SHARE_OF_FALL_TOO_LOW_ACT, SHARE_OF_FALL_TOO_LOW_WATCH, SHARE_OF_FALL_TOO_LOW_NOTE
    limits = dict(zip(STRENGTHS, shares, strict=True))
    strength = next((name for name, limit in limits.items() if share < limit), None)
    moves = [move.value for move in by_layer(at_peak(record), "update_ratio").values()]
    if strength == "act" and moves and median(moves) >= LOW:
        strength = "watch"  # a run that is slow at first only looks like that, too
    if strength is not None:
        yield Finding("rate-too-low", strength, said_of_rates(factor, trial)
            + " So short a run favours high learning rates: compare them in a longer one."
            * (strength != "act"),
            by_trial(factor, trial, share, limits[strength]),
            other_rates([factor, *(f for f in (10.0, 3.0) if f != factor)]))  # fmt: skip


def _too_low_by_measures(record: Record) -> Iterator[Finding]:
    moves = by_layer(at_peak(record), "update_ratio")
    if still_rises(record.reports) or (course.is_long_enough(record) and course.fell(record)):
        return  # the peak is still to come, or layers need not move near the loss's end
    began = at_first(record, "update_ratio")
    if (
        began
        and not course.is_long_enough(record)
        and all(t.value >= LOW for t in began[0].values())
    ):
        return  # they moved well at first, so the training has probably come to its end
    if moves and all(t.below(HARDLY_MOVES) for t in moves.values()):
        path = worst_first({path: move.value for path, move in moves.items()})[0]
        largest = moves[path].value
        # Reports alone don't distinguish a training that never began from one that has ended.
        unsure = " That is usual at the end of a training."
        factor = usual_factor([largest]) or 10.0
        yield Finding("rate-too-low", act_if(record.is_audited and suffers(record)),
            f"In a typical step, no layer's activations move by more than {largest:.3g} times "
            f"their length (limit {HARDLY_MOVES:g}).{unsure * (not record.is_audited)}",
            (Evidence("update_ratio", largest, HARDLY_MOVES, path),),
            other_rates([factor, factor / 10 if factor > 10 else 3.0]))  # fmt: skip


@finds()
def became_non_finite(record: Record) -> Iterator[Finding]:
    """Find values that became not finite in training, and steps that were skipped for it.

    Where later losses are finite, weights stayed finite.
    """
    if is_broken(record):
        if by_training(record):
            yield non_finite(record)
    elif record.skipped is not None:
        step, count = record.skipped
        yield Finding("non-finite", "note",
            f"The loss was not finite in {count:,} {'steps' if count > 1 else 'step'}, first at "
            f"step {step:,}, and was finite again later: these steps were skipped.",
            (Evidence("losses that are not finite", float(count), 0.0, step=step),),
            (Advice("look at the batches of these steps, unless a gradient scaler skips them"),),
            since=step)  # fmt: skip


@fault("cannot-overfit", "The model can't overfit one small batch", about="last", certain=True)
def cannot_overfit(record: Record) -> Iterator[Finding]:
    """Find a model that can't even overfit one small batch."""
    trial, first = record.overfit, course.start(record)
    if trial is None or trial.steps < LEAST_STEPS or not math.isfinite(first):
        return
    if first > 0 and trial.loss / first > NOT_BY_HEART and not course.tells_nothing(record):
        yield Finding("cannot-overfit", act_if(not trial.falls),
            f"After {trial.steps} steps on one small batch, the loss of this batch is still "
            f"{trial.loss:.3g}{', and falling' * trial.falls}.",
            (Evidence("loss of one small batch", trial.loss, NOT_BY_HEART * first),),
            (Advice("print the inputs and outputs of each function, from batch to loss"),),
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
        if reference > EXPLAINS and own < BEHIND * reference and not course.tells_nothing(record):
            yield Finding("behind-reference", "watch",
                f"A small network explains {reference:.0%} of unseen labels, and this model "
                f"{own:.0%} of them: the fault is in the model, the loss or the optimizer.",
                (Evidence("share of the labels that the model explains", own, BEHIND * reference),),
                (Advice("start from parts that work on these data, and exchange one at a time"),),
                against=())  # fmt: skip


@fault("loss-stuck", "The loss does not fall, or hardly", about="symptom", shown_by=course.is_known)
def loss_stuck(record: Record) -> Iterator[Finding]:
    """Find a loss that does not fall, ends no lower than a constant prediction's, or is unclear.

    A monitor can't know whether a loss is a measure of the training. It is one if it is positive,
    and this optimizer alone trains, from the first step; else the finding is a note. So it is if
    the loss fell a little: much of it may be what no model can predict.
    """
    if (
        not course.is_long_enough(record)
        or not math.isfinite(course.end(record))
        or course.tells_nothing(record)
    ):
        return
    no_lower = course.end(record) > (1 - course.STILL) * course.start(record) > 0
    unclear = course.may_have_fallen(record) and not no_lower
    if (course.fell(record) and not no_lower) or (unclear and not record.is_audited):
        return
    rises, little = (
        still_rises(record.reports),
        not record.is_audited and course.fell_little(record),
    )
    factor = usual_factor(move.value for move in by_layer(at_peak(record), "update_ratio").values())
    factors = [10.0, 0.1] if record.is_audited else []
    if course.end(record) > (1 + course.STILL) * record.losses[0] > 0:
        factors = [0.1]
    if factor is not None and factor > 10:  # layers hardly move, whatever the loss does
        factors = [factor]
    advice = other_rates(factors) or (AUDIT,)
    if rises:
        advice = ()
    elif unclear:
        advice = (Advice("train for more steps: the mean over more batches has less noise"),)
    told = record.is_audited or course.is_measure(record)
    overfit = record.overfit is not None and record.overfit.loss < NOT_BY_HEART * course.start(
        record
    )
    if unclear:
        said = f"may fall, but differs by {course.noise(record):.3g} from batch to batch"
    elif course.rose(record):
        said = "rises"
    elif little:
        said = f"falls by less than {course.STILL:.0%}"
    elif (course.fell(record) or course.may_have_fallen(record)) and course.start(
        record
    ) == record.chance:
        said = f"ends no lower than {record.chance:.3g}, the loss of a constant prediction"
    else:
        said = "does not fall"
    yield Finding("loss-stuck", "note" if unclear or rises or little or not told else "watch",
        f"The loss {said}: {record.losses[0]:.3g} at first, {course.end(record):.3g} at the end."
        + " However, the model overfits one small batch." * overfit
        + f" {RISES_YET}" * rises + _NO_MEASURE * (not told),
        (Evidence("loss", course.end(record), course.start(record)),), advice)  # fmt: skip


@fault(
    "interference",
    "Direction lost to interference between rows",
    shown_by=lambda record: by_layer(record, "attainable_cosine"),
)
def interference(record: Record) -> Iterator[Finding]:
    """Find layers whose gradient step has a low cosine although a better step exists."""
    ceilings = by_layer(record, "attainable_cosine")
    lost = {
        path: cosine.value
        for path, cosine in by_layer(record, "gradient_cosine").items()
        if path in ceilings
        and cosine.below(LOW_COSINE)
        and ceilings[path].above(ROOM * abs(cosine.value))
    }
    if lost:
        worst, *_ = layers = tuple(sorted(lost, key=lambda path: lost[path]))
        # If rows may be tokens, batch normalisation would mix later into earlier ones.
        tokens = any(r.kind == "embedding" for x in record.reports for r in x.layers.values())
        yield Finding("interference", "note",
            f"In {named(record, worst)}, the rows of a batch disturb each other: a gradient step "
            f"has a cosine of {lost[worst]:.3g}, the best possible {ceilings[worst].value:.3g}.",
            (Evidence("gradient_cosine", lost[worst], LOW_COSINE, worst),),
            () if tokens else
            (Advice("add batch normalisation in front of these layers", "batch-norm"),),
            "Corrected layers remove differences in scale, not interference.", layers=layers,
            against=("affine-like", "norm-like"))  # fmt: skip


def _spoken_for(found: Sequence[Finding], measure: str) -> set[str]:
    """Return the layers of which other findings report a measure; "*" stands for all."""
    names = SPEAK_OF[measure]
    return {layer for f in found if f.name in names for layer in f.layers or ("*",)}


@fault("stands-still", "Layers that hardly move", "rest", about="symptom", shown_by=stepped)
@fault("settled", "Layers that move less than at first", "rest", about="course")
def stands_still(record: Record, found: Sequence[Finding]) -> Iterator[Finding]:
    """Find layers that hardly move, typically or lately, or whose move is not known.

    Those with a healthy move in a step of the first quarter have settled, unless the loss did not
    fall. One such step is enough, so that the result hardly depends on how many are measured.
    """
    spoken_for = _spoken_for(found, "update_ratio")
    if record.rates or "*" in spoken_for:
        return
    parts, late = [at_peak(record)], _quarter(record, last=True)
    if len(late.reports) >= FEWEST_REPORTS:
        parts.append(late)
    little = {
        path: move
        for part in parts
        for path, move in by_layer(part, "update_ratio").items()
        if move.below(LOW) and path not in spoken_for
    }
    began: set[str] = set()
    if not course.is_long_enough(record) or course.fell(record):
        for report in _quarter(record, last=False).reports:
            values = value_of(record, report, "update_ratio")
            began |= {path for path, value in values.items() if LOW <= value <= HIGH}
    settled = {p: t for p, t in little.items() if t.value > 0 and p in began}
    limit = limits(record, "update_ratio")[0]
    if still := {p: t for p, t in little.items() if p not in settled and t.below(limit)}:
        yield _stands_still(record, still)
    if settled:
        yield _little(record, "settled", "note", settled,
                      "At first they did. That is usual as a loss falls.", ())  # fmt: skip
    told = by_layer(record, "update_ratio")
    if silent := tuple(
        path
        for path in maps(record)
        if path not in told and path not in spoken_for
        and all(r.update_ratio is not None and not r.non_finite
                for r in readings(record, path).values())
    ):  # fmt: skip
        yield Finding("stands-still", _of_readings(record),
            f"The move of the activations of {these(record, silent)} is not known: in no measured "
            "step were both their gradients and their outputs nonzero.", (),
            (Advice("check whether gradients are zero, or are cleared before the step"),),
            layers=silent)  # fmt: skip


def _quarter(record: Record, *, last: bool) -> Record:
    """Return the record of the first, or the last, quarter of the steps at the peak."""
    reports = at_peak(record).reports
    steps = [report.step for report in reports]
    length = (steps[-1] - steps[0]) / 4 if steps else 0
    kept = [r for r in reports
            if (r.step >= steps[-1] - length if last else r.step <= steps[0] + length)]  # fmt: skip
    return replace(record, reports=tuple(kept))


def _stands_still(record: Record, layers: Mapping[str, Typical]) -> Finding:
    strength, said = _of_readings(record), ""
    factor = max(3.0, usual_factor(move.value for move in layers.values()) or 0.0)
    advice: tuple[Advice, ...] = (
        Advice(f"use a learning rate {factor:g} times as high, for these layers or for all, unless "
               "pretrained weights should stay close to their values"),
    )  # fmt: skip
    if not any(move.value for move in layers.values()):
        said = "The learning rate is zero, or other code resets the weights."
        advice = (Advice("give these layers a learning rate above zero"),)
    elif still_rises(record.reports):
        strength, advice, said = "note", (), RISES_YET
    elif strength == "note":
        said = "The loss still falls: in fine-tuning, layers need not move far."
    return _little(record, "stands-still", strength, layers, said, advice)


def _little(
    record: Record, name: str, strength: Strength, layers: Mapping[str, Typical], said: str,
    advice: tuple[Advice, ...]
) -> Finding:  # fmt: skip
    paths = tuple(sorted(layers, key=lambda path: layers[path].value))
    return Finding(name, strength,
        f"In a typical step, the activations of {these(record, paths)} move by at most "
        f"{layers[paths[-1]].value:.3g} times their length. Healthy layers that train from scratch "
        f"move by at least {LOW:g}. {said}".rstrip(),
        tuple(Evidence("update_ratio", layers[p].value, LOW, p) for p in paths[:5]), advice,
        layers=paths, since=min(t.since or 0 for t in layers.values()))  # fmt: skip


def typical_values(record: Record, measure: str) -> dict[str, Typical]:
    """Return layer → typical reading of a measure of the pictures, its median over the steps."""
    seen: dict[str, list[tuple[int, float, float]]] = {}
    for report in record.reports:
        for path, value in value_of(record, report, measure).items():
            if math.isfinite(value):
                error = report.layers[path].standard_error.get(measure, 0.0)
                seen.setdefault(path, []).append((report.step, value, error))
    return {path: middle(values) for path, values in seen.items()}


def _of_readings(record: Record) -> Strength:
    """Return "note" if the loss falls, or need not: the state may be meant; else "watch"."""
    if not course.is_long_enough(record) or not record.losses:
        return "watch"
    return "note" if course.fell(record) or not course.is_measure(record) else "watch"


def limits(record: Record, measure: str) -> tuple[float, float]:
    """Return the limits of typical readings beyond which layers are reported.

    They are the ends of the healthy range if the loss does not fall. If it falls, a reading outside
    the range is unusual, but does no harm that shows: AdamW with its default learning rate moves
    layers of small networks that learn well by 0.001 to 0.009. Then only readings beyond the ends
    of the colour scale are reported. If the loss is not known, the same holds for layers that move
    little, for measures that do not indicate faults, and as long as fewer than three measured steps
    show what is typical.
    """
    near, far = HEALTH[measure].healthy, HEALTH[measure].far
    if course.is_long_enough(record):
        return far if course.fell(record) else near
    if len(record.reports) < FEWEST_REPORTS or measure not in _TELL_FAULTS:
        return far
    return (far[0] if measure == "update_ratio" else near[0]), near[1]


def _outside(record: Record, measure: str) -> tuple[dict[str, Typical], dict[str, Typical]]:
    """Return layers typically below, and above, the limits by two standard errors."""
    low, high = limits(record, measure)
    typically = typical_values(at_peak(record), measure)
    below = {path: value for path, value in typically.items() if value.below(low)}
    above = {path: value for path, value in typically.items() if value.above(high)}
    if measure == GRADIENT and below:
        known = heard(record, record.reports[0])
        # Queries and keys get little while attention is even, and the values beside them more.
        paths, last = list(typically), record.reports[-1].layers
        for i, path in enumerate(paths):
            near = [p for p in paths[max(i - 2, 0) : i + 3] if not typically[p].below(low)]
            if path not in known or any(of_same_rows(last, path, other) for other in near):
                below.pop(path, None)
    return below, above


@fault(
    "outside-healthy", "Readings outside the healthy range", "rest", about="symptom", shown_by=maps
)
def outside_healthy(record: Record, found: Sequence[Finding]) -> Iterator[Finding]:
    """Find layers whose typical readings are outside of the limits, unless others report them.

    If learning rates were tried, the loss itself has decided, and nothing is reported.
    """
    said, evidence, layers, faulty = [], [], [], False
    for (measure, is_high), words in _WORDS.items():
        outside = {} if record.rates else _outside(record, measure)[is_high]
        outside = {p: t for p, t in outside.items() if not {p, "*"} & _spoken_for(found, measure)}
        paths = sorted(outside, key=lambda path: outside[path].value, reverse=is_high)
        if paths:
            limit = limits(record, measure)[is_high]
            said.append(words.format(these(record, paths), f"{limit:g}"))
            evidence += [Evidence(measure, outside[p].value, limit, p) for p in paths[:3]]
            layers += paths
            faulty |= measure in _TELL_FAULTS
    if said:
        yield Finding("outside-healthy", _of_readings(record) if faulty else "note",
            f"Typical readings lie outside the healthy range: {'; '.join(said)}.",
            tuple(evidence), (AUDIT,), layers=tuple(dict.fromkeys(layers)))  # fmt: skip


@fault("rate-decayed", "The learning rate has decayed", "rest", about="course")
def rate_decayed(record: Record, found: Sequence[Finding]) -> Iterator[Finding]:
    """Find layers that pictures draw as still only since the learning rate has decayed."""
    if record.rates or (since := decayed_since(record.reports)) is None:
        return
    first, last = record.reports[0], record.reports[-1]
    now = [v for v in value_of(record, last, "update_ratio").values() if math.isfinite(v)]
    if any(value < LOW for value in now):
        peak = max(learning_rate(report) or 0.0 for report in record.reports)
        share = (learning_rate(last) or 0.0) / peak
        yield Finding("rate-decayed", "note",
            f"Since step {since:,}, the learning rate is below half of its peak, so the layers "
            "move less. The findings use the steps near the peak.",
            (Evidence("learning rate over its peak", share, step=last.step),), (),
            since=max(since, first.step))  # fmt: skip
