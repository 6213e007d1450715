"""Sums over all rows of every layer, from the lengths of features and gradients.

All layers lie end to end, so that a dozen operations serve them all.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from adiv_monitor.features.rows import to_device

MOST_ENTRIES = 2_048
_WITH_SEGMENTS = ("cpu", "cuda")  # devices that have `segment_reduce`


@dataclass(frozen=True)
class AllRows:
    """The lengths of every row of a layer in a step, over all its calls.

    Attributes:
        gradient: ‖g_r‖, in the units of the gradient that backward left.
        weight: ‖φ_W‖; None where a pass over the input would be expensive.
        bias_square: φ_b², or one number for all rows.
    """

    gradient: Float[Tensor, " rows"]
    weight: Float[Tensor, " rows"] | None = None
    bias_square: Float[Tensor, " rows"] | float = 0.0


class Totals(NamedTuple):
    """Sums over all rows of layers on one device.

    Attributes:
        paths: the layers. Those whose rows have one scale each come first.
        sums: by column of the table of layers, (layers,).
        scales: the same of sums over scales, of the first layers.
        entries: scales of 2,048 random rows, or of all, of the first layers; NaN for zero-gradient
            rows. Of layers with fewer rows than others, lines are filled up.
        counts: numbers of rows of all layers.
    """

    paths: Sequence[str]
    sums: dict[str, Tensor]
    scales: dict[str, Tensor]
    entries: Tensor | None
    counts: Sequence[int]


def sums(
    layers: Mapping[str, Sequence[AllRows]], generator: np.random.Generator
) -> Iterator[Totals]:
    """Yield the sums over all rows of layers, device by device.

    Args:
        layers: the rows of every call, by path of the layer.
        generator: random generator that chooses 2,048 rows of many, whose scales are kept.
    """
    devices: dict[torch.device, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for path, calls in layers.items():
        has_no_scales = any(call.weight is None for call in calls)
        devices[calls[0].gradient.device][has_no_scales].append(path)
    for scaled, others in devices.values():
        paths = [*scaled, *others]
        yield _sums(paths, [layers[path] for path in paths], len(scaled), generator)


def _sums(
    paths: Sequence[str],
    layers: Sequence[Sequence[AllRows]],
    scaled: int,
    generator: np.random.Generator,
) -> Totals:
    """Return the sums of layers, the first `scaled` of which have one scale for each row."""
    calls = [call for of_layer in layers for call in of_layer]
    square = _end_to_end([call.gradient for call in calls]).square_()
    every = [sum(len(call.gradient) for call in of_layer) for of_layer in layers]
    lengths = torch.tensor(every).to(square.device, non_blocking=True)
    active = square != 0
    several = active.to(square.dtype), square, square * square
    count, total, squares = summed(several, lengths)
    concentration = squares / torch.where(total == 0, 1, total * total)
    found = {"active": count, "G_G": total, "concentration": concentration}
    if not scaled:
        return Totals(paths, found, {}, None, every)
    calls = [call for of_layer in layers[:scaled] for call in of_layer]
    rows, lengths, counts = sum(every[:scaled]), lengths[:scaled], every[:scaled]
    active, square, count = active[:rows], square[:rows], count[:scaled]
    constants = [0.0 if isinstance(x.bias_square, Tensor) else x.bias_square for x in calls]
    of_calls = torch.tensor(constants, dtype=square.dtype).to(square.device, non_blocking=True)
    bias = [
        one.expand(len(x.gradient)) if isinstance(x.bias_square, float) else x.bias_square
        for x, one in zip(calls, of_calls.unbind(), strict=True)
    ]
    scale = _end_to_end([x.weight for x in calls if x.weight is not None]).square_()
    scale += _end_to_end(bias)
    own, masked = scale * square, torch.where(active, scale, 0)
    of_scales, own_G, own_own = summed([masked, own, scale * own], lengths)
    # A second pass over the rows, so that equal scales have a spread of exactly zero.
    means = torch.repeat_interleave(of_scales / count, lengths, output_size=rows)
    (off,) = summed([torch.where(active, scale - means, 0).square_()], lengths)
    places = to_device(_entries(counts, generator), scale.device)
    scales = {
        "own_G": own_G,
        "own_own": own_own,
        "scale_sum": of_scales,
        "scale_off": off.sqrt(),
        "scale_max": reduced("max", masked, lengths),
    }
    entries = torch.where(active, scale, torch.nan)[places]
    return Totals(paths, found, scales, entries, every)


def _entries(counts: Sequence[int], generator: np.random.Generator) -> np.ndarray:
    """Return places of 2,048 random rows of every layer, or of all if it has fewer.

    Layers with equally many rows have the same ones. The rest of a line repeats a place.
    """
    starts = np.cumsum([0, *counts[:-1]])
    chosen = {
        n: generator.choice(n, MOST_ENTRIES, replace=False) if n > MOST_ENTRIES else np.arange(n)
        for n in dict.fromkeys(counts)
    }
    places = np.zeros((len(counts), max(map(len, chosen.values()))), dtype=np.int64)
    for line, start, n in zip(places, starts, counts, strict=True):
        line[: len(chosen[n])] = start + chosen[n]
    return places


def _end_to_end(parts: Sequence[Tensor]) -> Float[Tensor, " rows"]:
    """Return new memory with all parts."""
    return wide(torch.cat([part.flatten() for part in parts]))


def wide(tensor: Tensor) -> Tensor:
    """Return the tensor in a precision in which long sums of alike numbers do not drift."""
    return tensor if tensor.device.type == "mps" else tensor.double()


def summed(
    several: Sequence[Float[Tensor, " values"]], lengths: Int[Tensor, " parts"]
) -> Sequence[Float[Tensor, " parts"]]:
    """Return of each of several the sums of consecutive parts of these lengths."""
    joined = torch.cat(list(several)) if several[1:] else several[0]
    found = reduced("sum", joined, lengths.repeat(len(several)))
    return found.view(len(several), -1).unbind()


def reduced(
    how: str, values: Float[Tensor, " values"], lengths: Int[Tensor, " parts"]
) -> Float[Tensor, " parts"]:
    """Return the sum or the largest of consecutive parts of these lengths; of none it is 0."""
    if values.device.type in _WITH_SEGMENTS:
        return torch.segment_reduce(values, how, lengths=lengths, unsafe=True, initial=0)
    # Others have no such operation; this one waits for the device.
    of_part = torch.sum if how == "sum" else torch.amax
    zero = values.new_zeros(1)
    parts = torch.split(values, lengths.tolist())
    return torch.stack([of_part(torch.cat([zero, part])) for part in parts])
