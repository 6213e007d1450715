"""Many tensors concatenated, so that one operation serves all."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cached_property

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from adiv_monitor.capture.entries import bits, sampled_entries
from adiv_monitor.features.rows import to_compute_dtype


class SideBySide:
    """Small tensors, concatenated on each device in compute precision.

    Args:
        tensors: the tensors, by the keys of pieces.

    Attributes:
        flat: the concatenated tensors of each device, by negative keys that no piece has.
    """

    def __init__(self, tensors: Mapping[int, Tensor]) -> None:
        kinds: dict[torch.device, dict[int, Tensor]] = defaultdict(dict)
        for key, tensor in tensors.items():
            kinds[tensor.device][key] = tensor
        self._kinds = list(kinds.values())
        self.flat = {-1 - i: _side_by_side(list(of.values())) for i, of in enumerate(self._kinds)}

    @cached_property
    def views(self) -> dict[int, Tensor]:
        """The parts of `flat`, by the keys of pieces."""
        found: dict[int, Tensor] = {}
        for tensor, of in zip(self.flat.values(), self._kinds, strict=True):
            views = _unflatten_dense_tensors(tensor, list(of.values()))  # type: ignore[no-untyped-call]
            found.update(zip(of, views, strict=True))
        return found

    @property
    def places(self) -> dict[int, tuple[int, slice]]:
        """For each piece by key, the flat tensor that contains it and the slice in it."""
        found: dict[int, tuple[int, slice]] = {}
        for i, of in enumerate(self._kinds):
            end = 0
            for key, tensor in of.items():
                start, end = end, end + tensor.numel()
                found[key] = -1 - i, slice(start, end)
        return found

    def times(self, other: "SideBySide") -> dict[int, Tensor]:
        """Return the elementwise products of all entries."""
        return {key: mine * other.flat[key] for key, mine in self.flat.items()}

    def minus(self, other: "SideBySide") -> "SideBySide":
        """Return the differences; they overwrite the other tensors."""
        for key, mine in self.flat.items():
            torch.sub(mine, other.flat[key], out=other.flat[key])
        return other


def _side_by_side(tensors: list[Tensor]) -> Tensor:
    flat: Tensor = _flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
    return to_compute_dtype(flat.clone() if len(tensors) == 1 else flat)


class Entries:
    """Copies of sampled entries of many tensors, concatenated for each dtype and device."""

    def __init__(self, tensors: Mapping[int, Tensor]) -> None:
        kinds = _sampled(tensors)
        self._flat = {kind: torch.cat(list(parts.values())) for kind, parts in kinds.items()}
        self._places: dict[int, tuple[object, int, int]] = {}  # kind, start and length
        for kind, parts in kinds.items():
            end = 0
            for key, part in parts.items():
                length = part.shape[0]
                self._places[key] = kind, end, length
                end += length

    def of(self, key: int) -> Tensor:
        """Return the entries of one tensor."""
        kind, start, length = self._places[key]
        return self._flat[kind].narrow(0, start, length).flatten()

    def differ(self, tensors: Mapping[int, Tensor]) -> Tensor:
        """Return whether any of these entries of the same tensors differs now."""
        now = _sampled(tensors).items()
        return any_differs(
            [(self._flat[kind], torch.cat(list(parts.values()))) for kind, parts in now]
        )


def _sampled(tensors: Mapping[int, Tensor]) -> dict[object, dict[int, Tensor]]:
    """Return the `sampled_entries` of tensors, by dtype, device and number of dimensions."""
    kinds: dict[object, dict[int, Tensor]] = defaultdict(dict)
    for key, tensor in tensors.items():
        entries = sampled_entries(tensor)
        kinds[entries.dtype, entries.device, entries.dim()][key] = entries
    return kinds


def any_differs(pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Return whether any entries of these pairs differ, or their shapes or devices.

    Bits are compared, so NaN equals itself.
    """
    kinds: dict[object, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for one, other in pairs:
        if one.shape != other.shape or one.device != other.device:
            return torch.ones((), dtype=torch.bool)
        kinds[one.dtype, one.device].append((one, other))
    flags = []
    for of_kind in kinds.values():
        one, other = (
            torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors[1:] else tensors[0]
            for tensors in zip(*of_kind, strict=True)
        )
        flags.append((bits(one) != bits(other)).any())
    if not flags:  # one of several ranks may have nothing to measure
        return torch.zeros((), dtype=torch.bool)
    return torch.stack([flag.to(flags[0].device) for flag in flags]).any()
