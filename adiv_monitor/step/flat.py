"""Many tensors end to end in a few buffers, so that one operation serves all of them."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from adiv_monitor.capture.weights.pieces import Key, Parts
from adiv_monitor.features.rows import joined, wide
from adiv_monitor.maths.totals import reduced

_LINE = 128  # entries; every tensor in a buffer begins at a multiple of it
# The most entries that are read at once: on a CPU its cache holds them.
CACHED, CHUNK = 2**19, 2**26


class Flat:
    """Tensors in one buffer for each dtype and device, with sums by tensor.

    Args:
        like: the tensors whose shapes, dtypes and devices the parts have, by key.

    Attributes:
        keys: the keys, in the order of the sums.
        views: the parts, by key.
        buffers: one for each dtype and device.
    """

    def __init__(self, like: Parts) -> None:
        alike: dict[object, list[Key]] = defaultdict(list)
        for key, x in like.items():
            alike[x.shape, x.stride()].append(key)
        kinds: dict[object, list[Key]] = defaultdict(list)
        for key in chain(*alike.values()):  # at equal distances, to be stacked without a copy
            kinds[like[key].dtype, like[key].device].append(key)
        self._kinds = [*kinds.values()]
        self.keys = tuple(chain(*self._kinds))
        self.views: dict[Key, Tensor] = {}
        self.buffers: list[Tensor] = []
        self._lengths: list[Tensor] = []  # in lines, of each tensor of a buffer
        self._groups: list[dict[tuple[Key, ...], int]] = []  # of small tensors, with their lines
        for kind in self._kinds:
            lines = [-(-like[key].numel() // _LINE) for key in kind]
            buffer, start = _zeros(sum(lines) * _LINE, like[kind[0]]), 0  # zero between the tensors
            for key, length in zip(kind, lines, strict=True):
                self.views[key] = _view(buffer, start, like[key])
                start += length * _LINE
            self.buffers.append(buffer)
            self._lengths.append(torch.tensor(lines).to(buffer.device, non_blocking=True))
            self._groups.append(_groups(dict(zip(kind, lines, strict=True)), _most(buffer)))

    def copy(self, tensors: Parts) -> "Flat":
        """Write these tensors to the parts, and return the buffers."""
        for kind in self._kinds:
            torch._foreach_copy_([self.views[key] for key in kind], [tensors[key] for key in kind])
        return self

    def sums(
        self, names: Sequence[str], terms: Callable[..., Sequence[Tensor]], *others: "Flat | Parts"
    ) -> dict[str, tuple[Float[Tensor, " tensors"], ...]]:
        """Return sums by tensor, in the order of `keys`, one vector for each buffer.

        Args:
            names: the names of the sums.
            terms: returns for each name the sums of lines. It is called with lines of this buffer,
                to which it may write, and of the others, a chunk at a time: what it computes needs
                little memory, and is in the cache of a CPU.
            others: other buffers of such tensors, or tensors by key.
        """
        found: list[Tensor] = []
        for i, lengths in enumerate(self._lengths):
            most = _most(self.buffers[i])
            of_groups = zip(*(self._lines(x, i) for x in (self, *others)), strict=True)
            chunks = (zip(*(x.split(most) for x in lines), strict=True) for lines in of_groups)
            columns = [torch.stack([*terms(*chunk)]) for chunk in chain.from_iterable(chunks)]
            # Sequential float32 sums of many alike numbers would drift.
            values = wide(torch.cat(columns, 1))
            several = lengths.repeat(len(values))
            found.append(reduced("sum", values.flatten(), several).view(len(values), -1))
        return {name: tuple(of[i] for of in found) for i, name in enumerate(names)}

    def _lines(self, x: "Flat | Parts", i: int) -> Iterable[Tensor]:
        """Return the lines of each group of the i-th buffer."""
        groups = self._groups[i]
        if isinstance(x, Flat):
            return torch.split(x.buffers[i].view(-1, _LINE), [*groups.values()])
        gap = self.buffers[i].new_zeros(_LINE)
        padded = (
            [y for key in keys for y in _padded(x[key], self.views[key], gap)] for keys in groups
        )
        return (joined(parts).view(-1, _LINE) for parts in padded)


def _most(buffer: Tensor) -> int:
    return (CACHED if buffer.device.type == "cpu" else CHUNK) // _LINE


def _groups(lines: Mapping[Key, int], most: int) -> dict[tuple[Key, ...], int]:
    """Group neighbours that have at most so many lines together, or one that has more."""
    groups, filled = list[list[Key]](), most + 1
    for key, length in lines.items():
        filled += length
        if filled > most:
            groups.append([])
            filled = length
        groups[-1].append(key)
    return {tuple(keys): sum([lines[key] for key in keys]) for keys in groups}


def _zeros(count: int, like: Tensor) -> Tensor:
    """Return zeros of a tensor's dtype and device."""
    if like.device.type != "cpu":
        return like.new_zeros(count)
    # NumPy asks for huge pages: the first write to a large buffer takes a fifth of the time.
    return torch.from_numpy(np.zeros(count * like.element_size(), np.uint8)).view(like.dtype)


def _view(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    """Return a part of a buffer with the shape of a tensor, and its strides if it is dense."""
    if like.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(like):
        return buffer[start : start + like.numel()].view(like.shape)
    return buffer.as_strided(like.shape, like.stride(), start)


def _padded(x: Tensor, like: Tensor, gap: Tensor) -> list[Tensor]:
    """Return a tensor's entries in the order of memory of another, and zeros up to whole lines."""
    if not like.is_contiguous():
        x = x.permute(sorted(range(like.dim()), key=like.stride, reverse=True))
    x = x.reshape(-1)
    x = x if x.device == like.device else x.to(like.device)
    return [x, gap[:rest]] if (rest := -x.numel() % _LINE) else [x]
