"""Many tensors end to end in a few buffers, so that one operation serves all of them."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import chain

import torch
from jaxtyping import Float
from torch import Tensor

from adiv_monitor.capture.weights.pieces import Key, Parts
from adiv_monitor.features.rows import compute_dtype, dots, joined, wide
from adiv_monitor.maths.totals import reduced

_LINE = 128  # entries; every tensor in a buffer begins at a multiple of it
_CHUNK = 2**24  # entries that are multiplied at once


class Flat:
    """Tensors in one buffer for each dtype and device, with sums of products by tensor.

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
        kinds: dict[object, dict[Key, Tensor]] = defaultdict(dict)
        for key in chain(*alike.values()):  # at equal distances, to be stacked without a copy
            kinds[like[key].dtype, like[key].device][key] = like[key]
        self._kinds = [tuple(kind) for kind in kinds.values()]
        self.keys = tuple(chain(*self._kinds))
        self.views: dict[Key, Tensor] = {}
        self.buffers: list[Tensor] = []
        self._lengths: list[Tensor] = []  # in lines, of each tensor of a buffer
        for kind in kinds.values():
            lines = [-(-tensor.numel() // _LINE) for tensor in kind.values()]
            first, start = next(iter(kind.values())), 0
            # It is zero between the tensors.
            buffer = torch.zeros(sum(lines) * _LINE, dtype=first.dtype, device=first.device)
            for (key, tensor), length in zip(kind.items(), lines, strict=True):
                self.views[key] = _view(buffer, start, tensor)
                start += length * _LINE
            self.buffers.append(buffer)
            self._lengths.append(torch.tensor(lines).to(buffer.device, non_blocking=True))

    def apply(self, function: Callable[..., object], others: Parts) -> None:
        """Call a `_foreach` function that writes to the parts, with other tensors by key."""
        for kind in self._kinds:
            function([self.views[key] for key in kind], [others[key] for key in kind])

    def dots(self, other: "Flat") -> tuple[Float[Tensor, " tensors"], ...]:
        """Return ⟨a, b⟩ of each tensor with its counterpart, in the order of `keys`, in parts."""
        return self._by_tensor(map(_line_dots, self.buffers, other.buffers))

    def sums(self) -> tuple[Float[Tensor, " tensors"], ...]:
        """Return the sum of each tensor's entries, one vector for each buffer."""
        return self._by_tensor(
            buffer.view(-1, _LINE).sum(1, dtype=compute_dtype(buffer)) for buffer in self.buffers
        )

    def nonzero(self) -> list[Tensor]:
        """Return which entries are not zero, as bytes in lines, for each buffer."""
        # On a CPU `.bool()` takes half the time of `!= 0`, and a sum of bytes a fortieth of bools'.
        return [buffer.bool().view(torch.uint8).view(-1, _LINE) for buffer in self.buffers]

    def counts(self, which: Iterable[Tensor]) -> tuple[Float[Tensor, " tensors"], ...]:
        """Return the number of each tensor's entries that `nonzero` of each buffer chooses."""
        return self._by_tensor(lines.sum(1, dtype=torch.uint8) for lines in which)

    def differs(self, others: Parts) -> Tensor:
        """Return whether any part differs from its tensor; NaN equals itself."""
        pairs = [(self.views[key], others[key]) for key in self.keys]
        flags = [((a != b) & ~(a.isnan() & b.isnan())).any() for a, b in pairs]
        if not flags:  # one of several ranks may have nothing to measure
            return torch.zeros((), dtype=torch.bool)
        return torch.stack([flag.to(flags[0].device) for flag in flags]).any()

    def _by_tensor(self, lines: Iterable[Tensor]) -> tuple[Tensor, ...]:
        # Sequential float32 sums of many alike numbers would drift.
        return tuple(
            reduced("sum", wide(of_lines), lengths)
            for of_lines, lengths in zip(lines, self._lengths, strict=True)
        )


def _view(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    """Return a part of a buffer with the shape of a tensor, and its strides if it is dense."""
    if torch.ops.aten.is_non_overlapping_and_dense(like):
        return buffer.as_strided(like.shape, like.stride(), buffer.storage_offset() + start)
    return buffer[start : start + like.numel()].view(like.shape)


def _line_dots(a: Tensor, b: Tensor) -> Tensor:
    """Return the dot products of lines, in the precision of the measures.

    Part by part: the product of all entries would be one more copy of them.
    """
    dtype, parts = compute_dtype(a), []
    for x, y in zip(torch.split(a, _CHUNK), torch.split(b, _CHUNK), strict=True):
        parts.append(dots(x.to(dtype).view(-1, _LINE), y.to(dtype).view(-1, _LINE)))
    return joined(parts)


def copied(like: Parts, tensors: Parts) -> Flat:
    """Return a copy of tensors that are laid out like others."""
    flat = Flat(like)
    flat.apply(torch._foreach_copy_, tensors)
    return flat
