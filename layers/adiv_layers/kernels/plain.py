"""When a backward pass may use the kernels, and what it does otherwise."""

from collections.abc import Callable

import torch
from torch import Tensor

from adiv_layers.kernels.choice import kernels_for


def usable_backward(g: Tensor) -> bool:
    """Whether these gradients may go through kernels: nobody will differentiate what comes out.

    Nor map over them: `is_grads_batched` sends batches that look like plain tensors.
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
    """The gradients of a plain expression, which can be differentiated again."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        output = plain(*inputs)
    wanted = [t for t, need in zip(inputs, needed, strict=True) if need and t is not None]
    gradients = iter(torch.autograd.grad(output, wanted, g.to(output.dtype), create_graph=again))
    return [next(gradients) if need else None for need in needed]
