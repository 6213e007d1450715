"""What a tensor is made of, by the graph that autograd keeps of it."""

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import Tensor


def nodes_above(tensors: Iterable[Tensor], stop: Collection[Any] = ()) -> Iterator[Any]:
    """The nodes that gradients of the tensors go on to, but for `stop` and what lies behind it."""
    seen = set(stop)
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                waiting.append(node)
                yield node


def edges_to_leaves(
    tensors: Iterable[Tensor], stop: Collection[Any]
) -> Iterator[tuple[Any, int, Tensor]]:
    """The edges by which gradients of tensors come to leaves: node, which of its edges, leaf.

    Args:
        tensors: the tensors.
        stop: nodes whose edges do not count, nor what lies behind them.
    """
    made = [tensor for tensor in tensors if tensor.grad_fn not in stop]
    first = dict.fromkeys(tensor.grad_fn for tensor in made if tensor.grad_fn is not None)
    for node in (*first, *nodes_above(made, (*stop, *first))):
        for i, (above, _) in enumerate(node.next_functions):
            leaf = getattr(above, "variable", None)
            if leaf is not None:
                yield node, i, leaf


def leaves_of(tensors: Iterable[Tensor], inputs: Iterable[Tensor]) -> set[int]:
    """Ids of the leaves, such as parameters, that tensors are made of, besides by the inputs."""
    stop = {tensor.grad_fn for tensor in inputs if tensor.grad_fn is not None}
    leaves = (getattr(node, "variable", None) for node in nodes_above(tensors, stop))
    return {id(leaf) for leaf in leaves if leaf is not None}
