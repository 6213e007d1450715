"""Hooks on parameters and optimizers, which copies lose: they are registered on copies again."""

import copy
from collections.abc import Callable
from types import CellType, FunctionType, ModuleType
from typing import Any

from torch import nn
from torch.optim import Optimizer

Memo = dict[int, Any]


def carry_over(
    model: nn.Module, copied: nn.Module, optimizers: tuple[Optimizer, Optimizer] | None, memo: Memo
) -> list[str]:
    """Register the hooks of a model's parameters and of its optimizer on their copies.

    The objects that a hook refers to, in its closure or as globals, are copied too, so that nothing
    of the user's is changed.

    Args:
        model: The user's model.
        copied: Its copy.
        optimizers: The user's optimizer and its copy; None if the optimizer was made for the copy.
        memo: id of an original → its copy.

    Returns:
        The owners of the hooks that can't be copied: parameters by name, or the optimizer.
    """
    places: list[tuple[str, dict[int, Any] | None, Callable[..., object]]] = []
    for (name, p), q in zip(model.named_parameters(), copied.parameters(), strict=True):
        owner, late = f"parameter '{name}'", getattr(p, "_post_accumulate_grad_hooks", None)
        places.append((owner, p._backward_hooks, q.register_hook))
        places.append((owner, late, q.register_post_accumulate_grad_hook))
    if optimizers is not None:
        (own, theirs), owner = optimizers, "the optimizer"
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
