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
from adiv_monitor.diagnosis.faults.fault import (
    FEWEST_REPORTS,
    act_if,
    fault,
    finds,
    of_layers,
    stepped,
)
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
    heard,
    maps,
    middle,
    named,
    of_same_rows,
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
# Those that are reported, and whether because they are too large.
_REPORTED = (
    *(("update_ratio", True), (GRADIENT, False), (GRADIENT, True), ("idle_share", True)),
    *(("scale_cv", True), ("projection_cosine", False)),
)
LOW_COSINE = 0.1  # cosine of the gradient step with the ideal one
ROOM = 5.0  # ratio of the ceiling to the cosine: how much better a step could be
# In few steps a higher learning rate gets further, as more steps would, and need not be better in
# the end: AdamW's usual 1e-3 has 0.15 to 0.75 on a small LSTM and GPT; 100 times too low, below
# 0.11.
SHARE_OF_FALL_TOO_LOW_ACT, SHARE_OF_FALL_TOO_LOW_WATCH, SHARE_OF_FALL_TOO_LOW_NOTE = 0.125, 0.5, 0.8
LONG = 24  # fewest steps of a trial that tells more than a run's beginning
# Typical ‖Δz‖ / ‖z‖ of a step in the layer that moves most. Healthy runs have 0.01 to 0.5.
HARDLY_MOVES = 3e-3
# Share of the first loss that is left after overfitting one small batch.
NOT_BY_HEART = 0.5
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
    is_slow = median(_moves(record).values() or [0.0]) < LOW
    if strength == "act" and not (is_slow and trial.steps >= LONG):
        strength = "watch"  # a run that is slow at first only looks like that, too
    if strength is not None:
        yield Finding("rate-too-low", strength, said_of_rates(factor, trial)
            + " So short a run favours high learning rates: compare them in a longer one."
            * (strength != "act"),
            by_trial(factor, trial, share, limits[strength]),
            other_rates([factor, *(f for f in (10.0, 3.0) if f != factor)]))  # fmt: skip


def _moves(record: Record) -> dict[str, float]:
    """Return how far each layer's activations typically move near the peak of the rate."""
    return {p: t.value for p, t in by_layer(at_peak(record), "update_ratio").items()}


def _too_low_by_measures(record: Record) -> Iterator[Finding]:
    moves, is_long = by_layer(at_peak(record), "update_ratio"), course.is_long_enough(record)
    if still_rises(record) or (is_long and course.fell(record)):
        return  # the peak is still to come, or layers need not move near the loss's end
    began = at_first(record, "update_ratio")[:1]
    if not is_long and any(all(t.value >= LOW for t in step.values()) for step in began):
        return  # they moved well at first, so the training has probably come to its end
    if moves and all(t.below(HARDLY_MOVES) for t in moves.values()):
        path = worst_first(_moves(record))[0]
        largest = moves[path].value
        # Reports alone don't distinguish a training that never began from one that has ended.
        unsure = " That is usual at the end of a training." * (not record.is_audited)
        factor = usual_factor([largest]) or 10.0
        yield Finding("rate-too-low", act_if(record.is_audited and suffers(record)),
            f"In a typical step, no layer's activations move by more than {largest:.3g} times "
            f"their length (limit {HARDLY_MOVES:g}).{unsure}",
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
    trial, left = record.overfit, _left_of_one_batch(record)
    if trial is not None and left > NOT_BY_HEART and not course.tells_nothing(record):
        yield Finding("cannot-overfit", act_if(not trial.falls),
            f"After {trial.steps} steps on one small batch, the loss of this batch is still "
            f"{trial.loss:.3g}{', and falling' * trial.falls}.",
            (Evidence("share of the first loss that is left", left, NOT_BY_HEART),),
            (Advice("print the inputs and outputs of each function, from batch to loss"),),
            "More data do not help a model that can't learn a few samples." * (not trial.falls),
            against=())  # fmt: skip


def _left_of_one_batch(record: Record) -> float:
    """Return the share of the first loss that is left after overfitting one batch; NaN: unknown."""
    trial, first = record.overfit, course.start(record)
    is_known = trial is not None and trial.steps >= LEAST_STEPS and first > 0
    return trial.loss / first if trial is not None and is_known else math.nan


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
    start, end, audited = course.start(record), course.end(record), record.is_audited
    if not course.is_known(record) or course.tells_nothing(record):
        return
    stays, fell = end > (1 - course.STILL) * start > 0, course.fell(record)
    unclear = course.may_have_fallen(record) and not stays
    if (fell and not stays) or (unclear and not audited):
        return
    little, rises = not audited and course.fell_little(record), still_rises(record)
    told = audited or course.is_measure(record)
    factor = usual_factor(_moves(record).values()) or 1.0
    factors = [10.0, 0.1] * audited
    if factor > 10:  # layers hardly move, whatever the loss does
        factors = [factor]
    elif end > (1 + course.STILL) * record.losses[0] > 0:
        factors = [0.1]
    advice = other_rates(factors) or (AUDIT,)
    said = "does not fall"
    if unclear:
        said = f"may fall, but differs by {course.noise(record):.3g} from batch to batch"
        advice = (Advice("train for more steps: the mean over more batches has less noise"),)
    elif course.rose(record):
        said = "rises"
    elif little:
        said = f"falls by less than {course.STILL:.0%}"
    elif (fell or course.may_have_fallen(record)) and start == record.chance:
        said = f"ends no lower than {start:.3g}, the loss of a constant prediction"
    yield Finding("loss-stuck", "note" if unclear or rises or little or not told else "watch",
        f"The loss {said}: {record.losses[0]:.3g} at first, {end:.3g} at the end."
        + " However, the model overfits one small batch."
        * (_left_of_one_batch(record) < NOT_BY_HEART)
        + f" {RISES_YET}" * rises
        + " That is no fault of generative adversarial networks, of reinforcement learning, or of "
        "a run that was resumed." * (not told),
        (Evidence("loss", end, start),), advice * (not rises))  # fmt: skip


@fault("interference", "Direction lost to interference between rows",
       shown_by=lambda record: by_layer(record, "attainable_cosine"))  # fmt: skip
def interference(record: Record) -> Iterator[Finding]:
    """Find layers whose gradient step has a low cosine although a better step exists."""
    cosines, ceilings = (by_layer(record, f"{of}_cosine") for of in ("gradient", "attainable"))
    lost = [p for p in sorted(cosines, key=lambda p: cosines[p].value)
            if p in ceilings and cosines[p].below(LOW_COSINE)
            and ceilings[p].above(ROOM * abs(cosines[p].value))]  # fmt: skip
    if lost:
        cosine, ceiling = cosines[lost[0]].value, ceilings[lost[0]].value
        # If rows may be tokens, batch normalisation would mix later into earlier ones.
        tokens = any(r.kind == "embedding" for x in record.reports for r in x.layers.values())
        yield Finding("interference", "note",
            f"In {named(record, lost[0])}, the rows of a batch disturb each other: a gradient step "
            f"has a cosine of {cosine:.3g}, the best possible {ceiling:.3g}.",
            (Evidence("gradient_cosine", cosine, LOW_COSINE, lost[0]),),
            (Advice("add batch normalisation in front of these layers", "batch-norm"),)
            * (not tokens),
            "Corrected layers remove differences in scale, not interference.", layers=tuple(lost),
            against=("affine-like", "norm-like"))  # fmt: skip


def _spoken_for(found: Sequence[Finding], measure: str) -> set[str]:
    """Return the layers of which other findings report a measure; "*" stands for all."""
    names = SPEAK_OF[measure]
    return {layer for f in found if f.name in names for layer in f.layers or ("*",)}


@fault("stands-still", "Layers that hardly move", "rest", about="symptom", shown_by=stepped)
@fault("settled", "Layers that move less than at first", "rest", about="course")
def stands_still(record: Record, found: Sequence[Finding]) -> Iterator[Finding]:
    """Find layers that hardly move, typically or lately.

    Those with a healthy move in a step of the first quarter have settled, unless the loss did not
    fall. One such step is enough, so that the result hardly depends on how many are measured.
    """
    spoken_for = _spoken_for(found, "update_ratio")
    if record.rates or "*" in spoken_for:
        return
    peak = at_peak(record)
    late = _quarter(peak, last=True)
    began: set[str] = set()
    little: dict[str, Typical] = {}
    for part in (peak, *[late] * (len(late.reports) >= FEWEST_REPORTS)):
        little |= {p: t for p, t in by_layer(part, "update_ratio").items() if t.below(LOW)}
    if not course.is_long_enough(record) or course.fell(record):
        for report in _quarter(peak, last=False).reports:
            values = value_of(record, report, "update_ratio")
            began |= {path for path, value in values.items() if LOW <= value <= HIGH}
    lately = by_layer(_quarter(record, last=True), "update_ratio")
    settled = little | {p: t for p, t in lately.items() if t.below(LOW)}
    settled = {p: t for p, t in settled.items() if t.value > 0 and p in began - spoken_for}
    limit = limits(record, "update_ratio")[0]
    others = {p: t for p, t in little.items() if p not in {*settled, *spoken_for}}
    if still := {p: t for p, t in others.items() if t.below(limit)}:
        strength, said = _of_readings(record), ""
        do = "give these layers a learning rate above zero"
        factor = max(3.0, usual_factor(t.value for t in still.values()) or 0.0)
        if not any(t.value for t in still.values()):
            said = "The learning rate is zero, or other code resets the weights."
        elif still_rises(record):
            strength, do, said = "note", "", RISES_YET
        else:
            do = (f"use a learning rate {factor:g} times as high, for these layers or for all, "
                  "unless pretrained weights should stay close to their values")  # fmt: skip
        yield _little(record, "stands-still", strength, still, said, do)
    if settled:
        said = "At first they did. That is usual as a loss falls, or as the learning rate does."
        yield _little(record, "settled", "note", settled, said)


def _quarter(record: Record, *, last: bool) -> Record:
    """Return the record of the first, or the last, quarter of the steps."""
    reports = record.reports
    first, end = (reports[0].step, reports[-1].step) if reports else (0, 0)
    length = (end - first) / 4
    kept = [r for r in reports if (r.step >= end - length if last else r.step <= first + length)]
    return replace(record, reports=tuple(kept))


def _little(record: Record, name: str, strength: Strength, layers: Mapping[str, Typical],
            said: str, do: str = "") -> Finding:  # fmt: skip
    moves = {p: layers[p].value for p in sorted(layers, key=lambda path: layers[path].value)}
    return Finding(name, strength,
        f"In a typical step, the activations of {these(record, [*moves])} move by at most "
        f"{max(moves.values()):.3g} times their length. Healthy layers that train from scratch "
        f"move by at least {LOW:g}. {said}".rstrip(),
        of_layers("update_ratio", moves, LOW), (Advice(do),) * bool(do),
        layers=tuple(moves), since=min(t.since or 0 for t in layers.values()))  # fmt: skip


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


def _outside(record: Record, measure: str, is_high: bool) -> dict[str, float]:
    """Return the layers typically above, or below, the limit by two standard errors, worst first.

    Queries and keys get little gradient while attention is even, and the values beside them more.
    """
    seen: dict[str, list[tuple[int, float, float]]] = {}
    for report in at_peak(record).reports:
        for path, value in value_of(record, report, measure).items():
            if math.isfinite(value):
                error = report.layers[path].standard_error.get(measure, 0.0)
                seen.setdefault(path, []).append((report.step, value, error))
    typical = {path: middle(values) for path, values in seen.items()}
    limit = limits(record, measure)[is_high]
    off = {p: t.value for p, t in typical.items() if (t.above if is_high else t.below)(limit)}
    if measure == GRADIENT and not is_high and off:
        known, last, paths = heard(record, record.reports[0]), record.reports[-1].layers, [*typical]
        for path in [*off]:
            i = paths.index(path)
            near = [p for p in paths[max(i - 2, 0) : i + 3] if not typical[p].below(limit)]
            if path not in known or any(of_same_rows(last, path, other) for other in near):
                del off[path]
    return {path: off[path] for path in sorted(off, key=off.__getitem__, reverse=is_high)}


@fault("outside-healthy", "Readings outside the healthy range", "rest", about="symptom",
       shown_by=maps)  # fmt: skip
def outside_healthy(record: Record, found: Sequence[Finding]) -> Iterator[Finding]:
    """Find layers whose typical readings are outside of the limits, unless others report them.

    If learning rates were tried, the loss itself has decided, and nothing is reported.
    """
    said, evidence, layers, faulty = [], [], [], False
    for measure, is_high in _REPORTED:
        spoken_for = _spoken_for(found, measure)
        outside = {} if record.rates or "*" in spoken_for else _outside(record, measure, is_high)
        if paths := [path for path in outside if path not in spoken_for]:
            limit = limits(record, measure)[is_high]
            side = "above" if is_high else "below"
            title = HEALTH[measure].title.lower()
            said.append(f"{title} {side} {limit:g} at {these(record, paths)}")
            evidence += [Evidence(measure, outside[p], limit, p) for p in paths[:3]]
            layers += paths
            faulty |= measure in _TELL_FAULTS
    if said:
        yield Finding("outside-healthy", _of_readings(record) if faulty else "note",
            f"Typical readings lie outside the healthy range: {'; '.join(said)}.",
            tuple(evidence), (AUDIT,), layers=tuple(dict.fromkeys(layers)))  # fmt: skip
