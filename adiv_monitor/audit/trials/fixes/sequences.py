"""Fixes of models of sequences: positions, masks, and the softmax of attention."""

import math
from collections.abc import Collection
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from adiv_monitor.audit.experiments.attention import spreads, uses
from adiv_monitor.audit.experiments.calls import Call, change_calls
from adiv_monitor.audit.experiments.changed_inputs import ChangedInputs
from adiv_monitor.audit.experiments.exchange import mask_of, patch_of, patch_size, places
from adiv_monitor.audit.experiments.loss_inputs import those
from adiv_monitor.audit.training.setup import Fork
from adiv_monitor.audit.trials.fixes.calls import with_input
from adiv_monitor.audit.trials.fixes.fix import DoesNotApply, Layers, fix, some
from adiv_monitor.diagnosis.faults.initialisation import SPREAD
from adiv_monitor.diagnosis.record import Record


def _sinusoids(length: int, width: int) -> Tensor:
    """Return sines and cosines of place / 10000^(2i/width), (length, width).

    Source: Vaswani et al. 2017, section 3.5.
    """
    rates = torch.exp(-math.log(1e4) * torch.arange(0, width, 2) / width)
    angles = torch.arange(length)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :width]


@fix("positions", "sinusoids added to what the first layer gives", rescales=True)
def _positions(fork: Fork, layers: Layers, record: Record | None) -> None:
    """Add sinusoids to the first layer's vectors of the places, with the vectors' own rms."""
    batch = fork.batches[0]
    inputs = ChangedInputs(fork, batch).inputs
    count = places(inputs[0], patch_size(fork, batch)) if inputs else 0
    found = those(fork, lambda call: count > 0 and _makes_places(call, count))
    first = some(found, "no layer gives each place a vector")[0]

    def change(call: Call) -> object:
        if (call.number, call.name) != (first.number, first.name):
            return NotImplemented
        made = call.function(*call.args, **call.kwargs)
        rows = made.flatten(2).transpose(1, 2) if made.ndim == 4 else made
        added = _sinusoids(rows.shape[1], rows.shape[2]).to(made)
        added = rows.detach().square().mean().sqrt() * math.sqrt(2) * added
        return made + (added.T.reshape(made.shape[1:]) if made.ndim == 4 else added)

    change_calls(fork, change)


def _makes_places(call: Call, count: int) -> bool:
    """Return whether the call is a layer that gives a vector for each place."""
    made = call.result
    if not isinstance(made, Tensor) or not any(
        isinstance(x, Tensor) and x.requires_grad and x.is_leaf
        for x in (*call.args, *call.kwargs.values())
    ):
        return False
    if made.ndim == 4:
        return patch_of(call) > 0 and made.shape[2] * made.shape[3] == count
    return made.ndim == 3 and made.shape[1] == count and made.shape[2] > 1


@fix("inverted-masks", "masks the other way round", rescales=True)
def _inverted_masks(fork: Fork, layers: Layers, record: Record | None) -> None:
    some(those(fork, lambda call: mask_of(call) is not None), "no mask of booleans is used")

    def change(call: Call) -> object:
        told = mask_of(call)
        if told is None:
            return NotImplemented
        place, name, mask = told
        args = [~mask if i == place else x for i, x in enumerate(call.args)]
        others = {key: ~mask if key == name else x for key, x in call.kwargs.items()}
        return call.function(*args, **others)

    change_calls(fork, change)


@fix("summed-axis", "the softmax over the axis that is summed over", rescales=True)
def _summed_axis(fork: Fork, layers: Layers, record: Record | None) -> None:
    """Take the softmaxes over the axis along which their products sum, if one suits all of them."""
    found = {use.softmax.number: use.softmax for use in uses(fork) if not use.fits}
    some(found, "all weights sum to 1 along the axis that is summed over")
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


@fix("unit-scores", "scores with a standard deviation of 1 before training", rescales=True)
def _unit_scores(fork: Fork, layers: Layers, record: Record | None) -> None:
    """Divide the scores of saturated attentions by their standard deviation before training."""
    found = {call.number: size for call, size in spreads(uses(fork)) if size > SPREAD}
    some(found, "no scores differ so much")

    def change(call: Call) -> object:
        if call.name != "softmax" or call.number not in found:
            return NotImplemented
        return with_input(call, call.argument(0, "input") / found[call.number])

    change_calls(fork, change)
