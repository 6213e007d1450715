"""Is a learning rate too high, for some layers or for all? And does the run suffer at all?

The first functions compute what some fixes need of the run.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median

import numpy as np

from adiv_monitor.diagnosis import course
from adiv_monitor.diagnosis import readings as read
from adiv_monitor.diagnosis.faults.fault import LONG_STEPS, fault
from adiv_monitor.diagnosis.finding import Advice, Evidence, Finding, Trial, act_if
from adiv_monitor.diagnosis.health import HEALTH
from adiv_monitor.diagnosis.readings import at_first, named, these
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.printable import quoted
from adiv_monitor.report.wording import listed

USUAL = 0.9  # momentum, and Adam's β₁
MOVES = 0.01  # move of activations, relative to their length, in a step of a model that learns
AT_MOST = 100.0  # largest factor on a layer's learning rate
LEAST, MOST = 0.7, 1.4  # factors between them change nothing that can be told
# update_ratio of a layer over the median layer's, at the first step. Healthy nets have 1/25 to 24.
OVERDRIVEN, STARVED = 30.0, 50.0


def less_momentum(momentum: float) -> float:
    """Return the momentum to try next: 0.9 if it is above 0.95, else half of it."""
    return USUAL if momentum > (1 + USUAL) / 2 else momentum / 2


def clip_norm(record: Record) -> float:
    """Return the 90th percentile of the gradient's norms, as Google's tuning playbook advises.

    It is 1 if no norm is finite and positive.
    """
    norms = [n for n in record.gradient_norms if math.isfinite(n) and n > 0]
    return float(np.quantile(norms, 0.9)) if norms else 1.0


def usual_factor(moves: Iterable[float]) -> float | None:
    """Return the power of ten on the learning rate at which layers would move by `MOVES`.

    A small move is proportional to the learning rate, with plain gradient descent as with Adam. The
    layer that moves most decides.

    Args:
        moves: typical `update_ratio` of layers.

    Returns:
        The factor; None if no layer moves, or one by a number that is not finite.
    """
    largest = max(moves, default=0.0)
    factor = MOVES / largest if largest > 0 else 0.0
    return 10.0 ** round(math.log10(factor)) if 0 < factor < math.inf else None


def other_rates(factors: Iterable[float]) -> tuple[Advice, ...]:
    """Return advice to multiply the learning rate by each of some factors."""
    return tuple(Advice(f"learning rate × {f:g}", f"rate*{f:g}") for f in factors)


def rates_per_layer(record: Record, layers: Collection[str] = ()) -> Mapping[str, float]:
    """Return factors on the learning rates of layers that move unlike the median layer.

    A factor is limit / u, with a layer's largest `update_ratio` u of the first two measured steps:
    below 1 where it moves too far, above 1 where it stands still. The limit is the nearest value
    that is healthy and on this side of the median. Not by `effective_lr`: where gradients vanish on
    the way down, it is largest in the lowest layers, which hardly move.

    Args:
        record: The record of the run.
        layers: The layers to include; empty: all.

    Returns:
        Layer → factor, 0.01 to 100, for the layers outside of the limits; none from 0.7 to 1.4.
    """
    steps = [{path: t.value for path, t in step.items() if t.value > 0}
             for step in at_first(record, "update_ratio")]  # fmt: skip
    if not any(steps):
        return {}
    middle = median(steps[0].values() or [math.nan])
    low, high = HEALTH["update_ratio"].healthy
    found = {}
    for path in layers or steps[0]:
        move = max((step[path] for step in steps if path in step), default=middle)
        if move > middle * OVERDRIVEN:
            found[path] = max(min(high, middle * OVERDRIVEN), middle) / move
        elif move < middle / STARVED:
            found[path] = min(max(low, middle / STARVED), middle) / move
    factors = {path: min(max(f, 1 / AT_MOST), AT_MOST) for path, f in found.items()}
    return {path: f for path, f in factors.items() if not LEAST <= f <= MOST}


# Fall of the loss at the run's learning rate over its fall at a better one.
SHARE_OF_FALL_ACT, SHARE_OF_FALL_WATCH = 0.8, 0.9
# Loss at a tenth of the learning rate, or less, over that at the learning rate itself. Where the
# first loss is far above what is soon reached, any learning rate takes most of the fall, and what
# is left of the loss tells more.
LEFT_AT_A_TENTH = 2 / 3
SHARE_OF_FALL_SUFFERS = 0.5
# ‖Δz‖ / ‖z‖ of the first step, in the median layer: activations that move by their own length are
# not those that the gradient was computed at. Healthy runs have 0.02 to 0.7 (RMSprop 4).
MOVES_TOO_FAR = 1.0
MOVES_TOO_FAR_UNSEEN = 10.0  # limit if the losses are unknown, so that they may fall all the same
OVERSHOOTS = 10 * HEALTH["update_ratio"].healthy[1]
KILLS = 1.0  # the same, if a layer gets no gradient any more afterwards: a move by its own length
LEAST_GAIN = 0.1  # rms of outputs over that of inputs: below it, a layer begins near zero
RATES_APART = 10.0  # times the learning rate of most layers
UNEVEN_ACT = 100.0  # in either direction, at more than one step


@fault("group-rates", "The learning rate of a parameter group is far from the others'")
@fault("uneven-rates", "Layers move by very different amounts",
       shown_by=lambda r: read.stepped(r) and len(read.maps(r)) >= read.FEWEST_LAYERS)  # fmt: skip
def uneven_rates(record: Record) -> Iterator[Finding]:
    """Find layers whose activations move far less, or far more, than those of the others.

    Layers that do not move at all are left out, here and in the median, as are parts of modules,
    whose outputs hold more than what these make. The first measured step decides, since training
    has broken nothing yet. A layer whose output begins near zero moves far there and is healthy.
    So nothing is found unless the layer also does so at the next measured step, or the loss goes
    badly, or it has a far higher learning rate than others and moves beyond the healthy range. If
    only one step is measured, the finding is a note.
    """
    parts = {p for r in record.reports for p, of in r.layers.items() if of.kind == "module"}
    moves = [{path: move for path, move in step.items() if move.value > 0 and path not in parts}
             for step in read.at_first(record, "update_ratio")]  # fmt: skip
    apart = _of_other_rates(record)
    off, *later = [_off_the_middle(step, apart) for step in moves] or [{}]
    lasting = [min(off[path], again[path]) for again in later for path in off if path in again]
    by_rate = any(moves[0][p].above(HEALTH["update_ratio"].healthy[1]) for p in off if p in apart)
    harms = suffers(record)
    if not off or (later and not lasting and not harms and not by_rate):
        return
    # By one step alone, it is not known whether it lasts.
    act = max(lasting, default=0.0) > UNEVEN_ACT or (harms and (lasting or not later or by_rate))
    layers, middle = read.worst_first(off), _middle(moves[0], apart)
    first = moves[0][layers[0]].value
    low, high = middle / STARVED, middle * OVERDRIVEN
    yield Finding("group-rates" if {*layers} <= apart else "uneven-rates",
        "act" if act else "watch" if later else "note",
        f"In one step, the activations of {these(record, layers)} move unlike those of the other "
        f"layers: {named(record, layers[0])} by {first:.3g} times their length, and the median "
        f"layer by {middle:.3g}. Healthy ones lie between {low:.3g} and {high:.3g}."
        + " Their parameter groups have another learning rate." * ({*layers} <= apart),
        tuple(Evidence("update_ratio", value, low if value < middle else high, p)
              for p in layers[:3] for value in (moves[0][p].value,)),
        tuple(_evened(record, layers, apart)),
        "No single learning rate suits both kinds of layers.",
        layers=layers, since=record.reports[0].step)  # fmt: skip


def suffers(record: Record) -> bool:
    """Return whether the loss goes badly: no fall, or a far greater one at another learning rate.

    Other rules require it before they return "act". It is False if the loss is unknown, or need not
    fall.
    """
    if not record.losses or not course.is_long_enough(record) or course.tells_nothing(record):
        return False
    if not course.fell(record):
        return True
    if (better := better_rate(record)) is None or _overtakes(record, better[1]):
        return False
    limit = SHARE_OF_FALL_ACT if better[0] < 1 else SHARE_OF_FALL_SUFFERS
    return share_of_fall(record, better[1]) < limit


def share_of_fall(record: Record, trial: Trial) -> float:
    """Return the fall of the loss at the run's learning rate over its fall in the trial.

    If it falls in neither, the share is 1; it is −∞ if the run's loss is not finite, or rises by
    more than the limit for standing still.
    """
    if not math.isfinite(trial.loss_without):
        return -math.inf
    fall, best = course.start(record) - trial.loss_without, course.start(record) - trial.loss
    if best > 0:
        return fall / best
    return -math.inf if -fall > course.STILL * abs(course.start(record)) else 1.0


def _overtakes(record: Record, trial: Trial) -> bool:
    """Return whether the run, longer than the trial, ends below the trial's loss.

    Then the trial compares beginnings only. A ResNet-20 at its best learning rate of 0.1 is above
    chance after 13 steps, as it is not at 0.01, and within 0.1 of 0.01's loss after 60.
    """
    return len(record.losses) > trial.steps and course.end(record) < trial.loss


def better_rate(record: Record) -> tuple[float, Trial] | None:
    """Return the best learning rate factor and its trial, if it pays, else None.

    It pays if the loss is lower by more than two standard errors, and by 2 %, and below that of a
    constant prediction. Where that is not known, a higher rate must end below the first loss by two
    standard errors. A lower rate need only be better than a run that ends above its first loss.
    There is none if the loss need not fall. Only one factor is best, so that no learning rate is
    both too high and too low.
    """
    if course.tells_nothing(record):
        return None
    trials = [(f, t) for f, t in record.rates.items() if _learns(record, f, t)]
    best = min(trials, key=lambda pair: pair[1].loss, default=None)
    return best if best is not None and best[0] != 1 and best[1].pays else None


def _learns(record: Record, factor: float, trial: Trial) -> bool:
    first = record.losses[0] if record.losses else math.nan
    if trial.steps < course.FEWEST or not math.isfinite(trial.loss):
        return False
    if factor < 1 and trial.loss_without > first:
        return True
    if record.chance is not None:
        return trial.loss < record.chance
    error = 0.0 if math.isnan(trial.loss_error) else trial.loss_error
    return factor < 1 or trial.loss + 2 * error < first


def _evened(record: Record, layers: Sequence[str], apart: set[str]) -> Iterator[Advice]:
    """Yield what may make all layers move alike."""
    if {*layers} <= apart:
        yield Advice("give their parameter groups the learning rate of the other layers")
    if factors := rates_per_layer(record, layers):
        each = [f"× {factors[path]:.3g} for {quoted(path)}" for path in layers if path in factors]
        said = f"give these layers their own learning rates: {listed(each)}"
        yield Advice(said, "rate-per-layer")
    if not read.scale_free(record):
        yield Advice("use AdamW with learning rate 0.001: it scales each parameter's step", "adamw")


def _of_other_rates(record: Record) -> set[str]:
    """Return the layers whose learning rate is `RATES_APART` times the usual one, or a part."""
    own = {
        path: report.learning_rates[group]
        for report in record.reports[:1]
        for path, group in report.groups.items()
        if group < len(report.learning_rates)
    }
    ((usual, _),) = Counter(own.values()).most_common(1) or [(0.0, 0)]
    low, high = usual / RATES_APART, usual * RATES_APART
    return {path for path, rate in own.items() if usual > 0 and not low < rate < high}


def _middle(moves: dict[str, read.Typical], apart: set[str]) -> float:
    """Return how far the median layer moves, of those with the usual learning rate if there are."""
    usual = [move.value for path, move in moves.items() if path not in apart]
    return median(usual or [move.value for move in moves.values()])


def _off_the_middle(moves: dict[str, read.Typical], apart: set[str]) -> dict[str, float]:
    """Return the layers that move unlike the median layer, with the factor, at least 1."""
    if len(moves) < read.FEWEST_LAYERS and not apart & {*moves}:
        return {}
    middle = _middle(moves, apart)
    return {
        path: max(move.value / middle, middle / move.value)
        for path, move in moves.items()
        if move.above(middle * OVERDRIVEN) or move.below(middle / STARVED)
    }


@fault("rate-too-high", "Learning rate too high", explains=LONG_STEPS)
def rate_too_high(record: Record) -> Iterator[Finding]:
    """Find a learning rate so high that steps leave the range where the loss is nearly linear."""
    yield from (_too_high_by_trial if record.rates else _too_high_by_measures)(record)


def _too_high_by_trial(record: Record) -> Iterator[Finding]:
    if (better := better_rate(record)) is None or better[0] > 1:
        return
    factor, trial = better
    share, said = share_of_fall(record, trial), said_of_rates(factor, trial)
    # A tenth of the learning rate, or less, leaves far less of the loss.
    left = factor <= 0.1 and 0 < trial.loss < LEFT_AT_A_TENTH * trial.loss_without < math.inf
    seen = by_trial(factor, trial, share, SHARE_OF_FALL_WATCH)
    if _overtakes(record, trial) and (share < SHARE_OF_FALL_WATCH or left):
        said += f" Only the beginning is rough: the run goes on to {course.end(record):.3g}."
        yield _too_high(False, said, seen, [])
    elif share < SHARE_OF_FALL_WATCH or left:
        factors = [factor, *(f for f in (0.1, 0.3) if f != factor)]
        yield _too_high(share < SHARE_OF_FALL_ACT or left, said, seen, factors)


def by_trial(factor: float, trial: Trial, share: float, limit: float) -> tuple[Evidence, ...]:
    """Return the evidence of a trial of a learning rate."""
    return (
        Evidence("loss", trial.loss_without),
        Evidence(f"loss at learning rate × {factor:g}", trial.loss),
        Evidence(f"fall of the loss, over its fall at learning rate × {factor:g}", share, limit),
    )


def said_of_rates(factor: float, trial: Trial) -> str:
    """Return the sentence on a trial of a learning rate."""
    without = "; at the current one it diverges"
    if math.isfinite(trial.loss_without):
        without = f" instead of {trial.loss_without:.3g}"
    return (f"At {factor:g} times the learning rate, the loss after {trial.steps} steps is "
            f"{trial.loss:.3g}{without}.")  # fmt: skip


def _too_high(act: bool, said: str, seen: Sequence[Evidence], factors: Sequence[float]) -> Finding:
    """Return the finding; without factors, no learning rate is known to be better for long."""
    longer = Advice("compare lower learning rates in runs as long as this one or longer")
    warm_up = Advice("warm the learning rate up over the first steps")
    advice = (*other_rates(factors), warm_up, *[longer] * (not factors))
    return Finding("rate-too-high", act_if(act), said, tuple(seen), advice)


def _too_high_by_measures(record: Record) -> Iterator[Finding]:
    """Find steps that move activations too far."""
    if course.tells_nothing(record):
        return
    first = read.at_first(record, "update_ratio")
    is_seen = bool(first) and record.reports[0].coverage > 0.5  # of most parameters
    moves = median([t.value for t in first[0].values()] or [0.0]) if is_seen else 0.0
    limit = MOVES_TOO_FAR if record.losses else MOVES_TOO_FAR_UNSEEN
    halved = course.end(record) <= course.start(record) / 2
    if moves > limit and (course.peaked(record) or not halved):
        evidence = Evidence("update_ratio, median layer", moves, limit, step=0)
        said = (f"The first step moved the activations of the median layer by {moves:.3g} times "
                "their length.")  # fmt: skip
    elif not course.fell(record) and (over := overshoot(record)) is not None:
        path, move, furthest = over
        evidence = Evidence("update_ratio", move.value, furthest, path, move.since)
        then = "a layer is dead since" if furthest == KILLS else "the loss rose after it"
        said = (f"Step {move.since} moved the activations of {named(record, path)} by "
                f"{move.value:.3g} times their length, and {then}.")  # fmt: skip
    else:
        return
    yield _too_high(suffers(record), said, (evidence,), (0.1, 0.3))


def overshoot(record: Record) -> tuple[str, read.Typical, float] | None:
    """Return the layer that moved furthest before the loss rose, its move, and the limit of this.

    It counts at any measured step, though the layer may stand still later, if it is ten times
    beyond the healthy range, or if it is longer than the activations and a layer is dead after it,
    whatever the loss does.
    A weight that begins at or near zero (the second factor of a low-rank update, the end of a
    residual branch, a head) moves far relative to its output and is healthy.
    """
    dead = {p for x in record.reports[-1:] for p, r in x.layers.items() if r.idle_share == 1}
    near_zero = {p for x in record.reports[:1] for p, r in x.layers.items()
                 if r.activation_rms is not None and r.activation_rms
                 <= LEAST_GAIN * math.sqrt((r.scale_mean or 0.0) / (r.features or 1))}  # fmt: skip
    killed, moves = False, []
    for report in record.reports:
        killed |= any((report.layers[p].idle_share or 0.0) < 1 for p in dead & {*report.layers})
        if killed or _rises_after(record, report.step):
            limit = KILLS if killed else OVERSHOOTS
            moved = read.by_layer(replace(record, reports=(report,)), "update_ratio")
            moves += [(p, t, limit) for p, t in moved.items() if p not in near_zero]
    furthest = max(moves, key=lambda each: each[1].value, default=None)
    return furthest if furthest is not None and furthest[1].above(furthest[2]) else None


def _rises_after(record: Record, step: int) -> bool:
    """Return whether the loss over the next eighth of the run is above that up to the step.

    The median before it counts, since the batch of the step may be the one with a large loss.
    """
    pairs = [*zip(record.steps_of_losses, record.losses, strict=False)]
    length = max(3, len(pairs) // 8)
    before = [loss for s, loss in pairs if s <= step][-length:]
    after = [loss for s, loss in pairs if s > step][:length]
    if not before or not after:
        return False
    here, error = median(before), course.noise(record) / math.sqrt(len(after))
    return not fmean(after) <= here + max(course.STILL * abs(here), error)
