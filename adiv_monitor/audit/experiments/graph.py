"""The graph that autograd keeps of a loss."""

from collections.abc import Iterable
from typing import Any


def nodes_of(ends: Iterable[Any]) -> set[Any]:
    """Return these nodes of a graph, and all that their gradients pass on to."""
    seen: set[Any] = set()
    left = list(ends)
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [before for before, _ in node.next_functions]
    return seen
