"""Jacobian-vector products: J t of tensors for a change t of the leaves of their graph."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor


def pusher(
    made: Sequence[Tensor], leaves: Sequence[Tensor], precision: float
) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """Return t ↦ J t of tensors, by two backward passes through their graph, which is kept.

    The result is float32, or float64 if the tensors are.

    v ↦ Jᵀv is linear, and the derivative of ⟨Jᵀv, t⟩ by v is J t (J. Townsend, "A new trick for
    calculating Jacobian vector products", 2017). So each function needs a differentiable backward
    pass, which more of them have than a forward-mode derivative.

    Args:
        made: the tensors, with their graph.
        leaves: the leaves of the graph; t has one tensor for each.
        precision: rounding of the coarsest dtype that the functions compute in.

    Raises:
        RuntimeError: a backward pass can't be differentiated.
    """
    v = [pattern(x).requires_grad_() for x in made]
    pulled = torch.autograd.grad(made, leaves, v, create_graph=True, materialize_grads=True)
    unchecked = [True]

    def push(tangents: Sequence[Tensor]) -> list[Tensor]:
        unit = torch.stack([t.abs().amax() for t in tangents]).amax()
        unit = torch.where(unit == 0, 1, unit)  # half precision cannot represent small changes
        used = [(g, (t / unit).to(g)) for g, t in zip(pulled, tangents, strict=True)]
        moves: Sequence[Tensor] = [torch.zeros_like(x) for x in made]
        if reached := [(g, t) for g, t in used if g.requires_grad]:
            gradients, directions = zip(*reached, strict=True)
            keeps: dict[str, bool] = {"retain_graph": True, "materialize_grads": True}
            moves = torch.autograd.grad(gradients, v, directions, **keeps)
        if unchecked:
            # What is linear in v equals its derivative times v; a custom function may not be.
            unchecked.clear()
            whole, again = _sums(used), _sums(zip(moves, v, strict=True))
            if (whole[0] - again[0]).abs() > tolerance(precision) * (whole[1] + again[1]):
                raise RuntimeError(
                    "the backward pass of a custom function or operator can't be differentiated"
                )
        return [_wide(move) * unit for move in moves]

    return push


def tolerance(precision: float) -> float:
    """Return the relative error that rounding explains; float32 products may be TensorFloat-32."""
    return 1e-9 if precision < 1e-15 else max(1e-3, 4 * precision)


def pattern(like: Tensor) -> Tensor:
    """Return a tensor of nonzero numbers with the shape, dtype and device of `like`."""
    numbers = torch.linspace(0.5, 1.5, like.numel(), dtype=like.dtype, device=like.device)
    return numbers.view(like.shape)


def _sums(pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Return Σ ⟨a, b⟩ and the sum of the absolute values of its terms."""
    terms = [_wide(a.detach()) * _wide(b.detach()) for a, b in pairs]
    return torch.stack([torch.stack((t.sum(), t.abs().sum())) for t in terms]).sum(0)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
