"""Runs a model in place with given parameters, without side effects on the training run."""

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from adiv_monitor.capture.selection import trainable
from adiv_monitor.rerun.kept import may_be_written
from adiv_monitor.rerun.surroundings import Surroundings, is_plain, untouched
from adiv_monitor.rerun.twin import Alone

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
        RuntimeError: a module would wait for other ranks.
    """
    own = {parameter: parameter.data for parameter in parameters}

    def given() -> T:
        try:
            _set(parameters)
            _come_to_rest(modules)
            with ExitStack() as stack:
                if dist.is_available() and dist.is_initialized():
                    stack.enter_context(Alone())  # type: ignore[no-untyped-call]
                stack.enter_context(surroundings.again())
                return body()
        finally:
            _set(own)

    return untouched(modules, surroundings.devices, given)


def _set(values: Mapping[nn.Parameter, Tensor]) -> None:
    for parameter, value in values.items():
        parameter.data = value


def _come_to_rest(modules: Collection[nn.Module]) -> None:
    """Set evaluation mode and copy the buffers; `untouched` restores both."""
    copies: dict[int, Tensor] = {}
    for module in modules:
        if isinstance(module, nn.RNNBase):  # cuDNN has no backward pass in evaluation mode
            module.dropout = 0.0
        elif not isinstance(module, _NormBase):
            module.training = False
        for name, buffer in module._buffers.items():
            if buffer is not None and is_plain(buffer):
                copy = copies.setdefault(id(buffer), buffer.detach().clone())
                module._buffers[name] = copy


def written(
    model: nn.Module, modules: Collection[nn.Module], *, trained: bool
) -> list[nn.Parameter]:
    """Return the parameters that a forward pass, or with `trained` also a step, may change."""
    renormed = [m for m in modules if getattr(m, "max_norm", None) is not None]
    held = [p for m in renormed for p in m.parameters(recurse=False)]
    frozen = [p for p in model.parameters() if not p.requires_grad and may_be_written(p)]
    stepped = trainable(model) if trained else ()
    return [p for p in dict.fromkeys([*stepped, *held, *frozen]) if is_plain(p)]


def why_not(modules: Collection[nn.Module]) -> str:
    """Return why these modules can't run again; "" if they can."""
    for module in modules:
        name = type(module).__name__
        if isinstance(module, torch.jit.ScriptModule):
            return f"{name} is scripted, so its buffers can't be restored"
        if any(type(p.data) is not Tensor for p in module._parameters.values() if p is not None):
            return f"a parameter of {name} is not a plain tensor (sharded?)"
        if isinstance(module, nn.SyncBatchNorm) and dist.is_available() and dist.is_initialized():
            return f"{name} waits for the other ranks"
    return ""
