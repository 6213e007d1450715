"""The sums of squares from which all measures of a layer are computed; they add up over ranks."""

from dataclasses import dataclass, fields

import torch
from jaxtyping import Float, Int
from torch import Tensor

from adiv_monitor.alignment.layers import AlignedLayer
from adiv_monitor.alignment.ratio import (
    effective_rank,
    kappa,
    largest_singular,
    log_ratio,
    root_ratio,
)
from adiv_monitor.features.features import BlockFeatures, Features
from adiv_monitor.report import AlignmentReading

ROUTED = "experts"  # a layer of this kind has its rows in another order in each pass


@dataclass(frozen=True)
class Sums:
    """Sums of one layer over a probe's rows; z₀, W₀ the reference, dz = z − z₀, dW = W − W₀.

    A numerator sums the mean square of the outputs, a bound the mean square of the weight times
    that of the inputs, a spectral bound the mean square that outputs have at most. All are by
    group of the weight, so that no ratio exceeds 1.
    """

    rows: float
    scale: float  # the denominator of W₀ z₀
    alpha: float  # dW z₀
    alpha_bound: float
    omega: float  # W₀ dz
    omega_bound: float
    u: float  # dW dz
    u_bound: float
    cumulative: float  # W z
    cumulative_bound: float
    change: float  # W z − W₀ z₀
    alpha_spectral: float  # the spectral bounds: 0 unless they are requested
    omega_spectral: float
    u_spectral: float
    cumulative_spectral: float

    def reading(self, layer: AlignedLayer) -> AlignmentReading:
        """Return the reading of a layer.

        Tables, whose rows are looked up, have no alignment. Experts have no change of the output,
        since their rows are routed anew in each pass.
        """
        fan_in = layer.fan_in
        base = 0 if layer.is_table else fan_in
        ratios = {
            name: log_ratio(getattr(self, name), getattr(self, f"{name}_bound"), base, self.scale)
            for name in _RATIOS
        }
        spectral = {
            f"spectral_{name}": root_ratio(
                getattr(self, name), getattr(self, f"{name}_spectral"), self.scale
            )
            for name in _RATIOS
        }
        return AlignmentReading(
            role=layer.role,
            kind=layer.kind,
            fan_in=fan_in,
            fan_out=layer.fan_out,
            predecessors=layer.predecessors,
            rows=round(self.rows),
            **ratios,
            **{f"kappa_{name}": kappa(ratio, fan_in) for name, ratio in ratios.items()},
            **spectral,
            effective_rank=effective_rank(ratios["cumulative"], fan_in),
            output_rms=_root_mean(self.cumulative, self.rows),
            output_change_rms=None if layer.kind == ROUTED else _root_mean(self.change, self.rows),
        )


_RATIOS = ("alpha", "omega", "u", "cumulative")
COUNT = len(fields(Sums))


def layer_sums(
    W0: Float[Tensor, "groups out n"],
    W: Float[Tensor, "groups out n"],
    z0: Float[Tensor, "rows groups n"],
    z: Float[Tensor, "rows groups n"],
    block: Int[Tensor, " rows"] | None = None,
    *,
    spectral: bool = False,
) -> Float[Tensor, " sums"]:
    """Return `Sums` of a layer that multiplies its rows, in float64 if the device supports it.

    Args:
        W0: the matrices of groups or blocks at the reference point.
        W: the present matrices.
        z0: the rows at the reference point; (rows, 1, n) with blocks.
        z: the present rows.
        block: index of the block that every row uses; None: every row uses all groups.
        spectral: compute the spectral bounds too.
    """
    W0, W = (weight.to(z.dtype) for weight in (W0, W))
    dW, dz = W - W0, z - z0
    terms = (dW, z0), (W0, dz), (dW, dz), (W, z)
    products = [_product(*term, block) for term in terms]
    change = sum(products[1:3], products[0])
    measured = [_of_rows(_mean_squares(W0), z0, block)]
    for product, (weight, rows) in zip(products, terms, strict=True):
        measured += [_mean_square(product).sum(), _of_rows(_mean_squares(weight), rows, block)]
    measured.append(_mean_square(change).sum())
    if spectral:
        of_weights = {id(weight): _largest_squares(weight) for weight, _ in terms}
        measured += [_of_rows(of_weights[id(weight)], rows, block) for weight, rows in terms]
    else:
        measured += [torch.zeros_like(measured[0])] * len(terms)
    rows = torch.tensor(float(len(z)), dtype=measured[0].dtype, device=z.device)
    return torch.stack([rows, *measured])


def table_sums(
    W0: Float[Tensor, "entries n"], W: Float[Tensor, "entries n"], features: Features
) -> Float[Tensor, " sums"]:
    """Return `Sums` of a table, with the sums of its outputs only."""
    before, now = features.by_weight(W0), features.by_weight(W)
    assert before is not None
    assert now is not None
    sums = _wide(now).new_zeros(COUNT)
    sums[0] = len(now)
    sums[8] = _wide(now).square().mean(1).sum()
    sums[10] = _wide(now - before).square().mean(1).sum()
    return sums


def _product(weight: Tensor, rows: Tensor, block: Tensor | None) -> Tensor:
    """Return the product of weight and rows, (rows, groups, outputs)."""
    if block is not None:
        return BlockFeatures(rows[:, 0], block, len(weight)).by_weight(weight)[:, None]
    if len(weight) == 1:
        return (rows[:, 0] @ weight[0].t())[:, None]
    return torch.einsum("rgn,gon->rgo", rows, weight)


def _mean_squares(weight: Tensor) -> Tensor:
    """Return the mean square of every group, (groups,)."""
    wide = torch.float32 if weight.device.type == "mps" else torch.float64
    norms = torch.linalg.vector_norm(weight, dim=(1, 2), dtype=wide)
    squares: Tensor = norms.square() / weight[0].numel()
    return squares


def _largest_squares(weight: Tensor) -> Tensor:
    """Return, of every group, ‖W‖₂² n / m: outputs have at most so many times the inputs' square.

    Both squares are means, over n inputs and m outputs.
    """
    exact = weight.cpu().double() if weight.device.type == "mps" else weight.double()
    squares = largest_singular(exact).square() * weight.shape[2] / weight.shape[1]
    return squares.to(weight.device, _wide(weight).dtype)


def _of_rows(of_groups: Tensor, rows: Tensor, block: Tensor | None) -> Tensor:
    """Return the sum over rows, mean over groups, of the group's value times the mean square."""
    of_rows = _wide(torch.linalg.vector_norm(rows, dim=2)).square() / rows.shape[2]
    if block is not None:
        of_none = of_groups.new_zeros(1)  # for rows that use no block, which are zero
        of_blocks: Tensor = torch.cat([of_groups, of_none])[block] @ of_rows[:, 0]
        return of_blocks
    total: Tensor = (of_rows @ of_groups).sum() / len(of_groups)
    return total


def _mean_square(product: Tensor) -> Tensor:
    """Return the mean square of every row."""
    flat = product.flatten(1)
    return _wide(torch.linalg.vector_norm(flat, dim=1)).square() / flat.shape[1]


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.device.type == "mps" else tensor.double()


def _root_mean(total: float, rows: float) -> float | None:
    return (total / rows) ** 0.5 if rows else None
