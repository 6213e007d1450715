"""A model's outputs for a batch with changed inputs; labels, targets and masks stay."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from adiv_monitor.audit.experiments.calls import Call, see_calls
from adiv_monitor.audit.experiments.inputs import by_name, changed, is_input, is_list
from adiv_monitor.audit.experiments.repeated_loss import RepeatedLoss
from adiv_monitor.audit.training.batches import copied, mapped, size_of, tensors
from adiv_monitor.audit.training.setup import Fork, seeded

Change = Callable[[Tensor], Tensor]


def still(fork: Fork) -> Fork:
    """Switch off a fork's batch norms and dropout, which mix samples or draw random numbers."""
    for module in dict.fromkeys(_modules(fork.model)):
        if isinstance(module, (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)):
            module.eval()
        if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
            module.dropout = 0.0
    return fork


def _modules(value: Any) -> Iterator[nn.Module]:
    """Yield a model's modules, also those that torch does not know of: in lists or dictionaries."""
    if isinstance(value, nn.Module):
        for module in value.modules():
            yield module
            yield from _modules([x for name, x in vars(module).items() if name != "_modules"])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _modules(item)
    elif isinstance(value, Mapping):
        yield from _modules([*value.values()])


class _Seen(BaseException):
    """Raised to end a forward pass whose inputs are known; no loss takes it for an error."""


def arguments(fork: Fork, batch: Any) -> dict[str, Any]:
    """Return what the model is first called with, by argument; {}: the loss does not call it.

    The model does not run.
    """
    found: dict[str, Any] = {}

    def look(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        found.update(by_name(module, args, kwargs))
        raise _Seen

    with (
        fork.model.register_forward_pre_hook(look, with_kwargs=True),
        seeded(fork.seed),
        torch.no_grad(),
        suppress(_Seen),
    ):
        fork.loss(fork.model, copied(batch))
    return found


def given_inputs(fork: Fork, batch: Any) -> dict[str, Tensor]:
    """Return the tensors of the batch's length that the model is called with, by argument.

    Of several tensors in an argument, each has a number. None of a list of tensors is returned, no
    label, target or mask.
    """
    size = size_of(batch)
    found: dict[str, Tensor] = {}
    for name, value in arguments(fork, batch).items():
        if is_input(name) and not is_list(value):
            own = [x.detach() for x in tensors(value) if x.ndim and len(x) == size]
            found.update({name if len(own) == 1 else f"{name}.{i}": x for i, x in enumerate(own)})
    return found


def _each_input(
    module: nn.Module,
    args: Any,
    kwargs: dict[str, Any],
    change: Callable[[str, Tensor], Tensor],
    everything: bool = False,
) -> Any:
    """Return the arguments with each tensor replaced; those of labels, masks and lists stay."""

    def of_argument(name: str, x: Any) -> Any:
        may_change = everything or (is_input(name) and not is_list(x))
        return mapped(x, partial(change, name)) if may_change else x

    return changed(module, args, kwargs, of_argument)


class ChangedInputs:
    """Runs a fork's model on a batch with its own and with changed inputs.

    All passes start from the same buffers, and from random numbers of the fork's seed.

    Attributes:
        inputs: The dense tensors of that size that the model was called with; none of a list.
        names: Their arguments' names, or numbers.
        own: The outputs for the unchanged inputs.

    Args:
        fork: A copy, in the mode in which it runs.
        batch: The batch.
        fewest: Fewest dimensions of the inputs that count.
        size: Length of the inputs; None: of the batch.
        see: Function that is called with each call of every pass.
    """

    def __init__(
        self,
        fork: Fork,
        batch: Any,
        fewest: int = 2,
        size: int | None = None,
        see: Callable[[Call], None] | None = None,
    ) -> None:
        self._model, self._batch, self._fewest = fork.model, batch, fewest
        self._size = size_of(batch) if size is None else size
        watched = partial(_watched, fork, see) if see else fork.loss
        with seeded(fork.seed):
            self._loss = RepeatedLoss(replace(fork, loss=watched))
        self.inputs: list[Tensor] = []
        self.names: list[str] = []
        self.own = self.outputs(None, lambda x: x)

    def outputs(
        self, number: int | None, change: Change, *, everything: bool = False
    ) -> list[Tensor]:
        """Return the model's outputs with one input changed.

        Args:
            number: The input's number; None: all are changed.
            change: Function from an input to the one in its place.
            everything: Whether labels, masks and lists count as inputs, too.
        """
        seen: list[Tensor] = []

        def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            self.inputs, self.names = [], []

            def instead(name: str, x: Tensor) -> Tensor:
                is_dense = x.layout is torch.strided
                if not is_dense or x.ndim < self._fewest or len(x) != self._size:
                    return x
                self.inputs.append(x.detach())
                self.names.append(name)
                return change(x) if number in (None, len(self.inputs) - 1) else x

            return _each_input(module, args, kwargs, instead, everything)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            seen.extend(x.detach().clone() for x in tensors(output) if x.is_floating_point())

        handles = [
            self._model.register_forward_pre_hook(before, with_kwargs=True),
            self._model.register_forward_hook(after),
        ]
        try:
            self._loss.of(self._batch)
        finally:
            for handle in handles:
                handle.remove()
        return seen


def _watched(fork: Fork, see: Callable[[Call], None], model: nn.Module, batch: Any) -> Tensor:
    return see_calls(fork, see, batch)
