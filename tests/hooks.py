"""Check for hooks on a model and its optimizer."""

import torch
from torch import nn

HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_post_accumulate_grad_hooks"),
    *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
)


def no_hooks(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether neither the modules, the parameters nor the optimizer have hooks."""
    places = [*model.modules(), *model.parameters(), optimizer]
    return not any(getattr(place, name, None) for place in places for name in HOOKS)
