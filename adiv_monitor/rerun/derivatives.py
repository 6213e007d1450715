"""Jacobian-vector products: J t of a function's results for a change t of its parameters."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only

T = TypeVar("T")
Parameters = Mapping[str, Tensor]
"""Parameters by name; a change of them lacks the names of those that do not change."""


def jvp(
    function: Callable[[Parameters], T], parameters: Parameters, tangents: Parameters
) -> tuple[T, T]:
    """Return a function's result and J t by forward-mode derivatives.

    They are taken with gradients enabled: without, a custom operator (`torch.library`) loses its
    tangent, and no error is raised.

    Args:
        function: a function of the parameters that returns tensors in any structure.
        parameters: the point at which J is taken.
        tangents: t.

    Raises:
        RuntimeError: the function calls something without a forward-mode derivative.
    """
    _load_derivatives()
    with torch.enable_grad(), _unseen(), forward_ad.dual_level():
        found = function({name: _dual(p, tangents.get(name)) for name, p in parameters.items()})
        return tree_map_only(Tensor, _value, found), tree_map_only(Tensor, _move, found)


def jvp_by_gradients(
    function: Callable[[Parameters], T],
    parameters: Parameters,
    tangents: Parameters,
    precision: float,
) -> tuple[T, T]:
    """Return a function's result and J t by differentiating its backward, also a custom one.

    Args:
        function: see `jvp`.
        parameters: see `jvp`.
        tangents: see `jvp`.
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
        precision: see `jvp_by_gradients`; None: do not check that the backward passes are linear in
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


def _dual(value: Tensor, tangent: Tensor | None) -> Tensor:
    value = value.detach()
    if tangent is None:
        return value
    value.requires_grad_()
    dual: Tensor = forward_ad.make_dual(value, tangent.to(value))  # type: ignore[no-untyped-call]
    return dual


def _value(dual: Tensor) -> Tensor:
    value: Tensor = forward_ad.unpack_dual(dual).primal  # type: ignore[no-untyped-call]
    return value.detach()


def _move(dual: Tensor) -> Tensor:
    value, tangent = forward_ad.unpack_dual(dual)  # type: ignore[no-untyped-call]
    return torch.zeros_like(value) if tangent is None else tangent.detach()


@cache
def _load_derivatives() -> None:
    """Make torch load its forward-mode derivatives, which it does at first use, with a warning."""
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.simplefilter("ignore")
        forward_ad.make_dual(torch.zeros(1), torch.zeros(1))  # type: ignore[no-untyped-call]
