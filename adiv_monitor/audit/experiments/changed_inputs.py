"""Outputs of a copy for changed inputs, and which of them inputs and targets concern."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from adiv_monitor.audit.experiments.calls import by_name, changed, is_input, is_list, see_calls
from adiv_monitor.audit.training.batches import copied, first, mapped, size_of, tensors
from adiv_monitor.audit.training.setup import Fork, Setup, seeded
from adiv_monitor.rerun.surroundings import Randomness, Surroundings, devices_of, untouched


def still(fork: Fork) -> Fork:
    """Switch off a fork's batch norms and dropout, which mix samples or draw random numbers."""
    for module in fork.model.modules():
        if isinstance(module, (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)):
            module.eval()
        if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
            module.dropout = 0.0
    return fork


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

    hook = fork.model.register_forward_pre_hook(look, with_kwargs=True)
    with hook, seeded(fork.seed), torch.no_grad(), suppress(_Seen):
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


@torch.no_grad()
def outputs(fork: Fork, batch: Any) -> list[Tensor]:
    """Return the outputs of the model in a loss, which may change what the model keeps."""
    made: list[Tensor] = []
    with fork.model.register_forward_hook(noting(made)), seeded(fork.seed):
        fork.loss(fork.model, copied(batch))
    return made


def noting(made: list[Tensor]) -> Callable[[nn.Module, Any, Any], None]:
    """Return a hook that notes copies of a module's outputs of floating point."""

    def note(module: nn.Module, args: Any, output: Any) -> None:
        made.extend(x.detach().clone() for x in tensors(output) if x.is_floating_point())

    return note


def change_inputs(
    model: nn.Module, change: Callable[[str, Tensor], Tensor], everything: bool = False
) -> RemovableHandle:
    """Replace the tensors that a model is called with, from now on.

    Args:
        model: A copy.
        change: Function from an argument's name and a tensor in it to the one in its place.
        everything: Whether labels, targets, masks and lists of tensors change, too.
    """

    def of_argument(name: str, x: Any) -> Any:
        may_change = everything or (is_input(name) and not is_list(x))
        return mapped(x, partial(change, name)) if may_change else x

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return changed(module, args, kwargs, of_argument)

    return model.register_forward_pre_hook(before, with_kwargs=True)


class ChangedInputs:
    """Runs a fork's model on a batch with its own and with changed inputs.

    All passes start from the same buffers, and from random numbers of the fork's seed.

    Attributes:
        inputs: The dense tensors of the batch's length in the model's last call; none of a list.
        names: Their arguments' names, or numbers.
        own: The outputs for the unchanged inputs.

    Args:
        fork: A copy, in the mode in which it runs.
        batch: The batch.
    """

    def __init__(self, fork: Fork, batch: Any) -> None:
        self._model, self._batch = fork.model, batch
        self.inputs: list[Tensor] = []
        self.names: list[str] = []
        with seeded(fork.seed):
            self._loss = RepeatedLoss(fork)
        self.own = self.outputs(lambda x: x)

    def outputs(
        self,
        change: Callable[[Tensor], Tensor],
        number: int | None = None,
        everything: bool = False,
    ) -> list[Tensor]:
        """Return the model's outputs with its inputs changed.

        Args:
            change: Function from an input to the one in its place.
            number: The number of the input that changes; None: all do.
            everything: Whether labels, masks and lists count as inputs, too.
        """
        made: list[Tensor] = []

        def begins(module: nn.Module, args: Any) -> None:
            self.inputs, self.names = [], []

        def instead(name: str, x: Tensor) -> Tensor:
            if x.is_sparse or x.shape[:1] != (size_of(self._batch),):
                return x
            self.inputs.append(x.detach())
            self.names.append(name)
            return change(x) if number in (None, len(self.inputs) - 1) else x

        with (
            self._model.register_forward_pre_hook(begins),
            change_inputs(self._model, instead, everything),
            self._model.register_forward_hook(noting(made)),
        ):
            self._loss.of(self._batch)
        return made


class RepeatedLoss:
    """Computes a fork's loss with fixed random numbers and restores random numbers and buffers.

    The same functions run as in training, but no gradient is taken and monitors do not observe it.
    The computation starts from the random numbers and buffers at the time of construction.
    """

    def __init__(self, fork: Fork) -> None:
        self._fork = fork
        own = fork.loss.modules() if isinstance(fork.loss, nn.Module) else ()
        self._modules = list(dict.fromkeys((*fork.model.modules(), *own)))
        random = Randomness(devices_of(self._modules), others=True)
        self._begin = Surroundings(random, self._modules)

    def of(self, batch: Any, backward: bool = False) -> float:
        """Return the loss of a batch with the model's current weights, after its backward pass."""

        def run() -> float:
            loss = self._fork.loss(self._fork.model, copied(batch))
            if backward:
                loss.backward()  # type: ignore[no-untyped-call]
            return float(loss.detach())

        return untouched(self._modules, self._begin, run)

    def with_graph(self, batch: Any) -> Tensor:
        """Return the same loss with its graph; what it changed of the fork stays until the next."""
        with seeded(self._fork.seed), self._begin.again(), torch.enable_grad():
            return self._fork.loss(self._fork.model, copied(batch))


# A few samples, and which outputs their inputs and targets concern

SAMPLES = 8  # most samples of a batch, so that large models take little time


def of_few(setup: Setup) -> Setup:
    """Return the setup with a few samples of each batch, if the loss can be computed for them."""
    cut = {id(batch): first(batch, SAMPLES) for batch in setup.batches}  # some are given again
    try:
        with torch.set_grad_enabled(setup.differentiates):
            see_calls(still(setup.fork()), lambda call: None, cut[id(setup.batches[0])])
    except Exception:  # the model works with one batch size only
        return setup
    return replace(setup, batches=tuple(cut[id(batch)] for batch in setup.batches))


class Pass(NamedTuple):
    """The outputs of all of the model's calls in one loss, and the loss's gradients there, flat.

    Attributes:
        outputs: the outputs that have a gradient.
        gradients: the gradients.
    """

    outputs: Tensor
    gradients: Tensor


def passed(fork: Fork, batch: Any) -> Pass:
    """Return outputs and gradients for a batch; what the model keeps may change."""
    seen: list[Tensor] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        seen.extend(x for x in tensors(output) if x.is_floating_point() and x.requires_grad)

    hook = fork.model.register_forward_hook(note)
    with hook, seeded(fork.seed), torch.enable_grad():
        loss = fork.loss(fork.model, copied(batch))
    if not seen or not loss.requires_grad:
        return Pass(torch.empty(0), torch.empty(0))
    found = torch.autograd.grad(loss, seen, allow_unused=True)
    zeros = (torch.zeros_like(x) if g is None else g for x, g in zip(seen, found, strict=True))
    outputs = torch.cat([x.detach().flatten() for x in seen])
    return Pass(outputs, torch.cat([g.flatten() for g in zeros]))


def with_tensor(batch: Any, number: int, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the batch with its tensor of this number changed."""
    wanted = list(tensors(batch))[number]
    return mapped(batch, lambda x: change(x) if x is wanted else x)


def only_target(setup: Setup, batch: Any) -> Tensor | None:
    """Return the only tensor that changes gradients, and no outputs, if samples exchange theirs.

    None: no tensor does, or several do: one may be a mask or a weight.
    """
    own, size = passed(still(setup.fork()), batch), size_of(batch)
    found = []
    for number, x in enumerate(tensors(batch)):
        if not x.ndim or len(x) != size:
            continue
        rolled = with_tensor(batch, number, lambda y: y.roll(1, 0))
        other = passed(still(setup.fork()), rolled)
        is_input = not torch.equal(other.outputs, own.outputs)
        if not is_input and not torch.equal(other.gradients, own.gradients):
            found.append(x)
    return found[0] if len(found) == 1 else None
