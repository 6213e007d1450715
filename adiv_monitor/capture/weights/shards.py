"""Parameters that are partitioned across ranks: this rank's part, and the unsharded parameter.

Such a parameter is a `DTensor`, whose local tensor is this rank's part. FSDP2 replaces it by an
unsharded parameter while a module runs, so a forward pass uses another tensor than the optimizer.
With tensor parallelism it is never unsharded: each rank computes with its part (`Peers`).
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from adiv_monitor.capture.world import world_size

_WHOLE = (Tensor, nn.Parameter)  # most tensors; checked first, since it is cheapest


def is_shard(tensor: object) -> bool:
    """Return whether a tensor is partitioned, so that this rank holds only a part."""
    return type(tensor) not in _WHOLE and hasattr(tensor, "full_tensor")


def part_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, or all of it if unsharded, without its graph."""
    if type(tensor) not in _WHOLE and is_shard(tensor):
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


def same_on(whole: Tensor, mesh: Any) -> Any:
    """Return a tensor that all ranks of a mesh have as a replicated `DTensor` on it."""
    from torch.distributed.tensor import DTensor, Replicate  # not in every build of torch

    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)


def is_sum(tensor: object) -> bool:
    """Return whether the ranks hold partial sums of the tensor that are not reduced yet."""
    if type(tensor) in _WHOLE:
        return False
    return is_shard(tensor) and any(p.is_partial() for p in tensor.placements)  # type: ignore[attr-defined]


def lies_apart(gradient: object, parameter: object) -> bool:
    """Return whether a gradient is partitioned differently from its parameter.

    The rank then holds a partial sum or another part. A replicated gradient does not count, as a
    backward pass may leave one for a sharded parameter.
    """
    if type(gradient) in _WHOLE or not (is_shard(gradient) and is_shard(parameter)):
        return False
    lies, wanted = gradient.placements, parameter.placements  # type: ignore[attr-defined]
    return any(g != p and not g.is_replicate() for g, p in zip(lies, wanted, strict=True))


def gradient_part(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's part of a gradient, with the parameter's placement where possible."""
    if type(gradient) in _WHOLE:
        return gradient.detach()
    if is_shard(gradient) and is_shard(parameter) and not lies_apart(gradient, parameter):
        placements = parameter.placements  # type: ignore[attr-defined]
        gradient = gradient.redistribute(placements=placements)  # type: ignore[attr-defined]
    return part_of(gradient)


@dataclass(frozen=True)
class Peers:
    """The ranks that get the same data because each computes with parts of the parameters.

    Attributes:
        mesh: the one-dimensional `DeviceMesh` of these ranks.
        placements: id of a parameter that is partitioned across them → its placements.
    """

    mesh: Any
    placements: Mapping[int, Any]

    @property
    def count(self) -> int:
        """The number of these ranks."""
        return int(self.mesh.size())

    @property
    def place(self) -> int:
        """The position of this rank among them."""
        return int(self.mesh.get_local_rank())

    @property
    def first(self) -> int:
        """The global rank of the first of them."""
        return int(self.mesh.mesh.flatten()[0])

    def share(self, rows: int, before: int = 0) -> slice:
        """Return this rank's rows: rows are partitioned across the ranks one by one in turn.

        Args:
            rows: the number of rows.
            before: the number of rows that were partitioned before.
        """
        return slice((self.place - before) % self.count, rows, self.count)

    def hold(self, tensor: object) -> bool:
        """Return whether a tensor is placed on these ranks."""
        return is_shard(tensor) and tensor.device_mesh == self.mesh  # type: ignore[attr-defined]

    def part(self, whole: Tensor, parameter: Tensor) -> Tensor:
        """Return this rank's part of a tensor that is placed like a parameter."""
        placements = self.placements.get(id(parameter))
        if placements is None:
            return whole
        spread = same_on(whole, self.mesh).redistribute(placements=placements)
        return part_of(spread)


def peers(model: nn.Module) -> Peers | None:
    """Return the ranks across which never unsharded parameters are partitioned, or None.

    If parameters have different groups of ranks, the group of the first parameter counts.
    """
    if not _together():
        return None
    spread: dict[int, tuple[Any, Any]] = {}
    for _, held in _managed(model):  # FSDP partitions them across other ranks too
        known = "_unsharded_dtensor_spec", "_tp_spec"  # the second before torch 2.14
        spec = next((s for name in known if (s := getattr(held, name, None)) is not None), None)
        if spec is not None:
            spread[id(held.sharded_param)] = spec.mesh, spec.placements
    at_times = managed(model)
    for parameter in model.parameters():
        if is_shard(parameter) and id(parameter) not in at_times:
            p: Any = parameter
            spread[id(parameter)] = p.device_mesh, p.placements
    for mesh, _ in spread.values():
        if mesh.ndim == 1:
            return Peers(mesh, {key: lies for key, (on, lies) in spread.items() if on == mesh})
    return None


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


def gives_back(module: nn.Module) -> bool:
    """Return whether a module reshards its parameters in a forward hook (FSDP2)."""
    if not _together():
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def held_in_place_of(model: nn.Module) -> dict[int, nn.Parameter]:
    """Return the sharded parameters by the ids of the unsharded ones that exist now.

    Some modules keep unsharded parameters until the next backward pass, for example after an
    evaluation.
    """
    return {id(getattr(x, "_unsharded_param", None)): x.sharded_param for _, x in _managed(model)}


def waiting(model: nn.Module, parameter: nn.Parameter) -> Callable[[], bool]:
    """Return a function that tells whether a gradient has not reached a sharded parameter yet.

    Such a gradient stays with the unsharded parameter, or in a wider dtype beside it, until the
    ranks average it. With replicated shards, it stays within a group until the groups average it.
    """
    for group, held in _managed(model):
        if held.sharded_param is parameter:
            return lambda: (
                getattr(held, "unsharded_accumulated_grad", None) is not None
                or getattr(group, "_partial_reduce_output", None) is not None
            )
    return lambda: False


def _managed(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield torch's FSDP records of a model's sharded parameters: of the group and of each."""
    for module in _giving_back(model):
        state: Any = module._get_fsdp_state()  # type: ignore[operator]
        groups = getattr(state, "_fsdp_param_groups", None)  # the plural since torch 2.12
        for group in (state._fsdp_param_group,) if groups is None else groups:
            for held in () if group is None else group.fsdp_params:
                yield group, held


def _giving_back(model: nn.Module) -> list[nn.Module]:
    """Return the modules that unshard parameters temporarily; none without a process group."""
    if not _together():
        return []
    return [module for module in model.modules() if gives_back(module)]


def managed(model: nn.Module) -> set[int]:
    """Return ids of the sharded parameters that a model's modules unshard when they run."""
    shards = {id(p) for module in _giving_back(model) for p in module.parameters() if is_shard(p)}
    return shards | {id(p) for p in held_in_place_of(model).values()}


def why_unusable(parameter: Tensor, managed: Collection[int], peers: Peers | None) -> str | None:
    """Return why a sharded parameter can't be measured, or None if it can.

    Args:
        parameter: the parameter.
        managed: ids of the parameters that modules unshard when they run.
        peers: see `peers`.
    """
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    split = [placement for placement in placements if not placement.is_replicate()]
    is_parallel = peers is not None and id(parameter) in peers.placements
    if id(parameter) in managed:
        alike = 1 if peers is None or is_parallel else peers.count  # groups that compute the same
        if len(split) > 1 + is_parallel:
            return "is sharded in more ways than by FSDP and one other kind"
        if alike * mesh.size() != world_size():
            return "is sharded over some of the ranks only"
    elif not is_parallel:
        return (
            "is a DTensor that is never all-gathered, or is sharded over other ranks than the "
            "model's first DTensor, or over a mesh of several dimensions"
        )
    return None


class Standing:
    """Finds the unsharded parameters that replace sharded ones while modules run.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        held, whole_at_times = held_in_place_of(model), managed(model)
        self._places = [
            (module, name, parameter)
            for module in (model.modules() if whole_at_times else ())
            for name, now in module._parameters.items()
            if now is not None and id(parameter := held.get(id(now), now)) in whole_at_times
        ]

    def of(self, tensor: object) -> nn.Parameter | None:
        """Return the sharded parameter that an unsharded one replaces, or None."""
        if not self._places or not isinstance(tensor, nn.Parameter):
            return None
        for module, name, parameter in self._places:
            if module._parameters.get(name) is tensor:
                return None if tensor is parameter else parameter
        return None
