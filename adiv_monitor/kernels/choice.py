"""The choice between a Triton kernel and plain PyTorch, for all kernels. See `attempt`."""

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from adiv_layers.kernels import choice as of_layers
from adiv_layers.kernels.launch import KernelError
from torch import Tensor

_DTYPES = {torch.float16, torch.bfloat16, torch.float32}


def counts_launches(*tensors: Tensor | None) -> bool:
    """Return whether kernels run on these tensors, on a device where launches cost most.

    Kernels never run in float64, which is used where full precision matters.
    """
    first = tensors[0]
    if first is None or first.device.type not in of_layers.DEVICES:
        return False
    given = [tensor for tensor in tensors if tensor is not None]
    return all(t.dtype in _DTYPES for t in given) and of_layers.kernels_for(*given) is not None


def attempt(name: str, *tensors: Tensor | None, **settings: Any) -> Any:
    """Return the result of the named launcher, or None if plain PyTorch must compute it.

    The result is None on a CPU, in float64, without Triton, for tensors that hide their data, and
    where the kernel does not start or does not support the arguments.
    """
    if not counts_launches(*tensors):
        return None
    with suppress(KernelError):
        return _launchers()[name](*tensors, **settings)
    return None


@cache
def _launchers() -> dict[str, Callable[..., Any]]:
    """Return the launchers by name, imported on first use because they need Triton."""
    from adiv_monitor.kernels import looks, moments, products, steps, totals

    of_each = (
        *(looks.look, moments.normalised_rows, products.row_products, steps.step_products),
        totals.totals,
    )
    return {launcher.__name__: launcher for launcher in of_each}
