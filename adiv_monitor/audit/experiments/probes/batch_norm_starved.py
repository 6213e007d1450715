"""Does batch normalisation have enough values in each channel of a batch?"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from adiv_monitor.audit.experiments.questions import asks
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact

FEW = 4  # the variance's relative error, √(2/(n−1)), is 82 % for four values


@asks("batch-norm-starved")
def ask(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return samples × positions per channel of the first batch, if they are four or fewer."""
    fork = setup.fork()
    found: dict[str, Fact] = {}
    paths = {module: path for path, module in fork.model.named_modules()}

    def look(module: nn.Module, args: Any) -> None:
        x = args[0] if args else None
        if module.training and isinstance(x, Tensor) and x.ndim > 1:
            values = x.numel() // x.shape[1]
            ranks = _ranks(module)
            if values * ranks <= FEW:
                numbers = {"values": float(values * ranks), "samples": float(len(x))}
                found[paths[module]] = Fact(paths[module], numbers)

    for module in paths:
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.register_forward_pre_hook(look)
    with torch.no_grad():
        fork.first_loss()
    return tuple(found.values())


def _ranks(module: nn.Module) -> int:
    """Return the number of ranks whose values are merged."""
    together = isinstance(module, nn.SyncBatchNorm) and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if together else 1
