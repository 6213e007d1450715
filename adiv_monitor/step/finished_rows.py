"""The products of the sampled rows' vectors after a step, for layers of the same shapes at once."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from adiv_monitor.features.rows import Index, to_device
from adiv_monitor.maths import dots
from adiv_monitor.maths.alike import Fail, of_alike
from adiv_monitor.maths.records import replaced, split
from adiv_monitor.maths.sums import Blocks, Common, LayerSums, Vector, column_of, pairs_of
from adiv_monitor.step.layer_in_progress import LayerInProgress

# The most entries of a vector of several layers on a GPU: their copies take memory.
_TOGETHER = 2**20


def finished(
    layers: Mapping[str, LayerInProgress], fail: Fail, *, is_alone: bool
) -> dict[str, LayerSums[Tensor]]:
    """Return the sums of layers by path, with the products of each row's vectors and the scales.

    Args:
        layers: the layers by path.
        fail: called with path and exception of layers that fail, which are left out.
        is_alone: there is one rank; else its sum of features is needed too.
    """

    def together(paths: Sequence[str]) -> dict[str, LayerSums[Tensor]]:
        found = _finished([layers[path] for path in paths], is_alone=is_alone)
        return dict(zip(paths, found, strict=True))

    return of_alike(_alike(layers), together, fail)


def _alike(layers: Mapping[str, LayerInProgress]) -> list[list[str]]:
    """Return the paths of layers whose vectors can be stacked."""
    kinds: dict[object, list[str]] = defaultdict(list)
    for path, x in layers.items():
        parts = x.scale, x.factor, x.entries, *(map(_row, x.d) if x.d else ())
        shapes = [None if part is None else part.shape for part in parts]
        kinds[(x.G.shape, x.G.dtype, x.G.device, x.d is None, *shapes)].append(path)
    found = []
    for paths in kinds.values():
        G = layers[paths[0]].G
        most = max(1, (dots.STACKED if G.is_cpu else _TOGETHER) // max(1, G.numel()))
        found += [paths[i : i + most] for i in range(0, len(paths), most)]
    return found


def _finished(layers: Sequence[LayerInProgress], *, is_alone: bool) -> list[LayerSums[Tensor]]:
    """Return the sums of layers of the same shapes."""
    scale = _known([x.scale for x in layers])
    vectors = _vectors(layers, scale)
    named = tuple([vector for vector in Vector if vector in vectors])
    products = dots.of_rows({vector: vectors[vector] for vector in named}, pairs_of(named))
    scales: Sequence[Tensor | None] = [None] * len(layers)
    blocks: Sequence[Blocks[Tensor] | None] = [None] * len(layers)
    if scale is not None and scale.shape[2] == 1:
        scales = scale[..., 0].unbind()
    elif scale is not None:
        blocks = _blocks(scale, [x.entries for x in layers])
    square = column_of(pairs_of(named), Vector.G, Vector.G)
    return [
        replaced(
            x.sums,
            vectors=named,
            products=of_rows,
            scale=own,
            blocks=several,
            common=_common(x, of_rows[:, square].sign(), is_alone) if x.asks_common else None,
            asked_common=x.asks_common,
        )
        for x, of_rows, own, several in zip(layers, products.unbind(), scales, blocks, strict=True)
    ]


def _vectors(
    layers: Sequence[LayerInProgress], scale: Tensor | None
) -> dict[Vector, Float[Tensor, "layers rows n"]]:
    """Return the vectors of the rows of layers, whose scales are these."""
    G, e, z = (_stacked(each) for each in zip(*[(x.G, x.e, x.z) for x in layers], strict=True))
    if (factor := _known([x.factor for x in layers])) is not None:
        G = G * factor.to(G)[:, None, None]
    vectors = {Vector.G: G, Vector.E: e, Vector.Z: z}
    if scale is not None and scale.shape[2] == 1:
        vectors[Vector.REST] = torch.addcmul(e, scale, G, value=-1)
    elif scale is not None:
        blocks = G.view(*scale.shape, G.shape[2] // scale.shape[2])
        own = vectors[Vector.OWN] = (scale[..., None] * blocks).flatten(2)
        vectors[Vector.REST] = e - own
    moves = [x.d for x in layers if x.d is not None]
    if moves:
        by_weight = _known([of_weight for of_weight, _ in moves])
        by_bias = _known([_row(of_bias) for _, of_bias in moves])
        if by_weight is None or by_bias is None:
            lone = by_bias if by_weight is None else by_weight
            assert lone is not None
            vectors[Vector.D] = lone.expand_as(G)
        else:
            vectors[Vector.D] = by_weight + by_bias
            vectors[Vector.BIAS] = by_bias.expand_as(G)
    return vectors


def _blocks(
    scale: Float[Tensor, "layers rows groups"], entries: Sequence[Index | None]
) -> list[Blocks[Tensor]]:
    """Return the sums over each row's scales; see `Blocks`."""
    pivot, groups, each = scale[:, :1, :1], scale.shape[2], scale.flatten(1)
    shifted = scale - pivot
    chosen = [places for places in entries if places is not None]
    if chosen:
        each = each.gather(1, to_device(np.stack(chosen), each.device))
    stacked = Blocks(
        groups,
        pivot,
        sums=shifted.sum(2),
        norms=torch.linalg.vector_norm(shifted, dim=2),
        largest=scale.amax(2),
        entries=each,
    )
    found = split(stacked, len(scale), torch.unbind)
    return [
        of if places is None else replaced(of, entry_rows=torch.from_numpy(places // groups))
        for of, places in zip(found, entries, strict=True)
    ]


def _common(x: LayerInProgress, active: Tensor, is_alone: bool) -> Common[Tensor] | None:
    """Return the sums for `common_share`: how alike the features of the active rows are."""
    assert x.features is not None
    found = x.features.common(active)
    return found and Common(*found, None if is_alone else x.features.weight_sum(active))


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)) if tensors[1:] else tensors[0][None]


def _known(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """Return the tensors of all layers, stacked; None if they have none."""
    known = [tensor for tensor in tensors if tensor is not None]
    return _stacked(known) if known else None


def _row(part: Tensor | None) -> Tensor | None:
    """Return the one row that all rows repeat, if so."""
    return part if part is None or part.stride(0) else part[:1]
