"""Runs a model on the probe: in place, in evaluation mode, alone."""

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from adiv_monitor.features.uses import Refused
from adiv_monitor.rerun.surroundings import Surroundings, untouched
from adiv_monitor.rerun.twin import alone

T = TypeVar("T")


def run(
    modules: Collection[nn.Module],
    surroundings: Surroundings,
    parameters: Mapping[nn.Parameter, Tensor] | None,
    body: Callable[[], T],
    *,
    by_all_ranks: bool = False,
    keeps: tuple[type[nn.Module], ...] = (_NormBase,),
) -> T:
    """Call a function that runs modules of the model.

    They run in evaluation mode, so that dropout is off. All calls begin with the same random
    numbers, and with the present buffers.

    Args:
        modules: all modules of the model.
        surroundings: autocast's settings and random numbers.
        parameters: values of trained parameters; None: the present ones.
        body: runs the modules.
        by_all_ranks: whether all ranks call this, so that the modules may wait for each other.
        keeps: classes of the modules that keep their mode.

    Returns:
        The function's result.

    Raises:
        Refused: a module can't run again without a trace.
        Waits: a module would wait for other ranks.
    """
    for module in modules:
        name = type(module).__name__
        if isinstance(module, torch.jit.ScriptModule):
            raise Refused(f"{name} is scripted, so its buffers can't be restored")
        held = [] if by_all_ranks else [p for p in module._parameters.values() if p is not None]
        if any(type(p.data) is not Tensor for p in held):
            raise Refused(f"a parameter of {name} is not a plain tensor (sharded?)")

    def at_rest() -> T:
        for module in modules:
            if isinstance(module, nn.RNNBase):  # cuDNN has no backward pass in evaluation mode
                module.dropout = 0.0
            elif not isinstance(module, keeps):
                module.training = False  # without `eval()`, which some override to do more
        with nullcontext() if by_all_ranks else alone():
            return body()

    return untouched(modules, surroundings, at_rest, parameters)
