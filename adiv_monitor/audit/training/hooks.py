"""Hooks that copies lose, on parameters and on the optimizer; what they refer to is copied, too."""

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

    What a hook refers to, in its closure or as a global, is copied as well, so that nothing of the
    user's is changed.

    Args:
        model: the model that was given.
        copied: its copy.
        optimizers: the optimizer that was given, and its copy; None: it was made for the copy.
        memo: id of an original → its copy.

    Returns:
        The hooks that can't be copied, by what they are on.
    """
    lost = []
    for (name, p), q in zip(model.named_parameters(), copied.parameters(), strict=True):
        for hook in (getattr(p, "_backward_hooks", None) or {}).values():
            if (made := _rebound(hook, memo)) is not None:
                q.register_hook(made)  # type: ignore[no-untyped-call]
            else:
                lost.append(f"parameter '{name}'")
        for hook in (getattr(p, "_post_accumulate_grad_hooks", None) or {}).values():
            if (made := _rebound(hook, memo)) is not None:
                q.register_post_accumulate_grad_hook(made)  # type: ignore[no-untyped-call]
            else:
                lost.append(f"parameter '{name}'")
    if optimizers is not None:
        own, theirs = optimizers
        for hooks, register in (
            (own._optimizer_step_pre_hooks, theirs.register_step_pre_hook),
            (own._optimizer_step_post_hooks, theirs.register_step_post_hook),
        ):
            for hook in hooks.values():
                if (made := _rebound(hook, memo)) is not None:
                    register(made)
                else:
                    lost.append("the optimizer")
    return lost


def without_gradient_hooks(model: nn.Module, optimizer: Optimizer) -> bool:
    """Take off a copy what changes gradients between backward() and the step; was there any?"""
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


def _rebound(hook: Callable[..., Any], memo: Memo) -> Callable[..., Any] | None:
    """The same function of copies; None where something that it refers to can't be copied."""
    try:
        if not isinstance(hook, FunctionType):
            return copy.deepcopy(hook, memo)  # a method, or an object that is called
        cells = hook.__closure__ or ()
        closure = tuple(CellType(_copied(cell.cell_contents, memo)) for cell in cells)
        names = [name for name in hook.__code__.co_names if name in hook.__globals__]
        used = {name: hook.__globals__[name] for name in names}
        own = {**hook.__globals__, **{name: _copied(x, memo) for name, x in used.items()}}
        made = FunctionType(hook.__code__, own, hook.__name__, hook.__defaults__, closure)
        made.__kwdefaults__ = hook.__kwdefaults__
        if hook.__defaults__:
            made.__defaults__ = tuple(_copied(x, memo) for x in hook.__defaults__)
        return made
    except Exception:  # whatever can't be copied
        return None


def _copied(value: Any, memo: Memo) -> Any:
    """A copy, so that nothing of the user's is changed; modules of code, which have none, stay.

    Functions and classes are their own copies.
    """
    return value if isinstance(value, ModuleType) else copy.deepcopy(value, memo)
