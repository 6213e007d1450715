"""Fixes of attention, applied to a copy: the axis of its softmax, and the scale of its scores."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from adiv_monitor.audit.experiments.attention import spreads, uses
from adiv_monitor.audit.experiments.calls import Call, change_calls
from adiv_monitor.audit.training.setup import Fork
from adiv_monitor.audit.trials.fixes.fix import DoesNotApply, Fix
from adiv_monitor.diagnosis.faults.initialisation import SPREAD
from adiv_monitor.diagnosis.record import Record


def _summed_axis(fork: Fork, layers: Sequence[str], record: Record | None) -> None:
    """Take the softmaxes over the axis along which their products sum, if one suits all of them."""
    found = {use.softmax.number: use.softmax for use in uses(fork) if not use.fits}
    if not found:
        raise DoesNotApply("all weights sum to 1 along the axis that is summed over")
    most = max(call.argument(0, "input").ndim for call in found.values())
    for axis in range(-1, -most, -1):  # never the first axis, that of the samples
        change = partial(_along, found, axis)
        tried = replace(fork)
        change_calls(tried, change)
        if all(use.fits for use in uses(tried)):
            change_calls(fork, change)
            return
    raise DoesNotApply("no axis of these softmaxes is the one that is summed over")


def _along(numbers: Collection[int], axis: int, call: Call) -> object:
    if call.name != "softmax" or call.number not in numbers:
        return NotImplemented
    others = {name: x for name, x in call.kwargs.items() if name not in ("input", "dim")}
    return call.function(call.argument(0, "input"), dim=axis, **others)


def _unit_scores(fork: Fork, layers: Sequence[str], record: Record | None) -> None:
    """Divide the scores of saturated attentions by their standard deviation before training."""
    found = {call.number: size for call, size in spreads(uses(fork)) if size > SPREAD}
    if not found:
        raise DoesNotApply("no scores differ so much")
    change_calls(fork, partial(_divided, found))


def _divided(spreads: Mapping[int, float], call: Call) -> object:
    if call.name != "softmax" or call.number not in spreads:
        return NotImplemented
    x = call.argument(0, "input") / spreads[call.number]
    others = {name: value for name, value in call.kwargs.items() if name != "input"}
    return call.function(x, *call.args[1:], **others)


FIXES = [
    Fix("summed-axis", "the softmax over the axis that is summed over", _summed_axis,
         rescales=True),
    Fix("unit-scores", "scores with a standard deviation of 1 before training", _unit_scores,
         rescales=True),
]  # fmt: skip
