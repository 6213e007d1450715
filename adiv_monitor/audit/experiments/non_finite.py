"""Search for the origin of the first value that is not finite."""

from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn

from adiv_monitor.audit.experiments.repeated_loss import RepeatedLoss
from adiv_monitor.audit.training.batches import tensors
from adiv_monitor.audit.training.setup import Fork


def in_forward(fork: Fork, loss: RepeatedLoss, step: int, batch: Any) -> str:
    """Locate the first value that is not finite in a forward pass whose loss is not finite.

    The weights must be those of that pass. The order is that of the computation: the weights, the
    data, the outputs of modules, the loss.
    """
    when = f"after step {step - 1}" if step else "before training"
    given = [
        *((f"parameter {name} {when}", x) for name, x in fork.model.named_parameters()),
        *((f"buffer {name} {when}", x) for name, x in fork.model.named_buffers()),
        *(("data", x) for x in tensors(batch)),
    ]
    found = [place for place, x in given if _is_broken(x)]
    return found[0] if found else _in_modules(fork.model, loss, batch) or "loss"


def in_backward(model: nn.Module) -> str:
    """Locate the first gradient that is not finite, in the order of the backward pass."""
    for name, parameter in reversed(list(model.named_parameters())):
        if parameter.grad is not None and not bool(parameter.grad.to_dense().isfinite().all()):
            return f"gradient of {name}"
    return "norm of the gradient"


def _in_modules(model: nn.Module, loss: RepeatedLoss, batch: Any) -> str:
    """Run the forward pass again and return the first module whose output is not finite.

    NaN and +∞ have precedence over -∞.
    """
    broken: list[str] = []
    infinite: list[str] = []

    def look(path: str, module: nn.Module, args: Any, output: Any) -> None:
        outputs = list(tensors(output))
        if any(map(_is_broken, outputs)):
            broken.append(path or type(module).__name__)
        elif not all(bool(x.isfinite().all()) for x in outputs):
            infinite.append(path or type(module).__name__)

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(partial(look, path)))
        loss.of(batch)
    return next((f"output of {path}" for path in broken or infinite), "")


def _is_broken(x: Tensor) -> bool:
    """Return whether the tensor holds NaN or +∞; masks consist of -∞."""
    return x.is_floating_point() and bool((x.isnan() | x.isposinf()).any())
