"""Fixes of inputs: standardised, centred or scaled in front of the model."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from adiv_monitor.audit.experiments.calls import changed, is_input
from adiv_monitor.audit.experiments.changed_inputs import arguments
from adiv_monitor.audit.training.setup import Fork
from adiv_monitor.audit.trials.fixes.fix import Layers, fix, some
from adiv_monitor.diagnosis.record import Record

_CONSTANT = 1e-6  # a smaller standard deviation relative to the largest is rounding

Map = tuple[Tensor, Tensor]  # what is subtracted, and what the rest is divided by


def _standardised(features: Tensor) -> Map:
    std, mean = torch.std_mean(features, dim=0, correction=0)
    return mean, torch.where(std <= _CONSTANT * std.amax(), 1.0, std)


def _centred(features: Tensor) -> Map:
    return features.mean(0), features.new_ones(1)


def _scaled(features: Tensor) -> Map:
    rms = features.square().mean().sqrt()
    return features.new_zeros(1), torch.where(rms > 0, rms, 1.0)


@fix("standardise-inputs", rescales=True, map_of=_standardised)
@fix("centre-inputs", rescales=True, map_of=_centred)
@fix("scale-inputs", rescales=True, map_of=_scaled)
def _mapped(
    fork: Fork, layers: Layers, record: Record | None, map_of: Callable[[Tensor], Map]
) -> None:
    """Map the model's inputs by a forward pre-hook.

    The map of an input follows from its features over the different batches, one a column. The
    model itself does not run for that.
    """
    seen: dict[str, list[Tensor]] = {}
    for batch in {id(batch): batch for batch in fork.batches}.values():  # each once
        for name, x in arguments(fork, batch).items():
            if _is_mapped(name, x):
                seen.setdefault(name, []).append(x.detach())
    some(seen, "the model is called with no real numbers")
    maps = {}
    for name, tensors in seen.items():
        axis = feature_axis(tensors[0], fork.model)
        shape = [-1 if i == axis else 1 for i in range(tensors[0].dim())]
        last = [x[..., None] if axis is None else x.movedim(axis, -1) for x in tensors]
        features = torch.cat([x.double().flatten(0, -2) for x in last])
        some(bool(features.isfinite().all()), "inputs are not finite")
        less, over = map_of(features)
        maps[name] = less.reshape(shape), over.reshape(shape)

    def change(name: str, x: Any) -> Any:
        if name not in maps or not _is_mapped(name, x):
            return x
        less, over = maps[name]
        return ((x.double() - less) / over).to(x.dtype)

    fork.model.register_forward_pre_hook(partial(changed, change=change), with_kwargs=True)


def _is_mapped(name: str, x: Any) -> bool:
    """Return whether an argument is a floating-point input."""
    return is_input(name) and isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 0


def feature_axis(x: Tensor, model: nn.Module) -> int | None:
    """Return the axis of an input's features, or channels; None if each entry is a sample.

    It is the last of (samples, features) and (samples, places, features). It is the second for
    images, and before a one-dimensional convolution of as many channels. It is the last of an image
    if the second is longer than the last and the last has at most 4 entries, like colours.
    """
    if x.dim() < 3:
        return 1 if x.dim() == 2 else None
    if x.dim() == 3:
        channels = {m.in_channels for m in model.modules() if isinstance(m, nn.Conv1d)}
        return 1 if x.shape[1] in channels else 2
    return x.dim() - 1 if x.shape[1] > x.shape[-1] and x.shape[-1] <= 4 else 1
