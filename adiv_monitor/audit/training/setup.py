"""Setups, their losses, and their forks: copies that train on the same batches and numbers."""

import copy
import gc
import inspect
import itertools
import math
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from adiv_monitor.audit.training.batches import called, copied, tensors
from adiv_monitor.rerun.surroundings import restored_after

Loss = Callable[[nn.Module, Any], Tensor]
OptimizerFactory = Callable[[nn.Module], Optimizer]

COSTLY = 0.15  # seconds of a step on a usual machine


@dataclass
class Fork:
    """A copy to train, which a fix may change before it runs.

    Attributes:
        model: The copy of the model.
        optimizer: Optimizer over the copy's parameters.
        loss: model, batch → scalar.
        batches: One batch per step.
        clip_norm: Largest norm of the gradient; None: not clipped.
        seed: Seed of the run's random numbers.
        lost: The owners of hooks that the copy lacks.
    """

    model: nn.Module
    optimizer: Optimizer
    loss: Loss
    batches: list[Any]
    clip_norm: float | None
    seed: int
    lost: tuple[str, ...] = ()

    def first_loss(self) -> Tensor:
        """Return the loss of the first batch, with random numbers from the run's seed."""
        with seeded(self.seed):
            return self.loss(self.model, copied(self.batches[0]))

    def change_outputs(self, paths: Iterable[str], change: Callable[[Tensor], Tensor]) -> None:
        """Change the outputs of the modules at these paths, in order, from now on."""
        for path in paths:
            self.model.get_submodule(path).register_forward_hook(lambda m, args, out: change(out))


@dataclass(frozen=True)
class Setup:
    """Everything that a run consists of. The model itself is never trained; its forks are.

    Attributes:
        model: The user's model.
        optimizer: An optimizer over the model's parameters, or a function model → optimizer.
        loss: model, batch → scalar.
        batches: The available batches, on the model's device.
        steps: Number of training steps; batches are repeated if there are fewer.
        clip_norm: Largest norm of the gradient; None: not clipped.
        seed: Seed of the run's random numbers.
        cost: What a step costs, as `Facts.step_cost`; NaN: unknown.
        differentiates: Whether the loss computes gradients itself, such as a gradient penalty. The
            losses of forks then do so even where gradients are disabled.
    """

    model: nn.Module
    optimizer: Optimizer | OptimizerFactory
    loss: Loss
    batches: tuple[Any, ...] = field(repr=False)
    steps: int
    clip_norm: float | None = None
    seed: int = 0
    cost: float = math.nan
    differentiates: bool = False

    @property
    def is_costly(self) -> bool:
        """Whether a step costs so much that the audit saves passes and steps."""
        return self.cost > COSTLY

    @cached_property
    def lifted(self) -> dict[int, float]:
        """The groups whose learning rate a warm-up raises, with its highest rate."""
        return lifted(self.optimizer, self.steps) if isinstance(self.optimizer, Optimizer) else {}

    def fork_like(self, trained: Fork) -> Fork:
        """Return a fork with the weights and buffers of a trained one, which stays as it is."""
        fork = self.fork()
        fork.model.load_state_dict(trained.model.state_dict())
        return fork

    def fork(self) -> Fork:
        """Return a copy of the model in training mode with its own copy of the optimizer.

        Raises:
            TypeError: The model can't be copied, or the factory returned no optimizer.
            ValueError: The optimizer holds none of the model's parameters.
        """
        memo = _leaves(self.model)
        try:
            model, loss = copy.deepcopy((self.model, _own_modules(self.loss)), memo)
        except Exception as error:
            raise TypeError(
                f"audit(model=…): got a {type(self.model).__name__} that copy.deepcopy can't copy "
                f"({type(error).__name__}: {error}), expected one that it can: give it before its "
                "first forward pass, without hooks that hold tensors"
            ) from error
        of_its_own = any(type(m).train is not nn.Module.train for m in model.modules())
        if of_its_own or not model.training:  # as a loop does: it may leave some in eval mode
            model.train()
        own = self.optimizer if isinstance(self.optimizer, Optimizer) else None
        with seeded(self.seed):
            optimizer = _copy(own, memo) if own is not None else self.optimizer(model)  # type: ignore[operator]
        _check_optimizer(model, optimizer)
        peaks = lifted(optimizer, self.steps) if own is None else self.lifted
        for i, rate in peaks.items():  # forks have no scheduler
            optimizer.param_groups[i]["lr"] = rate
        batches = list(itertools.islice(itertools.cycle(self.batches), self.steps))
        lost = tuple(_hooked(self.model, own))
        loss = loss or self.loss
        if self.differentiates:
            loss = torch.enable_grad()(loss)
        return Fork(model, optimizer, loss, batches, self.clip_norm, self.seed, lost)


def _own_modules(loss: Loss) -> Loss | None:
    """Return the loss if it is a module, which may have parameters and buffers of its own."""
    loss_of = getattr(loss, "function", loss)  # a TargetLoss has one
    is_module = isinstance(getattr(loss_of, "__self__", loss_of), nn.Module)
    return loss if is_module else None


def _leaves(model: nn.Module) -> dict[int, Any]:
    """Return copies of the tensors in a model's attributes that torch can't copy, by id.

    They were computed from parameters, as by `nn.Parameter(x).to(device)`: no step trains them.
    """
    values = (x for m in model.modules() for x in (*vars(m).values(), *m._buffers.values()))
    each = (x for value in values for x in (value if isinstance(value, list) else [value]))
    tensors = (x for x in each if isinstance(x, Tensor) and not x.is_leaf)
    return {id(x): x.detach().clone().requires_grad_() for x in tensors}


def _copy(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Copy an optimizer, with its state, over the parameters that `memo` has copies of.

    Torch copies only the state and the groups. Other attributes, such as LBFGS's, are copied here;
    hooks are registered later.
    """
    copied = copy.deepcopy(optimizer, memo)
    own = {name: value for name, value in vars(optimizer).items() if not callable(value)}
    for name in own.keys() - vars(copied).keys():
        setattr(copied, name, copy.deepcopy(own[name], memo))
    return copied


def _check_optimizer(model: nn.Module, optimizer: object) -> None:
    kind, own = type(optimizer).__name__, {id(p) for p in model.parameters()}
    if not isinstance(optimizer, Optimizer):
        told = "expected a torch.optim.Optimizer of the model that it was called with"
        raise TypeError(f"audit(optimizer=…): the factory gave {kind}, {told}")
    if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            f"audit(optimizer=…): got a {kind} that holds none of the parameters of "
            f"{type(model).__name__}, expected one that is made from model.parameters()"
        )


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's, Python's and numpy's random numbers for a block, and restore them after it."""
    on_cuda = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    devices = [torch.device("cpu"), *(torch.device("cuda", i) for i in on_cuda)]
    with restored_after(devices):
        # Without an accelerator, `torch.manual_seed` keeps the seed for one, with a stack trace.
        generator = torch if torch.accelerator.is_available() else torch.default_generator
        generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        yield


def _hooked(model: nn.Module, optimizer: Optimizer | None) -> Iterator[str]:
    """Yield the owners of hooks that copies lack: those may change objects of the user's."""
    for name, p in model.named_parameters():
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            yield f"parameter '{name}'"
    if optimizer and (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks):
        yield "the optimizer"


# Warm-ups

FOLLOWED = 1_000  # steps for which a warm-up is followed, at least


def lifted(optimizer: Optimizer, steps: int) -> dict[int, float]:
    """Return the groups whose learning rate a warm-up raises, with its highest rate.

    A copy of the scheduler is stepped. A rate of 0 that is not raised within the given steps is
    left out: it is a fault, not a warm-up. If no scheduler of torch's is known, a rate of 0 is
    taken for the beginning of another's warm-up.
    """
    groups = {i: g for i, g in enumerate(optimizer.param_groups) if g.get("initial_lr", 0) > 0}
    # The schedulers of torch's that hold this optimizer, wherever they are kept.
    schedulers = [x for x in gc.get_objects() if issubclass(type(x), LRScheduler)] if groups else []
    every = [_peaks(x, steps) for x in schedulers if x.optimizer is optimizer] or [
        {i: float(g["initial_lr"]) for i, g in groups.items() if g["lr"] == 0}
    ]
    peaks = {i: max(peaks.get(i, 0.0) for peaks in every) for i in groups}
    return {i: peak for i, peak in peaks.items() if peak > groups[i]["lr"] * (1 + 1e-6)}


def _peaks(scheduler: LRScheduler, steps: int) -> dict[int, float]:
    """Return each group's highest rate; the usual one where it still rises in the end."""
    groups, rates = scheduler.optimizer.param_groups, []
    # Schedulers write to groups only: no parameters and no state are copied.
    memo: dict[int, Any] = {id(p): p for group in groups for p in group["params"]}
    memo[id(scheduler.optimizer.state)] = {}
    with warnings.catch_warnings(), suppress(Exception):  # at its end, or it waits for a loss
        warnings.simplefilter("ignore")  # the scheduler steps before the optimizer does
        moved = copy.deepcopy(scheduler, memo)
        for _ in range(max(steps, FOLLOWED)):
            rates.append([float(group["lr"]) for group in moved.optimizer.param_groups])
            moved.step()
    peaks = {}
    for i, of_group in enumerate(zip(*rates, strict=True)):
        usual = float(groups[i].get("max_lr", groups[i].get("initial_lr", 0.0)))
        peaks[i] = max(of_group) if max(of_group) > of_group[-1] else usual
        peaks[i] *= any(of_group[: steps + 1])
    return peaks


Function = Callable[[Tensor, Tensor], Tensor]

_OUTPUTS = {"output", "outputs", "out", "logits", "input", "pred", "predictions", "y_pred"}
_TARGETS = {"target", "targets", "label", "labels", "y", "y_true", "t"}
_MODELS = {"model", "net", "network", "module", "m"}


class LossError(ValueError):
    """Raised for outputs, targets or batches that a loss can't take, in one line."""


def first_tensor(output: Any) -> Tensor | None:
    """Return the first tensor of a model's output, or its logits; None if it holds no tensor."""
    return next(tensors(getattr(output, "logits", output)), None)


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
                f"{type(batch).__name__}: give no loss, or a function (model, batch) → loss"
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


def loss_of_output(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss that the model itself returns, as models of Hugging Face do.

    Raises:
        TypeError: the model's output has no loss, or the model does not accept the batch.
    """
    kind = type(model).__name__
    told = (
        "expected a model that gives its own loss, as the `loss` of an object or a dict: give "
        "audit a loss, (model, batch) → number, or batches that hold labels"
    )
    try:
        output = called(model, batch)
    except TypeError as error:
        got = f"can't take the whole batch ({error})"
        raise TypeError(f"audit(loss=None): {kind} {got}, {told}") from error
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        got = type(output).__name__ + " whose loss is None" * hasattr(output, "loss")
        raise TypeError(f"audit(loss=None): {kind} gave {got}, {told}")
    return loss


def of_batch(loss: Callable[..., Any], name: str = "") -> Loss:
    """Return a loss as a function of model and batch; one of output and target is wrapped.

    The names of its parameters tell, as in `F.cross_entropy(input, target)`.

    Args:
        loss: a function, a module, or another object that can be called.
        name: what errors call it; "": its own name.
    """
    try:
        found = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
        found.bind(None, None)
    except (TypeError, ValueError):  # it takes others, or does not tell
        return loss
    names = [name for name, p in found.parameters.items() if p.kind != p.VAR_POSITIONAL]
    takes_outputs = len(names) > 1 and (names[0] in _OUTPUTS or names[1] in _TARGETS)
    if takes_outputs and names[0] not in _MODELS:
        return TargetLoss(name or name_of(loss), loss)
    return loss


def name_of(loss: Callable[..., Any] | None) -> str:
    """Return the name of a loss, that of a function or of another object's class; "" of None."""
    return "" if loss is None else str(getattr(loss, "__name__", type(loss).__name__))


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"class {type(value).__name__}"
    return f"shape {tuple(value.shape)}, {str(value.dtype).removeprefix('torch.')}"
