"""Parameters that are partitioned across ranks: this rank's part, and the unsharded parameter.

Such a parameter is a `DTensor`, whose local tensor is this rank's part. FSDP2 replaces it by an
unsharded parameter while a module runs, so a forward pass uses another tensor than the optimizer.
With tensor parallelism it is never unsharded: such models are not measured.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_WHOLE = (Tensor, nn.Parameter)  # most tensors; checked first, since it is cheapest


def world_size() -> int:
    """Return the number of ranks in the default process group, or 1 without a group."""
    return torch.distributed.get_world_size() if _together() else 1


def is_shard(tensor: object) -> bool:
    """Return whether a tensor is partitioned, so that this rank holds only a part."""
    return type(tensor) not in _WHOLE and hasattr(tensor, "full_tensor")


def part_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, or all of it if unsharded, without its graph."""
    if is_shard(tensor):
        with torch.no_grad():  # detaching a sum first could reduce it
            tensor = tensor.to_local()  # type: ignore[attr-defined]
    return tensor.detach()


def sharded_as(part: Tensor, like: Tensor) -> Any:
    """Return a part as a sharded tensor; its `full_tensor` is a collective of all ranks.

    Args:
        part: the part that this rank holds.
        like: a sharded tensor with the same placement.
    """
    from torch.distributed.tensor import DTensor  # not in every build of torch

    return DTensor.from_local(
        part,
        like.device_mesh,  # type: ignore[attr-defined]
        like.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def gradient_part(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's part of a gradient, with the parameter's placement where possible."""
    if is_shard(gradient) and is_shard(parameter):
        placements = parameter.placements  # type: ignore[attr-defined]
        gradient = gradient.redistribute(placements=placements)  # type: ignore[attr-defined]
    return part_of(gradient)


def is_parallel(model: nn.Module) -> bool:
    """Return whether ranks compute with parts of parameters that are never unsharded.

    So it is with tensor parallelism, also inside FSDP2.
    """
    names = "_unsharded_dtensor_spec", "_tp_spec"  # the second before torch 2.14
    if any(getattr(held, name, None) is not None for _, held in _managed(model) for name in names):
        return True
    at_times = {id(held.sharded_param) for _, held in _managed(model)}
    return any(is_shard(p) and id(p) not in at_times for p in model.parameters())


def holders(tensor: Tensor) -> int:
    """Return how many ranks hold the same part of a tensor as this one."""
    if not is_shard(tensor):
        return world_size()
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    count: int = world_size() // mesh.size()
    for dimension, placement in enumerate(placements):
        count *= mesh.size(dimension) if placement.is_replicate() else 1
    return count


def range_of_part(tensor: Tensor) -> tuple[int, int] | None:
    """Return the part's contiguous range in the unsharded tensor's memory, or None."""
    whole, parts, place, last = tensor.shape[0], 1, 0, 0
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    for dimension, placement in enumerate(placements):
        if not placement.is_replicate():
            parts, place = mesh.size(dimension), mesh.get_local_rank(dimension)
            last = placement.dim
    if last:
        return None
    rows = -(-whole // parts)
    row = tensor[0].numel() if whole else 0
    return min(place * rows, whole) * row, min((place + 1) * rows, whole) * row


def _together() -> bool:
    """Return whether there is a process group; without one, nothing is partitioned."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _managed(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield torch's FSDP records of a model's sharded parameters: of the group and of each."""
    if not _together():
        return
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # the plural since torch 2.12
            for group in (state._fsdp_param_group,) if groups is None else groups:
                for held in () if group is None else group.fsdp_params:
                    yield group, held


def why_unusable(parameter: Tensor) -> str | None:
    """Return why a parameter that FSDP2 shards can't be measured, or None if it can."""
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    if sum(not placement.is_replicate() for placement in placements) > 1:
        return "is sharded in more ways than by FSDP"
    return None if mesh.size() == world_size() else "is sharded over some of the ranks only"


class Sharded:
    """The sharded parameters of a model, and the unsharded ones that replace them for a while.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._records = {id(held.sharded_param): (group, held) for group, held in _managed(model)}

    def replaced(self) -> dict[int, nn.Parameter]:
        """Return the sharded parameters by the ids of the unsharded ones that exist now.

        Some modules keep unsharded parameters until the next backward pass, for example after an
        evaluation.
        """
        every = (held for _, held in self._records.values())
        return {id(getattr(held, "_unsharded_param", None)): held.sharded_param for held in every}

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        """Return whether there is a gradient that has not reached a sharded parameter yet.

        Such a gradient stays with the unsharded parameter, or in a wider dtype beside it, until the
        ranks average it. With replicated shards, it stays within a group until the groups average
        it.
        """
        group, held = self._records.get(id(parameter), (None, None))
        return (
            getattr(getattr(held, "_unsharded_param", None), "grad", None) is not None
            or getattr(held, "unsharded_accumulated_grad", None) is not None
            or getattr(group, "_partial_reduce_output", None) is not None
        )
