"""Is a learning rate too high, for some layers or for all? And does the run suffer at all?"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean, median

from adiv_monitor.diagnosis.course import (
    FEWEST,
    STILL,
    end,
    fell,
    is_long_enough,
    noise,
    start,
    tells_nothing,
)
from adiv_monitor.diagnosis.faults.fault import FEWEST_LAYERS, LONG_STEPS, fault, stepped
from adiv_monitor.diagnosis.faults.remedies import (
    OVERDRIVEN,
    STARVED,
    GroupRates,
    group_rates,
    optimizer_of,
    other_rates,
    own_rates,
    rates_per_layer,
)
from adiv_monitor.diagnosis.finding import Advice, Evidence, Finding, Strength, Trial
from adiv_monitor.diagnosis.health import HEALTH
from adiv_monitor.diagnosis.readings import (
    SCALE_FREE,
    Typical,
    at_first,
    by_layer,
    maps,
    named,
    worst_first,
)
from adiv_monitor.diagnosis.record import Record

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
LEAST_GAIN = 0.1  # rms of a weight's entries · √fan-in: below it, its outputs begin near zero
UNEVEN_ACT = 100.0  # in either direction, at more than one step


@fault(
    "uneven-rates",
    "Layers move by very different amounts",
    shown_by=lambda r: stepped(r) and len(maps(r)) >= FEWEST_LAYERS,
)
def uneven_rates(record: Record) -> Iterator[Finding]:
    """Find layers whose activations move far less, or far more, than those of the others.

    Layers that do not move at all are left out, here and in the median. The first measured step
    decides, since training has broken nothing yet. A layer whose output begins near zero moves far
    there and is healthy. So nothing is found unless the layer also does so at the next measured
    step, or the loss goes badly. If only one step is measured, the finding is a note.
    """
    steps = [_off_the_middle(ratios) for ratios in at_first(record, "update_ratio")]
    off = steps[0] if steps else {}
    lasting = {
        path: min(step[path] for step in steps)
        for path in off
        if all(path in step for step in steps)
    }
    if not off or (len(steps) > 1 and not lasting and not suffers(record)):
        return
    is_known = len(steps) > 1  # whether it lasts
    if not is_known:
        lasting = {}
    strength: Strength = "watch" if lasting or (is_known and suffers(record)) else "note"
    harms = suffers(record) and (lasting or not is_known)
    if harms or max(lasting.values(), default=0.0) > UNEVEN_ACT:
        strength = "act"
    layers = worst_first(off)
    ratios = _moving(at_first(record, "update_ratio")[0])
    middle = median(t.value for t in ratios.values())
    starved = all(ratios[p].value < middle for p in layers)
    groups = _at_fault(group_rates(record, layers), record, ratios, layers)
    yield Finding("uneven-rates", strength,
        f"In one step, the activations of {', '.join(named(record, p) for p in layers[:3])} "
        f"{'hardly move' if starved else 'move unlike those of the other layers'}: "
        + (f"{named(record, layers[0])} moves " if layers[1:] else "")
        + f"{ratios[layers[0]].value / middle:.3g} times as far, relative to their length, as "
          f"those of the median layer. The limits are 1/{STARVED:g} and {OVERDRIVEN:g} times the "
          f"median, here {middle / STARVED:.3g} and {middle * OVERDRIVEN:.3g}."
        + (f" The cause is the learning rate of a parameter group: {groups.rates} in the "
           f"optimizer's {groups.names}, and {groups.usual:g} for the other layers." if groups else
           ""),
        tuple(Evidence("update_ratio", ratios[p].value, _limit(ratios[p], middle), p)
              for p in layers[:3]),
        tuple(_evened(record, layers, groups)),
        "" if groups else "No single learning rate suits both kinds of layers.", layers=layers,
        since=record.reports[0].step)  # fmt: skip


def suffers(record: Record) -> bool:
    """Return whether the loss goes badly: no fall, or a far greater one at another learning rate.

    Other rules require it before they return "act". It is False if the loss is unknown, or need not
    fall.
    """
    if not record.losses or not is_long_enough(record) or tells_nothing(record):
        return False
    share_at_lower, share_at_higher = (
        1.0 if better is None or _overtakes(record, better[1]) else share_of_fall(record, better[1])
        for better in (_lower(record), _higher(record))
    )
    return (
        not fell(record)
        or share_at_lower < SHARE_OF_FALL_ACT
        or share_at_higher < SHARE_OF_FALL_SUFFERS
    )


def share_of_fall(record: Record, trial: Trial) -> float:
    """Return the fall of the loss at the run's learning rate over its fall in the trial.

    If it falls in neither, the share is 1; it is −∞ if the run's loss is not finite, or rises by
    more than the limit for standing still.
    """
    if not math.isfinite(trial.loss_without):
        return -math.inf
    fall, best = start(record) - trial.loss_without, start(record) - trial.loss
    if best > 0:
        return fall / best
    return -math.inf if -fall > STILL * abs(start(record)) else 1.0


def _overtakes(record: Record, trial: Trial) -> bool:
    """Return whether the run, longer than the trial, ends below the trial's loss.

    Then the trial compares beginnings only. A ResNet-20 at its best learning rate of 0.1 is above
    chance after 13 steps, as it is not at 0.01, and within 0.1 of 0.01's loss after 60.
    """
    return len(record.losses) > trial.steps and end(record) < trial.loss


def _lower(record: Record) -> tuple[float, Trial] | None:
    """Return the best learning rate factor and its trial if it is below 1, else None."""
    return better if (better := _better(record)) is not None and better[0] < 1 else None


def _better(record: Record) -> tuple[float, Trial] | None:
    """Return the best learning rate factor and its trial, if it pays, else None.

    It pays if the loss is lower by more than two standard errors, and by 2 %, and below that of a
    constant prediction. Where that is not known, a higher rate must end below the first loss by two
    standard errors. A lower rate need only be better than a run that ends above its first loss.
    There is none if the loss need not fall.
    """
    if tells_nothing(record):
        return None
    trials = [
        (factor, trial)
        for factor, trial in record.rates.items()
        if trial.steps >= FEWEST and math.isfinite(trial.loss) and _learns(record, factor, trial)
    ]
    if not trials:
        return None
    factor, trial = min(trials, key=lambda pair: pair[1].loss)
    return (factor, trial) if trial.pays else None


def _learns(record: Record, factor: float, trial: Trial) -> bool:
    first = record.losses[0] if record.losses else math.nan
    if factor < 1 and trial.loss_without > first:
        return True
    if record.chance is not None:
        return trial.loss < record.chance
    error = 0.0 if math.isnan(trial.loss_error) else trial.loss_error
    return factor < 1 or trial.loss + 2 * error < first


def _higher(record: Record) -> tuple[float, Trial] | None:
    """Return the best learning rate factor and its trial if it is above 1, else None.

    Only one factor is best, so that no learning rate is both too high and too low.
    """
    return better if (better := _better(record)) is not None and better[0] > 1 else None


def _evened(record: Record, layers: Sequence[str], groups: GroupRates | None) -> Iterator[Advice]:
    """Yield what may make all layers move alike."""
    if groups is not None:
        yield Advice(f"give {groups.names} the learning rate of the other layers, {groups.usual:g} "
                     f"instead of {groups.rates}", "group-rate")  # fmt: skip
        return
    if rates_per_layer(record, layers):
        yield Advice(own_rates(record, layers), "rate-per-layer")
    if optimizer_of(record) not in SCALE_FREE:
        yield Advice("use AdamW with learning rate 0.001: it scales each parameter's step", "adamw")


def _at_fault(
    groups: GroupRates | None, record: Record, ratios: dict[str, Typical], layers: Sequence[str]
) -> GroupRates | None:
    """Return the groups if these layers would move like the others at the others' learning rate."""
    if groups is None:
        return None
    middle = median(ratio.value for ratio in ratios.values())
    rates = {path: groups.own[record.reports[0].groups[path]] for path in layers}
    moves = [ratios[path].value * groups.usual / rate for path, rate in rates.items()]
    is_within = all(middle / STARVED < move < middle * OVERDRIVEN for move in moves)
    return groups if is_within else None


def _off_the_middle(ratios: dict[str, Typical]) -> dict[str, float]:
    """Return the layers that move unlike the median layer, with the factor, at least 1."""
    ratios = _moving(ratios)
    if len(ratios) < 3:
        return {}
    middle = median(ratio.value for ratio in ratios.values())
    return {
        path: max(ratio.value / middle, middle / ratio.value)
        for path, ratio in ratios.items()
        if ratio.above(middle * OVERDRIVEN) or ratio.below(middle / STARVED)
    }


def _moving(ratios: dict[str, Typical]) -> dict[str, Typical]:
    """Return the layers that move."""
    return {path: ratio for path, ratio in ratios.items() if ratio.value > 0}


def _limit(ratio: Typical, middle: float) -> float:
    return middle / STARVED if ratio.value < middle else middle * OVERDRIVEN


@fault("rate-too-high", "Learning rate too high", explains=LONG_STEPS)
def rate_too_high(record: Record) -> Iterator[Finding]:
    """Find a learning rate so high that steps leave the range where the loss is nearly linear."""
    if record.rates:
        yield from _too_high_by_trial(record)
    else:
        yield from _too_high_by_measures(record)


def _too_high_by_trial(record: Record) -> Iterator[Finding]:
    if (better := _lower(record)) is None:
        return
    factor, trial = better
    share = share_of_fall(record, trial)
    left = trial.loss / trial.loss_without if _far_less_is_left(factor, trial) else None
    rough = _overtakes(record, trial)
    if share < SHARE_OF_FALL_WATCH or left is not None:
        evidence = [*_by_trial(factor, trial, share, SHARE_OF_FALL_WATCH)]
        if left is not None:
            evidence.append(Evidence("share of the loss that it leaves", left, LEFT_AT_A_TENTH))
        if rough:
            evidence.append(Evidence("loss at the end of the run", end(record), trial.loss))
        yield _too_high(record,
            "act" if (share < SHARE_OF_FALL_ACT or left is not None) and not rough else "watch",
            _said_of_rates(factor, trial)
            + (f" The run itself goes on, and reaches {end(record):.3g} in {len(record.losses)} "
               "steps: only its beginning is known to be rough.") * rough,
            evidence, None if rough else factor)  # fmt: skip


def _far_less_is_left(factor: float, trial: Trial) -> bool:
    """Return whether a tenth of the learning rate, or less, leaves far less of the loss."""
    is_finite = math.isfinite(trial.loss_without)
    return is_finite and factor <= 0.1 and 0 < trial.loss < LEFT_AT_A_TENTH * trial.loss_without


def _by_trial(factor: float, trial: Trial, share: float, limit: float) -> tuple[Evidence, ...]:
    return (
        Evidence("loss", trial.loss_without),
        Evidence(f"loss at learning rate × {factor:g}", trial.loss),
        Evidence(f"fall of the loss, over its fall at learning rate × {factor:g}", share, limit),
    )


def _said_of_rates(factor: float, trial: Trial) -> str:
    is_finite = math.isfinite(trial.loss_without)
    without = f" instead of {trial.loss_without:.3g}" if is_finite else None
    return (f"At {factor:g} times the learning rate, the loss after {trial.steps} steps is "
            f"{trial.loss:.3g}{without or '; at the current one it diverges'}.")  # fmt: skip


def _too_high(
    record: Record, strength: Strength, said: str, seen: list[Evidence], factor: float | None
) -> Finding:
    """Return the finding; with no factor, no learning rate is known to be better for long."""
    factors = [] if factor is None else [factor] + [f for f in (0.1, 0.3) if f != factor]
    return Finding("rate-too-high", strength, said, tuple(seen),
        (*other_rates(factors),
         Advice("warm the learning rate up over the first steps", "warm-up"),
         *[Advice("compare lower learning rates in runs as long as this one or longer")]
         * (factor is None)),
        "More steps at this learning rate do not help."
        * (bool(record.losses) and not fell(record)), against=())  # fmt: skip


def _too_high_by_measures(record: Record) -> Iterator[Finding]:
    """Find steps that raise their batch's loss, or that move activations too far."""
    if tells_nothing(record):
        return
    predicted = {r.step: r.descent for r in record.reports if r.descent is not None}
    steps = [s for s in record.realised if predicted.get(s, 0) > 0]
    risen = sum(not record.realised[s] <= 0 for s in steps)
    often = len(steps) >= 3 and risen > len(steps) / 2
    first = at_first(record, "update_ratio")
    moves = median([t.value for t in first[0].values()] or [0.0]) if first else 0.0
    limit = MOVES_TOO_FAR if record.losses else MOVES_TOO_FAR_UNSEEN
    far = moves > limit and not end(record) <= start(record) / 2
    over = None if fell(record) else overshoot(record)
    evidence = []
    if over is not None:
        path, move, furthest = over
        evidence.append(Evidence("update_ratio", move.value, furthest, path, move.since))
        said = (f"Step {move.since} moved the activations of {named(record, path)} by "
                f"{move.value:.3g} times their length, and the loss rose after it.")  # fmt: skip
    if far:
        evidence.append(Evidence("update_ratio, median layer", moves, limit, step=0))
        said = (f"The first step moved the activations of the median layer by {moves:.3g} times "
                "their length.")  # fmt: skip
    if often:
        share = risen / len(steps)
        evidence.insert(0, Evidence("steps that raise their batch's loss", share, 0.5))
        said = f"{risen} of {len(steps)} measured steps raised the loss of their own batch."
    if evidence:
        yield _too_high(record, "act" if suffers(record) else "watch", said, evidence, 0.1)


def overshoot(record: Record) -> tuple[str, Typical, float] | None:
    """Return the layer that moved furthest before the loss rose, its move, and the limit of this.

    It counts at any measured step, though the layer may stand still later, if it is ten times
    beyond the healthy range, or if it is longer than the activations and a layer is dead after it.
    A weight that begins at or near zero (the second factor of a low-rank update, the end of a
    residual branch, a head) moves far relative to its output and is healthy.
    """
    rising = [report for report in record.reports if _rises_after(record, report.step)]
    moves = [
        (path, move)
        for report in rising
        for path, move in by_layer(replace(record, reports=(report,)), "update_ratio").items()
        if path not in record.weights or record.weights[path].gain >= LEAST_GAIN
    ]
    most = max(moves, key=lambda pair: pair[1].value, default=None)
    if most is None:
        return None
    path, move = most
    limit = KILLS if _kills(record, move.since) else OVERSHOOTS
    return (path, move, limit) if move.above(limit) else None


def _kills(record: Record, step: int | None) -> bool:
    """Return whether a layer that got a gradient up to a step gets none at the end."""
    last = record.reports[-1].layers
    return any(
        path in last and (reading.idle_share or 0.0) < 1 and last[path].idle_share == 1
        for report in record.reports
        if step is not None and report.step <= step
        for path, reading in report.layers.items()
    )


def _rises_after(record: Record, step: int) -> bool:
    """Return whether the loss over the next eighth of the run is above that of the step."""
    by_step = dict(zip(record.steps_of_losses, record.losses, strict=False))
    after = [loss for s, loss in by_step.items() if s > step][: max(3, len(by_step) // 8)]
    if step not in by_step or not after:
        return False
    here = by_step[step]
    return not fmean(after) <= here + max(STILL * abs(here), noise(record) / math.sqrt(len(after)))
