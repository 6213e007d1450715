"""Setups, and their forks: copies that train on the same batches with the same random numbers."""

import copy
import gc
import itertools
import math
import random
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import CellType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from adiv_monitor.audit.training.batches import copied
from adiv_monitor.rerun.randomness import restored_after

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
        own = self.optimizer if isinstance(self.optimizer, Optimizer) else None
        with seeded(self.seed):
            optimizer = _copy(own, memo) if own is not None else self.optimizer(model)  # type: ignore[operator]
        _check_optimizer(model, optimizer)
        peaks = lifted(optimizer, self.steps) if own is None else self.lifted
        for i, rate in peaks.items():  # forks have no scheduler
            optimizer.param_groups[i]["lr"] = rate
        batches = list(itertools.islice(itertools.cycle(self.batches), self.steps))
        lost = tuple(carry_over((self.model, own), (model, optimizer), memo))
        loss = loss or self.loss
        if self.differentiates:
            loss = partial(_with_gradients, loss)
        return Fork(model, optimizer, loss, batches, self.clip_norm, self.seed, lost)


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


# Hooks, which copies lose

Memo = dict[int, Any]


def carry_over(
    given: tuple[nn.Module, Optimizer | None], copies: tuple[nn.Module, Optimizer], memo: Memo
) -> list[str]:
    """Register the hooks of a model's parameters and of its optimizer on their copies.

    The objects that a hook refers to, in its closure or as globals, are copied too, so that nothing
    of the user's is changed.

    Args:
        given: The user's model and optimizer; None: the optimizer was made for the copy.
        copies: Their copies.
        memo: id of an original → its copy.

    Returns:
        The owners of the hooks that can't be copied: parameters by name, or the optimizer.
    """
    places: list[tuple[str, dict[int, Any] | None, Callable[..., object]]] = []
    (model, own), (other, theirs) = given, copies
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        owner, late = f"parameter '{name}'", getattr(p, "_post_accumulate_grad_hooks", None)
        places.append((owner, p._backward_hooks, q.register_hook))
        places.append((owner, late, q.register_post_accumulate_grad_hook))
    if own is not None:
        owner = "the optimizer"
        places.append((owner, own._optimizer_step_pre_hooks, theirs.register_step_pre_hook))
        places.append((owner, own._optimizer_step_post_hooks, theirs.register_step_post_hook))
    lost = []
    for owner, hooks, register in places:
        for hook in (hooks or {}).values():
            try:
                register(_rebound(hook, memo))
            except Exception:  # copying user objects may raise anything
                lost.append(owner)
    return lost


def without_gradient_hooks(model: nn.Module, optimizer: Optimizer) -> bool:
    """Remove the hooks of a copy that change gradients between backward() and the step.

    Returns whether there were any.
    """
    held = [
        *(p._backward_hooks for p in model.parameters()),
        *(getattr(p, "_post_accumulate_grad_hooks", None) for p in model.parameters()),
        *(m._backward_hooks for m in model.modules()),
        *(m._backward_pre_hooks for m in model.modules()),
        optimizer._optimizer_step_pre_hooks,
    ]
    found = [hooks for hooks in held if hooks]
    for hooks in found:
        hooks.clear()
    return bool(found)


def _rebound(hook: Callable[..., Any], memo: Memo) -> Callable[..., Any]:
    """Return the hook bound to copies of its objects; raises what copying them raises."""
    if not isinstance(hook, FunctionType):
        return copy.deepcopy(hook, memo)  # a method, or an object that is called
    closure = tuple(CellType(_copied(cell.cell_contents, memo)) for cell in hook.__closure__ or ())
    used = hook.__globals__.keys() & {*hook.__code__.co_names}
    own = hook.__globals__ | {name: _copied(hook.__globals__[name], memo) for name in used}
    defaults = tuple(_copied(x, memo) for x in hook.__defaults__ or ())
    return FunctionType(hook.__code__, own, hook.__name__, defaults, closure)


def _copied(value: Any, memo: Memo) -> Any:
    """Return a copy of an object that a hook refers to; Python modules are returned as they are.

    `copy.deepcopy` also returns functions and classes as they are.
    """
    return value if isinstance(value, ModuleType) else copy.deepcopy(value, memo)


# Warm-ups

MOST = 10_000  # steps for which a warm-up is followed
STILL = 1_000  # steps without a rise after which it is over


def lifted(optimizer: Optimizer, steps: int) -> dict[int, float]:
    """Return the groups whose learning rate a warm-up raises, with its highest rate.

    A copy of the scheduler is stepped until the rates have not risen for a while. A rate
    of 0 that is not raised within the given steps is left out: it is a fault, not a warm-up. If no
    scheduler of torch's is known, a rate of 0 is taken for the beginning of another's warm-up.
    """
    groups = {i: g for i, g in enumerate(optimizer.param_groups) if g.get("initial_lr", 0) > 0}
    schedulers = _schedulers(optimizer) if groups else []
    if not schedulers:
        return {i: float(g["initial_lr"]) for i, g in groups.items() if g["lr"] == 0}
    every = [_peaks(scheduler, steps) for scheduler in schedulers]
    return {i: max(peaks.get(i, 0.0) for peaks in every) for peaks in every for i in peaks}


def _peaks(scheduler: LRScheduler, steps: int) -> dict[int, float]:
    optimizer = scheduler.optimizer
    start = _rates(optimizer)
    peaks, last, step = dict(start), 0, 0
    # Schedulers write to groups only: no parameters and no state are copied.
    memo: dict[int, Any] = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    memo[id(optimizer.state)] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the scheduler steps before the optimizer does
        try:
            moved = copy.deepcopy(scheduler, memo)
            while peaks and step < MOST and step - last < STILL:
                moved.step()
                step += 1
                higher = {i: x for i, x in _rates(moved.optimizer).items() if x > peaks.get(i, x)}
                last = step if higher else last
                peaks |= higher
                if step == steps:
                    peaks = {i: peak for i, peak in peaks.items() if peak > 0}
        except Exception:  # of a scheduler that is at its end, or that waits for a loss
            pass
    for i, peak in peaks.items():
        if step - last < STILL or math.isinf(peak):  # a long warm-up, or a search for a rate
            group = optimizer.param_groups[i]
            peaks[i] = min(peak, float(group.get("max_lr", group["initial_lr"])))
    return {i: peak for i, peak in peaks.items() if peak > start[i] * (1 + 1e-6)}


def _rates(optimizer: Optimizer) -> dict[int, float]:
    groups = enumerate(optimizer.param_groups)
    return {i: float(group["lr"]) for i, group in groups if "initial_lr" in group}


def _schedulers(optimizer: Optimizer) -> list[LRScheduler]:
    """Return the torch schedulers that hold this optimizer, wherever they are kept.

    Those that are parts of another one are left out: it says when they step.
    """
    holders = gc.get_referrers(optimizer)
    attributes = [x for x in holders if isinstance(x, dict) and x.get("optimizer") is optimizer]
    found = [*holders, *gc.get_referrers(*attributes)]
    kept = [x for x in found if isinstance(x, LRScheduler) and x.optimizer is optimizer]
    parts = {id(part) for x in kept for part in getattr(x, "_schedulers", ())}
    return list({id(x): x for x in kept if id(x) not in parts}.values())
