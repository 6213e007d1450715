"""Sums over all rows of every layer, from the lengths of features and gradients.

All layers lie end to end, so that a dozen operations serve them all.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from adiv_monitor.features.rows import Whole, wide

_WITH_SEGMENTS = ("cpu", "cuda")  # devices that have `segment_reduce`


# Of one call: ‖g_r‖ of all rows, in the units of the gradient that backward left, and ‖φ_r‖; None
# where a pass over the input would be expensive.
AllRows = tuple[Float[Tensor, " rows"], Whole | None]


# Paths of layers, their columns in the table of layers, and whether those of scales are among them.
Totals = tuple[Sequence[str], dict[str, Tensor], bool]


def sums(layers: Mapping[str, Sequence[AllRows]]) -> Iterator[Totals]:
    """Yield the sums over all rows of layers on one device, which all have scales or none has.

    Args:
        layers: the rows of every call, by path of the layer.
    """
    alike: dict[object, list[str]] = defaultdict(list)
    for path, calls in layers.items():
        alike[calls[0][0].device, any(whole is None for _, whole in calls)].append(path)
    for paths in alike.values():
        yield _sums(paths, [layers[path] for path in paths])


def _sums(paths: Sequence[str], layers: Sequence[Sequence[AllRows]]) -> Totals:
    calls = [call for of_layer in layers for call in of_layer]
    # ‖g_r‖ is 0 for rows without trained weights.
    trained = [g if w is None or w.trained is None else g * w.trained for g, w in calls]
    square = _end_to_end(trained).square_()
    counts = torch.tensor([sum(len(norms) for norms, _ in of_layer) for of_layer in layers])
    lengths = counts.to(square.device, non_blocking=True)
    active = square != 0
    count, total, squares = summed([active.to(square.dtype), square, square * square], lengths)
    concentration = squares / torch.where(total == 0, 1, total * total)
    found = {"active": count, "G_G": total, "concentration": concentration}
    wholes = [whole for _, whole in calls if whole is not None]
    if len(wholes) < len(calls):
        return paths, found, False
    bias = torch.tensor([x.bias_square for x in wholes], dtype=square.dtype)
    of_calls = bias.to(square.device, non_blocking=True).unbind()
    scale = _end_to_end([x.norm for x in wholes]).square_()
    pairs = zip(wholes, of_calls, strict=True)
    scale += torch.cat([square.expand(len(x.norm)) for x, square in pairs])
    own, masked = scale * square, torch.where(active, scale, 0)
    of_scales, own_G, own_own = summed([masked, own, scale * own], lengths)
    # A second pass over the rows, so that equal scales have a spread of exactly zero.
    means = torch.repeat_interleave(of_scales / count, lengths, output_size=len(scale))
    (off,) = summed([torch.where(active, scale - means, 0).square_()], lengths)
    found |= {"own_G": own_G, "own_own": own_own, "scale_sum": of_scales, "scale_off": off.sqrt()}
    found["scale_max"] = reduced("max", masked, lengths)
    return paths, found, True


def _end_to_end(parts: Sequence[Tensor]) -> Float[Tensor, " rows"]:
    """Return new memory with all parts."""
    return wide(torch.cat([part.flatten() for part in parts]))


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
