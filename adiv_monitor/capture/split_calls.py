"""Calls of functions that several ranks make together, each with a part of what they get.

With tensor parallelism a function gets `DTensor`s: of its input a rank has all, some columns or
some rows; of its result all, some columns, some rows, or a term of a sum. What rules say of such a
call they say of this rank's part of it; how the parts make the whole is kept beside (`Split`),
so that chosen rows can be put together when all ranks come to it.
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

COLUMNS, PARTIAL_SUM, SAME = "columns", "sum", "same"  # of rows, what a rank has


@dataclass(frozen=True)
class Split:
    """How the rows of one call lie on the ranks that make it together.

    Attributes:
        peers: the ranks.
        own: each has rows of its own, and all of those; the rest says nothing then.
        features: what each has of the rows' features: `COLUMNS` or `SAME`.
        output: of z: `COLUMNS`, `PARTIAL_SUM` or `SAME`.
        widths: how many columns features and z have in all.
        tokens: from where to where the rank's part of a table goes, where rows beyond it are
            to count as zeros in its term of z.
        gradient: what each has of ∂L/∂z; None: none came yet.
    """

    peers: Peers
    own: bool = False
    features: str = SAME
    output: str = SAME
    widths: tuple[int, int] = (0, 0)
    tokens: tuple[int, int] | None = None
    gradient: str | None = None

    def arrived(self, gradient: Any) -> "Split":
        """With what has come as ∂L/∂z.

        Raises:
            ValueError: its rows lie on the ranks as those of z do not, or as before.
        """
        placement = gradient.placements[0]
        rows = placement.is_shard() and placement.dim < gradient.dim() - 1
        lies = _lie(gradient)
        if rows is not self.own or self.gradient not in (None, lies):
            raise ValueError(
                f"∂L/∂z lies on the ranks as {placement}, its rows or those before do not"
            )
        return replace(self, gradient=lies)

    def term(self, z: Tensor, features: Features) -> Tensor:
        """This rank's term of z of some rows, where it is a sum."""
        if self.tokens is None:
            return z
        assert isinstance(features, OneHotFeatures)
        first, last = self.tokens
        mine = (features.token >= first) & (features.token < last)
        return torch.where(mine[:, None], z, 0)


def uses_of_parts(
    name: str, call: FunctionCall, args: tuple[Any, ...], kwargs: Mapping[str, Any], peers: Peers
) -> tuple[Sequence[Use], Split]:
    """The uses in this rank's part of a call, and how the parts make the whole.

    Args:
        name: of the function.
        call: with its result, spread over the ranks.
        args: its arguments, likewise.
        kwargs: see args.
        peers: the ranks.

    Raises:
        Refused: they can't be put together.
    """
    if name in REPEATING:  # what it shows is told by later calls
        raise Refused(NO_RULE)
    data: list[Any] = []

    def local(tensor: Any) -> Any:
        if not is_shard(tensor) or call.of_model(tensor):
            return tensor  # of a weight a rule asks no more than its shape
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
    "no rule describes what is computed of it, and ranks compute that together (tensor parallelism)"
)
_CANT = (
    "what it is given, or gives, lies on the ranks (tensor parallelism) in a way in which its "
    "rows can't be put together"
)


def _row_dimension(tensor: Any) -> int | None:
    """The dimension of which each rank has a part, if that makes other rows of it."""
    placement = tensor.placements[0]
    is_last = placement.is_shard() and placement.dim == tensor.dim() - 1 and tensor.dim() > 1
    return placement.dim if placement.is_shard() and not is_last else None


def _lie(tensor: Any) -> str:
    placement = tensor.placements[0]
    if placement.is_partial():
        return PARTIAL_SUM
    return COLUMNS if placement.is_shard() else SAME


def _own_rows(table: Any) -> tuple[int, int]:
    """Which rows of a table this rank has."""
    placement = table.placements[0]
    if not placement.is_shard() or placement.dim:
        return 0, len(table)
    place, parts = table.device_mesh.get_local_rank(), table.device_mesh.size()
    rows = -(-len(table) // parts)
    return min(place * rows, len(table)), min((place + 1) * rows, len(table))
