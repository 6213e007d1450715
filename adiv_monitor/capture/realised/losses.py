"""The loss in the forward passes of a step: of all samples together and of each sample."""

import copy
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss

from adiv_monitor.capture.guard import call_all
from adiv_monitor.capture.hook import Hook, ModuleHook, trains
from adiv_monitor.capture.realised.forward_calls import ForwardCalls, NotRepeatable, tensors_of
from adiv_monitor.capture.selection import inside_wrappers
from adiv_monitor.features.rows import to_compute_dtype
from adiv_monitor.rerun.surroundings import is_rerun
from adiv_monitor.rerun.thread import ThreadState

# The module that computes the loss in the training loop, or: output of a model call → loss.
LossOf = nn.Module | Callable[[Any], Tensor]


@dataclass(eq=False)
class Loss:
    """The result of one call of the loss.

    Attributes:
        call: the number of the forward pass that contains it or that it is.
        whole: one number: the loss of all samples.
        samples: (B,); None if only `whole` is known.
        reached: whether a gradient arrived at it.
    """

    call: int
    whole: Tensor
    samples: Tensor | None
    reached: bool = False

    @classmethod
    def of(cls, call: int, value: Any, samples: Tensor | None = None) -> "Loss":
        """Return a loss from its value: one number, or one for every sample (B, …).

        Raises:
            TypeError: the value is not a tensor.
        """
        if not isinstance(value, Tensor):
            raise TypeError(
                f"Monitor(realised=…): the loss is a {type(value).__name__}, expected a tensor"
            )
        whole = to_compute_dtype(value.detach())
        each = whole if samples is None else to_compute_dtype(samples.detach())
        if each.dim() > 1:
            each = each.flatten(1).mean(1)
        return cls(call, whole.mean(), each if each.dim() else None)


class Losses:
    """Records the loss during a step and when its forward passes are rerun.

    Args:
        loss: the loss.
        model: the model whose output it gets, if it is a function.
        calls: the forward passes; calls of a loss module are recorded there too.
        fail: called with the exception if the loss can't be read.

    Attributes:
        refusal: the reason why there is no realised change of the loss.
    """

    def __init__(
        self,
        loss: LossOf,
        model: nn.Module,
        calls: ForwardCalls,
        fail: Callable[[Exception], None],
    ) -> None:
        self.refusal = ""
        self._loss = loss
        self._model = inside_wrappers(model)
        self._calls = calls
        self._fail = fail
        self._seen: list[Loss] = []
        self._again: list[Loss] = []
        self._run = -1  # the number of the call that is rerun
        module = self._loss if isinstance(self._loss, nn.Module) else self._model
        ended, began = (Hook(self._guarded, body) for body in (self._ended, self._began))
        self._hooks = [ModuleHook(module, ended, before=False, always=True)]
        if module is self._loss:
            self._hooks.append(ModuleHook(module, began, before=True))

    def attach(self) -> None:
        """Register the hooks. `detach` removes them, even if this method raises."""
        for hook in self._hooks:
            hook.put_on()

    def detach(self) -> None:
        """Remove the hooks."""
        call_all(*(hook.remove for hook in self._hooks))

    @property
    def needed(self) -> set[int]:
        """The forward passes to rerun: those whose loss a gradient reached."""
        return {loss.call for loss in self._seen if loss.reached}

    def runs_again(self, call: int) -> None:
        """Announce which forward pass is rerun next."""
        self._run = call

    def change(self) -> tuple[Tensor, Tensor | None]:
        """Return the mean change of the loss over its calls, and that of each sample, (samples,).

        Raises:
            NotRepeatable: the loss was not seen, not seen again, or can't be rerun.
        """
        if self.refusal:
            raise NotRepeatable(self.refusal)
        before, after = _by_call(self._seen), _by_call(self._again)
        pairs: list[tuple[Loss, Loss]] = []
        for call in sorted(self.needed):
            if len(before[call]) != len(after[call]):
                raise NotRepeatable(
                    "the loss was computed another number of times when its forward pass ran again"
                )
            both = zip(before[call], after[call], strict=True)
            pairs += [(old, new) for old, new in both if old.reached]
        if not pairs:
            raise NotRepeatable(
                "no backward pass from the given loss was seen"
                if self._seen
                else "the given loss was not seen to be computed (is it another instance than the "
                "one that the training calls?)"
            )
        whole = torch.stack([new.whole - old.whole for old, new in pairs]).mean()
        samples = [
            new.samples - old.samples
            for old, new in pairs
            if old.samples is not None and new.samples is not None
        ]
        return whole, torch.cat(samples) if len(samples) == len(pairs) else None

    def _began(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record a call of the loss unless it is inside another recorded forward pass."""
        alone = self._calls.running is None and not is_rerun()
        if alone and torch.is_grad_enabled() and trains(args):
            self._begin(module, args, kwargs)

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._calls.begin(module, args, kwargs)
        if not self._calls.calls[-1].needs:  # the loss of another model
            self._calls.end(None)
            self._calls.calls.pop()

    def _ended(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if is_rerun():
            self._again.append(self._read(self._run, args, kwargs, output))
            return
        call = self._calls.running
        if call is None:
            return
        try:
            if output is not None:
                self._note(call, args, kwargs, output)
        finally:
            if self._calls.calls[call].module is self._loss:
                self._calls.end(output)

    def _note(self, call: int, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        loss = self._read(call, args, kwargs, output)
        self._seen.append(loss)

        def reached(gradient: Tensor) -> None:
            loss.reached = True

        for tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._guarded, reached))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _read(self, call: int, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Loss:
        with torch._C.DisableTorchFunction():
            if isinstance(self._loss, nn.Module):
                return Loss.of(call, output, _of_samples(self._loss, args, kwargs))
            return Loss.of(call, self._loss(output))

    def _guarded(self, action: Callable[..., None], *args: Any) -> None:
        try:
            with ThreadState():
                action(*args)
        except NotRepeatable as reason:
            self.refusal = str(reason)
        except Exception as error:
            if is_rerun():
                raise
            self.refusal = f"{type(error).__name__}: {error}"
            self._fail(error)


def _by_call(losses: list[Loss]) -> dict[int, list[Loss]]:
    found: dict[int, list[Loss]] = defaultdict(list)
    for loss in losses:
        found[loss.call].append(loss)
    return found


def _of_samples(loss: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return a torch loss for each sample, or None for other modules."""
    if not isinstance(loss, _Loss) or loss.reduction == "none":
        return None
    twin = copy.copy(loss)
    twin.reduction = "none"
    found: Tensor = twin.forward(*args, **kwargs)
    return found
