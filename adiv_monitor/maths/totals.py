"""What all rows of a layer say together, where one pass gave every row's ‖g_r‖², or its scale too.

Layers with equally many rows are taken together: many small operations cost more than a large one.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from adiv_monitor.features.rows import to_device
from adiv_monitor.kernels.choice import attempt
from adiv_monitor.maths.alike import Fail, of_alike, raised

MOST_ENTRIES = 2_048


@dataclass(frozen=True)
class AllRows:
    """Of every row of a layer's step, over all its calls.

    Attributes:
        weight_square: ‖φ_W‖²; None where no pass over the input is cheap.
        bias_square: φ_b², or one number for all of them.
        square: ‖g_r‖², in the units of the gradient that backward left.
        own: where every row has several scales, Σ_i s_ri g_ri² and Σ_i s_ri² g_ri²; None: unknown.
    """

    weight_square: Float[Tensor, " rows"] | None
    bias_square: Float[Tensor, " rows"] | float
    square: Float[Tensor, " rows"]
    own: Float[Tensor, "2 rows"] | None = None


def sums(
    layers: Mapping[str, AllRows], generator: np.random.Generator, fail: Fail = raised
) -> dict[str, dict[str, Tensor]]:
    """By layer and name: sums over the active rows, and entries for quantiles.

    `active` rows, `G_G` = Σ ‖g_r‖², `own_G` = Σ s_r ‖g_r‖², `own_own` = Σ s_r² ‖g_r‖², `scale_sum`,
    `scale_deviation` = √(Σ (s_r − mean)²), `scale_max`, `weight_squares` = Σ ‖φ_W‖² over all rows,
    and `scale_entries`: the scales of at most 2,048 rows, chosen by chance; NaN for idle ones.
    Without the rows' scales: `active`, `G_G` and `G_concentration` = Σ ‖g_r‖⁴ / (Σ ‖g_r‖²)², and
    `own_G`, `own_own` where `own` is known.
    Layers that fail are left out; `fail` gets path and exception.
    """

    def together(paths: Sequence[str]) -> dict[str, dict[str, Tensor]]:
        square = torch.stack([layers[p].square for p in paths])
        scales = [layers[p].weight_square for p in paths]
        known = [of_rows for of_rows in scales if of_rows is not None]
        if not known:
            own = [of_rows.own for p in paths if (of_rows := layers[p]).own is not None]
            return _by_layer(paths, _of_gradients(square) | (_of_own(own) if own else {}))
        weight_square = torch.stack(known)
        biases = [layers[p].bias_square for p in paths]
        several = [bias for bias in biases if isinstance(bias, Tensor)]
        bias_square = torch.stack(several) if several else biases[0]
        named = _of_stacked(weight_square, bias_square, square)
        entries = named.pop("active_scale")
        if entries.shape[1] > MOST_ENTRIES:
            some = generator.choice(entries.shape[1], MOST_ENTRIES, replace=False)
            entries = entries.index_select(1, to_device(some, entries.device))
        named["scale_entries"] = entries
        return _by_layer(paths, named)

    return of_alike(_alike(layers), together, fail)


def _by_layer(paths: Sequence[str], named: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    return {
        path: {name: values[i] for name, values in named.items()} for i, path in enumerate(paths)
    }


def _of_gradients(square: Float[Tensor, "layers rows"]) -> dict[str, Tensor]:
    return {
        "active": (square != 0).sum(-1, keepdim=True),
        "G_G": square.sum(-1, keepdim=True),
        "G_concentration": concentration(square),
    }


def concentration(square: Float[Tensor, "*layers rows"]) -> Float[Tensor, "*layers 1"]:
    """Σ ‖g_r‖⁴ / (Σ ‖g_r‖²)²: 1 where one row has all of the gradient; 0 where there is none."""
    total = square.sum(-1, keepdim=True)
    return (square / torch.where(total == 0, 1, total)).square().sum(-1, keepdim=True)


def _of_own(own: Sequence[Float[Tensor, "2 rows"]]) -> dict[str, Tensor]:
    sums = torch.stack([of_layer.sum(-1, keepdim=True) for of_layer in own])
    return {"own_G": sums[:, 0], "own_own": sums[:, 1]}


def _of_stacked(
    weight_square: Float[Tensor, "layers rows"],
    bias_square: Float[Tensor, "layers rows"] | float,
    square: Float[Tensor, "layers rows"],
) -> dict[str, Tensor]:
    several = bias_square if isinstance(bias_square, Tensor) else None
    number = float(bias_square) if several is None else 0.0
    fused: dict[str, Tensor] | None = attempt("totals", weight_square, square, several, bias=number)
    if fused is not None:
        return fused
    scale = weight_square + bias_square
    active = square != 0
    own = scale * square
    masked = torch.where(active, scale, 0)
    count, total = active.sum(-1, keepdim=True), masked.sum(-1, keepdim=True)
    # A pass of its own: scales that are all the same must read a spread of zero.
    deviation = torch.where(active, scale - total / count, 0)
    return {
        "active": count,
        "G_G": square.sum(-1, keepdim=True),
        "own_G": own.sum(-1, keepdim=True),
        "own_own": (scale * own).sum(-1, keepdim=True),
        "scale_sum": total,
        "scale_deviation": torch.linalg.vector_norm(deviation, dim=-1, keepdim=True),
        "scale_max": masked.amax(-1, keepdim=True),
        "weight_squares": weight_square.sum(-1, keepdim=True),
        "active_scale": torch.where(active, scale, torch.nan),
    }


def _alike(layers: Mapping[str, AllRows]) -> Sequence[list[str]]:
    kinds: dict[object, list[str]] = defaultdict(list)
    for path, rows in layers.items():
        bias = rows.bias_square
        constant = None if isinstance(bias, Tensor) else bias
        square = rows.square
        of_scales = None if rows.weight_square is None else rows.weight_square.dtype
        kind = (square.shape, square.dtype, square.device, of_scales, constant, rows.own is None)
        kinds[kind].append(path)
    return list(kinds.values())
