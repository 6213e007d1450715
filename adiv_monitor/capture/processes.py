"""How many processes train together."""

import torch


def processes() -> int:
    """Those of the default process group; 1 without one."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if distributed else 1
