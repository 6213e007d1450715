"""Jacobian-vector products: J t of a function's results for a change t of its parameters."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only

T = TypeVar("T")
Parameters = Mapping[str, Tensor]
"""Parameters by name; a change of them lacks the names of those that do not change."""


def jvp(
    function: Callable[[Parameters], T],
    parameters: Parameters,
    tangents: Parameters,
    precision: float,
) -> tuple[T, T]:
    """Return a function's result and J t by differentiating its backward, also a custom one.

    Args:
        function: a function of the parameters that returns tensors in any structure.
        parameters: the point at which J is taken.
        tangents: t.
        precision: rounding of the coarsest dtype that the function computes in.

    Raises:
        RuntimeError: a backward inside can't be differentiated.
    """
    with torch.enable_grad(), _unseen():
        leaves = {
            name: p.detach().requires_grad_(name in tangents) for name, p in parameters.items()
        }
        found = function(leaves)
        reached = [x for x in tree_leaves(found) if isinstance(x, Tensor) and x.requires_grad]
        precision = max([precision, *(torch.finfo(x.dtype).eps for x in reached)])
        moving = [leaves[name] for name in tangents]
        moves = pushed_forward(reached, moving, [*tangents.values()], precision)
    by_id = dict(zip(map(id, reached), moves, strict=True))
    return (
        tree_map_only(Tensor, Tensor.detach, found),
        tree_map_only(Tensor, lambda x: by_id.get(id(x), torch.zeros_like(x)), found),
    )


def pushed_forward(
    made: Sequence[Tensor],
    leaves: Sequence[Tensor],
    tangents: Sequence[Tensor],
    precision: float | None = None,
) -> list[Tensor]:
    """Return J t of tensors by two backward passes through their graph, which is kept.

    v ↦ Jᵀv is linear, and the derivative of ⟨Jᵀv, t⟩ by v is J t (J. Townsend, "A new trick for
    calculating Jacobian vector products", 2017). So each function needs a differentiable backward
    pass, which more of them have than a forward-mode derivative.

    Args:
        made: the tensors, with their graph.
        leaves: the leaves of the graph.
        tangents: t, one tensor per leaf.
        precision: see `jvp`; None: do not check that the backward passes are linear in
            v (only custom ones may not be), since the check makes the host wait for the device.

    Raises:
        RuntimeError: a backward pass can't be differentiated.
    """
    still = [torch.zeros_like(x) for x in made]
    if not made:
        return still
    v = [pattern(x).requires_grad_() for x in made]
    pulled = torch.autograd.grad(made, leaves, v, create_graph=True, allow_unused=True)
    pairs = zip(pulled, tangents, strict=True)
    used = [(g, t.to(g)) for g, t in pairs if g is not None]
    reached = [(g, t) for g, t in used if g.requires_grad]
    moves = still
    if reached:
        gradients, directions = zip(*reached, strict=True)
        found = torch.autograd.grad(gradients, v, directions, allow_unused=True)
        moves = [a if b is None else b for a, b in zip(still, found, strict=True)]
    if precision is not None and used:
        # A function that is linear in v equals its derivative times v.
        whole, again = _sums(used), _sums(zip(moves, v, strict=True))
        if (whole[0] - again[0]).abs() > tolerance(precision) * (whole[1] + again[1]):
            raise RuntimeError(
                "the backward pass of a custom function or operator can't be differentiated"
            )
    return moves


def tolerance(precision: float) -> float:
    """Return the relative error that rounding explains; float32 products may be TensorFloat-32."""
    return 1e-9 if precision < 1e-15 else max(1e-3, 4 * precision)


def pattern(like: Tensor) -> Tensor:
    """Return a tensor of nonzero numbers with the shape, dtype and device of `like`."""
    numbers = torch.linspace(0.5, 1.5, like.numel(), dtype=like.dtype, device=like.device)
    return numbers.view(like.shape)


def _sums(pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Return Σ ⟨a, b⟩ and the sum of the absolute values of its terms."""
    terms = [_at_least_single(a.detach()) * _at_least_single(b.detach()) for a, b in pairs]
    return torch.stack([torch.stack((t.sum(), t.abs().sum())) for t in terms]).sum(0)


def _at_least_single(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _unseen() -> saved_tensors_hooks:
    """Return a context that hides saved tensors from hooks of the run, such as checkpointing's."""
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
