"""Searches of the graph that autograd keeps of a tensor."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor


def nodes_above(tensors: Iterable[Tensor], stop: Collection[Any] = ()) -> Iterator[Any]:
    """Yield the nodes that the tensors' gradients pass on to, but neither `stop` nor beyond it."""
    seen = set(stop)
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                waiting.append(node)
                yield node


# Nodes that move, reshape or cast a tensor.
_MOVES = {
    *("TBackward0", "TransposeBackward0", "PermuteBackward0", "AliasBackward0", "ToCopyBackward0"),
    *("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"),
    *("SqueezeBackward0", "SqueezeBackward1", "UnsqueezeBackward0"),
}


# The node that passes a gradient on to a leaf, the index of its edge, the leaf, and the nodes on
# the way that reorder or reshape the gradient without computing.
Edge = tuple[Any, int, Tensor, Sequence[Any]]


def edges_to_leaves(tensors: Iterable[Tensor], stop: Collection[Any]) -> Iterator[Edge]:
    """Yield the edges by which the tensors' gradients reach leaves.

    The node of an edge is the one that computes with the leaf. A node that only moves the leaf may
    be shared with other calls, and with the gradient of this call's gradient.

    Args:
        tensors: the tensors.
        stop: nodes whose edges are ignored, with all nodes behind them.
    """
    seen = set(stop)
    waiting = [tensor.grad_fn for tensor in tensors]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for number, (above, _) in enumerate(node.next_functions):
            moves = []
            while above is not None and above not in seen and type(above).__name__ in _MOVES:
                if type(above).__name__ != "ToCopyBackward0":  # the precision does not matter
                    moves.append(above)
                above = above.next_functions[0][0]
            leaf = getattr(above, "variable", None)
            if leaf is not None:
                yield node, number, leaf, moves
            else:
                waiting.append(above)


def leaves_of(tensors: Iterable[Tensor], inputs: Iterable[Tensor]) -> set[int]:
    """Return ids of the leaves that tensors are computed from other than through the inputs."""
    stop = {tensor.grad_fn for tensor in inputs if tensor.grad_fn is not None}
    leaves = (getattr(node, "variable", None) for node in nodes_above(tensors, stop))
    return {id(leaf) for leaf in leaves if leaf is not None}
