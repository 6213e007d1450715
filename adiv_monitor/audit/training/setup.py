"""Setups, and their forks: copies that train on the same batches with the same random numbers."""

import copy
import itertools
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from adiv_monitor.audit.training.batches import copied
from adiv_monitor.audit.training.hooks import carry_over
from adiv_monitor.audit.training.schedulers import lifted
from adiv_monitor.rerun.randomness import restored_after

Loss = Callable[[nn.Module, Any], Tensor]
OptimizerFactory = Callable[[nn.Module], Optimizer]


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
        lost: The hooks that could not be copied, by their owners.
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
    differentiates: bool = False

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
        memo = _copies_of_empty_tables(self.model) | _leaves(self.model)
        try:
            model, loss = copy.deepcopy((self.model, _own_modules(self.loss)), memo)
        except Exception as error:
            raise TypeError(
                f"audit(model=…): got a {type(self.model).__name__} that copy.deepcopy can't copy "
                f"({type(error).__name__}: {error}), expected one that it can, since copies of it "
                "are trained: give it before its first forward pass, without hooks that hold "
                "tensors, or teach its class __deepcopy__"
            ) from error
        if not all(parameter.is_leaf for parameter in model.parameters()):
            raise TypeError(
                f"audit(model=…): got a {type(self.model).__name__} whose copies can't be trained "
                "(scripted?), expected a plain torch.nn.Module: give it as it is before "
                "torch.jit.script"
            )
        if not model.training:
            model.train()
        pair = None
        if isinstance(self.optimizer, Optimizer):
            optimizer, peaks = _copy(self.optimizer, memo), self.lifted
            pair = self.optimizer, optimizer
            _check_optimizer(model, optimizer)
        else:
            with seeded(self.seed):
                optimizer = self.optimizer(model)
            _check_optimizer(model, optimizer)
            peaks = lifted(optimizer, self.steps)
        for i, rate in peaks.items():  # forks have no scheduler
            optimizer.param_groups[i]["lr"] = rate
        batches = list(itertools.islice(itertools.cycle(self.batches), self.steps))
        lost = tuple(carry_over(self.model, model, pair, memo))
        loss = loss or self.loss
        if self.differentiates:
            loss = partial(_with_gradients, loss)
        return Fork(model, optimizer, loss, batches, self.clip_norm, self.seed, lost)


def differentiates(setup: Setup) -> bool:
    """Return whether the loss fails without gradients, because it computes some itself."""
    fork = setup.fork()
    try:
        with torch.no_grad():
            fork.first_loss()
    except Exception as error:  # training says what else is wrong
        return "does not require grad" in str(error)
    return False


def _with_gradients(loss: Loss, model: nn.Module, batch: Any) -> Tensor:
    with torch.enable_grad():
        return loss(model, batch)


def _own_modules(loss: Loss) -> Loss | None:
    """Return the loss if it is a module, which may have parameters and buffers of its own."""
    loss_of = getattr(loss, "function", loss)  # a TargetLoss has one
    is_module = isinstance(getattr(loss_of, "__self__", loss_of), nn.Module)
    return loss if is_module else None


def _copies_of_empty_tables(model: nn.Module) -> dict[int, Any]:
    """Return copies of the empty tables of a model's hooks, by id, for `copy.deepcopy`.

    Every module has a dozen of them. They take a quarter of the time to copy a MobileNet.
    """
    tables = (x for module in model.modules() for x in vars(module).values())
    return {id(x): OrderedDict() for x in tables if type(x) is OrderedDict and not (x or vars(x))}


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
        raise TypeError(
            f"audit(optimizer=…): the factory gave {kind}, expected a torch.optim.Optimizer over "
            "the parameters of the model that it was called with"
        )
    if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            f"audit(optimizer=…): got a {kind} that holds none of the parameters of "
            f"{type(model).__name__}, expected the optimizer that trains this model: make it from "
            "model.parameters(), or give a function model → optimizer"
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
