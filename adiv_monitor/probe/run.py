"""Runs a model on the probe: in place, in evaluation mode, alone."""

from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from adiv_monitor.rerun.surroundings import Surroundings, untouched
from adiv_monitor.rerun.twin import alone

T = TypeVar("T")


def run(
    modules: Collection[nn.Module],
    surroundings: Surroundings,
    parameters: Mapping[nn.Parameter, Tensor],
    body: Callable[[], T],
) -> T:
    """Call a function that runs modules of the model.

    They run in evaluation mode, so that dropout is off; only batch norms keep their mode. All
    calls begin with the same random numbers, and with the present buffers.

    Args:
        modules: all modules of the model.
        surroundings: autocast's settings and random numbers.
        parameters: values of some parameters; what the modules write to them is lost.
        body: runs the modules.

    Returns:
        The function's result.

    Raises:
        Waits: a module would wait for other ranks.
    """

    def at_rest() -> T:
        for module in modules:
            if isinstance(module, nn.RNNBase):  # cuDNN has no backward pass in evaluation mode
                module.dropout = 0.0
            elif not isinstance(module, _NormBase):
                module.training = False
        with alone():
            return body()

    return untouched(modules, surroundings, at_rest, parameters)


def why_not(modules: Collection[nn.Module]) -> str:
    """Return why these modules can't run again; "" if they can."""
    for module in modules:
        name = type(module).__name__
        if isinstance(module, torch.jit.ScriptModule):
            return f"{name} is scripted, so its buffers can't be restored"
        if any(type(p.data) is not Tensor for p in module._parameters.values() if p is not None):
            return f"a parameter of {name} is not a plain tensor (sharded?)"
        if isinstance(module, nn.SyncBatchNorm) and torch.distributed.is_initialized():
            return f"{name} waits for the other ranks"
    return ""
