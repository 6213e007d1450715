"""The number of ranks that train together."""

from torch import distributed


def world_size() -> int:
    """Return the number of ranks in the default process group, or 1 without a group."""
    together = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if together else 1
