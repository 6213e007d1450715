"""What is called with a layer that fails."""

from collections.abc import Callable

Fail = Callable[[str, Exception], None]


def raised(path: str, error: Exception) -> None:
    """Raise the exception: the failure callback for callers that do not collect failures."""
    raise error
