"""Check for hooks on a model and its optimizer."""

import torch
from torch import nn


def no_hooks(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether neither the modules, the parameters nor the optimizer have hooks."""
    on_modules = [
        hooks
        for m in model.modules()
        for hooks in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks)
    ]
    on_parameters = [
        hooks
        for p in model.parameters()
        for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks)
    ]
    on_optimizer = (
        []
        if optimizer is None
        else [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    )
    return not any(on_modules + on_parameters + on_optimizer)
