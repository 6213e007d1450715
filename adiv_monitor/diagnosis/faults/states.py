"""In which state is the run? Other faults lead to these states, so they are asked about last.

Is the learning rate too low; did values become not finite; can the model overfit one batch, and
learn as much as a small network; does the loss fall; do rows interfere? At the very end: which
layers hardly move, and no other finding has named them?
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

from adiv_monitor.diagnosis import course
from adiv_monitor.diagnosis import readings as read
from adiv_monitor.diagnosis.faults import rates
from adiv_monitor.diagnosis.faults.data import BEHIND, EXPLAINS
from adiv_monitor.diagnosis.faults.fault import Number, fault, finds, loop_fault, of_layers, told
from adiv_monitor.diagnosis.faults.inputs import by_training, is_broken, non_finite
from adiv_monitor.diagnosis.finding import STRENGTHS, Advice, Evidence, Finding, Strength, act_if
from adiv_monitor.diagnosis.health import HEALTH, value_of
from adiv_monitor.diagnosis.readings import named, these
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.report.wording import listed

# Findings that already say how far layers move; a layer that one of them names is not named again.
OF_MOVES = ("group-rates", "uneven-rates", "rate-too-high", "rate-too-low", "dead-units",
            "vanishing")  # fmt: skip
LOW, HIGH = HEALTH["update_ratio"].healthy
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
BY_OUTPUTS = 0.95  # of the loss, that outputs of free choice take away
LEAST_STEPS = 50  # fewest steps of the attempt to overfit; slow runs try fewer
CLEARLY = 4.0  # standard errors below a constant prediction's loss: more is learnt, though little
IN_VAIN = 0.1  # of the first loss: the sum of its falls in single steps, which later ones undo
RISES_YET = "The learning rate still rises: measurements at its peak will be clearer."
TARGETS = Advice("check that each target belongs to its input, and that the loss compares the two")
AUDIT = Advice("run adiv-audit: it looks for the cause, and tries fixes")


@fault("rate-too-low", "Learning rate too low", about="symptom")
def rate_too_low(record: Record) -> Iterator[Finding]:
    """Find a learning rate so low that nothing is learned."""
    if rates.overshoot(record) is None:
        yield from (_too_low_by_trial if record.rates else _too_low_by_measures)(record)


def _too_low_by_trial(record: Record) -> Iterator[Finding]:
    if (better := rates.better_rate(record)) is None or better[0] < 1:
        return
    factor, trial = better
    share = rates.share_of_fall(record, trial)
    shares = SHARE_OF_FALL_TOO_LOW_ACT, SHARE_OF_FALL_TOO_LOW_WATCH, SHARE_OF_FALL_TOO_LOW_NOTE
    limits = dict(zip(STRENGTHS, shares, strict=True))
    strength = next((name for name, limit in limits.items() if share < limit), None)
    is_slow = median(_moves(record).values() or [0.0]) < LOW
    if strength == "act" and not (is_slow and trial.steps >= LONG):
        strength = "watch"  # a run that is slow at first only looks like that, too
    if strength is not None:
        yield Finding("rate-too-low", strength, rates.said_of_rates(factor, trial)
            + " So short a run favours high learning rates: compare them in a longer one."
            * (strength != "act"),
            rates.by_trial(factor, trial, share, limits[strength]),
            rates.other_rates([factor, *(f for f in (10.0, 3.0) if f != factor)]))  # fmt: skip


def _moves(record: Record) -> dict[str, float]:
    """Return how far each layer's activations typically move near the peak of the rate."""
    return {p: t.value for p, t in read.by_layer(read.at_peak(record), "update_ratio").items()}


def _too_low_by_measures(record: Record) -> Iterator[Finding]:
    moves = read.by_layer(read.at_peak(record), "update_ratio")
    is_long = course.is_long_enough(record)
    if read.still_rises(record) or (is_long and course.fell(record)):
        return  # the peak is still to come, or layers need not move near the loss's end
    began = read.at_first(record, "update_ratio")[:1]
    if not is_long and any(LOW <= t.value <= HIGH for step in began for t in step.values()):
        return  # some moved well at first, so the training has probably come to its end
    if moves and all(t.below(HARDLY_MOVES) for t in moves.values()):
        path = read.worst_first(_moves(record))[0]
        largest = moves[path].value
        # Reports alone don't distinguish a training that never began from one that has ended.
        unsure = " That is usual at the end of a training." * (not record.is_audited)
        resumed = is_long and read.resumed(record)
        unsure = " The optimizer began with averages of an earlier run." if resumed else unsure
        factor = rates.usual_factor([largest]) or 10.0
        yield Finding("rate-too-low", act_if(record.is_audited and rates.suffers(record)),
            f"In a typical step, no layer's activations move by more than {largest:.3g} times "
            f"their length (limit {HARDLY_MOVES:g}).{unsure}",
            (Evidence("update_ratio", largest, HARDLY_MOVES, path),),
            rates.other_rates([factor, factor / 10 if factor > 10 else 3.0]))  # fmt: skip


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


@loop_fault("loss-spike", "The loss jumps up in single steps",
            shown_by=lambda record: record.losses and read.stepped(record))  # fmt: skip
def loss_spike(record: Record) -> Iterator[Finding]:
    """Find the loss's largest spike, and the layers that moved most with it."""
    spikes = [s for r in record.reports[-1:] for s in r.spikes if math.isfinite(s.loss)]
    for worst in sorted(spikes, key=lambda spike: -spike.sigmas)[:1]:
        yield Finding("loss-spike", act_if(rates.suffers(record)), str(worst),
            (Evidence("loss", worst.loss, worst.usual, step=worst.step),),
            (Advice("look at the batches of this step and of the one before, and at the learning "
                    "rates and weights of these layers; or clip the gradient's norm"),),
            layers=tuple(worst.layers)[:3], since=worst.step)  # fmt: skip


@fault("cannot-overfit", "The model can't overfit one small batch", about="last", certain=True)
def cannot_overfit(record: Record) -> Iterator[Finding]:
    """Find a model that can't even overfit one small batch."""
    trial, left = record.overfit, _left_of_one_batch(record)
    free = any(f.numbers["share"] < 1 - BY_OUTPUTS for f in record.found_by("outputs-in-vain"))
    if trial is not None and left > NOT_BY_HEART and not course.tells_nothing(record):
        yield Finding("cannot-overfit", act_if(not trial.falls),
            f"After {trial.steps} steps on one small batch, the loss of this batch is still "
            f"{trial.loss:.3g}{', and falling' * trial.falls}."
            + " Outputs of free choice bring the loss of a few samples close to 0: the fault lies "
            "before the loss." * free,
            (Evidence("share of the first loss that is left", left, NOT_BY_HEART),),
            (Advice("print the inputs and outputs of each function, from batch to loss"),),
            "More data do not help a model that can't learn a few samples." * (not trial.falls),
            against=())  # fmt: skip


def _left_of_one_batch(record: Record) -> float:
    """Return the share of the first loss that is left after overfitting one batch; NaN: unknown."""
    trial, first = record.overfit, course.start(record)
    is_known = trial is not None and trial.steps >= LEAST_STEPS and first > 0
    return trial.loss / first if trial is not None and is_known else math.nan


# This is a symptom of any fault.
behind_reference = told(__name__, "behind-reference", "The model learns less than a small network",
     "watch",
     "A small network explains {reference:.0%} of unseen labels, and this model {model:.0%} of "
     "them: the fault is in the model, the loss or the optimizer.",
     Number("share of the labels that the model explains", "model"),
     Advice("start from parts that work on these data, and exchange one at a time"),
     where=lambda fact: fact.numbers["reference"] > EXPLAINS
     and fact.numbers["model"] < BEHIND * fact.numbers["reference"],
     unless=course.tells_nothing, against=(), about="last")  # fmt: skip


@fault("loss-stuck", "The loss hardly falls, or ends at that of a constant prediction",
       about="symptom", shown_by=course.is_known)  # fmt: skip
def loss_stuck(record: Record) -> Iterator[Finding]:
    """Find a loss that does not fall, ends no lower than a constant prediction's, or is unclear.

    A monitor can't know whether a loss is a measure of the training. It is one if it is positive,
    and this optimizer alone trains, from the first step; else the finding is a note. So it is if
    the loss fell a little: much of it may be what no model can predict.
    """
    start, end, audited = course.start(record), course.end(record), record.is_audited
    few = not (read.several(record) and len(record.losses) >= 2 * course.FEWEST)  # a beginning
    if (few and not audited) or not course.is_known(record) or course.tells_nothing(record):
        return
    stays, fell = end > (1 - course.STILL) * start > 0, course.fell(record)
    unclear = course.may_have_fallen(record) and not stays
    if (fell and not stays) or (unclear and not audited):
        return
    little, rises = not audited and course.fell_little(record), read.still_rises(record)
    told = audited or course.is_measure(record)
    known = audited or any(report.loss_module for report in record.reports)
    own = median([r.descent for r in record.reports if r.descent is not None] or [0.0])
    vain = told and not audited and course.course(record) == "does not fall" and (
        own * len(record.losses) > IN_VAIN * start and rates.overshoot(record) is None)  # fmt: skip
    factor = rates.usual_factor(_moves(record).values()) or 1.0
    factors = [10.0, 0.1] * audited
    if factor > 10:  # layers hardly move, whatever the loss does
        factors = [factor]
    elif end > (1 + course.STILL) * record.losses[0] > 0:
        factors = [0.1]
    advice = rates.other_rates(factors) or (*[TARGETS] * (told and not vain), AUDIT)
    said = "does not fall"
    if unclear:
        said = f"may fall, but differs by {course.noise(record):.3g} from batch to batch"
        advice = (Advice("train for more steps: the mean over more batches has less noise"),)
    elif course.rose(record):
        said = "rises"
    elif (fell or course.may_have_fallen(record)) and start == record.chance:
        said = f"ends at about {start:.3g}, the loss of a constant prediction"
    elif little or (fell and not audited):
        said = f"falls by less than {course.STILL:.0%}"
    yield Finding("loss-stuck", "note" if unclear or rises or little or not told else "watch",
        f"The loss {said}: {record.losses[0]:.3g} at first, {end:.3g} at the end."
        + " However, the model overfits one small batch."
        * (_left_of_one_batch(record) < NOT_BY_HEART)
        + f" {RISES_YET}" * rises
        + f" By its gradient, a typical step lowers the loss by {own:.2g}, which does not last: "
        "code changes the gradient within the backward pass (a hook, say), inputs change at "
        "random, or targets are unrelated to them."
        * vain
        + " That is no fault of generative adversarial networks, of reinforcement learning, or of "
        "a run that was resumed." * (not (told and known)),
        (Evidence("loss", end, start),), advice * (not rises))  # fmt: skip


told(__name__, "loss-stuck", "", "watch",
     "The mean loss of the later half is {loss:.3g}, and a constant prediction has {constant:.3g} "
     "for the same targets.",
     Number("standard errors below the loss of a constant prediction", "z", below=CLEARLY),
     TARGETS, AUDIT,
     where=lambda fact: fact.numbers["loss"] > (1 - course.STILL) * fact.numbers["constant"],
     unless=lambda record: len(record.losses) < 2 * course.FEWEST
     or not course.is_measure(record) or any(loss_stuck(record)), against=())  # fmt: skip


@fault("interference", "Direction lost to interference between rows",
       shown_by=lambda record: read.by_layer(record, "attainable_cosine"))  # fmt: skip
def interference(record: Record) -> Iterator[Finding]:
    """Find layers whose gradient step has a low cosine although a better step exists."""
    cosines, ceilings = (read.by_layer(record, f"{of}_cosine") for of in ("gradient", "attainable"))
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
            against=("affine-like",))  # fmt: skip


@finds("rest")
def never_reached(record: Record, found: Sequence[Finding]) -> Iterator[Finding]:
    """Find parameters whose gradient is exactly zero in all steps, if nothing else explains it.

    Biases are left out: distances between outputs do not depend on them.
    """
    names = [name for name in record.wiring.zero_gradient if not name.endswith("bias")]
    if names and record.is_audited and not any(finding.strength == "act" for finding in found):
        yield Finding("zero-gradient", "watch",
            f"The gradient of {listed([f'{name!r}' for name in names])} is exactly 0 in all steps.",
            (Evidence("parameters whose gradient is 0", len(names), 0),),
            (Advice("look for a factor of 0, for two factors that both begin at 0, and for units "
                    "that are flat for all rows"),))  # fmt: skip


@fault("stands-still", "Layers that hardly move", "rest", about="symptom", shown_by=read.stepped)
def stands_still(record: Record, found: Sequence[Finding]) -> Iterator[Finding]:
    """Find layers that hardly move, typically or lately.

    Those that moved by more in a step of the first quarter have settled, unless the loss did not
    fall. One such step is enough, so that the result hardly depends on how many are measured. If
    the loss falls, small moves do no harm that shows: AdamW with its default learning rate moves
    layers of small networks that learn well by 0.001 to 0.009. Then, and where the loss is not
    known, only layers that hardly move at all are named.
    """
    named_ones = {layer for f in found if f.name in OF_MOVES for layer in f.layers or ("*",)}
    if record.rates or "*" in named_ones:
        return
    peak, knows_loss = read.at_peak(record), course.is_long_enough(record)
    late, fell = _quarter(peak, last=True), not knows_loss or course.fell(record)
    limit = HEALTH["update_ratio"].far[0] if fell else LOW
    still: dict[str, read.Typical] = {}
    for part in (peak, *[late] * (len(late.reports) >= read.FEWEST_REPORTS)):
        still |= {p: t for p, t in read.by_layer(part, "update_ratio").items() if t.below(limit)}
    for report in _quarter(peak, last=False).reports if fell else ():
        values = value_of(record, report, "update_ratio")
        named_ones |= {path for path, value in values.items() if limit <= value <= HIGH}
    moves = {p: still[p].value for p in sorted(still, key=lambda p: still[p].value)
             if p not in named_ones}  # fmt: skip
    if not moves:
        return
    # If the loss falls, or need not, the state may be meant.
    meant = knows_loss and bool(record.losses) and (fell or not course.is_measure(record))
    strength: Strength = "note" if meant or read.still_rises(record) else "watch"
    factor = max(3.0, rates.usual_factor(moves.values()) or 0.0)
    said, do = "", "give these layers a learning rate above zero"
    if not any(moves.values()):
        said = "The learning rate is zero, or other code resets the weights."
    elif read.still_rises(record):
        said, do = RISES_YET, ""
    else:
        do = (f"use a learning rate {factor:g} times as high, for these layers or for all, unless "
              "pretrained weights should stay close to their values")  # fmt: skip
    yield Finding("stands-still", strength,
        f"In a typical step, the activations of {these(record, [*moves])} move by at most "
        f"{max(moves.values()):.3g} times their length. Healthy layers that train from scratch "
        f"move by at least {LOW:g}. {said}".rstrip(),
        of_layers("update_ratio", moves, LOW), (Advice(do),) * bool(do),
        layers=tuple(moves), since=min(still[p].since or 0 for p in moves))  # fmt: skip


def _quarter(record: Record, *, last: bool) -> Record:
    """Return the record of the first, or the last, quarter of the steps."""
    reports = record.reports
    first, end = (reports[0].step, reports[-1].step) if reports else (0, 0)
    length = (end - first) / 4
    kept = [r for r in reports if (r.step >= end - length if last else r.step <= first + length)]
    return replace(record, reports=tuple(kept))
