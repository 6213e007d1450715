"""Rows of calls that several processes made together: put together, and dealt out among them.

With tensor parallelism the processes of a group are given the same data, and each has columns of
the rows' features, of z or of ∂L/∂z, or terms of them. They have chosen the same rows. Of these the
whole is put together; then each process keeps every k-th row, so that from here on they are what
processes with rows of their own are. Layers of which each has all are dealt out in the same way.
"""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from adiv_monitor.capture.layer_rows import Call
from adiv_monitor.capture.selection import Layer, Selection
from adiv_monitor.capture.split_calls import COLUMNS, SAME, SUM
from adiv_monitor.capture.weights.shards import Peers
from adiv_monitor.features.features import DenseFeatures
from adiv_monitor.step.collectives import Collectives

NOT_ALIKE = (
    "the processes that compute it together (tensor parallelism) have not all looked at the same "
    "rows of it: another batch, or one of them failed"
)

Reached = Mapping[Layer, Sequence[Call]]


class WholeRows:
    """Puts the rows of one step together.

    Args:
        selection: what is measured, the same in all processes.
        collectives: those of the step.
    """

    def __init__(self, selection: Selection, collectives: Collectives) -> None:
        self._peers = selection.peers
        self._parameters = [id(p) for p in selection.parameters]
        self._collectives = collectives

    def owe(self) -> None:
        """All processes have agreed to put together what they can."""
        if self._peers is not None:
            size = self._peers.count, len(self._parameters)
            self._collectives.owe([_spread(self._unsigned(self._peers), 0, size, self._peers)])

    def make(self, reached: Reached, *, come: bool) -> list[Layer]:
        """Put the calls' rows together, and deal them out; the layers of which that can't be.

        Args:
            reached: the layers with their calls.
            come: all processes have come to it; else only what each has alone is dealt out.
        """
        peers = self._peers
        if peers is None:
            return []
        alike = self._alike(reached, peers) if come else _apart(reached)
        joint = [call for layer in reached if layer in alike for call in reached[layer]]
        parts = [part for call in joint for part in _parts(call)]
        self._collectives.owe((part.spread(peers) for part in parts), next=True)
        for part in parts:
            part.give(self._collectives.whole(part.tensor))
        for call in joint:
            if call.split is None or not call.split.own:
                _deal(call, peers)
        return [layer for layer in reached if layer not in alike]

    def _alike(self, reached: Reached, peers: Peers) -> set[Layer]:
        """The layers of which all processes have the same rows, or rows of their own."""
        own = self._unsigned(peers)
        led: dict[int, list[Layer]] = {key: [] for key in self._parameters}
        for layer in sorted(reached, key=lambda layer: layer.path):
            led[id(layer.parameters[0])].append(layer)
        for place, layers in enumerate(led.values()):
            if layers:
                told = [(layer.path, *map(_told, reached[layer])) for layer in layers]
                own[0, place] = 1 + zlib.crc32(repr(told).encode())
        same = (self._collectives.whole(own) == own).all(0).tolist()
        return {x for layers, yes in zip(led.values(), same, strict=True) if yes for x in layers}

    def _unsigned(self, peers: Peers) -> Tensor:
        """Room for a number of each parameter, 0 where none of its layers was seen."""
        numbers, device = len(self._parameters), peers.mesh.device_type
        return torch.zeros(1, numbers, dtype=torch.float64, device=device)


def _told(call: Call) -> object:
    """What must be the same in all processes of a call that they make together."""
    split, known = call.split, (call.size is not None, call.whole is not None)
    if split is not None and split.own:
        return "own"
    chosen = b"" if call.rows.chosen is None else call.rows.chosen.tobytes()
    lies = split and (split.features, split.output, split.gradient, split.widths)
    return call.rows.shape, zlib.crc32(chosen), lies, str(call.z.dtype), known


def _apart(reached: Reached) -> set[Layer]:
    """Those of which each process has all that there is, or rows of its own."""
    return {
        layer
        for layer, calls in reached.items()
        if all(call.split is None or call.split.own for call in calls)
    }


class _Part:
    """A tensor of a call that is to be put together.

    Args:
        call: the call.
        name: of the tensor.
        tensor: what this process has of it.
        how: `COLUMNS` or `SUM`.
        width: how many columns there are in all.
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
        if name in ("z", "gradient", "size"):
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
    ]
    if isinstance(call.features, DenseFeatures):
        found.append(("phi", call.features.phi, split.features, inputs))
    if call.whole is not None:
        found += [
            ("weight_square", call.whole.weight_square, _squared(split.features), 0),
            ("weight_sum", _flat(call.whole.weight_sum), split.features, inputs),
            ("size", call.size, _squared(split.gradient), 0),
        ]
    for name, tensor, how, width in found:
        if tensor is not None and how != SAME:
            yield _Part(call, name, tensor, how, width)


def _squared(how: str) -> str:
    """What squared norms of rows are, of which a process has this."""
    return SUM if how == COLUMNS else how


def _flat(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.flatten()


def _spread(part: Tensor, dim: int | None, size: Sequence[int], peers: Peers) -> Tensor:
    """A part as one of those that make a whole of this size: joined in a dimension, or added."""
    from torch.distributed.tensor import DTensor, Partial, Shard  # not in every build of torch

    made: Any = DTensor.from_local(
        *(part, peers.mesh, [Partial() if dim is None else Shard(dim)]),
        run_check=False,
        shape=torch.Size(size),
        stride=torch.empty(*size, device="meta").stride(),
    )
    return made  # type: ignore[no-any-return]


def _deal(call: Call, peers: Peers) -> None:
    """Keep this process's share of the rows, all of which it knows."""
    assert call.gradient is not None
    share = slice(peers.place, None, peers.count)
    index = torch.arange(*share.indices(len(call.z)), device=call.z.device)
    call.pick(index)
    call.gradient = call.gradient.index_select(0, index)
    call.total = peers.share(call.rows.total)
    whole, split = call.whole, call.split
    if call.size is not None and (whole is not None or split is None or split.gradient == SAME):
        call.size = call.size.reshape(-1)[share]  # else norms of columns, all of them its own
    if whole is not None:
        call.whole = replace(
            whole,
            weight_square=_share(whole.weight_square, share),
            bias_square=_share(whole.bias_square, share),
            weight_sum=None if whole.weight_sum is None else whole.weight_sum / peers.count,
            trained=_share(whole.trained, share),
        )


def _share(values: Any, share: slice) -> Any:
    return values[share] if isinstance(values, Tensor) else values
