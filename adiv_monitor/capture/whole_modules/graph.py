"""Searches of the graph that autograd keeps of a tensor."""

from collections.abc import Collection, Iterable, Iterator
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


def leaves_of(tensors: Iterable[Tensor], inputs: Iterable[Tensor]) -> set[int]:
    """Return ids of the leaves that tensors are computed from other than through the inputs."""
    stop = {tensor.grad_fn for tensor in inputs if tensor.grad_fn is not None}
    leaves = (getattr(node, "variable", None) for node in nodes_above(tensors, stop))
    return {id(leaf) for leaf in leaves if leaf is not None}
