"""The float32 copies of 16-bit weights that an optimizer steps, where its state holds them."""

import torch
from torch import Tensor
from torch.optim import Optimizer

from adiv_monitor.capture.weights.shards import is_shard


class Masters:
    """Finds the copies in an optimizer's state, once it has one.

    They are all float32, and rounded they are the weights.
    """

    def __init__(self) -> None:
        self._name: str | None = None  # "": there are none; None: no state yet

    def of(self, optimizer: Optimizer | None) -> dict[int, Tensor]:
        """Return the copies, by id of the weight; those of shards are left out."""
        if optimizer is None:
            return {}
        states = (each for each in optimizer.state.items() if isinstance(each[0], Tensor))
        coarse = {p: of for p, of in states if p.dtype.itemsize == 2}
        if self._name is None:
            self._name = _name_of(coarse) if any(optimizer.state.values()) else None
        name = self._name or ""
        return {id(p): of[name] for p, of in coarse.items() if name in of and not is_shard(p)}


def _name_of(states: dict[Tensor, dict[str, Tensor]]) -> str:
    """Return the name of the copies in the state of each weight; "": there are none."""
    for name in sorted({name for of in states.values() for name in of}):
        pairs = [(p, of.get(name)) for p, of in states.items()]
        is_fine = all(isinstance(x, Tensor) and x.dtype == torch.float32 for _, x in pairs)
        # Values are compared last, since a device waits for that.
        if is_fine and all(torch.equal(x.to(p.dtype), p) for p, x in pairs if x is not None):
            return name if any(p.any() for p in states) else ""
    return ""
