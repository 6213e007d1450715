"""Many tensors end to end in one buffer, so that one operation serves all of them."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

import torch
from adiv_layers.autocast import without_autocast
from jaxtyping import Float
from torch import Tensor

from adiv_monitor.features.rows import compute_dtype, dots, joined
from adiv_monitor.maths.totals import reduced, wide

_LINE = 64  # entries; every tensor in a buffer begins at a multiple of it
_CHUNK = 2**22  # entries that are multiplied at once
# Entries of a tensor that stays by itself on a CPU, where an operation on it costs more than its
# call; and of the lines of such a tensor, at most.
_LARGE, _LONG_LINE = 2**17, 2**12


class Flat:
    """Tensors in one buffer for each dtype and device, with sums of products by tensor.

    On a CPU, large tensors have memory of their own, or are read where they are.

    Args:
        like: the tensors whose shapes, dtypes and devices the parts have, by key.

    Attributes:
        keys: the keys, in the order of the sums.
        views: the parts, by key, once they are taken.
        buffers: one for each dtype and device.
    """

    def __init__(self, like: Mapping[int, Tensor]) -> None:
        self._like = _described(like)
        self._large = tuple(key for key, x in like.items() if x.is_cpu and x.numel() >= _LARGE)
        alike: dict[object, list[int]] = defaultdict(list)
        for key in [key for key in like if key not in self._large]:
            alike[like[key].shape, like[key].stride()].append(key)
        kinds: dict[object, dict[int, Tensor]] = defaultdict(dict)
        for key in chain(*alike.values()):  # at equal distances, to be stacked without a copy
            kinds[like[key].dtype, like[key].device][key] = like[key]
        self._kinds = [tuple(kind) for kind in kinds.values()]
        self.keys = (*chain(*self._kinds), *self._large)
        self.views: dict[int, Tensor] = {}
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
        self._memory: dict[int, Tensor] = {}  # of the large ones

    def fits(self, like: Mapping[int, Tensor]) -> bool:
        """Whether the parts are as those of other tensors; then their memory can be used again."""
        # Tensors that were made in inference mode can't be written to outside of it.
        usable = not any(x.is_inference() for x in (*self.buffers, *self._memory.values()))
        return usable and self._like == _described(like)

    def take(self, tensors: Mapping[int, Tensor], *, read: bool = False) -> None:
        """Copy tensors, by key; large ones that are only read become the parts themselves."""
        if read:
            self._memory.clear()
        elif not self._memory:
            self._memory = {key: torch.empty_like(tensors[key]) for key in self._large}
        for key in self._large:
            self.views[key] = tensors[key] if read else self._memory[key]
        self.apply(torch._foreach_copy_, tensors, self._kinds if read else None)

    def release(self) -> None:
        """Refer to no other tensors any more."""
        for key in self._large:
            self.views.pop(key, None)

    def apply(
        self,
        function: Callable[..., object],
        others: Mapping[int, Tensor],
        kinds: Sequence[tuple[int, ...]] | None = None,
    ) -> None:
        """Call a `_foreach` function that writes to the parts, with other tensors by key."""
        for kind in (*self._kinds, self._large) if kinds is None else kinds:
            if kind:
                function([self.views[key] for key in kind], [others[key] for key in kind])

    def dots(self, other: "Flat") -> tuple[Float[Tensor, " tensors"], ...]:
        """Return ⟨a, b⟩ of each tensor with its counterpart, in the order of `keys`, in parts."""
        pairs = zip(self.buffers, other.buffers, strict=True)
        of_buffers = self._by_tensor(_line_dots(a, b) for a, b in pairs)
        return of_buffers + self._of_large(other)

    def squares(self) -> tuple[Float[Tensor, " tensors"], ...]:
        """Return ‖a‖² of each tensor, as `dots` does; it reads the buffer once."""
        lines = ((buffer.view(-1, _LINE), compute_dtype(buffer)) for buffer in self.buffers)
        norms = (torch.linalg.vector_norm(of, dim=1, dtype=dtype) for of, dtype in lines)
        return self._by_tensor(wide(norm).square() for norm in norms) + self._of_large(self)

    def sums(self) -> tuple[Float[Tensor, " tensors"], ...]:
        """Return the sum of each tensor's entries, one vector for each buffer."""
        return self._by_tensor(
            buffer.view(-1, _LINE).sum(1, dtype=compute_dtype(buffer)) for buffer in self.buffers
        )

    def differs(self, others: Mapping[int, Tensor]) -> Tensor:
        """Return whether any part differs from its tensor; NaN equals itself."""
        pairs = [(self.views[key], others[key]) for key in self.keys]
        flags = [((a != b) & ~(a.isnan() & b.isnan())).any() for a, b in pairs]
        if not flags:  # one of several ranks may have nothing to measure
            return torch.zeros((), dtype=torch.bool)
        return torch.stack([flag.to(flags[0].device) for flag in flags]).any()

    def _of_large(self, other: "Flat") -> tuple[Tensor, ...]:
        found = [_dot(self.views[key], other.views[key]) for key in self._large]
        return (torch.tensor(found, dtype=torch.float64),) if found else ()

    def _by_tensor(self, lines: Iterable[Tensor]) -> tuple[Tensor, ...]:
        # Sequential float32 sums of many alike numbers would drift.
        return tuple(
            reduced("sum", wide(of_lines), lengths)
            for of_lines, lengths in zip(lines, self._lengths, strict=True)
        )


def _described(tensors: Mapping[int, Tensor]) -> list[object]:
    return [(key, x.shape, x.stride(), x.dtype, x.device) for key, x in tensors.items()]


def _view(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    """Return a part of a buffer with the shape of a tensor, and its strides if it is dense."""
    if torch.ops.aten.is_non_overlapping_and_dense(like):
        return buffer.as_strided(like.shape, like.stride(), buffer.storage_offset() + start)
    return buffer[start : start + like.numel()].view(like.shape)


def _line_dots(a: Tensor, b: Tensor, line: int = _LINE) -> Tensor:
    """Return the dot products of lines, in the precision of the measures.

    Part by part: the product of all entries would be one more copy of them.
    """
    dtype, parts = compute_dtype(a), []
    with without_autocast(a):
        for x, y in zip(torch.split(a, _CHUNK), torch.split(b, _CHUNK), strict=True):
            parts.append(dots(x.to(dtype).view(-1, line), y.to(dtype).view(-1, line)))
    return joined(parts)


def _dot(a: Tensor, b: Tensor) -> float:
    """Return ⟨a, b⟩ of large tensors on a CPU."""
    if a.stride() == b.stride() and torch.ops.aten.is_non_overlapping_and_dense(a):
        a, b = (x.as_strided((x.numel(),), (1,)) for x in (a, b))  # in memory order
    line = math.gcd(a.numel(), _LONG_LINE)
    return float(wide(_line_dots(a.reshape(-1), b.reshape(-1), line)).sum())
