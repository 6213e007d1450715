"""Sums over all rows of a layer, from a pass that gave every row's ‖g_r‖², and perhaps its scale.

Layers with equally many rows are stacked: many small operations cost more than one large one.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from adiv_monitor.features.rows import to_device
from adiv_monitor.maths.alike import Fail, of_alike, raised
from adiv_monitor.maths.records import replaced, split
from adiv_monitor.maths.sums import ScaleTotals, T, Totals

MOST_ENTRIES = 2_048


@dataclass(frozen=True)
class AllRows:
    """Numbers of every row of a layer in a step, over all its calls.

    Attributes:
        weight_square: ‖φ_W‖²; None where a pass over the input would be expensive.
        bias_square: φ_b², or one number for all rows.
        square: ‖g_r‖², in the units of the gradient that backward left.
        own: where every row has several scales, Σ_i s_ri g_ri² and Σ_i s_ri² g_ri²; None if
            unknown.
        weight_sum: Σ φ_W, or its norm; None if unknown.
    """

    weight_square: Float[Tensor, " rows"] | None
    bias_square: Float[Tensor, " rows"] | float
    square: Float[Tensor, " rows"]
    own: Float[Tensor, "2 rows"] | None = None
    weight_sum: Float[Tensor, "*features"] | None = None


def joined(calls: Sequence[AllRows]) -> AllRows:
    """Return the rows of several calls of one layer, with what is known of every call."""
    if not calls[1:]:
        return calls[0]
    filled = [rows for rows in calls if rows.square.shape[0]] or calls[:1]
    square = torch.cat([rows.square for rows in filled])
    weights = [rows.weight_square for rows in filled if rows.weight_square is not None]
    if len(weights) < len(filled):
        own = [rows.own for rows in filled if rows.own is not None]
        return AllRows(None, 0.0, square, torch.cat(own, 1) if len(own) == len(filled) else None)
    biases = [rows.bias_square for rows in filled if isinstance(rows.bias_square, Tensor)]
    totals = [rows.weight_sum for rows in filled if rows.weight_sum is not None]
    return AllRows(
        torch.cat(weights),
        torch.cat(biases) if biases else filled[0].bias_square,
        square,
        weight_sum=torch.stack(totals).sum(0) if len(totals) == len(filled) else None,
    )


def sums(
    layers: Mapping[str, AllRows],
    generator: np.random.Generator,
    fail: Fail = raised,
    *,
    across: bool = False,
) -> dict[tuple[str, ...], Totals[Tensor]]:
    """Return the stacked totals of layers by their paths; `by_layer` splits them.

    Of many rows the scales of 2,048 random ones are kept.

    Args:
        layers: the rows by path of the layer.
        generator: random generator that chooses these rows.
        fail: called with path and exception of layers that fail, which are left out.
        across: other ranks have rows too, so `weight_sum` is summed before its norm is taken.
    """
    weights = {p: x.weight_sum for p, x in layers.items() if x.weight_sum is not None}
    if weights and not across:
        norms = torch._foreach_norm(list(weights.values()))
        of_norms = zip(weights, norms, strict=True)
        layers = {**layers, **{p: replaced(layers[p], weight_sum=norm) for p, norm in of_norms}}

    def together(paths: Sequence[str]) -> dict[str, tuple[tuple[str, ...], Totals[Tensor]]]:
        stacked = _of_alike([layers[path] for path in paths], generator)
        return {paths[0]: (tuple(paths), stacked)}

    return dict(of_alike(_alike(layers), together, fail).values())


def by_layer(groups: Mapping[tuple[str, ...], Totals[T]]) -> dict[str, Totals[T]]:
    """Return the totals by path of layers whose totals are stacked."""
    return {
        path: of
        for paths, stacked in groups.items()
        for path, of in zip(paths, split(stacked, len(paths), list), strict=True)
    }


def _of_alike(layers: Sequence[AllRows], generator: np.random.Generator) -> Totals[Tensor]:
    """Return the stacked totals of layers of the same kind."""
    found = _of_squares(layers, generator)
    weights = [rows.weight_sum for rows in layers if rows.weight_sum is not None]
    if not weights:
        return found
    return replaced(found, weight_sum=torch.stack(weights).reshape(len(layers), -1))


def _of_squares(layers: Sequence[AllRows], generator: np.random.Generator) -> Totals[Tensor]:
    square = torch.stack([rows.square for rows in layers])
    known = [rows.weight_square for rows in layers if rows.weight_square is not None]
    if not known:
        return _of_gradients(square, [rows.own for rows in layers if rows.own is not None])
    several = [rows.bias_square for rows in layers if isinstance(rows.bias_square, Tensor)]
    bias_square = torch.stack(several) if several else layers[0].bias_square
    found = _of_stacked(torch.stack(known), bias_square, square)
    assert found.scales is not None
    entries = found.scales.entries
    if entries.shape[1] > MOST_ENTRIES:
        some = generator.choice(entries.shape[1], MOST_ENTRIES, replace=False)
        entries = entries.index_select(1, to_device(some, entries.device))
    return replaced(found, scales=replaced(found.scales, entries=entries))


def _of_gradients(
    square: Float[Tensor, "layers rows"], own: Sequence[Float[Tensor, "2 rows"]]
) -> Totals[Tensor]:
    sums = torch.stack([of_layer.sum(-1, keepdim=True) for of_layer in own]) if own else None
    return Totals(
        active=(square != 0).sum(-1, keepdim=True),
        G_G=square.sum(-1, keepdim=True),
        concentration=concentration(square),
        own_G=None if sums is None else sums[:, 0],
        own_own=None if sums is None else sums[:, 1],
    )


def concentration(square: Float[Tensor, "*layers rows"]) -> Float[Tensor, "*layers 1"]:
    """Σ ‖g_r‖⁴ / (Σ ‖g_r‖²)²: 1 if one row has all of the gradient; 0 if there is no gradient."""
    total = square.sum(-1, keepdim=True)
    return (square / torch.where(total == 0, 1, total)).square().sum(-1, keepdim=True)


def _of_stacked(
    weight_square: Float[Tensor, "layers rows"],
    bias_square: Float[Tensor, "layers rows"] | float,
    square: Float[Tensor, "layers rows"],
) -> Totals[Tensor]:
    scale = weight_square + bias_square
    active = square != 0
    own = scale * square
    masked = torch.where(active, scale, 0)
    count, total = active.sum(-1, keepdim=True), masked.sum(-1, keepdim=True)
    # A second pass over the rows, so that equal scales have a spread of exactly zero.
    off = torch.where(active, scale - total / count, 0)
    return Totals(
        active=count,
        G_G=square.sum(-1, keepdim=True),
        own_G=own.sum(-1, keepdim=True),
        own_own=(scale * own).sum(-1, keepdim=True),
        scales=ScaleTotals(
            sum=total,
            deviation=torch.linalg.vector_norm(off, dim=-1, keepdim=True),
            largest=masked.amax(-1, keepdim=True),
            entries=torch.where(active, scale, torch.nan),
        ),
        weight_squares=weight_square.sum(-1, keepdim=True),
    )


def _alike(layers: Mapping[str, AllRows]) -> Sequence[list[str]]:
    kinds: dict[object, list[str]] = defaultdict(list)
    for path, rows in layers.items():
        bias = rows.bias_square
        constant = None if isinstance(bias, Tensor) else bias
        square = rows.square
        of_scales = None if rows.weight_square is None else rows.weight_square.dtype
        weights = None if rows.weight_sum is None else rows.weight_sum.shape
        kind = (
            square.shape,
            square.dtype,
            square.device,
            of_scales,
            constant,
            rows.own is None,
            weights,
        )
        kinds[kind].append(path)
    return list(kinds.values())
