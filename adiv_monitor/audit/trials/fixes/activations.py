"""Fixes that replace activation functions, both modules and functions that a module calls."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from adiv_monitor.audit.experiments.calls import Call
from adiv_monitor.audit.experiments.loss_inputs import activation, leave_out
from adiv_monitor.audit.experiments.operands import maps_that_run
from adiv_monitor.audit.training.setup import Fork
from adiv_monitor.audit.trials.fixes.fix import DoesNotApply, Fix, replace_calls
from adiv_monitor.audit.trials.fixes.places import modules_at
from adiv_monitor.diagnosis.record import Record

Functions = frozenset[Callable[..., Any]]

_IN_PLACE: Functions = frozenset(
    {
        *(functional.relu_, torch.relu_, Tensor.relu_),
        *(torch.sigmoid_, Tensor.sigmoid_, torch.tanh_, Tensor.tanh_, functional.hardtanh_),
    }
)
_RELUS: Functions = frozenset(
    {functional.relu, torch.relu, Tensor.relu, functional.relu_, torch.relu_, Tensor.relu_}
)
_SATURATING: Functions = frozenset(
    {
        *(torch.sigmoid, torch.sigmoid_, Tensor.sigmoid, Tensor.sigmoid_, functional.sigmoid),
        *(torch.tanh, torch.tanh_, Tensor.tanh, Tensor.tanh_, functional.tanh),
        *(functional.hardsigmoid, functional.hardtanh, functional.hardtanh_, functional.softsign),
    }
)


def _replaced(
    functions: Functions, slope: float, fork: Fork, layers: Sequence[str], record: Record | None
) -> None:
    """Replace the functions wherever the named modules, or modules inside them, call one.

    If none of them does, replace them in the whole model. A ReLU is a leaky ReLU of slope 0.
    """
    chosen = {m for module in modules_at(fork.model, layers).values() for m in module.modules()}
    paths = {path for path, module in fork.model.named_modules() if module in chosen}

    def is_met(call: Call) -> bool:
        return call.function in functions and call.path in paths

    def instead(call: Call) -> Tensor:
        # The only boolean argument of these functions is `inplace`.
        given = call.kwargs.get("inplace", any(x is True for x in call.args))
        in_place = call.function in _IN_PLACE or given
        return functional.leaky_relu(call.argument(0, "input"), slope, in_place)

    try:
        replace_calls(fork, is_met, instead)
    except DoesNotApply:
        if not layers:
            raise DoesNotApply("no such activation function runs here") from None
        _replaced(functions, slope, fork, (), record)


def _plain_outputs(fork: Fork, layers: Sequence[str], record: Record | None) -> None:
    """Remove the activation function whose outputs a loss takes for logits: a module, or a call."""
    found = activation(fork)
    if found is None:
        raise DoesNotApply("no activation function stands in front of the loss")
    module = None if found.path is None else fork.model.get_submodule(found.path)
    if module is not None and type(module).__module__.startswith("torch.nn.modules.activation"):
        module.forward = nn.Identity().forward
        return
    leave_out(fork, [found])


def _relu_between(fork: Fork, layers: Sequence[str], record: Record | None) -> None:
    """Put a ReLU behind each linear or convolutional layer that runs, but the last."""
    before = maps_that_run(fork)[:-1]
    if not before:
        raise DoesNotApply("fewer than two layers run")
    for path in before:
        fork.model.get_submodule(path).register_forward_hook(
            lambda module, args, output: functional.relu(output)
        )


FIXES = [
    Fix("relu-between", "a ReLU between the layers", _relu_between, rescales=True),
    Fix("leaky-relu", "leaky ReLU in place of ReLU", partial(_replaced, _RELUS, 0.1)),
    Fix(
        "relu",
        "ReLU in place of activation functions that saturate",
        partial(_replaced, _SATURATING, 0.0),
        rescales=True,
    ),
    Fix("plain-outputs", "outputs without an activation function", _plain_outputs, rescales=True),
]
