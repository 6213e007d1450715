"""Losses of outputs and targets, as functions of model and batch."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

Function = Callable[[Tensor, Tensor], Tensor]

_MODELS = frozenset({"model", "net", "network", "module", "m"})
_TARGETS = frozenset({"target", "targets", "label", "labels", "y", "y_true", "t"})


class LossError(ValueError):
    """Raised for outputs, targets or batches that a loss can't take, in one line."""


def first_tensor(output: Any) -> Tensor | None:
    """Return the first tensor of a model's output, or its logits; None if it holds no tensor."""
    if isinstance(output, Tensor):
        return output
    if hasattr(output, "logits"):
        return first_tensor(output.logits)
    parts = output.values() if isinstance(output, Mapping) else output
    if not isinstance(output, (Mapping, tuple, list)):
        return None
    return next((found for part in parts if (found := first_tensor(part)) is not None), None)


@dataclass(frozen=True)
class TargetLoss:
    """A loss that calls the model with all parts of a batch but the last, which is the target.

    Attributes:
        name: Name of the loss.
        function: output, target → scalar.
    """

    name: str
    function: Function

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of the model on the batch.

        Raises:
            LossError: The batch has no target, or the loss can't take output and target.
        """
        if not isinstance(batch, (tuple, list)):
            raise LossError(
                f"the loss {self.name} needs batches (inputs…, target), got a "
                f"{type(batch).__name__}: give no loss if the model gives its own, or give a "
                "function (model, batch) → loss"
            )
        *inputs, target = batch
        output = first_tensor(model(*inputs))
        try:
            return self.function(output, target)  # type: ignore[arg-type]
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise LossError(
                f"the loss {self.name} can't take an output of {_described(output)} with a target "
                f"of {_described(target)}: {type(error).__name__}: {' '.join(str(error).split())}; "
                "choose another loss, or a function (model, batch) → loss"
            ) from error


def takes_outputs(loss: Callable[..., Any]) -> bool:
    """Return whether a loss takes outputs and targets, and not a model and a batch.

    The names of its parameters tell, as in `F.cross_entropy(input, target)`.
    """
    try:
        found = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
        found.bind(None, None)
    except (TypeError, ValueError):  # it takes others, or does not tell
        return False
    names = list(found.parameters)
    return len(names) > 1 and names[0] not in _MODELS and names[1] in _TARGETS


def name_of(loss: Callable[..., Any]) -> str:
    """Return the name of a loss: that of a function, or of the class of another object."""
    name: str = getattr(loss, "__name__", type(loss).__name__)
    return name


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"class {type(value).__name__}"
    return f"shape {tuple(value.shape)}, {str(value.dtype).removeprefix('torch.')}"
