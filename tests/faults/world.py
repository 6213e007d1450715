"""What a training leaves behind: its result, and what must be as it was before."""

import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from adiv_monitor.rerun import eager
from adiv_monitor.rerun.surroundings import _rerun

_TABLES = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks_with_kwargs", "_state_dict_hooks"),
)


@dataclass
class Result:
    """All that a training run gives, bit by bit.

    Attributes:
        losses: of its steps.
        values: by name: parameters, gradients, buffers, the optimizer's state, random numbers.
    """

    losses: list[bytes]
    values: dict[str, bytes]


def result(model: nn.Module, optimizer: Optimizer, losses: Sequence[Tensor]) -> Result:
    values: dict[str, Any] = {"random": torch.get_rng_state(), "python": random.getstate()}
    values["numpy"] = np.random.get_state()
    for name, parameter in model.named_parameters():
        values[f"parameter {name}"] = parameter
        values[f"gradient {name}"] = parameter.grad
    values |= {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
    values["optimizer"] = optimizer.state_dict()
    return Result([_bits(loss) for loss in losses], {k: _bits(v) for k, v in values.items()})


def _bits(value: Any) -> bytes:
    if isinstance(value, Tensor):
        whole = value.detach().contiguous().reshape(-1)
        return str((value.shape, value.dtype)).encode() + whole.view(torch.uint8).numpy().tobytes()
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, Mapping):
        return b"".join(_bits(key) + _bits(inner) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return b"".join(map(_bits, value))
    return repr(value).encode()


def surroundings(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """Hooks, modes and stances: nothing of the monitor's may be left in them."""
    found: dict[str, Any] = {
        "function modes": torch._C._len_torch_function_stack(),
        "function override": torch._C._is_torch_function_enabled(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        ),
        "saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "default dtype": torch.get_default_dtype(),
        "stance": (len(eager._holders), eager._outside),
        "rerun": _rerun.depth,
        "threads": threading.active_count(),
        "all modules": [*_global_forward_pre_hooks.items(), *_global_forward_hooks.items()],
        "all optimizers": [
            *_global_optimizer_pre_hooks.items(),
            *_global_optimizer_post_hooks.items(),
        ],
    }
    for name, module in model.named_modules():
        for table in _TABLES:
            hooks = getattr(module, table)
            found[f"{name}.{table}"] = (list(hooks.items()), dict(vars(hooks)))
        found[f"{name}.training"] = module.training
        found[f"{name}.vars"] = sorted(vars(module))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found[f"{name}.hooks"] = list((tensor._backward_hooks or {}).items())
        after = getattr(tensor, "_post_accumulate_grad_hooks", None) or {}
        found[f"{name}.accumulation"] = list(after.items())
    if optimizer is not None:
        found["optimizer"] = [
            *optimizer._optimizer_step_pre_hooks.items(),
            *optimizer._optimizer_step_post_hooks.items(),
        ]
    return found
