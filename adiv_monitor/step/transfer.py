"""Transfer of all numbers of a step from device to host at once."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, cast

import numpy as np
import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from adiv_monitor.maths.attention_sums import AttentionSums
from adiv_monitor.maths.records import numbers_of, replaced, with_numbers
from adiv_monitor.maths.sums import (
    Array,
    Blocks,
    Common,
    LayerSums,
    StackedSums,
    T,
    Totals,
    column_of,
    pairs_of,
)
from adiv_monitor.maths.totals import by_layer
from adiv_monitor.step.parameter_steps import PieceNumbers


@dataclass(slots=True, eq=False)
class Flags(Generic[T]):
    """Numbers of the step as a whole.

    Attributes:
        gradient_scale: the factor by which a fused optimizer divided the gradients.
        gradient_changed: nonzero if the optimizer changed `.grad` during its step.
        weights_changed: nonzero if the weights changed after the optimizer's step; None: not known.
        skipped: > 0 if a fused optimizer found inf and did nothing.
        moved: nonzero if the optimizer moved the weights before the gradient was computed.
        loss_change: realised change of the loss.
        loss_changes: realised change of every sample's loss.
        began: some weights as the optimizer's step began.
        stepped: the same as it ended.
        untrained: norms of some entries of each parameter that the optimizer does not step.
        loss_gradients: `Passes.losses`.
        zeroed: `Passes.norms`.
        batch: `Capture.batch`.
        next_batch: `Capture.next_batch`.
    """

    gradient_scale: T | None = None
    gradient_changed: T | None = None
    weights_changed: T | None = None
    skipped: T | None = None
    moved: T | None = None
    loss_change: T | None = None
    loss_changes: T | None = None
    began: T | None = None
    stepped: T | None = None
    untrained: tuple[T, ...] = ()
    loss_gradients: tuple[T, ...] = ()
    zeroed: tuple[T, ...] = ()
    batch: tuple[T, ...] = ()
    next_batch: tuple[T, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class StepSums(Generic[T]):
    """All numbers of a step.

    Attributes:
        layers: records of layers by path; `fetch` adds the numbers of rows.
        rows: numbers of the sampled rows of these layers, stacked.
        totals: by paths, stacked sums over all rows of these layers.
        flags: numbers of the step as a whole.
        products: dot products of the parameters.
        attention: records of each call, by path of the attention.
    """

    layers: dict[str, LayerSums[T]]
    rows: tuple[StackedSums[T], ...]
    totals: dict[tuple[str, ...], Totals[T]]
    flags: Flags[T]
    products: PieceNumbers[T]
    attention: dict[str, tuple[AttentionSums[T], ...]]


def fetch(step: StepSums[Tensor]) -> StepSums[Array]:
    """Copy the numbers to the host, and add those of rows to the layers."""
    found = cast("StepSums[Array]", with_numbers(step, fetch_tensors(numbers_of(step))))
    totals = by_layer(found.totals, {p: x.sampled.total for p, x in found.layers.items()})
    rows = dict(_of_rows(found.rows))  # also of layers that were lost since
    layers = {
        path: replaced(layer, totals=totals.get(path), **rows[path])
        for path, layer in found.layers.items()  # in the order of the model
        if path in rows
    }
    return replaced(found, layers=layers)


def _of_rows(several: Iterable[StackedSums[Array]]) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """Yield path and fields of `LayerSums` of stacked layers."""
    for x in several:
        layers, paths = iter(np.moveaxis(x.products, 0, 2)), iter(x.paths)
        for part in x.parts:
            pairs = pairs_of(part.vectors)
            columns = [column_of(pairs_of(x.vectors), *pair) for pair in pairs]
            for i, path, products in zip(range(part.count), paths, layers, strict=False):
                found: dict[str, Any] = {"vectors": part.vectors, "products": products[:, columns]}
                if part.scale is not None:
                    found["scale"] = part.scale[i]
                if (of := part.blocks) is not None:
                    arrays = (of.sums[i], of.norms[i], of.largest[i], of.entries[i])
                    found["blocks"] = Blocks(of.groups, of.pivot[i], *arrays, of.entry_rows)
                if part.common is not None:
                    products_of, norms, sums = part.common
                    one = i if norms.ndim > 1 else slice(None)
                    total = None if sums is None else sums[one]
                    found["common"] = Common(products_of[one], norms[one], total)
                yield path, found


def fetch_numbers(values: Sequence[float | Tensor]) -> list[float]:
    """Return all numbers, concatenated, by one transfer from each device."""
    arrays = iter(fetch_tensors([value for value in values if isinstance(value, Tensor)]))
    found: list[float] = []
    for value in values:
        found += next(arrays).reshape(-1).tolist() if isinstance(value, Tensor) else [value]
    return found


def fetch_tensors(tensors: Sequence[Tensor]) -> list[Array]:
    """Return float64 arrays of the tensors' shapes, by one transfer from each device."""
    devices = [tensor.device for tensor in tensors]
    fetched = {
        device: iter(
            _on_host([x for x, own in zip(tensors, devices, strict=True) if own == device])
        )
        for device in set(devices)
    }
    if len(fetched) == 1:
        return list(*fetched.values())
    return [next(fetched[device]) for device in devices]


def _on_host(tensors: list[Tensor]) -> list[Array]:
    """Return float64 copies on the host of tensors on one device."""
    try:
        flat: Tensor = _flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
    except torch.OutOfMemoryError:  # copying one by one needs no extra memory on the device
        return [part.cpu().double().numpy() for part in tensors]
    numbers: Array = flat.cpu().double().numpy()
    found: list[Array] = []
    end = 0
    for tensor in tensors:
        if tensor.ndim == 1:  # most are: there are thousands of them
            start, end = end, end + tensor.shape[0]
            found += (numbers[start:end],)
        else:
            start, end = end, end + tensor.numel()
            found += (numbers[start:end].reshape(tensor.shape),)
    return found
