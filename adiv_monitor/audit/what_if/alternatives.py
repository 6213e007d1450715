"""A layer's step with another map, other inputs or another learning rate, without retraining."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import isfinite
from statistics import median
from typing import Any, Literal

import torch
from adiv_layers import convert
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from adiv_monitor.audit.training.batches import copied
from adiv_monitor.audit.training.setup import Fork, Setup, seeded
from adiv_monitor.audit.what_if.layer_step import Calls, Centred, Step, mean_feature, step_of
from adiv_monitor.audit.what_if.normalisers import NORMALISERS
from adiv_monitor.capture.selection import named_modules
from adiv_monitor.diagnosis.record import Alternative
from adiv_monitor.features.rows import to_compute_dtype

_KINDS = (
    nn.Linear,
    nn.modules.linear.NonDynamicallyQuantizableLinear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
)


def what_if(setup: Setup) -> dict[str, dict[str, Alternative]]:
    """Compute how a plain gradient step on the first batch moves each layer, as it is or changed.

    The gradients that reach a layer are held fixed: with another map the network's outputs, and so
    the gradients, would differ too. All rows are used.

    "affine-like" and "norm-like" have the features of those maps (spec, section 1). The norms have
    no parameters and stand in front of the layer. "centred inputs" have the features [x − x̄, 1].
    "constant scale" divides the features by one constant that makes their mean scale 1. "rate per
    layer" sets every layer's effective learning rate to the median of all layers.

    Args:
        setup: The run to audit; a fork of it runs one forward and one backward pass.

    Returns:
        Alternatives by layer and name, for linear layers and convolutions that are called as
        modules and have trained weights of their own. Other layers are left out, and so is an
        alternative that a layer can't have (batch norm of one row).
    """
    found = {}
    for path, (layer, calls) in _calls(setup.fork()).items():
        as_it_is = step_of(layer, calls)
        steps = {name: make(layer, calls) for name, make in _OTHERS.items()}
        found[path] = {
            "as it is": _alternative(as_it_is),
            **{name: _alternative(step) for name, step in steps.items() if step is not None},
            "constant scale": _rescaled(as_it_is),
        }
    rates = [f["as it is"].effective_lr for f in found.values()]
    finite = [rate for rate in rates if isfinite(rate)]
    for alternatives in found.values():
        if finite:
            alternatives["rate per layer"] = replace(
                alternatives["as it is"], effective_lr=median(finite)
            )
    return found


def _alternative(step: Step) -> Alternative:
    return Alternative(step.gradient_cosine, step.scale_cv, step.effective_lr)


def _rescaled(step: Step) -> Alternative:
    """Return the step with all features divided by √scale_mean.

    Features times c have scales times c², and e is multiplied by c², too.
    """
    rate = step.effective_lr / step.scale_mean if step.scale_mean else float("nan")
    return replace(_alternative(step), effective_lr=rate)


def _converted(
    to: Literal["affine-like", "norm-like"], layer: nn.Module, calls: Calls
) -> Step | None:
    holder = nn.Sequential(copy.deepcopy(layer))
    return step_of(holder[0], calls) if convert(holder, to).swapped else None


def _normalised(name: str, layer: nn.Module, calls: Calls) -> Step | None:
    try:
        inputs = [NORMALISERS[name](layer, x) for x in calls.inputs]
    except ValueError:  # batch norm of one row
        return None
    return step_of(layer, replace(calls, inputs=inputs))


def _centred(layer: nn.Module, calls: Calls) -> Step:
    return step_of(Centred(layer, mean_feature(layer, calls)), calls)


_OTHERS: Mapping[str, Callable[[nn.Module, Calls], Step | None]] = {
    "affine-like": partial(_converted, "affine-like"),
    "norm-like": partial(_converted, "norm-like"),
    **{name: partial(_normalised, name) for name in NORMALISERS},
    "centred inputs": _centred,
}


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield plain layers without hooks whose weights no other module uses.

    Their module calls are all uses of their weights.
    """
    owners: dict[int, int] = {}
    for _, module in named_modules(model):
        for parameter in module._parameters.values():
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    for path, module in named_modules(model):
        if type(module) not in _KINDS or is_parametrized(module):
            continue
        hooked = module._forward_hooks or module._forward_pre_hooks
        weight = module._parameters.get("weight")
        if weight is not None and weight.requires_grad and owners[id(weight)] == 1 and not hooked:
            yield path, module


def _calls(fork: Fork) -> dict[str, tuple[nn.Module, Calls]]:
    """Return a copy of each layer with its inputs and output gradients on the first batch."""
    layers = dict(_layers(fork.model))
    copies = {path: _exact_copy(module) for path, module in layers.items()}
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {path: [] for path in layers}

    def watch(
        path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        x = to_compute_dtype((args[0] if args else kwargs["input"]).detach())
        if output.requires_grad:
            output.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: seen[path].append((x, to_compute_dtype(gradient)))
            )

    handles = [
        module.register_forward_hook(partial(watch, path), with_kwargs=True)
        for path, module in layers.items()
    ]
    try:
        with seeded(fork.seed), torch.enable_grad():
            loss = fork.loss(fork.model, copied(fork.batches[0]))
            for calls in seen.values():  # gradients that the loss computed itself
                calls.clear()
            loss.backward()  # type: ignore[no-untyped-call]
    finally:
        for handle in handles:
            handle.remove()
    return {
        path: (copies[path], Calls([x for x, _ in calls], [gradient for _, gradient in calls]))
        for path, calls in seen.items()
        if calls
    }


def _exact_copy(module: nn.Module) -> nn.Module:
    twin = copy.deepcopy(module)
    for parameter in twin.parameters():
        parameter.data = to_compute_dtype(parameter.data)
    return twin
