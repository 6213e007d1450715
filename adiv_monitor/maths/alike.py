"""Batched processing of layers of the same kind, with a fallback to one layer at a time."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

Found = TypeVar("Found")
Fail = Callable[[str, Exception], None]


def raised(path: str, error: Exception) -> None:
    """Raise the exception: the failure callback for callers that do not collect failures."""
    raise error


def of_alike(
    groups: Iterable[Sequence[str]],
    together: Callable[[Sequence[str]], Mapping[str, Found]],
    fail: Fail,
) -> dict[str, Found]:
    """Return the results of all layers by path, without the layers that fail on their own.

    A group that fails is repeated layer by layer: stacked arrays may not fit into memory, and one
    layer's numbers must not cost the others their results.

    Args:
        groups: paths of layers of the same kind, one sequence per group.
        together: computes the results of one group, by path.
        fail: called with the path of a layer that fails on its own, and the exception.
    """
    found: dict[str, Found] = {}
    for paths in groups:
        try:
            found |= together(paths)
        except Exception as error:
            if len(paths) == 1:
                fail(paths[0], error)
            else:
                found |= of_alike([[path] for path in paths], together, fail)
    return found
