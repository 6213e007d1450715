"""Rows of calls that several ranks made together: all-gathered, then partitioned across ranks.

With tensor parallelism the ranks of a group get the same data, and each has columns or partial sums
of the rows' features, of z or of ∂L/∂z. They have sampled the same rows. These are all-gathered;
then each of k ranks keeps every k-th row, so that from here on the ranks are like ranks with rows
of their own. Layers of which each rank has all rows are partitioned in the same way.
"""

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adiv_monitor.capture.layer_rows import Call
from adiv_monitor.capture.selection import Layer, Selection
from adiv_monitor.capture.split_calls import COLUMNS, PARTIAL_SUM, SAME, Split
from adiv_monitor.capture.weights.shards import Peers
from adiv_monitor.features.features import DenseFeatures
from adiv_monitor.features.rows import to_device
from adiv_monitor.maths.sums import Partition
from adiv_monitor.step.collectives import Agree, Collectives

NOT_ALIKE = (
    "the ranks that compute it together (tensor parallelism) did not all sample the same rows: "
    "another batch, or one of them failed"
)

Reached = Mapping[Layer, Sequence[Call]]


class RowsAcrossRanks:
    """All-gather and partition of the rows of one step.

    Args:
        selection: the measured parameters, the same in all ranks.
        collectives: the collectives of the step.
        agree: reaches agreement with the other ranks.
    """

    def __init__(self, selection: Selection, collectives: Collectives, agree: Agree) -> None:
        self._peers = selection.peers
        self._parameters = list(map(id, selection.parameters))
        self._collectives = collectives
        self._agree = agree

    def signatures(self) -> list[Tensor]:
        """Return the tensor to gather before any rows, which shows what rows can be gathered."""
        if self._peers is None:
            return []
        size = self._peers.count, len(self._parameters), 4
        return [_spread(self._unsigned(self._peers), 0, size, self._peers)]

    def make(self, reached: Reached, *, all_participate: bool) -> list[Layer]:
        """Gather the calls' rows and partition them; return the layers for which that fails.

        Args:
            reached: the layers with their calls.
            all_participate: all ranks participate; otherwise each rank keeps the layers that it has
                alone.
        """
        peers = self._peers
        if peers is None:
            return []
        if not all_participate:
            return [layer for layer in reached if layer not in _apart(reached)]
        try:
            alike = self._put_together(reached, peers)
        except BaseException:
            self._agree("rows", participates=False)
            raise
        for layer in alike:
            deal([call for call in reached[layer] if not _is_own(call)], peers)
        return [layer for layer in reached if layer not in alike]

    def _put_together(self, reached: Reached, peers: Peers) -> set[Layer]:
        """Gather rows; return the layers of which all ranks have the same, or all different rows.

        The ranks first exchange a few numbers that identify their rows. They agree to participate
        once all have read these, so that no rank starts to gather rows alone.
        """
        parts = {x: [part for call in reached[x] for part in _parts(call)] for x in reached}
        spread = {x: [part.spread(peers) for part in parts[x]] for x in reached}
        led: dict[int, list[Layer]] = {key: [] for key in self._parameters}
        for layer in sorted(reached, key=lambda layer: layer.path):
            led[id(layer.parameters[0])].append(layer)
        own = self._unsigned(peers)
        for place, layers in enumerate(led.values()):
            if layers:
                calls = [call for layer in layers for call in reached[layer]]
                own[0, place, 0] = _signature(layers, reached)
                own[0, place, 1] = sum(call.rows.total for call in calls)
                own[0, place, 2:] = _fingerprint(calls)
        same, apart = _compared(self._collectives.whole(own))
        alike, pending = [], []
        for layers, is_same, is_apart in zip(led.values(), same, apart, strict=True):
            if is_same or is_apart:
                alike += layers
                pending += [tensor for layer in layers for tensor in spread[layer]]
        pending.reverse()
        if not self._agree("rows"):  # all ranks call this: others may have rows to gather
            return set()
        self._collectives.pending.extendleft(pending)
        for layers, is_apart in zip(led.values(), apart, strict=True):
            for call in (call for x in layers if is_apart for call in reached[x]):
                call.split = Split(peers, own=True)
        for part in (part for layer in alike for part in parts[layer]):
            part.give(self._collectives.whole(part.tensor))
        return set(alike)

    def _unsigned(self, peers: Peers) -> Tensor:
        """Return a tensor for four numbers per parameter, filled with −1: no layer was seen."""
        size, device = (1, len(self._parameters), 4), peers.mesh.device_type
        return torch.full(size, -1, dtype=torch.float64, device=device)


def _compared(every: Tensor) -> tuple[list[bool], list[bool]]:
    """Return by parameter whether all ranks have the same rows, and whether all rows differ.

    Args:
        every: (ranks, parameters, 4), signature, number of rows, and two-number fingerprint.
    """
    signatures, totals, prints = every[..., 0], every[..., 1], every[..., 2:]
    chose_alike = signatures[:, None] == signatures
    differ = ((prints[:, None] - prints).abs() > _UNLIKE).any(-1)
    same = chose_alike.all(0).all(0) & ~differ.any(0).any(0)
    # Different fingerprints of equally many rows mean nothing if the samples differ.
    differ &= chose_alike | (totals[:, None] != totals)
    apart = (signatures >= 0).all(0) & (differ.sum((0, 1)) == len(every) * (len(every) - 1))
    return same.tolist(), apart.tolist()


# Two different fingerprints are as close as this with a probability of one in ten thousand.
_UNLIKE = 1e-2


def _fingerprint(calls: Sequence[Call]) -> Tensor:
    """Return two numbers that identify rows; zeros where the rows are known to be the same.

    They are the rows' z and ∂L/∂z along a fixed direction. For a layer that each rank computes by
    itself, it is not known whether the ranks get the same data, or parts of the samples or tokens.
    """
    if any(call.split is not None for call in calls):
        return torch.zeros(2, dtype=torch.float64)
    found = torch.zeros(2, dtype=torch.float64, device=calls[0].z.device)
    for call in calls:
        assert call.gradient is not None
        rows = torch.stack([call.z, call.gradient]).flatten(1).double()
        direction = torch.arange(1.0, rows.shape[1] + 1, device=rows.device).double().cos()
        tiny = torch.finfo(torch.float32).tiny
        found += rows @ direction / (torch.linalg.vector_norm(rows, dim=1) + tiny)
    return found


def _signature(layers: Sequence[Layer], reached: Reached) -> float:
    """Return a number that identifies the layers' rows; NaN if they can't be partitioned."""
    if any(len(set(map(_is_own, reached[layer]))) > 1 for layer in layers):
        return math.nan
    told = [(layer.path, *map(_told, reached[layer])) for layer in layers]
    return float(zlib.crc32(repr(told).encode()))


def _told(call: Call) -> object:
    """Return the properties of a shared call that must be the same in all ranks."""
    if _is_own(call):
        return "own"
    split, known = call.split, (call.squares is not None, call.whole is not None)
    chosen = b"" if call.rows.chosen is None else call.rows.chosen.tobytes()
    lies = split and (split.features, split.output, split.gradient, split.widths)
    return call.rows.shape, zlib.crc32(chosen), lies, str(call.z.dtype), known


def _apart(reached: Reached) -> set[Layer]:
    """Return the layers of which each rank has everything, or rows of its own."""
    return {
        layer
        for layer, calls in reached.items()
        if all(call.split is None for call in calls) or all(map(_is_own, calls))
    }


def _is_own(call: Call) -> bool:
    """Whether each rank has rows of its own."""
    return call.split is not None and call.split.own


class _Part:
    """A tensor of a call that is to be all-gathered or all-reduced.

    Args:
        call: the call.
        name: name of the tensor.
        tensor: this rank's part of it.
        how: `COLUMNS` or `PARTIAL_SUM`.
        width: number of columns of all ranks.
    """

    def __init__(self, call: Call, name: str, tensor: Tensor, how: str, width: int) -> None:
        self.tensor = tensor
        self._call, self._name = call, name
        self._dim = tensor.dim() - 1 if how == COLUMNS else None
        self._size = (*tensor.shape[:-1], width if how == COLUMNS else tensor.shape[-1])

    def spread(self, peers: Peers) -> Tensor:
        return _spread(self.tensor, self._dim, self._size, peers)

    def give(self, whole: Tensor) -> None:
        call, name = self._call, self._name
        if name in ("z", "gradient", "squares"):
            setattr(call, name, whole)
        elif name == "phi":
            assert isinstance(call.features, DenseFeatures)
            call.features = replace(call.features, phi=whole)
        else:
            assert call.whole is not None
            call.whole = replace(call.whole, **{name: whole})


def _parts(call: Call) -> Iterable[_Part]:
    split = call.split
    if split is None or split.own:
        return
    assert call.gradient is not None and split.gradient is not None
    inputs, outputs = split.widths
    found: list[tuple[str, Tensor | None, str, int]] = [
        ("z", call.z, split.output, outputs),
        ("gradient", call.gradient, split.gradient, outputs),
        ("squares", call.squares, _squared(split.gradient), 0),
    ]
    if isinstance(call.features, DenseFeatures):
        found.append(("phi", call.features.phi, split.features, inputs))
    if call.whole is not None:
        found += [
            ("weight_square", call.whole.weight_square, _squared(split.features), 0),
            ("weight_sum", _flat(call.whole.weight_sum), split.features, inputs),
        ]
    for name, tensor, how, width in found:
        if tensor is not None and how != SAME:
            yield _Part(call, name, tensor, how, width)


def _squared(how: str) -> str:
    """Return how squared norms are split across ranks, for rows that are split like this."""
    return PARTIAL_SUM if how == COLUMNS else how


def _flat(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.flatten()


def _spread(part: Tensor, dim: int | None, size: Sequence[int], peers: Peers) -> Tensor:
    """Return a part as a `DTensor` of this global size, sharded in a dimension, or partial."""
    from torch.distributed.tensor import DTensor, Partial, Shard  # not in every build of torch

    made: Any = DTensor.from_local(
        part,
        peers.mesh,
        [Partial() if dim is None else Shard(dim)],
        run_check=False,
        shape=torch.Size(size),
        stride=torch.empty(*size, device="meta").stride(),
    )
    return made  # type: ignore[no-any-return]


def deal(calls: Sequence[Call], peers: Peers) -> None:
    """Keep this rank's share of the rows of a layer, of which it has all."""
    chosen = rows = 0
    for call in calls:
        assert call.gradient is not None
        count, total = len(call.z), call.rows.total
        kept = np.arange(count)[peers.share(count, chosen)]
        share = peers.share(total, rows)
        chosen, rows = chosen + count, rows + total
        index = to_device(kept, call.z.device)
        call.pick(index)
        call.gradient = call.gradient.index_select(0, index)
        call.total = len(range(total)[share])
        call.squares = None if call.squares is None else call.squares[:, share]
        whole = call.whole
        if whole is not None:
            call.whole = replace(
                whole,
                weight_square=_share(whole.weight_square, share),
                bias_square=_share(whole.bias_square, share),
                weight_sum=None if whole.weight_sum is None else whole.weight_sum / peers.count,
                trained=_share(whole.trained, share),
            )


def partition(
    calls: Sequence[Call], peers: Peers | None, *, all_participate: bool
) -> Partition | None:
    """Return the partition to which a layer's rows belong; None if each rank has its own rows.

    Args:
        calls: the calls.
        peers: the ranks of the group; None without tensor parallelism.
        all_participate: the rows are partitioned across the ranks; otherwise each has all of them.
    """
    if peers is None or all(map(_is_own, calls)):
        return None
    every = [call.rows for call in calls if not _is_own(call)]
    seen = sum(rows.count for rows in every)
    total = sum(rows.total for rows in every)
    place, count = (peers.place, peers.count) if all_participate else (0, 1)
    return Partition(peers.first, place, count, seen, total)


def _share(values: Any, share: slice) -> Any:
    return values[share] if isinstance(values, Tensor) else values
