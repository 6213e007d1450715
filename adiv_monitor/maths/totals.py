"""What all rows of a layer say together, where one pass gave every row's scale and ‖g_r‖².

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
        weight_square: ‖φ_W‖².
        bias_square: φ_b², or one number for all of them.
        square: ‖g_r‖², in the units of the gradient that backward left.
    """

    weight_square: Float[Tensor, " rows"]
    bias_square: Float[Tensor, " rows"] | float
    square: Float[Tensor, " rows"]


def sums(
    layers: Mapping[str, AllRows], generator: np.random.Generator, fail: Fail = raised
) -> dict[str, dict[str, Tensor]]:
    """By layer and name: sums over the active rows, and entries for quantiles.

    `active` rows, `G_G` = Σ ‖g_r‖², `own_G` = Σ s_r ‖g_r‖², `own_own` = Σ s_r² ‖g_r‖², `scale_sum`,
    `scale_deviation` = √(Σ (s_r − mean)²), `scale_max`, `weight_squares` = Σ ‖φ_W‖² over all rows,
    and `scale_entries`: the scales of at most 2,048 rows, chosen by chance; NaN for idle ones.
    Layers that fail are left out; `fail` gets path and exception.
    """

    def together(paths: Sequence[str]) -> dict[str, dict[str, Tensor]]:
        weight_square = torch.stack([layers[p].weight_square for p in paths])
        square = torch.stack([layers[p].square for p in paths])
        biases = [layers[p].bias_square for p in paths]
        several = [bias for bias in biases if isinstance(bias, Tensor)]
        bias_square = torch.stack(several) if several else biases[0]
        named = _of_stacked(weight_square, bias_square, square)
        entries = named.pop("active_scale")
        if entries.shape[1] > MOST_ENTRIES:
            some = generator.choice(entries.shape[1], MOST_ENTRIES, replace=False)
            entries = entries.index_select(1, to_device(some, entries.device))
        named["scale_entries"] = entries
        return {
            path: {name: values[i] for name, values in named.items()}
            for i, path in enumerate(paths)
        }

    return of_alike(_alike(layers), together, fail)


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
        kind = (square.shape, square.dtype, square.device, rows.weight_square.dtype, constant)
        kinds[kind].append(path)
    return list(kinds.values())
