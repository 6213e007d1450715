"""Networks whose weights only the user's loop updates: teachers and averages of weights (EMA)."""

import inspect
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
from torch import nn

from adiv_monitor.audit.training.setup import Loss


def averages(model: nn.Module, loss: Loss) -> list[str]:
    """Return the names of untrained networks with the shapes of the model, or of a part of it.

    These are networks that the loss refers to, and parts of the model whose weights equal those of
    another part. The user's loop may update them; the audit's does not. An average that neither the
    model nor the loss refers to is not found, and changes no step.
    """
    found = [
        name for name, module in _referred(loss)
        if module is not model and _shapes(module) == _shapes(model)
    ]  # fmt: skip
    for path, module in model.named_modules():
        children = dict(module.named_children())
        found += [
            f"{path}.{name}".lstrip(".") for name, child in children.items()
            if any(_is_copy(child, other) for other in children.values() if other is not child)
        ]  # fmt: skip
    return list(dict.fromkeys(found))


def _is_copy(some: nn.Module, other: nn.Module) -> bool:
    """Return whether a module is frozen, and another one is trained and has the same weights.

    Those of normalisations begin as ones and zeros, so that two of them are equal without a copy.
    """
    own, others = list(some.parameters()), list(other.parameters())
    is_taught = any(p.requires_grad for p in others) and not any(p.requires_grad for p in own)
    is_drawn = any(bool((p != p.flatten()[:1]).any()) for p in own)
    alike = _shapes(some) == _shapes(other)
    return is_taught and is_drawn and alike and all(map(torch.equal, own, others))


def _shapes(module: nn.Module) -> list[torch.Size]:
    return [p.shape for p in module.parameters()]


def _referred(loss: Any, depth: int = 2) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that a loss refers to: in its closure, as globals, as attributes."""
    if isinstance(loss, FunctionType):
        try:
            used = inspect.getclosurevars(loss)
        except ValueError:  # a variable has no value yet
            return
        values = {**used.nonlocals, **used.globals}
    else:  # a method, a partial function, an object that is called
        inner = getattr(loss, "__self__", getattr(loss, "func", None))
        own = {**getattr(loss, "keywords", {}), **getattr(loss, "__dict__", {})}
        values = {"": inner, **own}
    for name, value in values.items():
        if isinstance(value, nn.Module):
            yield name, value
        elif depth and callable(value) and not isinstance(value, type):
            yield from _referred(value, depth - 1)
