"""Layers that are alike are looked at together; where that fails, one by one."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

Found = TypeVar("Found")
Fail = Callable[[str, Exception], None]


def raised(path: str, error: Exception) -> None:
    """Nobody wants to hear of it: raise the exception that a layer met."""
    raise error


def of_alike(
    groups: Iterable[Sequence[str]],
    together: Callable[[Sequence[str]], Mapping[str, Found]],
    fail: Fail,
) -> dict[str, Found]:
    """What is found of all layers, by path, without those that fail by themselves.

    Stacked arrays take memory that those of one layer don't, and one layer's numbers may be such
    that no others should suffer.

    Args:
        groups: paths of layers that are alike.
        together: finds it of such a group.
        fail: called with the path of a layer that fails by itself, and the exception.
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
