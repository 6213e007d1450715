"""What a tensor is made of, by the graph that autograd keeps of it."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
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


# These give what a tensor is, moved or in another shape or precision.
_MOVES = {
    *("TBackward0", "TransposeBackward0", "PermuteBackward0", "AliasBackward0", "ToCopyBackward0"),
    *("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"),
    *("SqueezeBackward0", "SqueezeBackward1", "UnsqueezeBackward0"),
}


@dataclass(frozen=True, eq=False)
class Edge:
    """One by which a tensor's gradient comes to a leaf.

    Attributes:
        node: that hands it on.
        number: which of its edges.
        leaf: to which it comes.
        moves: nodes on the way that change its place or shape, not its numbers.
    """

    node: Any
    number: int
    leaf: Tensor
    moves: Sequence[Any]


def edges_to_leaves(tensors: Iterable[Tensor], stop: Collection[Any]) -> Iterator[Edge]:
    """The edges by which gradients of tensors come to leaves.

    The node is the one that computes with the leaf: another that merely moves it may be shared,
    with calls of other functions, and with the gradient of this one's gradient.

    Args:
        tensors: the tensors.
        stop: nodes whose edges do not count, nor what lies behind them.
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
                if type(above).__name__ != "ToCopyBackward0":  # the precision is no matter
                    moves.append(above)
                above = above.next_functions[0][0]
            leaf = getattr(above, "variable", None)
            if leaf is not None:
                yield Edge(node, number, leaf, moves)
            else:
                waiting.append(above)


def leaves_of(tensors: Iterable[Tensor], inputs: Iterable[Tensor]) -> set[int]:
    """Ids of the leaves, such as parameters, that tensors are made of, besides by the inputs."""
    stop = {tensor.grad_fn for tensor in inputs if tensor.grad_fn is not None}
    leaves = (getattr(node, "variable", None) for node in nodes_above(tensors, stop))
    return {id(leaf) for leaf in leaves if leaf is not None}
