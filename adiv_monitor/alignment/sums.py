"""The sums of squares from which all measures of a layer are computed; they add up over ranks."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from adiv_monitor.alignment.layers import AlignedLayer
from adiv_monitor.alignment.passes import Seen
from adiv_monitor.alignment.ratio import (
    effective_rank,
    kappa,
    largest_singular,
    log_ratio,
    root_ratio,
)
from adiv_monitor.features.features import BlockFeatures
from adiv_monitor.features.rows import wide
from adiv_monitor.report import AlignmentReading

_TERMS = ("alpha", "omega", "u", "cumulative")  # dW z₀, W₀ dz, dW dz, W z
_ROUTED = "experts"  # a layer of this kind has its rows in another order in each pass


@torch.no_grad()
def sums_of(
    seen: Seen, z0: Tensor, before: Tensor, now: Tensor, *, spectral: bool
) -> Float[Tensor, "5 3"]:
    """Return the sums of one layer over a probe's rows, in float64 if the device supports it.

    The first line has the number of rows, the sum of the mean square of W z − W₀ z₀, and the bound
    of W₀ z₀. Each other line belongs to one product, such as dW z₀: the sum of its rows' mean
    squares, their bound (mean square of the weight times that of the inputs), and the bound by
    largest singular values, 0 unless it is requested. Bounds are by group of the weight, so that
    no ratio exceeds 1. A table, whose rows are looked up, has no bounds.

    Args:
        seen: the layer.
        z0: its inputs at the reference point.
        before: W₀, (groups or blocks, outputs, fan-in); of a table (1, rows, width).
        now: W.
        spectral: compute the last bounds.
    """
    with torch.autocast(now.device.type, enabled=False):
        W0, W, z, block = before, now, seen.rows, seen.block
        if seen.is_table:
            y0, y = (seen.features.by_weight(table[0]) for table in (W0, W))
            assert y0 is not None and y is not None
            sums = wide(y).new_zeros(5, 3)
            sums[0, 0], sums[0, 1] = len(y), _mean_square(y - y0).sum()
            sums[4, 0] = _mean_square(y).sum()
            return sums
        if seen.use.kind == _ROUTED:
            W0, z0 = W, z
        W0, W = W0.to(z.dtype), W.to(z.dtype)
        dW, dz = W - W0, z - z0
        terms = (dW, z0), (W0, dz), (dW, dz), (W, z)
        products = [_product(*term, block) for term in terms]
        scale = _of_rows(_mean_square(W0), z0, block)
        none = torch.zeros_like(scale)
        lines = [
            torch.stack(
                [
                    _mean_square(product).sum(),
                    _of_rows(_mean_square(weight), rows, block),
                    _of_rows(_largest_squares(weight), rows, block) if spectral else none,
                ]
            )
            for product, (weight, rows) in zip(products, terms, strict=True)
        ]
        change = _mean_square(sum(products[1:3], products[0])).sum()
        return torch.stack([torch.stack([none + len(z), change, scale]), *lines])


def reading_of(layer: AlignedLayer, sums: Sequence[Sequence[float]]) -> AlignmentReading:
    """Return the reading of a layer from `sums_of`.

    Tables have no alignment. Experts have no change of the output, since their rows are routed anew
    in each pass.
    """
    (rows, change, scale), *lines = sums
    fan_in, ratios = layer.fan_in, dict[str, float | None]()
    for name, (square, bound, spectral) in zip(_TERMS, lines, strict=True):
        ratio = None if layer.is_table else log_ratio(square, bound, fan_in, scale)
        ratios[name], ratios[f"kappa_{name}"] = ratio, kappa(ratio, fan_in)
        ratios[f"spectral_{name}"] = root_ratio(square, spectral, scale)
    return AlignmentReading(
        role=layer.role,
        kind=layer.kind,
        fan_in=fan_in,
        fan_out=layer.fan_out,
        predecessors=layer.predecessors,
        rows=round(rows),
        **ratios,
        effective_rank=effective_rank(ratios["cumulative"], fan_in),
        output_rms=(lines[3][0] / rows) ** 0.5 if rows else None,
        output_change_rms=(change / rows) ** 0.5 if rows and layer.kind != _ROUTED else None,
    )


def _product(weight: Tensor, rows: Tensor, block: Tensor | None) -> Tensor:
    """Return the product of weight and rows, (rows, groups, outputs)."""
    if block is not None:  # each row uses one, and rows are (rows, 1, n)
        return BlockFeatures(rows[:, 0], block, len(weight)).by_weight(weight)[:, None]
    return (rows.transpose(0, 1) @ weight.mT).transpose(0, 1)


def _largest_squares(weight: Tensor) -> Tensor:
    """Return, of every group, ‖W‖₂² n / m: outputs have at most so many times the inputs' square.

    Both squares are means, over n inputs and m outputs.
    """
    return largest_singular(wide(weight)).square() * weight.shape[2] / weight.shape[1]


def _of_rows(of_groups: Tensor, rows: Tensor, block: Tensor | None) -> Tensor:
    """Return the sum over rows, mean over groups, of the group's value times the mean square."""
    of_rows = _mean_square(rows.flatten(0, 1)).view(rows.shape[:2])
    if block is not None:
        of_none = of_groups.new_zeros(1)  # for rows that use no block, which are zero
        of_blocks: Tensor = torch.cat([of_groups, of_none])[block] @ of_rows[:, 0]
        return of_blocks
    total: Tensor = (of_rows @ of_groups).sum() / len(of_groups)
    return total


def _mean_square(each: Tensor) -> Tensor:
    """Return the mean square of every row, or of every matrix, in float64 if possible."""
    flat = each.flatten(1)
    norms = torch.linalg.vector_norm(flat, dim=1, dtype=wide(flat[:0]).dtype)
    squares: Tensor = norms.square() / flat.shape[1]
    return squares
