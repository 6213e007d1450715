"""Do normalisations run in evaluation mode with their initial statistics?"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from adiv_monitor.audit.experiments.questions import asks
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact

NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


@asks("left-in-eval")
def ask(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return batch normalisations in evaluation mode with mean exactly 0 and variance exactly 1."""
    fork = setup.fork()
    found: dict[str, Fact] = {}
    paths = {module: path for path, module in fork.model.named_modules()}

    def look(module: nn.Module, args: Any) -> None:
        if not module.training and _is_unused(module):
            kind = {"class": type(module).__name__}
            found.setdefault(paths[module], Fact(paths[module], {"given": 0.0}, kind))

    for module in paths:
        if isinstance(module, NORMS):
            module.register_forward_pre_hook(look)
    with torch.no_grad():
        fork.first_loss()
    if not found and not setup.model.training:
        for path, module in setup.model.named_modules():
            if isinstance(module, NORMS) and _is_unused(module):
                found[path] = Fact(path, {"given": 1.0}, {"class": type(module).__name__})
    return tuple(found.values())


def _is_unused(module: nn.Module) -> bool:
    mean, variance = getattr(module, "running_mean", None), getattr(module, "running_var", None)
    if mean is None or variance is None:
        return False
    return not bool(mean.any()) and bool((variance == 1).all())
