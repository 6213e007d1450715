"""Can the loop of a monitor's run train at all? What it does with gradients, rates and weights.

Asked in the order of a step: are gradients zeroed between steps, or too early; do they reach the
parameters; are they clipped away; is the learning rate gone, or still rising; are the weights set
back, or changed by another optimizer; are micro-batches summed? Each condition is exact, because
each of these is also done on purpose. Last: do the samples of each batch agree, as sorted ones do?
An audit trains a copy in a loop of its own. `parameters`, `data` and `loss` ask both kinds of runs.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median

from adiv_monitor.diagnosis import course
from adiv_monitor.diagnosis import readings as read
from adiv_monitor.diagnosis.faults.fault import (
    FEWEST_REPORTS,
    LEARNING,
    LONG_STEPS,
    act_if,
    fault,
    finds,
    loop_fault,
    reported,
    several,
    stepped,
)
from adiv_monitor.diagnosis.faults.rates import overshoot
from adiv_monitor.diagnosis.finding import LOWER_RATES, Advice, Evidence, Finding, Strength
from adiv_monitor.diagnosis.health import HEALTH
from adiv_monitor.diagnosis.readings import named, these
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.report import StepReport
from adiv_monitor.report.wording import NO_GRADIENT, listed, percent

FEWEST_MEASURED = FEWEST_REPORTS  # in all of which a condition must hold
FEWEST_SAME = 5  # the same, for batches: whole epochs of few batches repeat, too
LEAST_SHARE = 0.01  # of the trainable elements; less are a pooler or a head that nobody uses
# Norm of the gradient that was there before a step's first backward pass, over that of the gradient
# that the optimizer used. It is 0 if gradients are zeroed after each step; if never, it comes near
# 1 within a few steps.
KEPT = 0.1
ENDED = 0.1  # of the elements that a gradient reached in earlier steps; less may be a choice
# gradient_cosine of the last layer, typically: in shuffled batches of a classification it is below
# 0.4, in generators and critics up to 0.94, in sorted data above 0.99.
ALIKE = 0.97
CLIPPED = 0.1  # the gradient used over that of the backward pass, if clipping takes the step
GONE, GONE_SHARE, LAST = 1e-6, 0.2, 0.05  # of the peak; of the run; the end of a usual schedule
HARDLY = 1e-3  # of the peak: what is gone if the loss does not fall
RISEN = 10.0  # times the learning rate at the lowest loss
RISEN_SHARE = 0.2  # of the run, since its lowest loss: a learning-rate finder stops sooner
TINY = 3  # samples of a step
NOISY = 0.25  # of the loss: its deviation from step to step
SUMMED = 3  # passes of a step; two may be the two terms of a critic's loss
SET_BACK, RETURNED = 0.5, 0.999  # share of the way that is undone: by half; wholly
FEWEST_JUMPS = 2  # of the loss, to where it began
ROUNDING = 1e-6  # of the loss, or of activations
NEARLY = 0.95  # of the rows


def strength(record: Record) -> Strength:
    """Return "watch" while the loss falls, or is not known, else "act"."""
    return act_if(_goes_badly(record))


def _goes_badly(record: Record) -> bool:
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


@loop_fault("not-zeroed", "Gradients are not zeroed between steps", shown_by=stepped,
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


@loop_fault("gradient-reversed", "Gradients are turned round, so that steps go uphill",
            explains=(*LONG_STEPS, "rate-too-high", "optimizer-turns"),
            shown_by=stepped)  # fmt: skip
def reversed_(record: Record) -> Iterator[Finding]:
    """Find layers whose `.grad` points uphill, which that of a backward pass never does.

    A step along it would move the activations against their own gradient. A layer that reverses
    gradients in the graph turns both.
    """
    cosines = read.by_layer(record, "gradient_cosine")
    turned = {path: -cosine.value for path, cosine in cosines.items() if cosine.below(0)}
    if several(record) and turned and not any(not_zeroed(record)):
        first = read.worst_first(turned)[0]
        yield Finding("gradient-reversed", strength(record),
            f"The gradients of {these(record, [*turned])} are turned round between the backward "
            "pass and the step: a step along them raises the loss.",
            (Evidence("gradient_cosine", -turned[first], 0, first),),
            (Advice("look for a minus sign or a hook between the backward pass and the step"),),
            "No learning rate makes steps uphill lower the loss.",
            layers=read.worst_first(turned))  # fmt: skip


@loop_fault("zeroed-early", "Gradients are zeroed before the step uses them", shown_by=several)
def zeroed_early(record: Record) -> Iterator[Finding]:
    """Find gradients that are removed between the backward pass and the step."""
    paths, share = share_of(record, "removed", record.reports)
    if share > 0.5:
        yield Finding("zeroed-early", strength(record),
            f"Something, such as `zero_grad()`, removes the gradients of {these(record, paths)} "
            "between the backward pass and the step.",
            (Evidence("share of the trainable parameters", share, 0.5),),
            (Advice("call optimizer.zero_grad() before the backward pass, or after the step"),),
            layers=paths)  # fmt: skip


@finds("monitor")
def zeroed_between(record: Record) -> Iterator[Finding]:
    """Find gradients that are removed between the backward passes of a step."""
    counts = {report.zeroed_passes for report in record.reports}
    if several(record) and len(counts) == 1 and (count := counts.pop()) > 0:
        yield Finding("zeroed-early", strength(record),
            f"Gradients are zeroed between the micro-batches of a step: of {count + 1} backward "
            "passes, the optimizer uses the last one alone.",
            (Evidence("backward passes of a step that were zeroed", count, 0),),
            (Advice("call optimizer.zero_grad() once for every optimizer step"),))  # fmt: skip


@finds("monitor")
def no_gradient(record: Record) -> Iterator[Finding]:
    """Find gradients that are zero, or no more than rounding, in all measured steps."""
    if not several(record) or not course.is_known(record) or course.course(record) == "falls":
        return
    norms = [max(read.gradients(record, r).values(), default=math.nan) for r in record.reports]
    least = ROUNDING * abs(record.losses[0])
    small = all(norm <= least for norm in norms) and not any(clipped(record))
    if small and record.reports[-1].coverage > 0.5:
        yield Finding("zero-gradient", act_if(course.is_measure(record)),
            "In every measured step, the gradient of the loss is zero, or no more than rounding.",
            (Evidence("largest gradient at a layer", max(norms), least),),
            (Advice("check that the targets are no copy of the outputs, and look in the loss for "
                    "rounding, clamps, and margins that are satisfied"),))  # fmt: skip


@finds("monitor")
def untrained(record: Record) -> Iterator[Finding]:
    """Find that no gradient reaches most parameters, or many that one reached in earlier steps.

    The second half of the measured steps decides, since experts and dropped layers take turns. If a
    part is never reached although the loss falls, it is not used.
    """
    reports, sizes = record.reports, [*map(_reached, record.reports)]
    others = any(share_of(record, field, reports)[0] for field in ("cut_off", "removed"))
    if not several(record) or others or not (most := max(r.trainable for r in reports)):
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
    without, sizes = {*_without(report)}, report.unmeasured.items()
    return report.trainable - sum(
        count for name, count in sizes if {name, name.rpartition(".")[0]} & without
    )


@finds("monitor")
def frozen(record: Record) -> Iterator[Finding]:
    """Find blocks that are frozen in all measured steps, beside those that train."""
    paths, size = share_of(record, "frozen", record.reports)
    share = size / (1 + size)  # of all parameters
    if share > ENDED:
        harms = share > 0.5 and _goes_badly(record)
        yield Finding("frozen", "watch" if harms else "note",
            f"{these(record, paths)} are frozen (requires_grad is False), with {percent(share)} of "
            f"the parameters; {these(record, read.maps(record))} train.",
            (Evidence("share of the parameters", share, ENDED),),
            (Advice("set requires_grad=True, unless these parameters should stay frozen"),),
            layers=paths)  # fmt: skip


@loop_fault("clipping-always", "Most gradients are clipped", shown_by=lambda record:
            reported("loss_gradients")(record) and not read.scale_free(record))  # fmt: skip
def clipped(record: Record) -> Iterator[Finding]:
    """Find clipping that leaves so little of the gradient that the layers hardly move."""
    if read.scale_free(record) or not _goes_badly(record):
        return
    # Gradients of a loss that an AMP scaler multiplied are divided by its scale before the step.
    scales, shares = [], []
    for report in record.reports:
        factors = [r.gradient_factor for r in report.layers.values() if r.gradient_factor > 0]
        if report.loss_gradients and factors:
            scales.append(fmean(report.loss_gradients))
            shares.append(max(1.0, scales[-1]) * median(factors))
    moves = [move.value for move in read.by_layer(read.at_peak(record), "update_ratio").values()]
    if len(shares) < FEWEST_MEASURED or not moves:
        return
    scale, share = median(scales), median(shares)
    if share < CLIPPED and median(moves) < HEALTH["update_ratio"].healthy[0]:
        scaled = f", which a scaler still multiplies by {scale:g}," if scale > 1 else ""
        yield Finding("clipping-always", "act",
            f"Clipping takes the step: of the gradient{scaled} the optimizer gets {share:.2g} "
            "times its length.",
            (Evidence("gradient used, over that of the backward pass", share, CLIPPED),),
            (Advice("call scaler.unscale_(optimizer) before the gradients are clipped" if scaled
                    else "clip at a higher norm, or not at all"),),
            "A higher learning rate helps only while gradients keep their length.")  # fmt: skip


@fault("rate-gone", "The learning rate is gone before the end", about="loop", explains=LEARNING,
       shown_by=reported("learning_rates"))  # fmt: skip
def rate_gone(record: Record) -> Iterator[Finding]:
    """Find a learning rate that is gone long before the end, sooner if the loss does not fall."""
    rates = read.learning_rates(record)
    if len(rates) < FEWEST_MEASURED or not any(rates.values()):
        return  # a rate of zero is another finding
    peak, (first, *_, last) = max(rates.values()), rates
    limit = HARDLY if _goes_badly(record) else GONE
    low = [step for step, rate in rates.items() if rate < limit * peak]
    since = next((s for s in low if all(t in low for t in rates if t >= s)), None)
    if since is not None and (1 - LAST) * last + LAST * first - since > GONE_SHARE * (last - first):
        yield Finding("rate-gone", strength(record),
            f"By step {since:,}, the schedule has the learning rate below {limit:g} of its peak.",
            (Evidence("learning rate over its peak", rates[last] / peak, limit, step=last),),
            (Advice("make the schedule as long as the training, in batches or in epochs"),),
            "A higher base learning rate decays as soon.", since=since)  # fmt: skip


@loop_fault("rate-rises", "The learning rate rises until the loss does", shown_by=lambda record:
            course.is_known(record) and reported("learning_rates")(record))  # fmt: skip
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


@loop_fault("weights-set-back", "Weights are set back between steps", shown_by=lambda r:
            several(r) and any(x.weights_returned is not None for x in r.reports))  # fmt: skip
def set_back(record: Record) -> Iterator[Finding]:
    """Find weights that begin measured steps as they were in an earlier one."""
    back = [r.weights_returned for r in record.reports if r.weights_returned is not None]
    limit = SET_BACK if _goes_badly(record) else RETURNED
    if len(back) >= FEWEST_MEASURED - 1 and sum(share > limit for share in back) > len(back) / 2:
        since, share = None, median(back)
        said = f"measured steps begin with {percent(share)} of the way since an earlier one undone"
        seen = Evidence("share of the weights' way that is undone", share, limit)
    elif jumps := _jumps(record, above=False):
        since, said = jumps[0], f"{len(jumps)} times, the loss jumps to where it began, and falls"
        seen = Evidence("jumps of the loss", len(jumps), FEWEST_JUMPS, step=since)
    else:
        return
    yield Finding("weights-set-back", strength(record), f"The weights are set back: {said}.",
        (seen,),
        (Advice("look for load_state_dict, copy_, reset_parameters or a moving average that writes "
                "to the weights of the model in training, and is not undone"),),
        since=since)  # fmt: skip


@loop_fault("targets-change", "Targets that change in the course of the run",
            shown_by=course.is_known)  # fmt: skip
def targets_change(record: Record) -> Iterator[Finding]:
    """Find a loss that jumps at equal distances above where it began: what was learnt is wrong."""
    jumps = _jumps(record, above=True)
    if jumps and len({later - step for step, later in pairwise([0, *jumps])}) == 1:
        yield Finding("targets-change", "watch",
            f"Every {jumps[0]:,} steps, as in each epoch, the loss jumps above where it began, and "
            "falls again: the same inputs seem to get other targets.",
            (Evidence("jumps of the loss", len(jumps), FEWEST_JUMPS, step=jumps[0]),),
            (Advice("look for code that changes labels in place, such as y -= 1, or draws them "
                    "anew in each epoch, unless tasks or a target network change on purpose"),),
            since=jumps[0])  # fmt: skip


def _jumps(record: Record, *, above: bool) -> list[int]:
    """Return the steps at which the loss begins its course anew; none if it jumps elsewhere, too.

    A jump is a rise, in one step, by half of the way that the loss has gone. After it, the loss
    stays where it was at first, within a quarter of that way; or is above that.
    """
    losses, k = record.losses, FEWEST_REPORTS
    if not course.is_known(record) or not course.is_measure(record):
        return []
    means = [fmean(losses[i : i + k]) for i in range(len(losses) - k + 1)]
    way = means[0] - min(means)
    jumps = [i for i in range(k, len(means)) if losses[i] - losses[i - 1] > way / 2]
    least = max(course.STILL * losses[0], course.noise(record))
    back = all(losses[i] - losses[0] > least if above else abs(means[i] - means[0]) < way / 4
               for i in jumps)  # fmt: skip
    fell = way > max(course.STILL * abs(means[0]), 4 * course.noise(record))
    many = len(jumps) >= FEWEST_JUMPS
    return [record.steps_of_losses[i] for i in jumps] if back and fell and many else []


@loop_fault("other-optimizer", "Another optimizer steps the same weights",
            shown_by=several, explains=("projection-fights",))  # fmt: skip
def other_optimizer(record: Record) -> Iterator[Finding]:
    """Find another optimizer that changes measured weights in most of the steps."""
    by = [r.changed_by for r in record.reports[1:]]
    share = fmean(map(bool, by)) if several(record) else 0.0
    if share > 0.5:
        names = listed([*dict.fromkeys(name for each in by for name in each)])
        yield Finding("other-optimizer", strength(record),
            f"Between the steps of {record.reports[-1].optimizer}, another optimizer, {names}, "
            f"changes weights that it trains, in {percent(share)} of the measured steps.",
            (Evidence("share of the measured steps", share, 0.5),),
            (Advice("give each parameter to one optimizer alone"),))  # fmt: skip


@loop_fault("gradients-summed", "Gradients of micro-batches are summed, not averaged",
            shown_by=reported("loss_gradients"))  # fmt: skip
def summed(record: Record) -> Iterator[Finding]:
    """Find micro-batches whose gradients are added up where their mean was meant."""
    passes = [report.loss_gradients for report in record.reports]
    k = min(map(len, passes), default=0)
    if not several(record) or k < SUMMED or k < max(map(len, passes)) or min(map(min, passes)) < 1:
        return
    high = HEALTH["update_ratio"].healthy[1]
    steps = (replace(record, reports=(report,)) for report in record.reports)
    far = any(t.above(high) for step in steps for t in read.by_layer(step, "update_ratio").values())
    if far and not read.scale_free(record) and _goes_badly(record):
        yield Finding("gradients-summed", "act",
            f"The gradients of {k} micro-batches are summed, and the steps are too long.",
            (Evidence("backward passes of a step, each of a whole loss", k, SUMMED),),
            (Advice(f"divide the loss of each micro-batch by {k}"),
             Advice(f"learning rate × {1 / k:.3g}, if the sum is meant")))  # fmt: skip


@loop_fault("targets-ignored", "Nearly no row has a gradient", shown_by=stepped)
def targets_ignored(record: Record) -> Iterator[Finding]:
    """Find that, in every measured step, nearly all rows of the last layer have no gradient."""
    seen = [r.layers[p] for r in record.reports for p in read.maps(record)[-1:] if p in r.layers]
    shares = [x.idle_share for x in seen if x.idle_share is not None and not x.non_finite]
    if len(shares) >= FEWEST_MEASURED and NEARLY <= min(shares) < 1:
        yield Finding("targets-ignored", "watch" if _goes_badly(record) else "note",
            f"In every measured step, {percent(min(shares))} or more of the rows of the last layer "
            "have no gradient: the loss hardly uses them.",
            (Evidence("share of the rows without a gradient", min(shares), NEARLY),),
            (Advice("count the targets that the loss does not ignore (ignore_index, masks, "
                    "weights)"),))  # fmt: skip


@loop_fault("gradient-rescaled", "Gradients are rescaled one by one", shown_by=stepped)
def rescaled(record: Record) -> Iterator[Finding]:
    """Find gradients of one layer's parameters that are multiplied by different factors."""
    if not several(record) or not _goes_badly(record) or not course.is_measure(record):
        return
    apart = [report for report in record.reports if report.rescaled]
    share = len(apart) / len(record.reports)
    if share > 0.5:
        yield Finding("gradient-rescaled", "watch",
            f"In {percent(share)} of the measured steps, the gradients of parameters are "
            "multiplied by factors that differ from each other: the step is not the gradient's.",
            (Evidence("share of the measured steps", share, 0.5),),
            (Advice("train without the code that scales or clips each gradient by itself"),),
            layers=apart[-1].rescaled)  # fmt: skip


@loop_fault("batch-too-small", "Batches of very few samples",
            shown_by=lambda record: several(record) and read.maps(record))  # fmt: skip
def batch_too_small(record: Record) -> Iterator[Finding]:
    """Find steps of so few rows, in the layer with the fewest, that they are mostly noise."""
    rows = [r.rows_total for report in record.reports for r in report.layers.values()]
    fewest, badly = min(filter(None, rows), default=math.inf), _goes_badly(record)
    if not several(record) or fewest > TINY or not course.is_known(record):
        return
    noisy = course.noise(record) > NOISY * course.end(record) > 0
    if course.is_measure(record) and (badly or noisy):
        yield Finding("batch-too-small", "watch" if badly else "note",
            f"A step has gradients of {fewest:.0f} samples only, which differ from step to step.",
            (Evidence("rows of a step with a gradient", fewest, TINY),),
            (Advice("use larger batches, or average the gradients of several (accumulation)"),
             Advice("learning rate × 0.1")))  # fmt: skip


@finds("monitor")
def sorted_samples(record: Record) -> Iterator[Finding]:
    """Find batches whose samples all ask the last layer for the same change, as sorted data do."""
    cosines = [*read.by_layer(record, "gradient_cosine").items()][-1:]
    if len(record.reports) < FEWEST_SAME or not cosines or not _goes_badly(record):
        return
    (path, cosine), *_ = cosines
    if cosine.above(ALIKE) and course.is_measure(record) and overshoot(record) is None:
        yield Finding("unshuffled", "act",
            "The samples of a batch seem to be sorted by their class or target: in a typical step, "
            f"all ask {named(record, path)} for the same change (cosine {cosine.value:.3g}).",
            (Evidence("gradient_cosine", cosine.value, ALIKE, path),),
            (Advice("shuffle the samples (shuffle=True), unless their order is to be learnt"),),
            "Larger batches of sorted data are sorted too.", against=())  # fmt: skip
