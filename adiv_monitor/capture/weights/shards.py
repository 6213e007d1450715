"""Parameters of which each rank holds a part: what that part is, and the whole.

Such a parameter is a `DTensor`, whose local tensor is the part. With FSDP2 whole ones stand in for
them while a module runs, so what a forward pass uses is not what the optimizer steps. With tensor
parallelism they are never whole: each rank computes with its part (`Peers`).
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from adiv_monitor.capture.world import world_size

_WHOLE = (Tensor, nn.Parameter)  # which most are: asked first, as it costs least


def is_shard(tensor: object) -> bool:
    """Whether this rank holds but a part of it."""
    return type(tensor) not in _WHOLE and hasattr(tensor, "full_tensor")


def part_of(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, without its graph: all, or its part."""
    if type(tensor) not in _WHOLE and is_shard(tensor):
        with torch.no_grad():  # where a sum is detached first, its terms may be added up
            tensor = tensor.to_local()  # type: ignore[attr-defined]
    return tensor.detach()


def sharded_as(part: Tensor, like: Tensor) -> Any:
    """A part as one of those of a whole, which its `full_tensor` makes: a collective of all.

    Args:
        part: what this rank holds.
        like: a sharded tensor that lies on the ranks as this one does.
    """
    from torch.distributed.tensor import DTensor  # not in every build of torch

    return DTensor.from_local(
        *(part, like.device_mesh, like.placements),  # type: ignore[attr-defined]
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def same_on(whole: Tensor, mesh: Any) -> Any:
    """A tensor that all ranks of a mesh have, as one that lies on them."""
    from torch.distributed.tensor import DTensor, Replicate  # not in every build of torch

    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)


def is_sum(tensor: object) -> bool:
    """Whether it is what the ranks' tensors add up to, and nobody has added them up yet."""
    if type(tensor) in _WHOLE:
        return False
    return is_shard(tensor) and any(p.is_partial() for p in tensor.placements)  # type: ignore[attr-defined]


def lies_apart(gradient: object, parameter: object) -> bool:
    """Whether this rank has less of a gradient than of its parameter: a term of it, or a part.

    Of a part of a parameter a backward pass may leave the gradient of all, too.
    """
    if type(gradient) in _WHOLE or not (is_shard(gradient) and is_shard(parameter)):
        return False
    lies, wanted = gradient.placements, parameter.placements  # type: ignore[attr-defined]
    return any(g != p and not g.is_replicate() for g, p in zip(lies, wanted, strict=True))


def gradient_part(gradient: Tensor, parameter: Tensor) -> Tensor:
    """What this rank holds of a gradient: as it does of the parameter, if it has that much."""
    if type(gradient) in _WHOLE:
        return gradient.detach()
    if is_shard(gradient) and is_shard(parameter) and not lies_apart(gradient, parameter):
        placements = parameter.placements  # type: ignore[attr-defined]
        gradient = gradient.redistribute(placements=placements)  # type: ignore[attr-defined]
    return part_of(gradient)


@dataclass(frozen=True)
class Peers:
    """The ranks that are given the same data, since each computes with parts of parameters.

    Attributes:
        mesh: they, in one dimension: a `DeviceMesh`.
        placements: by id of a parameter that is spread over them, how it lies on them.
    """

    mesh: Any
    placements: Mapping[int, Any]

    @property
    def count(self) -> int:
        """How many they are."""
        return int(self.mesh.size())

    @property
    def place(self) -> int:
        """Which of them this rank is."""
        return int(self.mesh.get_local_rank())

    @property
    def first(self) -> int:
        """The rank of the first one, among all ranks."""
        return int(self.mesh.mesh.flatten()[0])

    def share(self, rows: int, dealt: int = 0) -> slice:
        """Which of so many rows this rank looks at: they are dealt out one by one.

        Args:
            rows: how many.
            dealt: how many others were dealt out before.
        """
        return slice((self.place - dealt) % self.count, rows, self.count)

    def hold(self, tensor: object) -> bool:
        """Whether it lies on these ranks."""
        return is_shard(tensor) and tensor.device_mesh == self.mesh  # type: ignore[attr-defined]

    def part(self, whole: Tensor, parameter: Tensor) -> Tensor:
        """What this rank computes with of a tensor that lies as a parameter does."""
        placements = self.placements.get(id(parameter))
        if placements is None:
            return whole
        spread = same_on(whole, self.mesh).redistribute(placements=placements)
        return part_of(spread)


def peers(model: nn.Module) -> Peers | None:
    """The ranks among which parameters are spread that are never whole; None: there are none.

    Where groups of them differ from parameter to parameter, those of the first.
    """
    if not _together():
        return None
    spread: dict[int, tuple[Any, Any]] = {}
    for _, held in _managed(model):  # over others too, which make them less spread at times
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
        if mesh.ndim == 1 and mesh.size() > 1:
            return Peers(mesh, {key: lies for key, (on, lies) in spread.items() if on == mesh})
    return None


def holders(tensor: Tensor) -> int:
    """How many ranks hold the same as this one does of a tensor."""
    if not is_shard(tensor):
        return world_size()
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    count: int = world_size() // mesh.size()
    for dimension, placement in enumerate(placements):
        count *= mesh.size(dimension) if placement.is_replicate() else 1
    return count


def range_of_part(tensor: Tensor) -> tuple[int, int] | None:
    """The contiguous range of the part in the memory of the whole; None if it is not in one."""
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
    """Whether ranks train together; one alone has no part of anything."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def gives_back(module: nn.Module) -> bool:
    """Whether a module has whole parameters only until its forward hooks run."""
    if not _together():
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def held_in_place_of(model: nn.Module) -> dict[int, nn.Parameter]:
    """By id of a whole parameter, the sharded one that it stands in for, of any that there are yet.

    Some modules hold them until the next backward pass, as an evaluation has left them.
    """
    return {id(getattr(x, "_unsharded_param", None)): x.sharded_param for _, x in _managed(model)}


def waiting(model: nn.Module, parameter: nn.Parameter) -> Callable[[], bool]:
    """Tells whether earlier passes left a gradient that has not come to a sharded parameter yet.

    It stays with the whole one, or in a wider type beside it, until ranks average it; or, where
    groups of ranks hold the same, within a group until these do.
    """
    for group, held in _managed(model):
        if held.sharded_param is parameter:
            return lambda: (
                getattr(held, "unsharded_accumulated_grad", None) is not None
                or getattr(group, "_partial_reduce_output", None) is not None
            )
    return lambda: False


def _managed(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """What torch knows of the sharded parameters of a model: of their group, and of each."""
    for module in _giving_back(model):
        state: Any = module._get_fsdp_state()  # type: ignore[operator]
        groups = getattr(state, "_fsdp_param_groups", None)  # the plural since torch 2.12
        for group in (state._fsdp_param_group,) if groups is None else groups:
            for held in () if group is None else group.fsdp_params:
                yield group, held


def _giving_back(model: nn.Module) -> list[nn.Module]:
    """The modules that have whole parameters at times; of one rank alone none."""
    if not _together():
        return []
    return [module for module in model.modules() if gives_back(module)]


def managed(model: nn.Module) -> set[int]:
    """Ids of the sharded parameters that modules of a model make whole when they run."""
    shards = {id(p) for module in _giving_back(model) for p in module.parameters() if is_shard(p)}
    return shards | {id(p) for p in held_in_place_of(model).values()}


def why_unusable(parameter: Tensor, managed: Collection[int], peers: Peers | None) -> str | None:
    """Why a sharded parameter can't be measured; None if it can.

    Args:
        parameter: the parameter.
        managed: ids of those that modules make whole when they run.
        peers: see `peers`.
    """
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    split = [placement for placement in placements if not placement.is_replicate()]
    is_parallel = peers is not None and id(parameter) in peers.placements
    if id(parameter) in managed:
        alike = 1 if peers is None or is_parallel else peers.count  # groups that do the same
        if len(split) > 1 + is_parallel or alike * mesh.size() != world_size():
            return "is spread over the ranks in more ways than FSDP and one of another kind"
    elif not is_parallel:
        return (
            "is a DTensor that is never made whole, spread over other ranks than the model's "
            "first one, or over a mesh of several dimensions"
        )
    return None


class Standing:
    """Finds the whole parameters that stand in for sharded ones while modules run.

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
        """The sharded parameter that a whole one stands in for; None if it is none."""
        if not self._places or not isinstance(tensor, nn.Parameter):
            return None
        for module, name, parameter in self._places:
            if module._parameters.get(name) is tensor:
                return None if tensor is parameter else parameter
        return None
