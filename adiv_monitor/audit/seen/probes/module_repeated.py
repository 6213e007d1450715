"""Are several entries of a module one and the same module?"""

from collections import Counter

import torch
from torch import nn

from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact, Probed

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def ask(setup: Setup, trained: Fork) -> Probed:
    """Return the modules that are several entries of one other module, with their number."""
    return Probed(tuple(
        Fact(f"{path}.{names[0]}".lstrip("."), {"times": float(len(names))},
             {"class": type(parent._modules[names[0]]).__name__})
        for path, parent, names in repeated(setup.fork())
    ))  # fmt: skip


def repeated(fork: Fork) -> list[tuple[str, nn.Module, list[str]]]:
    """Return path, parent and names of the entries of one type that have the same parameters.

    Entries of other modules than containers may be two names of one part: they count only if this
    part runs more than once in a forward pass.
    """
    found: list[tuple[str, nn.Module, list[str]]] = []
    for path, parent in fork.model.named_modules():
        entries: dict[tuple[object, ...], list[str]] = {}
        for name, module in parent._modules.items():
            if own := tuple(id(p) for p in module.parameters()) if module is not None else ():
                # A linear layer may share the weight of an embedding on purpose.
                entries.setdefault((type(module), *own), []).append(name)
        found += [(path, parent, names) for names in entries.values() if len(names) > 1]
    if all(isinstance(parent, CONTAINERS) for _, parent, _ in found):
        return found
    runs = _runs(fork)
    return [
        (path, parent, names)
        for path, parent, names in found
        if isinstance(parent, CONTAINERS) or sum(runs[m] for m in _modules(parent, names)) > 1
    ]


def _modules(parent: nn.Module, names: list[str]) -> set[nn.Module]:
    return {module for name in names if (module := parent._modules[name]) is not None}


def _runs(fork: Fork) -> Counter[nn.Module]:
    """Return how often each module runs in the forward pass of a batch."""
    runs: Counter[nn.Module] = Counter()
    handles = [
        module.register_forward_pre_hook(lambda module, args: runs.update([module]))
        for module in fork.model.modules()
    ]
    try:
        with torch.no_grad():
            fork.first_loss()
    finally:
        for handle in handles:
            handle.remove()
    return runs
