"""Fixes that replace a layer's map or put a normaliser in front of it."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from adiv_layers import convert
from torch import nn

from adiv_monitor.audit.training.setup import Fork
from adiv_monitor.audit.trials.fixes.fix import DoesNotApply, Fix
from adiv_monitor.audit.trials.fixes.normalisers import NORMALISERS, Normaliser
from adiv_monitor.audit.trials.fixes.places import affine_at, in_front
from adiv_monitor.audit.trials.fixes.rates import scale_rates
from adiv_monitor.diagnosis.record import Record


def _converted(
    to: Literal["affine-like", "norm-like"],
    factor: float,
    fork: Fork,
    layers: Sequence[str],
    record: Record | None,
) -> None:
    """Convert layers in place.

    The new layers hold the same parameters, so that the optimizer's state stays valid.
    """
    wanted = {id(module) for module in affine_at(fork.model, layers)}
    report = convert(fork.model, to, lambda path, module: id(module) in wanted)
    if not report.swapped:
        raise DoesNotApply("; ".join(dict.fromkeys(report.left.values())))
    if factor != 1:
        swapped = [fork.model.get_submodule(path) for path in report.swapped]
        scale_rates(fork.optimizer, {id(p): factor for m in swapped for p in m.parameters()})


def _normalised(
    normaliser: Normaliser, fork: Fork, layers: Sequence[str], record: Record | None
) -> None:
    """Normalise the inputs of these modules by a forward pre-hook."""

    def hook(layer: nn.Module, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (normaliser(layer, args[0]), *args[1:])

    for module, layer in in_front(fork.model, layers):
        module.register_forward_pre_hook(partial(hook, layer))


FIXES = [
    Fix(
        "affine-like",
        "affine-like layers, (Wx + b)/√(‖x‖² + 1)",
        partial(_converted, "affine-like", 1.0),
        rescales=True,
    ),
    Fix(
        "norm-like",
        "norm-like layers, Wx/‖x‖ + b, at half their learning rate",
        partial(_converted, "norm-like", 0.5),
        rescales=True,
    ),
    *(
        Fix(
            name.replace(" ", "-"),
            f"a {name} without parameters in front",
            partial(_normalised, normaliser),
            rescales=True,
        )
        for name, normaliser in NORMALISERS.items()
    ),
]
