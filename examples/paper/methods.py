"""The arms of the comparison: what each does to the input of an affine map.

First columns, statistics over the rows of a batch: subtracted by the centred arms, subtracted and
divided by in BatchNorm. Then rows, one formula for all: with d = x − m·mean(x),

    x̂ = d / s,  s² = max(p·‖d‖² + q, floor),  z = W·x̂ + b, or W·x̂ + b/s for affine-like maps.

Isotropic tanh has x̂ = tanh(‖d‖)·d/‖d‖ (eqn 29 of the paper), which is d/s of norm-like times a
factor that, like that of affine-like, is small for short rows only.

Gradient-only arms leave the map as it is, and change what its parameters receive: `Directions`.

All without parameters, as in the paper. The tensors have a leading dimension of networks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Method(NamedTuple):
    """An arm: settings of the formulas above, and of training.

    Attributes:
        columns: "", "batchnorm" or "centred".
        less_mean: whether m is 1, or 0.
        square: p; divided by the width if `by_width`.
        by_width: RMSNorm and LayerNorm.
        constant: q.
        floor: least s².
        isotropic: x̂ is multiplied by tanh(‖d‖).
        scaled_bias: affine-like: the bias is divided too.
        constant_scale: a network's input, and nothing else, over its root mean square length.
        rate: what multiplies the learning rate.
        gradient: what parameters receive in place of their gradient, one of `Directions`.
    """

    columns: str = ""
    less_mean: bool = False
    square: float = 0.0
    by_width: bool = False
    constant: float = 1.0
    floor: float = 0.0
    isotropic: bool = False
    scaled_bias: bool = False
    constant_scale: bool = False
    rate: float = 1.0
    gradient: str = ""


_NORM_LIKE = Method(square=1.0, constant=0.0, floor=1e-24)
_AFFINE_LIKE = Method(square=1.0, scaled_bias=True)
_RMS_EPS = torch.finfo(torch.float32).eps  # torch.nn.RMSNorm's default for float32
METHODS = {
    "standard": Method(),
    "batchnorm": Method("batchnorm"),
    "layernorm": Method(less_mean=True, square=1.0, by_width=True, constant=1e-5),
    "rmsnorm": Method(square=1.0, by_width=True, constant=_RMS_EPS),
    "norm-like": _NORM_LIKE,
    "norm-like-half": _NORM_LIKE._replace(rate=0.5),
    "affine-like": _AFFINE_LIKE,
    "isotropic-tanh": _NORM_LIKE._replace(isotropic=True),
    "constant-scale": Method(constant_scale=True),
    "centred": Method("centred"),
    "centred-affine-like": _AFFINE_LIKE._replace(columns="centred"),
    "rate-by-layer": Method(gradient="by-layer"),
    "gradient-proportional": Method(gradient="proportional"),
    "gradient-disproportional": Method(gradient="disproportional"),
    "gradient-batch": Method(gradient="batch"),
}


class Rows:
    """The formula for rows, each network with constants of its own.

    Args:
        methods: of the networks.
        width: of the rows.
        like: a tensor of the dtype and device to compute in.
        typical: s of the networks with a constant scale, where the rows are a network's input.
    """

    def __init__(
        self, methods: Sequence[Method], width: int, like: Tensor, typical: float = 1.0
    ) -> None:
        def per_network(values: list[float]) -> Tensor:
            return like.new_tensor(values).view(-1, 1, 1)

        self.less_mean = per_network([m.less_mean for m in methods])
        self.square = per_network([m.square / (width if m.by_width else 1) for m in methods])
        constants = [typical**2 if m.constant_scale else m.constant for m in methods]
        self.constant = per_network(constants)
        self.floor = per_network([m.floor for m in methods])
        self.isotropic = per_network([m.isotropic for m in methods]).bool()
        self.scaled_bias = per_network([m.scaled_bias for m in methods]).bool()

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x̂ of x (networks, rows, width), and what multiplies the bias, (networks, rows, 1)."""
        d = x - self.less_mean * x.mean(-1, keepdim=True)
        factor, of_bias = self.factors(d.square().sum(-1, keepdim=True))
        return d * factor, of_bias

    def factors(self, squares: Tensor) -> tuple[Tensor, Tensor]:
        """1/s and what multiplies the bias, of ‖d‖², all (networks, rows, 1)."""
        factor = torch.maximum(self.square * squares + self.constant, self.floor).rsqrt()
        of_bias = torch.where(self.scaled_bias, factor, 1.0)
        # ‖d‖ = ‖d‖²/s of norm-like, so that the gradient at d = 0 is 0, and not NaN.
        return factor * torch.where(self.isotropic, torch.tanh(squares * factor), 1.0), of_bias


class Directions:
    """What the gradients G of a map's rows become before they reach its parameters.

    The parameters receive AᵀX and the sums of B's columns in place of GᵀX and those of G; the map,
    and the gradient of its input, are as they were. With φ = (x, 1):

        by-layer           A = B = G / mean over rows of ‖φ‖², a learning rate for the layer
        proportional       A = B = G / ‖φ_r‖² by row (eqn 20 of the paper)
        disproportional    A = G / (2‖x_r‖²), B = G/2 (eqn 21)
        batch              A = B = (ΦΦᵀ + λI)⁻¹ G, λ = 10⁻³ of the mean of ‖φ‖²

    With all but the first, a step moves an output by its own gradient, once; with the last it
    moves by nothing else, as far as the map can.

    Args:
        methods: of the networks.
        like: a tensor of the dtype and device to compute in.
    """

    DAMPING = 1e-3  # of `adiv_layers.GradientOnlyLinear`

    def __init__(self, methods: Sequence[Method], like: Tensor) -> None:
        def are(kind: str) -> Tensor:
            of_kind = [method.gradient == kind for method in methods]
            return torch.tensor(of_kind, device=like.device).view(-1, 1, 1)

        self.changed = torch.tensor([bool(m.gradient) for m in methods], device=like.device)
        self.any = any(method.gradient for method in methods)
        self.by_layer, self.proportional = are("by-layer"), are("proportional")
        self.disproportional = are("disproportional")
        self.batch = [i for i, method in enumerate(methods) if method.gradient == "batch"]

    def __call__(self, g: Tensor, squares: Tensor, gram: Tensor) -> tuple[Tensor, Tensor]:
        """A and B, each (networks, rows, outputs).

        Args:
            g: G, (networks, rows, outputs).
            squares: ‖x_r‖², (networks, rows, 1).
            gram: XXᵀ of the networks of the batch form, (so many, rows, rows).
        """
        lengths = squares + 1
        factor = torch.where(self.by_layer, 1 / lengths.mean(-2, keepdim=True), 1.0)
        factor = torch.where(self.proportional, 1 / lengths, factor)
        of_weight = torch.where(self.disproportional, 0.5 / squares, factor) * g
        of_bias = torch.where(self.disproportional, 0.5, factor) * g
        if self.batch:
            damping = self.DAMPING * lengths[self.batch].mean(-2, keepdim=True)
            eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
            factored = torch.linalg.cholesky(gram + 1 + damping * eye)
            of_weight[self.batch] = torch.cholesky_solve(g[self.batch], factored)
            of_bias[self.batch] = of_weight[self.batch]
        return of_weight, of_bias


class Columns:
    """Statistics over the rows of a batch, for networks that are alike in this.

    "batchnorm" is `nn.BatchNorm1d(affine=False)`. "centred" subtracts a running mean, which counts
    as a constant in the backward pass: the mean over all batches at first, later one that forgets
    a hundredth with every batch.

    Args:
        kind: "batchnorm" or "centred".
        networks: how many.
        width: of the rows.
        like: a tensor of the dtype and device to compute in.
    """

    MOMENTUM = 0.1  # of torch's batch normalisation
    EPS = 1e-5
    FORGETTING = 0.01

    def __init__(self, kind: str, networks: int, width: int, like: Tensor) -> None:
        self.kind = kind
        self.mean = like.new_zeros(networks, 1, width)
        self.variance = like.new_ones(networks, 1, width)

    def train(self, x: Tensor, step: int) -> Tensor:
        """Treat the rows of x (networks, rows, width), and see their statistics.

        Args:
            x: the batch.
            step: number of this step, from 1.
        """
        if self.kind == "centred":
            mean = x.detach().mean(-2, keepdim=True)
            self.mean.lerp_(mean, max(1 / step, self.FORGETTING))
            return x - self.mean
        rows = x.shape[-2]
        mean, d, variance = _deviation(x)
        self.mean.lerp_(mean.detach(), self.MOMENTUM)
        self.variance.lerp_(variance.detach() * (rows / max(rows - 1, 1)), self.MOMENTUM)
        return d * (variance + self.EPS).rsqrt()

    def evaluate(self, x: Tensor, group: int | None = None) -> Tensor:
        """Treat rows by the statistics of training.

        Args:
            x: (networks, rows, width).
            group: batch normalisation takes the statistics of every so many rows instead.
        """
        if self.kind == "centred":
            return x - self.mean
        if group is None:
            return (x - self.mean) * (self.variance + self.EPS).rsqrt()
        normalised = []
        for rows in torch.split(x, group, -2):
            _, d, variance = _deviation(rows)
            normalised.append(d * (variance + self.EPS).rsqrt())
        return torch.cat(normalised, -2)

    def state(self) -> list[Tensor]:
        """The running statistics."""
        return [self.mean, self.variance]


def _deviation(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean over rows, what is left, and its mean square (`torch.var` is slow along columns)."""
    mean = x.mean(-2, keepdim=True)
    d = x - mean
    return mean, d, d.square().mean(-2, keepdim=True)
