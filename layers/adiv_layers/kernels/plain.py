"""The choice of kernels in a backward pass, and differentiable gradients otherwise."""

from collections.abc import Callable

import torch
from torch import Tensor

from adiv_layers.kernels.choice import kernels_for


def usable_backward(g: Tensor) -> bool:
    """Return whether kernels may process these gradients: the result will not be differentiated.

    Gradients must not be batched either: `is_grads_batched` passes batches that look like plain
    tensors.
    """
    return (
        not torch.is_grad_enabled()
        and not torch._C._functorch.is_legacy_batchedtensor(g)
        and kernels_for(g) is not None
    )


def differentiable(
    plain: Callable[..., Tensor],
    inputs: tuple[Tensor | None, ...],
    needed: tuple[bool, ...],
    g: Tensor,
) -> list[Tensor | None]:
    """Return the gradients of a plain expression, which can be differentiated again."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        output = plain(*inputs)
    wanted = [t for t, need in zip(inputs, needed, strict=True) if need and t is not None]
    gradients = iter(torch.autograd.grad(output, wanted, g.to(output.dtype), create_graph=again))
    return [next(gradients) if need else None for need in needed]
