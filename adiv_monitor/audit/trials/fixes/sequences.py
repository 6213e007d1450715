"""Fixes of sequence models, applied to a copy: positions and masks."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from adiv_monitor.audit.experiments.calls import Call, change_calls, see_calls
from adiv_monitor.audit.experiments.changed_inputs import ChangedInputs
from adiv_monitor.audit.experiments.exchange import mask_of, patch_of, patch_size, places
from adiv_monitor.audit.training.setup import Fork
from adiv_monitor.audit.trials.fixes.fix import DoesNotApply, Fix
from adiv_monitor.diagnosis.record import Record


def sinusoids(length: int, width: int) -> Tensor:
    """Return sines and cosines of place / 10000^(2i/width), (length, width).

    Source: Vaswani et al. 2017, section 3.5.
    """
    rates = torch.exp(-math.log(1e4) * torch.arange(0, width, 2) / width)
    angles = torch.arange(length)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :width]


def _positions(fork: Fork, layers: Sequence[str], record: Record | None) -> None:
    """Add sinusoids to the first layer's vectors of the places, with the vectors' own rms."""
    batch = fork.batches[0]
    inputs = ChangedInputs(fork, batch).inputs
    count = places(inputs[0], patch_size(fork, batch)) if inputs else 0
    found: list[Call] = []

    def look(call: Call) -> None:
        if not found and count and _makes_places(call, count):
            found.append(call)

    see_calls(fork, look)
    if not found:
        raise DoesNotApply("no layer gives each place a vector")
    first = found[0]

    def change(call: Call) -> object:
        if (call.number, call.name) != (first.number, first.name):
            return NotImplemented
        made = call.function(*call.args, **call.kwargs)
        rows = made.flatten(2).transpose(1, 2) if made.ndim == 4 else made
        added = sinusoids(rows.shape[1], rows.shape[2]).to(made)
        size = rows.detach().square().mean().sqrt()
        added = size * math.sqrt(2) * added
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


def _inverted_masks(fork: Fork, layers: Sequence[str], record: Record | None) -> None:
    found: list[bool] = []
    see_calls(fork, lambda call: found.append(mask_of(call) is not None))
    if not any(found):
        raise DoesNotApply("no mask of booleans is used")

    def change(call: Call) -> object:
        told = mask_of(call)
        if told is None:
            return NotImplemented
        place, name, mask = told
        args = [~mask if i == place else x for i, x in enumerate(call.args)]
        others = {key: ~mask if key == name else x for key, x in call.kwargs.items()}
        return call.function(*args, **others)

    change_calls(fork, change)


FIXES = [
    Fix("positions", "sinusoids added to what the first layer gives", _positions, rescales=True),
    Fix("inverted-masks", "masks the other way round", _inverted_masks, rescales=True),
]
