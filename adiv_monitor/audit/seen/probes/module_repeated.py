"""Does a container hold the same module, with parameters, several times?"""

from torch import nn

from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact, Probed

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def ask(setup: Setup, trained: Fork) -> Probed:
    """Return the modules that are several entries of one container, with their number."""
    return Probed(tuple(
        Fact(f"{path}.{names[0]}".lstrip("."), {"times": float(len(names))},
             {"class": type(container._modules[names[0]]).__name__})
        for path, container, names in repeated(setup.model)
    ))  # fmt: skip


def repeated(model: nn.Module) -> list[tuple[str, nn.Module, list[str]]]:
    """Return path, container and names of the entries that are one module with parameters."""
    found = []
    for path, container in model.named_modules():
        if not isinstance(container, CONTAINERS):
            continue
        names: dict[nn.Module, list[str]] = {}
        for name, module in container._modules.items():
            if module is not None and any(True for _ in module.parameters()):
                names.setdefault(module, []).append(name)
        found += [(path, container, same) for same in names.values() if len(same) > 1]
    return found
