"""Search for the origin of the first value that is not finite."""

from typing import Any

import torch
from torch import nn

from adiv_monitor.audit.experiments.repeated_loss import RepeatedLoss
from adiv_monitor.audit.training.batches import tensors
from adiv_monitor.audit.training.setup import Fork


def in_forward(fork: Fork, loss: RepeatedLoss, step: int, batch: Any) -> str:
    """Locate the first value that is not finite in a forward pass whose loss is not finite.

    The weights must be those of that pass. The order is that of the computation: the weights, the
    data, the outputs of modules, the loss.
    """
    when = f"after step {step - 1}" if step else "before training"
    for name, parameter in fork.model.named_parameters():
        if not _is_finite(parameter):
            return f"parameter {name} {when}"
    for name, buffer in fork.model.named_buffers():
        if _is_broken(buffer):
            return f"buffer {name} {when}"
    if any(map(_is_broken, tensors(batch))):
        return "data"
    return _in_modules(fork.model, loss, batch) or "loss"


def in_backward(model: nn.Module) -> str:
    """Locate the first gradient that is not finite, in the order of the backward pass."""
    for name, parameter in reversed(list(model.named_parameters())):
        if parameter.grad is not None and not _is_finite(parameter.grad):
            return f"gradient of {name}"
    return "norm of the gradient"


def _in_modules(model: nn.Module, loss: RepeatedLoss, batch: Any) -> str | None:
    """Run the forward pass again and return the first module whose output is not finite.

    NaN and +∞ have precedence over -∞.
    """
    found: list[str] = []
    infinite: list[str] = []

    def look(path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            outputs = list(tensors(output))
            if any(map(_is_broken, outputs)):
                found.append(path or type(module).__name__)
            elif not all(map(_is_finite, outputs)):
                infinite.append(path or type(module).__name__)

        return hook

    handles = [m.register_forward_hook(look(path)) for path, m in model.named_modules()]
    try:
        loss.of(batch)
    finally:
        for handle in handles:
            handle.remove()
    first = next(iter(found or infinite), None)
    return None if first is None else f"output of {first}"


def _is_broken(tensor: torch.Tensor) -> bool:
    """Return whether the tensor holds NaN or +∞; masks consist of -∞."""
    return tensor.is_floating_point() and bool((tensor.isnan() | tensor.isposinf()).any())


def _is_finite(tensor: torch.Tensor) -> bool:
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return bool(torch.isfinite(values).all())
