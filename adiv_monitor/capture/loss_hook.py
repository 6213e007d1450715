"""Reads the loss of training passes from a module, or from the model's output by a function."""

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from adiv_monitor.capture.hook import Hook, ModuleHook, trains
from adiv_monitor.capture.names import class_name
from adiv_monitor.capture.selection import inside_wrappers
from adiv_monitor.rerun.surroundings import reruns
from adiv_monitor.rerun.thread import ThreadState

# The module that computes the loss in the training loop, or: output of a model call → loss.
LossOf = nn.Module | Callable[[Any], Tensor]

_OTHERWISE = "Pass the module that the loop calls as `loss=`, or call `monitor.log_loss(loss)`."


class LossHook:
    """A hook that passes on the loss of forward passes with gradients enabled.

    Args:
        loss: the module that computes it, or a function: output of a model call → loss.
        model: the model whose outputs the function gets.
        note: receives every loss.
        fail: called with the exception if reading the loss fails.

    Attributes:
        stays: whether it may stay on between measured steps, since it is on the loss alone.
        unseen: a note for a report in which the loss is missing.
    """

    def __init__(
        self,
        loss: LossOf,
        model: nn.Module,
        note: Callable[[Tensor], None],
        fail: Callable[[Exception], None],
    ) -> None:
        self.stays = isinstance(loss, nn.Module)
        self._of = None if isinstance(loss, nn.Module) else loss
        self._note = note
        self._fail = fail
        self._can_be_called = self._of is None or takes(self._of, None)
        module = loss if isinstance(loss, nn.Module) else inside_wrappers(model)
        self.unseen = f"The loss is not known: {self._why(loss)}. {_OTHERWISE}"
        self._hook = ModuleHook(module, Hook(self._guarded), before=False)

    def _why(self, loss: LossOf) -> str:
        if isinstance(loss, nn.Module):
            return (
                f"the given {class_name(loss)} was not seen to be called with gradients (is it "
                "another instance than the one that the training calls, or compiled?)"
            )
        name = getattr(loss, "__name__", type(loss).__name__)
        if self._can_be_called:
            return f"{name} gave no value with a gradient for the model's output"
        return (
            f"{name} takes more than one argument; a function given as `loss=` is called with the "
            "model's output alone, and calls of it in the loop are not seen"
        )

    def put_on(self) -> None:
        """Register the hook. `remove` removes it, even if this method raises."""
        if self._can_be_called:
            self._hook.put_on()

    def remove(self) -> None:
        """Remove the hook."""
        self._hook.remove()

    def _guarded(self, module: nn.Module, args: object, kwargs: object, output: Any) -> None:
        if torch.compiler.is_compiling() or reruns() or not torch.is_grad_enabled():
            return
        try:
            self._ended(output)
        except Exception as error:
            self._fail(error)

    def _ended(self, output: Any) -> None:
        loss = output if self._of is None else self._made_of(output)
        # `note` refuses values that are not tensors.
        if not isinstance(loss, Tensor) or _counts(loss):
            self._note(loss)

    def _made_of(self, output: Any) -> Any:
        assert self._of is not None
        with ThreadState(), torch._C.DisableTorchFunction():
            return self._of(output)


def takes(function: Callable[..., object], *args: object) -> bool:
    """Return whether a function may be called with these arguments."""
    try:
        signature(function).bind(*args)
    except TypeError:
        return False
    except ValueError:  # functions written in C may have no signature
        pass
    return True


def _counts(loss: Tensor) -> bool:
    """Return whether the loss counts; only attributes are read, since functions are watched."""
    return loss.requires_grad and 0 not in loss.shape and trains(loss)
