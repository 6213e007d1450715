"""Can the loop of a monitor's run train at all? What it does with gradients, rates and weights.

Asked in the order of a step: do losses get a backward pass; are gradients zeroed between steps, or
too early; do they reach the parameters; are they clipped away, edited, or used again; is the
learning rate gone, still rising, or falling back; are the weights set back, or changed by another
optimizer; are micro-batches summed, or cut off by an epoch's end? Each
condition is exact, because each of these is also done on purpose. An audit trains a copy in a loop
of its own. `parameters`, `data` and `loss` ask both kinds of runs.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import fmean, median

from adiv_monitor.diagnosis import course
from adiv_monitor.diagnosis import readings as read
from adiv_monitor.diagnosis.faults.fault import LEARNING, LONG_STEPS, fault, finds, loop_fault
from adiv_monitor.diagnosis.faults.rates import overshoot
from adiv_monitor.diagnosis.finding import LOWER_RATES, Advice, Evidence, Finding, Strength, act_if
from adiv_monitor.diagnosis.health import HEALTH
from adiv_monitor.diagnosis.readings import these
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.report import StepReport
from adiv_monitor.report.wording import NO_GRADIENT, listed, percent

FEWEST_MEASURED = read.FEWEST_REPORTS  # in all of which a condition must hold
FEWEST_SAME = 5  # the same, for batches: whole epochs of few batches repeat, too
LEAST_SHARE = 0.01  # of the trainable elements; less are a pooler or a head that nobody uses
# Norm of the gradient that was there before a step's first backward pass, over that of the gradient
# that the optimizer used. It is 0 if gradients are zeroed after each step; if never, it comes near
# 1 within a few steps.
KEPT = 0.1
ENDED = 0.1  # of the elements that a gradient reached in earlier steps; less may be a choice
FOREIGN = 0.5  # share of the gradient that is not that of the rows, typically: what outweighs it
VARIES, LONGER = 3.0, 1.5  # largest factor on the gradient over the smallest, and over 1
FAR = 30.0  # a factor that is far from 1
ROUNDED = 1e-3  # by so much a constant factor on the gradient differs from step to step
CLIPPED = 0.1  # the gradient used over that of the backward pass, if clipping takes the step
GONE, GONE_SHARE, LAST = 1e-6, 0.2, 0.05  # of the peak; of the run; the end of a usual schedule
HARDLY = 1e-3  # of the peak: what is gone if the loss does not halve
RISEN = 10.0  # times the learning rate at the lowest loss
RISEN_SHARE = 0.2  # of the run, since its lowest loss: a learning-rate finder stops sooner
BELOW = 0.1  # of the peak of a schedule, at the end
FALLS = 2  # back from a rise: one may be the first step of a schedule after its warm-up
SUMMED = 3  # passes of a step; two may be the two terms of a critic's loss
UNUSED = 2  # losses of a step for each of its backward passes
FEW = 0.05  # of the batches
SET_BACK, RETURNED = 0.5, 0.999  # share of the way that is undone: by half; wholly
ROUNDING = 1e-6  # of the loss, or of activations


def strength(record: Record) -> Strength:
    """Return "watch" while the loss falls, or is not known, else "act"."""
    return act_if(goes_badly(record))


def halves(record: Record) -> bool:
    """Return whether the loss ends at half of its first value or below, or is not known."""
    return not goes_badly(record) and not course.end(record) > course.start(record) / 2


def goes_badly(record: Record) -> bool:
    """Return whether the loss is known, and does not fall."""
    return course.course(record) in ("rises", "does not fall")


def share_of(
    record: Record, field: str, reports: tuple[StepReport, ...]
) -> tuple[tuple[str, ...], float]:
    """Return the paths that a field has in all reports, and their share; none if it is small."""
    if len(record.reports) < FEWEST_MEASURED or not reports[-1].trainable:
        return (), 0.0
    of_last = getattr(reports[-1], field)
    paths = tuple(path for path in of_last if all(path in getattr(r, field) for r in reports))
    share = sum(of_last[path] for path in paths) / reports[-1].trainable
    return (paths, share) if share >= LEAST_SHARE else ((), 0.0)


@loop_fault("not-zeroed", "Gradients are not zeroed between steps", shown_by=read.stepped,
            explains=(*LEARNING, "non-finite", "optimizer-turns", "stands-still"))  # fmt: skip
def not_zeroed(record: Record) -> Iterator[Finding]:
    """Find layers whose gradients are not zeroed between two steps of the optimizer.

    Most of the measured steps must show it: a loop may zero them once an epoch. The first is left
    out: a run may begin with gradients of other code. Several backward passes of one step are no
    fault, because `.grad` is zero before the first of them.
    """
    seen: dict[str, list[float]] = {}
    for report in record.reports[1:]:
        for path, reading in report.layers.items():
            if not math.isnan(reading.gradient_factor):  # else the gradient's size is not known
                seen.setdefault(path, []).append(reading.earlier_share)
    kept = {path: median(shares) for path, shares in seen.items()
            if sum(share > KEPT for share in shares) > max(1, len(shares) / 2)}  # fmt: skip
    if kept:
        largest = read.worst_first(kept)[0]
        yield Finding("not-zeroed", "act",
            f"Before a step's first backward pass, `.grad` of {these(record, [*kept])} typically "
            f"holds an earlier gradient, {kept[largest]:.3g} times as long as the one used.",
            (Evidence("gradient kept, over the gradient used", kept[largest], KEPT, largest),),
            (Advice("call optimizer.zero_grad() once for every step"),),
            "A lower learning rate still follows the sum of all gradients so far.",
            layers=tuple(kept), since=record.reports[1].step, against=LOWER_RATES)  # fmt: skip


@loop_fault("gradient-reversed", "Steps that climb the loss",
            explains=(*LONG_STEPS, "rate-too-high", "optimizer-turns"),
            shown_by=read.stepped)  # fmt: skip
def reversed_(record: Record) -> Iterator[Finding]:
    """Find steps that climb a positive loss on demand; one of torch's own should not rise."""
    seen = [max(report.loss_gradients) for report in record.reports if report.loss_gradients]
    why = "backward() begins at its negative" * (bool(seen) and max(seen) < 0)
    if all(report.maximize for report in record.reports):
        why = "the optimizer has maximize=True"
    rises = read.several(record) and course.course(record) == "rises"
    if why and rises and min(record.losses) >= 0:
        yield Finding("gradient-reversed",
            act_if(course.is_measure(record) or any(r.loss_module for r in record.reports)),
            f"The steps go up the loss, which rises, since {why}.",
            (Evidence("loss", course.end(record), record.losses[0]),),
            (Advice("minimize the loss, unless it should rise, as a reward"),))  # fmt: skip


@loop_fault("losses-unused", "Losses of training that get no backward pass", explains=LEARNING,
            shown_by=read.reported("loss_gradients"))  # fmt: skip
def losses_unused(record: Record) -> Iterator[Finding]:
    """Find that steps typically compute several losses with a graph for each backward pass."""
    pairs = [(r.unused_losses, len(r.loss_gradients)) for r in record.reports if r.loss_gradients]
    unused, used = (median(of) for of in zip(*pairs, strict=True)) if pairs else (0, 1)
    if len(pairs) >= FEWEST_MEASURED and unused > UNUSED * used:
        yield Finding("losses-unused", strength(record),
            f"In a typical step, {unused:.0f} forward passes and their losses get no backward pass "
            f"at all; {used:.0f} backward {'passes' if used > 1 else 'pass'} trains.",
            (Evidence("losses without a backward pass", unused, UNUSED * used),),
            (Advice("indent backward() and step() into the loop over the batches, and put passes "
                    "that should not train under torch.no_grad()"),))  # fmt: skip


@loop_fault("zeroed-early", "Gradients are zeroed before the step uses them", shown_by=read.several)
def zeroed_early(record: Record) -> Iterator[Finding]:
    """Find gradients that are removed before the step, or between its backward passes."""
    paths, share = share_of(record, "removed", record.reports)
    if share > 0.5:
        yield Finding("zeroed-early", strength(record),
            f"Something, such as `zero_grad()`, removes the gradients of {these(record, paths)} "
            "between the backward pass and the step.",
            (Evidence("share of the trainable parameters", share, 0.5),),
            (Advice("call optimizer.zero_grad(), backward() and step() in this order"),),
            layers=paths)  # fmt: skip
    zeroed = [report for report in record.reports if report.zeroed_passes > 0]
    if read.several(record) and len(zeroed) > len(record.reports) / 2:
        lost = zeroed[-1].zeroed_passes
        used = max(1, len(zeroed[-1].loss_gradients) - lost)
        yield Finding("zeroed-early", strength(record),
            f"Gradients are zeroed between the micro-batches of a step: of {lost + used} backward "
            f"passes, the optimizer uses the last {'one' if used == 1 else used} alone.",
            (Evidence("backward passes of a step that were zeroed", lost, 0),),
            (Advice("call optimizer.zero_grad() once for every optimizer step"),
             _LAST_STEP))  # fmt: skip


_LAST_STEP = Advice("take a step with what is left of an accumulation at an epoch's end, or go on "
                    "with it in the next one")  # fmt: skip


@loop_fault("accumulation-cut", "An accumulation that an epoch's end cuts off",
            shown_by=read.reported("loss_counts"))  # fmt: skip
def accumulation_cut(record: Record) -> Iterator[Finding]:
    """Find steps after more batches than usual, by less than an accumulation, each of one number.

    An alternation with another optimizer's steps looks alike, as of a critic and a generator, whose
    steps may fall between measured ones; but few critics have three backward passes for each step.
    """
    counts = sum((Counter(report.loss_counts) for report in record.reports), Counter[int]())
    (usual, _), *_ = counts.most_common(1) or [(0, 0)]
    more = [count for count in counts if count > usual]
    alone = not any(report.other_optimizers for report in record.reports)
    each = any(len(report.loss_gradients) == usual >= SUMMED for report in record.reports)
    if alone and each and len(more) == 1 and more[0] < 2 * usual and counts[more[0]] > 1:
        times = counts[more[0]]
        share = times * (more[0] - usual) / sum(n * steps for n, steps in counts.items())
        yield Finding("accumulation-cut", strength(record) if share > FEW else "note",
            f"Steps accumulate {usual} batches, but {times:,} of {counts.total():,} come after "
            f"{more[0]}: what an epoch's end leaves over is zeroed, or added to the next.",
            (Evidence("share of the batches that are left over", share, FEW),),
            (_LAST_STEP,))  # fmt: skip


@finds("monitor")
def untrained(record: Record) -> Iterator[Finding]:
    """Find that no gradient reaches most parameters, or many that one reached in earlier steps.

    The second half of the measured steps decides, since experts and dropped layers take turns. If a
    part is never reached although the loss falls, it is not used.
    """
    reports, sizes = record.reports, [*map(_reached, record.reports)]
    others = any(share_of(record, field, reports)[0] for field in ("cut_off", "removed"))
    if not read.several(record) or others or not (most := max(r.trainable for r in reports)):
        return
    now = max(sizes[len(sizes) // 2 :])
    ended = now < (1 - ENDED) * max(sizes)
    never = now < most / 2 and course.course(record) != "falls"
    if not ended and not never:
        return
    first = next(i for i in range(len(sizes)) if max(sizes[i:]) == now)
    later = {path for report in reports[first:] for path in report.layers}
    paths = (*(path for path in read.maps(record) if path not in later), *_without(reports[-1]))
    frozen, share = reports[-1].trainable < most, 1 - now / most
    yield Finding("unreached", strength(record),
        f"Since step {reports[first].step:,}, no gradient reaches {these(record, paths)}, with "
        f"{percent(share)} of the parameters." + " Their requires_grad is False." * frozen,
        (Evidence("share of the parameters", share, ENDED if ended else 0.5),),
        (Advice("set requires_grad=True again after the code that froze them, unless they should "
                "stay frozen" if frozen else
                "look for a loss that is made anew from a number, as by torch.tensor(loss.item()), "
                "and for detach(), .data or no_grad() between these layers and the loss"),),
        layers=paths, since=reports[first].step)  # fmt: skip


def _without(report: StepReport) -> list[str]:
    """Return the modules, and single parameters, that no gradient reached."""
    return [path for path, why in report.unsupported.items() if why == NO_GRADIENT]


def _reached(report: StepReport) -> int:
    """Return the number of elements of the trainable parameters that a gradient reached."""
    without, sizes = {*_without(report)}, report.unmeasured
    lost = [name for name in sizes if {name, name.rpartition(".")[0]} & without]
    return report.trainable - sum(sizes[name] for name in lost)


@finds("monitor")
def frozen(record: Record) -> Iterator[Finding]:
    """Find blocks that are frozen in all measured steps, beside those that train."""
    paths, size = share_of(record, "frozen", record.reports)
    share = size / (1 + size)  # of all parameters
    if share > ENDED:
        harms = share > 0.5 and goes_badly(record)
        yield Finding("frozen", "watch" if harms else "note",
            f"The parameters of {these(record, paths)} are frozen (requires_grad is False), "
            f"{percent(share)} of all; those of {these(record, read.maps(record))} train.",
            (Evidence("share of the parameters", share, ENDED),),
            (Advice("set requires_grad=True, unless these parameters should stay frozen"),),
            layers=paths)  # fmt: skip


@loop_fault("gradient-rescaled", "Gradients are rescaled one by one", shown_by=read.stepped)
@loop_fault("loss-multiplied", "The gradient is multiplied by a number far from 1, or that changes",
            shown_by=read.reported("loss_gradients"),
            explains=(*LONG_STEPS, "rate-too-high"))  # fmt: skip
@loop_fault("clipping-always", "Most gradients are clipped", shown_by=lambda record:
            read.reported("loss_gradients")(record) and not read.scale_free(record))  # fmt: skip
def scaled(record: Record) -> Iterator[Finding]:
    """Find clipping after which the layers hardly move, or other factors on the gradient.

    Gradients of a loss that an AMP scaler multiplied are divided by its scale before the step.
    Clipping has another factor for each length of the gradient.
    """
    seen = [(sum(r.loss_gradients), median(of)) for r in record.reports
            if r.loss_gradients and (of := [x.gradient_factor for x in r.layers.values()
                                            if x.gradient_factor > 0])]  # fmt: skip
    diverged = any(not math.isfinite(loss) for loss in record.losses[-1:])
    if not seen or (len(seen) < FEWEST_MEASURED and not diverged) or read.scale_free(record):
        return
    moves = [move.value for move in read.by_layer(read.at_peak(record), "update_ratio").values()]
    scale, share = median(s for s, _ in seen), median(max(1.0, s) * f for s, f in seen)
    badly, little = goes_badly(record), HEALTH["update_ratio"].healthy[0]
    norms = [sum(read.gradients(record, report).values()) for report in record.reports]
    steady = _spread([max(1.0, s) * f for s, f in seen]) < ROUNDED < _spread(norms) / 10
    if badly and share < CLIPPED and median(moves or [little]) < little and not steady:
        still = f", which a scaler still multiplies by {scale:g}," if scale > 1 else ""
        yield Finding("clipping-always", "act",
            f"Clipping takes the step: of the gradient{still} the optimizer gets {share:.2g} "
            "times its length.",
            (Evidence("gradient used, over that of the backward pass", share, CLIPPED),),
            (Advice("call scaler.unscale_(optimizer) before the gradients are clipped" if still
                    else "clip at a higher norm, or not at all"),),
            "A higher learning rate helps only while gradients keep their length.")  # fmt: skip
        return
    factors = [s * f for s, f in seen]
    low, high = min(factors), max(factors)
    apart = [report.rescaled for report in record.reports if report.rescaled]
    changes = high > max(LONGER, VARIES * low)
    far = median(factors) > FAR or 0 < scale < 1 / FAR or (badly and steady and share < CLIPPED)
    one_by_one = len(apart) > len(record.reports) / 2
    others = any(share > FOREIGN for share in foreign_shares(record))
    if one_by_one or ((changes or far) and not others):
        yield Finding("gradient-rescaled" if one_by_one else "loss-multiplied",
            "act" if badly and course.is_measure(record) else "note",
            f"Between loss and step, the gradient is multiplied by {low:.3g}"
            + f" to {high:.3g}" * changes + (f" (1/{1 / low:,.0f})" if 0 < low < CLIPPED else "")
            + ", as if a GradScaler's scale had only multiplied the loss, or only divided the "
            "gradient" * _is_scale(low)
            + ", and that of each parameter by a factor of its own" * one_by_one + ".",
            (Evidence("factor on the gradient", high, VARIES * low if changes else FAR),),
            (Advice("look for factors and divisions of the loss, and for code that scales, clips "
                    "or normalises gradients one by one"),),
            layers=apart[-1] if one_by_one else ())  # fmt: skip


def foreign_shares(record: Record) -> list[float]:
    """Return by layer the typical share of the gradient that is not that of the rows."""
    layers = [read.readings(record, path).values() for path in read.maps(record)]
    return [median(reading.foreign_share for reading in readings) for readings in layers]


def _is_scale(factor: float) -> bool:
    """Return whether a number, or its inverse, may be the scale of a GradScaler, a power of two."""
    power = math.log2(factor) if factor > 0 else 0.0
    return abs(power) > math.log2(FAR) and abs(power - round(power)) < ROUNDED


def _spread(values: list[float]) -> float:
    return (max(values) - min(values)) / max(values) if max(values) > 0 else 0.0


@fault("rate-gone", "The learning rate is gone before the end", about="loop", explains=LEARNING,
       shown_by=read.reported("learning_rates"))  # fmt: skip
def rate_gone(record: Record) -> Iterator[Finding]:
    """Find a learning rate that is gone long before the end, sooner if the loss does not halve."""
    rates = read.learning_rates(record)
    if len(rates) < FEWEST_MEASURED or not any(rates.values()) or min(rates.values()) < 0:
        return  # a rate of zero, or below, is another finding
    known = {report.step: report.learning_rates for report in record.reports}
    of_groups = {i: {step: known[step][i] / rate for step, rate in rates.items() if rate > 0}
                 for i in range(min(len(known[step]) for step in rates))}  # fmt: skip
    for i, of in {-1: rates, **of_groups}.items():
        limit, last = GONE if i < 0 and halves(record) else HARDLY, max(of)
        if len(of) > 1 and (since := _gone_since(of, limit)) is not None:
            group = f" of param_groups[{i}], over that of the other groups," * (i >= 0)
            yield Finding("rate-gone", strength(record),
                f"By step {since:,}, the learning rate{group} is below {limit:g} of its peak.",
                (Evidence("learning rate over its peak", of[last] / max(of.values()), limit,
                          step=last),),
                (Advice("look for a decay of the groups that is applied in each step" if group else
                        "make the schedule as long as the training, in batches or in epochs"),),
                "A higher base learning rate decays as soon.", since=since, layers=tuple(
                    p for p, j in record.reports[-1].groups.items() if i == j))  # fmt: skip
            return


def _gone_since(rates: Mapping[int, float], limit: float) -> int | None:
    """Return since when rates stay below a share of their peak, for long before the end."""
    first, *_, last = rates
    low = {step for step, rate in rates.items() if rate < limit * max(rates.values())}
    since = next((s for s in rates if low.issuperset(t for t in rates if t >= s)), last)
    is_long = (1 - LAST) * last + LAST * first - since > GONE_SHARE * (last - first)
    return since if is_long else None


@loop_fault("rate-falls-back", "The learning rate stays below its schedule's peak",
            shown_by=read.reported("learning_rates"),
            explains=("rate-too-low", "loss-stuck", "stands-still"))  # fmt: skip
def rate_falls_back(record: Record) -> Iterator[Finding]:
    """Find a rate that again and again rises over several steps, and falls in one step."""
    falls = max((report.rate_falls for report in record.reports), default=0)
    if falls >= FALLS:
        peak = max(read.learning_rates(record).values())
        yield Finding("rate-falls-back", strength(record),
            f"The learning rate has risen step by step {falls} times, and each time fallen back in "
            f"one step, as if its warm-up began again: {peak:.3g} is the most that was measured.",
            (Evidence("falls in one step after a rise", falls, FALLS),),
            (Advice("count the steps of the run in the schedule, not those of the epoch, and make "
                    "one schedule for the run"),))  # fmt: skip


def _peak(report: StepReport) -> float:
    """Return the largest rate of a schedule of torch's; 0: there is none."""
    return max(report.settings.get("max_lr") or report.settings.get("initial_lr") or (0.0,))


@finds("monitor")
def rate_stays_low(record: Record) -> Iterator[Finding]:
    """Find rates far below the peak of their schedule that rise once in several measured steps."""
    rates = [*read.learning_rates(record).values()]
    rises = len({*rates}) - 1
    peak = max(map(_peak, record.reports), default=0.0)
    if 1 < rises < len(rates) / 2 and rates == sorted(rates) and rates[-1] < BELOW * peak:
        yield Finding("rate-falls-back", strength(record),
            f"The learning rate ends at {rates[-1]:.3g}, and its schedule's peak is {peak:.3g}: it "
            "rises once in many steps, as if a schedule of steps went on once an epoch.",
            (Evidence("learning rate over its schedule's peak", rates[-1] / peak, BELOW),),
            (Advice("call scheduler.step() in each step, or count epochs in it"),))  # fmt: skip


@loop_fault("rate-rises", "The learning rate rises too far", shown_by=lambda record:
            course.is_known(record) and read.reported("learning_rates")(record))  # fmt: skip
def rate_rises(record: Record) -> Iterator[Finding]:
    """Find a learning rate that rises on, as the loss does, long after the lowest loss."""
    rates, smooth = read.learning_rates(record), course.smoothed(record)
    if len(rates) < FEWEST_MEASURED or not smooth or not math.isfinite(record.losses[0]):
        return
    lowest, last = min(range(len(smooth)), key=smooth.__getitem__), max(rates)
    there, before_it = record.steps_of_losses[lowest], record.losses[: lowest + 1]
    before = max((rate for step, rate in rates.items() if step <= there), default=0.0)
    times = rates[last] / before if before > 0 else 0.0
    least = 2 * course.noise(replace(record, losses=before_it))
    learnt = record.losses[0] - smooth[lowest] > least
    long = len(smooth) - lowest > RISEN_SHARE * len(smooth)
    if times >= RISEN and learnt and long and course.end(record) > 2 * abs(smooth[lowest]):
        yield Finding("rate-rises", "act" if course.is_measure(record) else "note",
            f"Since the lowest loss, near step {there:,}, the learning rate has grown {times:.3g} "
            "times, and the loss rises.",
            (Evidence("learning rate over that at the lowest loss", times, RISEN, step=last),),
            (Advice(f"end the schedule's rise near step {there:,}, or lower its peak"),),
            since=there)  # fmt: skip


@finds("monitor")
def rate_jumps(record: Record) -> Iterator[Finding]:
    """Find groups whose learning rate, long the same, is suddenly far above all before."""
    groups = [*zip(*(r.learning_rates for r in record.reports), strict=False)]
    for k, report in enumerate(record.reports[FEWEST_MEASURED:], FEWEST_MEASURED):
        jumped = [i for i, r in enumerate(groups) if r[k] >= RISEN * max(r[:k]) > 0
                  and r[k] > _peak(report) and len({*r[k - FEWEST_MEASURED : k]}) == 1]  # fmt: skip
        if jumped:
            named = listed([f"param_groups[{i}]" for i in jumped])
            most = max(groups[i][k] / groups[i][k - 1] for i in jumped)
            yield Finding("rate-rises", strength(record),
                f"The learning rate of {named} jumps by a factor of up to {most:.3g}.",
                (Evidence("learning rate over that before", most, RISEN),),
                (Advice("look for code that sets it"),), since=report.step,
                layers=tuple(p for p, i in report.groups.items() if i in jumped))  # fmt: skip


@loop_fault("weights-set-back", "Weights are set back between steps", shown_by=lambda r:
            read.several(r) and any(x.weights_returned is not None for x in r.reports))  # fmt: skip
def set_back(record: Record) -> Iterator[Finding]:
    """Find weights that begin measured steps as they were in an earlier one."""
    back = {r.step: r.weights_returned for r in record.reports if r.weights_returned is not None}
    limit = SET_BACK if goes_badly(record) and overshoot(record) is None else RETURNED
    often = sum(share > limit for share in back.values()) > len(back) / 2
    wholly = [step for step, share in back.items() if share > RETURNED]
    if len(back) >= FEWEST_MEASURED - 1 and (often or wholly):
        share = median(back.values() if often else [1.0])
        begin = "measured steps begin" if often else f"step {listed([*map(str, wholly)])} began"
        yield Finding("weights-set-back",
            strength(record) if often else "watch" if wholly[1:] else "note",
            f"The weights are set back: {begin} with {percent(share)} of the way since an earlier "
            "one undone.",
            (Evidence("share of the weights' way that is undone", share, limit),),
            (Advice("look for load_state_dict, copy_, reset_parameters or a moving average that "
                    "writes to the weights of the model in training, and is not undone"),)
            )  # fmt: skip


@loop_fault("other-optimizer", "Another optimizer steps the same weights",
            shown_by=read.several, explains=("projection-fights",))  # fmt: skip
def other_optimizer(record: Record) -> Iterator[Finding]:
    """Find another optimizer that changes measured weights in most of the steps."""
    by = [r.changed_by for r in record.reports[1:]]
    share = fmean(map(bool, by)) if read.several(record) else 0.0
    if share > 0.5:
        names = listed([*dict.fromkeys(name for each in by for name in each)])
        yield Finding("other-optimizer", strength(record),
            f"Between the steps of {record.reports[-1].optimizer}, another optimizer, {names}, "
            f"changes weights that it trains, in {percent(share)} of the measured steps.",
            (Evidence("share of the measured steps", share, 0.5),),
            (Advice("give each parameter to one optimizer alone"),))  # fmt: skip


@loop_fault("gradients-summed", "Gradients of micro-batches are summed, not averaged",
            shown_by=read.reported("loss_gradients"))  # fmt: skip
def summed(record: Record) -> Iterator[Finding]:
    """Find micro-batches whose gradients are added up where their mean was meant.

    While the loss falls, or no step is too long, it is a note: the sum, or several terms with a
    backward pass each, may be meant.
    """
    passes = [report.loss_gradients for report in record.reports]
    k = min(map(len, passes), default=0)
    if not read.several(record) or k < SUMMED or k < max(map(len, passes)):
        return
    if min(map(min, passes)) < 1:
        return
    if read.scale_free(record) or any(report.other_optimizers for report in record.reports):
        return
    high = HEALTH["update_ratio"].healthy[1]
    steps = (replace(record, reports=(report,)) for report in record.reports)
    far = any(t.above(high) for step in steps for t in read.by_layer(step, "update_ratio").values())
    harms = far and goes_badly(record)
    yield Finding("gradients-summed", "act" if harms else "note",
        f"The gradients of {k} micro-batches are summed, not averaged, and the steps are "
        + ("too long." if harms else f"{k} times as long as those of their mean."),
        (Evidence("backward passes of a step, each of a whole loss", k, SUMMED),),
        (Advice(f"divide the loss of each micro-batch by {k}"),
         Advice(f"learning rate × {1 / k:.3g}, if the sum is meant")))  # fmt: skip
