"""Fixes of inputs: standardised, centred or scaled in front of the model; larger batches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from adiv_monitor.audit.experiments.changed_inputs import arguments
from adiv_monitor.audit.experiments.inputs import changed, is_input
from adiv_monitor.audit.training.samples import joined
from adiv_monitor.audit.training.setup import Fork
from adiv_monitor.audit.trials.fixes.fix import DoesNotApply, Fix
from adiv_monitor.diagnosis.record import Record

_CONSTANT = 1e-6  # a smaller standard deviation relative to the largest is rounding


@dataclass(frozen=True)
class _Moments:
    """Moments of an argument of the model over all batches, shaped to broadcast against it."""

    mean: Tensor
    std: Tensor
    rms: Tensor


Transform = Callable[[Tensor, _Moments], Tensor]


def _standardised(x: Tensor, moments: _Moments) -> Tensor:
    constant = moments.std <= _CONSTANT * moments.std.amax()
    return (x - moments.mean) / torch.where(constant, 1.0, moments.std)


def _centred(x: Tensor, moments: _Moments) -> Tensor:
    return x - moments.mean


def _scaled(x: Tensor, moments: _Moments) -> Tensor:
    return x / torch.where(moments.rms > 0, moments.rms, 1.0)


def _transformed(transform: Transform) -> Callable[[Fork, Sequence[str], Record | None], None]:
    """Return a fix that transforms the model's inputs by a forward pre-hook."""

    def change(fork: Fork, layers: Sequence[str], record: Record | None) -> None:
        moments = _moments(fork)

        def transformed(name: str, x: Any) -> Any:
            if name not in moments or not _is_transformed(name, x):
                return x
            return transform(x.double(), moments[name]).to(x.dtype)

        fork.model.register_forward_pre_hook(partial(changed, change=transformed), with_kwargs=True)

    return change


def _is_transformed(name: str, x: Any) -> bool:
    """Return whether an argument is a floating-point input."""
    return is_input(name) and isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 0


def _moments(fork: Fork) -> dict[str, _Moments]:
    """Return the moments of every input over the different batches; the model itself does not run.

    Raises:
        DoesNotApply: The model is called without floating-point inputs, or with ones that are not
            finite.
    """
    seen: dict[str, list[Tensor]] = {}
    for batch in different(fork.batches):
        for name, x in arguments(fork, batch).items():
            if _is_transformed(name, x):
                seen.setdefault(name, []).append(x.detach())
    if not seen:
        raise DoesNotApply("the model is called with no real numbers")
    return {key: _moments_of(tensors, fork.model) for key, tensors in seen.items()}


def _moments_of(tensors: list[Tensor], model: nn.Module) -> _Moments:
    axis = feature_axis(tensors[0], model)
    shape = [1] * tensors[0].dim()
    if axis is not None:
        shape[axis] = -1
    columns = [
        x.double().reshape(-1, 1) if axis is None else x.double().movedim(axis, -1).flatten(0, -2)
        for x in tensors
    ]
    features = torch.cat(columns)
    if not features.isfinite().all():
        raise DoesNotApply("inputs are not finite")
    std, mean = torch.std_mean(features, dim=0, correction=0)
    return _Moments(mean.reshape(shape), std.reshape(shape), features.square().mean().sqrt())


def feature_axis(x: Tensor, model: nn.Module) -> int | None:
    """Return the axis of an input's features, or channels; None if each entry is a sample.

    It is the last of (samples, features) and (samples, places, features). It is the second for
    images, and before a one-dimensional convolution of as many channels. It is the last of an image
    if the second is longer than the last and the last has at most 4 entries, like colours.
    """
    if x.dim() < 2:
        return None
    if x.dim() == 2:
        return 1
    if x.dim() == 3:
        channels = {m.in_channels for m in model.modules() if isinstance(m, nn.Conv1d)}
        return 1 if x.shape[1] in channels else 2
    return x.dim() - 1 if x.shape[1] > x.shape[-1] and x.shape[-1] <= 4 else 1


def different(batches: Sequence[Any]) -> list[Any]:
    """Return each batch once, in order."""
    return list({id(batch): batch for batch in batches}.values())


def _larger_batch(fork: Fork, layers: Sequence[str], record: Record | None) -> None:
    """Join batches 2i and 2i + 1, cyclically, for step i; the number of steps stays."""
    batches = different(fork.batches)
    n = len(batches)
    if n < 2:
        raise DoesNotApply("there is one batch only")
    try:
        pairs = [joined(batches[2 * i % n], batches[(2 * i + 1) % n]) for i in range(n)]
    except (ValueError, RuntimeError) as error:
        raise DoesNotApply(f"batches can't be joined: {error}") from error
    fork.batches = [pairs[step % len(pairs)] for step in range(len(fork.batches))]


FIXES = [
    Fix(
        "standardise-inputs",
        "inputs of mean 0 and standard deviation 1, each feature or channel for itself",
        _transformed(_standardised),
        rescales=True,
    ),
    Fix(
        "centre-inputs",
        "inputs less their mean, each feature or channel for itself",
        _transformed(_centred),
        rescales=True,
    ),
    Fix(
        "scale-inputs",
        "inputs divided by one constant, their root mean square",
        _transformed(_scaled),
        rescales=True,
    ),
    Fix(
        "larger-batch",
        "batches twice as large, for as many steps: twice the samples",
        _larger_batch,
    ),
]
