"""Hooks that stay behind when what they are on is copied."""

from collections.abc import Callable
from typing import Any


class Hook:
    """A hook that stays behind when the model is copied or pickled."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what it was made of."""
        return self.function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Hook":
        return Hook(_nothing)

    def __reduce__(self) -> tuple[type["Hook"], tuple[Callable[..., None]]]:
        return Hook, (_nothing,)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What is left of a hook in a copy of the model."""
