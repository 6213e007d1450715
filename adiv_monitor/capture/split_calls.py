"""Calls of functions that several ranks make together, each with a part of the arguments.

With tensor parallelism a function gets `DTensor`s. A rank has all of its input, some columns or
some rows; it has all of its result, some columns, some rows, or a partial sum. The rules are
applied to this rank's part of the call. `Split` records how the parts form the whole, so that
chosen rows can be merged when all ranks participate.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from adiv_monitor.capture.weights.shards import Peers, is_shard, part_of
from adiv_monitor.features.features import Features, OneHotFeatures
from adiv_monitor.features.functions.tokens import REPEATING
from adiv_monitor.features.uses import FunctionCall, Refused, Use, uses_in

COLUMNS, PARTIAL_SUM, SAME = "columns", "sum", "same"  # a rank's share of rows


@dataclass(frozen=True)
class Split:
    """How the rows of one call are partitioned across the ranks that make it together.

    Attributes:
        peers: the ranks.
        own: whether each rank has complete rows of its own; the rest has no meaning then.
        features: each rank's share of the rows' features: `COLUMNS` or `SAME`.
        output: each rank's share of z: `COLUMNS`, `PARTIAL_SUM` or `SAME`.
        widths: the total numbers of columns of features and z.
        tokens: the range of the rank's part of a table, if rows outside of it count as zeros in its
            partial sum of z.
        gradient: each rank's share of ∂L/∂z; None: no gradient has arrived.
    """

    peers: Peers
    own: bool = False
    features: str = SAME
    output: str = SAME
    widths: tuple[int, int] = (0, 0)
    tokens: tuple[int, int] | None = None
    gradient: str | None = None

    def arrived(self, gradient: Any) -> "Split":
        """Return the split with the placement of the gradient that arrived as ∂L/∂z.

        Raises:
            ValueError: its rows are placed unlike those of z or of an earlier gradient.
        """
        placement = gradient.placements[0]
        rows = placement.is_shard() and placement.dim < gradient.dim() - 1
        lies = _lie(gradient)
        if rows is not self.own or self.gradient not in (None, lies):
            raise ValueError(
                f"∂L/∂z is placed on the ranks as {placement}, unlike its rows or those of "
                "earlier calls"
            )
        return replace(self, gradient=lies)

    def term(self, z: Tensor, features: Features) -> Tensor:
        """Return this rank's partial sum of z for some rows, or z itself if it is no sum."""
        if self.tokens is None:
            return z
        assert isinstance(features, OneHotFeatures)
        first, last = self.tokens
        mine = (features.token >= first) & (features.token < last)
        return torch.where(mine[:, None], z, 0)


def uses_of_parts(
    name: str, call: FunctionCall, args: tuple[Any, ...], kwargs: Mapping[str, Any], peers: Peers
) -> tuple[Sequence[Use], Split]:
    """Return the uses in this rank's part of a call, and how the parts form the whole.

    Args:
        name: the name of the function.
        call: the call with its result, partitioned across the ranks.
        args: its arguments, partitioned likewise.
        kwargs: see args.
        peers: the ranks.

    Raises:
        Refused: the parts can't be merged.
    """
    if name in REPEATING:  # later calls determine the role of a repetition
        raise Refused(NO_RULE)
    data: list[Any] = []

    def local(tensor: Any) -> Any:
        if not is_shard(tensor) or call.of_model(tensor):
            return tensor  # rules read only the shape of a weight
        data.append(tensor)
        return part_of(tensor)

    args, kwargs = tree_map_only(Tensor, local, (args, dict(kwargs)))
    result: Any = call.result
    found = uses_in(name, replace(call, result=part_of(result)), args, dict(kwargs))
    if not found:
        return (), Split(peers)
    if len(found) > 1 or not all(map(peers.hold, [*data, result])):
        raise Refused(_CANT)
    return found, _split(found[0], data, result, peers)


def _split(use: Use, data: Sequence[Any], result: Any, peers: Peers) -> Split:
    of_rows = {_row_dimension(tensor) for tensor in (*data, result)}
    if of_rows != {None}:
        if len(of_rows) > 1:
            raise Refused(_CANT)
        return Split(peers, own=True)
    lies = {_lie(tensor) for tensor in data}
    output = _lie(result)
    if use.kind == "linear" and len(data) == 1 and PARTIAL_SUM not in lies:
        widths = data[0].shape[-1], result.shape[-1]
        return Split(peers, False, _lie(data[0]), output, widths)
    if lies <= {SAME} and use.kind == "embedding":
        assert use.weight is not None
        tokens = _own_rows(use.weight) if output == PARTIAL_SUM else None
        return Split(peers, False, SAME, output, (0, result.shape[-1]), tokens)
    if lies <= {SAME} and output == SAME:
        return Split(peers)
    raise Refused(_CANT)


NO_RULE = (
    "no rule describes the function that uses it, which several ranks compute together (tensor "
    "parallelism)"
)
_CANT = (
    "its inputs or outputs are placed on the ranks (tensor parallelism) in a way in which rows "
    "can't be merged"
)


def _row_dimension(tensor: Any) -> int | None:
    """Return the partitioned dimension if it splits the rows, else None."""
    placement = tensor.placements[0]
    is_last = placement.is_shard() and placement.dim == tensor.dim() - 1 and tensor.dim() > 1
    return placement.dim if placement.is_shard() and not is_last else None


def _lie(tensor: Any) -> str:
    placement = tensor.placements[0]
    if placement.is_partial():
        return PARTIAL_SUM
    return COLUMNS if placement.is_shard() else SAME


def _own_rows(table: Any) -> tuple[int, int]:
    """Return the range of a table's rows that this rank has."""
    placement = table.placements[0]
    if not placement.is_shard() or placement.dim:
        return 0, len(table)
    place, parts = table.device_mesh.get_local_rank(), table.device_mesh.size()
    rows = -(-len(table) // parts)
    return min(place * rows, len(table)), min((place + 1) * rows, len(table))
