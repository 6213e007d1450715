"""Several processes: weights of which each holds a part, and sums over all of their probes."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Kept:
    """A copy of a weight on the host; of a sharded one, of the part that this process holds.

    Attributes:
        values: the copy.
        like: what tells how the parts make up the whole; None where there are no parts.
    """

    values: Tensor
    like: Any = None

    @classmethod
    def of(cls, module: nn.Module, name: str, whole: Tensor) -> "Kept":
        """Copy a weight of a module, of which `whole` is the present value."""
        parameter = module._parameters.get(name)
        if is_sharded(parameter):
            local = parameter.to_local()  # type: ignore[union-attr]
            return cls(local.detach().to("cpu", copy=True), parameter)
        return cls(whole.detach().to("cpu", copy=True))

    def whole(self, device: torch.device) -> Tensor:
        """All of it, on a device; a sharded one takes all processes to call this."""
        values = self.values.to(device, non_blocking=True)
        if self.like is None:
            return values
        from torch.distributed.tensor import DTensor

        like = self.like
        sharded = DTensor.from_local(
            *(values, like.device_mesh, like.placements),
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )
        return sharded.full_tensor()


def is_sharded(tensor: object) -> bool:
    """Whether this process holds but a part of it."""
    return hasattr(tensor, "full_tensor")


def present(module: nn.Module, name: str, whole: Tensor) -> Tensor:
    """The present value of a weight; of a sharded one, what `whole` was is gone by now."""
    parameter = module._parameters.get(name)
    if is_sharded(parameter):
        gathered: Tensor = parameter.detach().full_tensor()  # type: ignore[union-attr]
        return gathered
    return whole.detach()


def summed(sums: Tensor, group: Any) -> Tensor:
    """The sums over the processes of a group; as they are without one."""
    if group is not None:
        dist.all_reduce(sums, group=group)
    return sums
