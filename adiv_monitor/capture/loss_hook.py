"""Reads the loss of training passes from a module, or from the model's output by a function."""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from adiv_monitor.capture.guard import call_all
from adiv_monitor.capture.hook import Hook, trains
from adiv_monitor.capture.selection import inside_wrappers
from adiv_monitor.rerun.surroundings import reruns

# The module that computes the loss in the training loop, or: output of a model call → loss.
LossOf = nn.Module | Callable[[Any], Tensor]

# The settings of torch's losses that change which loss a constant prediction has.
_USUAL = (("reduction", "mean"), ("ignore_index", -100), ("label_smoothing", 0.0),
          ("weight", None), ("pos_weight", None))  # fmt: skip
_OTHERWISE = "Pass the module that the loop calls as `loss=`, or call `monitor.log_loss(loss)`."


class LossHook:
    """A hook that passes on the loss of forward passes with gradients enabled.

    Args:
        loss: the module that computes it, or a function: output of a model call → loss.
        model: the model whose outputs the function gets.
        note: receives every loss, and the arguments that a module computed it from.
        fail: called with the exception if reading the loss fails.

    Attributes:
        stays: whether it may stay on between measured steps, since it is on the loss alone.
        unseen: a note for a report in which the loss is missing.
        of_torch: the class name of a loss module of torch's own; "": it is none.
        settings: the names of its settings that are not torch's defaults.
        weights: see `StepReport.loss_weights`.
    """

    def __init__(
        self,
        loss: LossOf,
        model: nn.Module,
        note: Callable[[Tensor, Sequence[Any]], None],
        fail: Callable[[Exception], None],
    ) -> None:
        self.stays = isinstance(loss, nn.Module)
        self._note = note
        self._fail = fail
        self.of_torch = torchs_loss(loss)
        self.settings = tuple(n for n, x in _USUAL if self.of_torch and getattr(loss, n, x) != x)
        self.weights = _weights(loss) if self.settings else ()
        name = getattr(loss, "__name__", type(loss).__name__)
        if isinstance(loss, nn.Module):
            self._module, self._of = loss, None
            why = f"the given {name} was not seen to be called (another instance is, or compiled?)"
        else:
            self._module, self._of = inside_wrappers(model), loss
            why = f"{name} gave no value with a gradient for the model's output"
        self.unseen = f"The loss is not known: {why}. {_OTHERWISE}"
        self._handles: list[RemovableHandle] = []

    def put_on(self) -> None:
        """Register the hook. `remove` removes it, even if this method raises."""
        hook = Hook(self._guarded)
        self._handles.append(self._module.register_forward_hook(hook, with_kwargs=True))

    def remove(self) -> None:
        """Remove the hook."""
        call_all(*[handle.remove for handle in self._handles])
        self._handles.clear()

    def _guarded(self, module: nn.Module, args: Any, kwargs: object, output: Any) -> None:
        if torch.compiler.is_compiling() or reruns() or not torch.is_grad_enabled():
            return
        try:
            if self._of is not None:
                with torch._C.DisableTorchFunction():
                    output = self._of(output)
            # `note` refuses values that are not tensors.
            if not isinstance(output, Tensor) or (
                output.requires_grad and 0 not in output.shape and trains(output)
            ):
                self._note(output, args if self._of is None else ())
        except Exception as error:
            self._fail(error)


def torchs_loss(loss: object) -> str:
    """Return the class name of a loss module of torch's own; "": it is none."""
    return type(loss).__name__ if type(loss).__module__ == nn.modules.loss.__name__ else ""


def _weights(loss: object) -> tuple[float, ...]:
    """Return the weights of the classes; of binary targets 1 and that of the positive ones."""
    positive, weight = (getattr(loss, name, None) for name in ("pos_weight", "weight"))
    if isinstance(positive, Tensor):
        return (1.0, positive.item()) if positive.numel() == 1 else ()
    if isinstance(loss, nn.BCELoss | nn.BCEWithLogitsLoss) or not isinstance(weight, Tensor):
        return ()  # those of the former are weights of entries
    return tuple(weight.tolist())


def takes(function: Callable[..., object], *args: object) -> bool:
    """Return whether a function may be called with these arguments."""
    try:
        signature(function).bind(*args)
    except TypeError:
        return False
    except ValueError:  # functions written in C may have no signature
        pass
    return True
