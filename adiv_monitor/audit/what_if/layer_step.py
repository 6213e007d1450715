"""How a plain gradient step moves the rows of one layer, as it is or with a change.

A layer is linear in its parameters, z = Φ Θᵀ, whatever its map and inputs are. So one backward pass
of the incoming gradients G gives the gradient γ = GᵀΦ, and the derivative of the forward pass along
γ is e = Φ γᵀ, the movement of the rows by a step of learning rate 1 (spec, section 1). Both are
over all rows, and no map's formula is implemented twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from adiv_monitor.features.features import DenseFeatures
from adiv_monitor.features.functions.conv import geometry_of, patchwise
from adiv_monitor.features.functions.linear import affine
from adiv_monitor.features.registry import Rule, find_rule, use_of
from adiv_monitor.features.rows import Rows
from adiv_monitor.features.uses import Use
from adiv_monitor.maths import measures
from adiv_monitor.maths.estimates import PerLayer, Sample, Sum
from adiv_monitor.rerun.derivatives import Parameters, jvp


@dataclass(frozen=True)
class Calls:
    """All calls of a linear layer or convolution in one step.

    Attributes:
        inputs: The input of each call.
        gradients: ∂L/∂z for the output of each call.
    """

    inputs: Sequence[Tensor]
    gradients: Sequence[Tensor]


@dataclass(frozen=True)
class Step:
    """The measures of a plain gradient step of learning rate 1.

    Attributes:
        gradient_cosine: The monitor's measure of that name.
        effective_lr: The monitor's measure of that name.
        scale_mean: The monitor's measure of that name.
        scale_cv: The monitor's measure of that name.
    """

    gradient_cosine: float
    effective_lr: float
    scale_mean: float
    scale_cv: float


class Centred(nn.Module):
    """z = W(x − x̄) + b: a layer with the mean subtracted from its features.

    Args:
        layer: A linear layer or a convolution.
        mean: x̄, the mean patch of every group.
    """

    def __init__(self, layer: nn.Module, mean: Float[Tensor, "groups n_feat"]) -> None:
        super().__init__()
        self.layer = layer
        self.mean = mean

    @property
    def weight(self) -> Tensor:
        """The weight of the layer."""
        weight = self.layer.weight
        assert isinstance(weight, Tensor)
        return weight

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output minus W x̄."""
        groups, n_feat = self.mean.shape
        blocks = self.weight.reshape(groups, -1, n_feat)
        offset = torch.einsum("gnp,gp->gn", blocks, self.mean).flatten()
        z: Tensor = self.layer(x) - offset.reshape(-1, *(1,) * (self.weight.dim() - 2))
        return z


def step_of(layer: nn.Module, calls: Calls) -> Step:
    """Compute the step of the layer for given inputs and gradients.

    Args:
        layer: Linear in its parameters; those that require no gradient are not stepped.
        calls: The calls of the layer.
    """
    moved = _moved(layer, calls)
    inner = layer.layer if isinstance(layer, Centred) else layer
    uses = [use_of_layer(inner, x) for x in calls.inputs]
    G, e = (
        torch.cat([use.layout(x).flatten(0, -2) for use, x in zip(uses, several, strict=True)])
        for several in (calls.gradients, moved)
    )
    active = (G != 0).any(1)
    scale = torch.cat([_scales(layer, *call) for call in zip(uses, *_pairs(calls), strict=True)])
    return _measured(*(t.double() for t in (G[active], e[active], scale[active])))


def use_of_layer(layer: nn.Module, x: Tensor) -> Use:
    """Return a layer's call in the form that the monitor uses."""
    rule = find_rule(layer)
    if isinstance(rule, Rule):
        return use_of(rule, layer, (x,), {})
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, Tensor) and (bias is None or isinstance(bias, Tensor))
    if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return patchwise(geometry_of(layer), x, weight, bias)
    return affine(x, weight, bias)


def mean_feature(layer: nn.Module, calls: Calls) -> Float[Tensor, "groups n_feat"]:
    """Return x̄: a linear layer's mean input, or the mean patch of each group of a convolution."""
    groups = layer.groups if isinstance(layer, nn.modules.conv._ConvNd) else 1
    total, count = calls.inputs[0].new_zeros(()), 0
    for x, gradient in zip(*_pairs(calls), strict=True):
        use = use_of_layer(layer, x)
        rows, whole = _all_rows(use, gradient), use.whole()
        if whole is not None and whole.weight_sum is not None:
            total = total + whole.weight_sum.reshape(groups, -1)
        else:
            total = total + _dense(use, rows).sum(0)
        count += rows.total
    return total / count


def _pairs(calls: Calls) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    return calls.inputs, calls.gradients


def _moved(layer: nn.Module, calls: Calls) -> list[Tensor]:
    """Return e for every call."""

    def run(parameters: Parameters) -> list[Tensor]:
        return [functional_call(layer, dict(parameters), (x,)) for x in calls.inputs]

    named = dict(layer.named_parameters())
    held = {name: p.detach().requires_grad_(p.requires_grad) for name, p in named.items()}
    trained = {name: p for name, p in held.items() if p.requires_grad}
    with torch.enable_grad():
        outputs = run(held)
    gamma = torch.autograd.grad(outputs, list(trained.values()), list(calls.gradients))
    return jvp(run, held, dict(zip(trained, gamma, strict=True)))[1]


def _scales(
    layer: nn.Module, use: Use, x: Tensor, gradient: Tensor
) -> Float[Tensor, "rows groups"]:
    """Return ‖φ_r‖² of the features of the trained parameters."""
    assert use.weight is not None
    trained = {
        "weight": use.weight.requires_grad,
        "bias": use.bias is not None and use.bias.requires_grad,
    }
    if isinstance(layer, Centred) and trained["weight"]:
        square = _centred_squares(layer, use, _all_rows(use, gradient), x)
        return square + float(trained["bias"])
    whole = use.whole()
    if whole is None:
        scale = use.features(_all_rows(use, gradient)).restrict(**trained).scale()
        assert scale is not None
        return scale
    kept = whole.restrict(**trained)
    square = torch.as_tensor(0.0 if kept.weight_square is None else kept.weight_square)
    return (square + kept.bias_square).reshape(-1, 1)


def _centred_squares(
    layer: Centred, use: Use, rows: Rows, x: Tensor
) -> Float[Tensor, "rows groups"]:
    """Return ‖x‖² − 2 x·x̄ + ‖x̄‖² of every row and group, in float64 since most of it cancels."""
    mean = layer.mean.double()
    whole = use_of_layer(layer.layer, x.double()).whole()
    if whole is None or whole.weight_square is None:
        return (_dense(use, rows).double() - mean).square().sum(-1)
    kernel = mean.reshape(1, *layer.weight.shape[1:])
    as_weights = {"weight": kernel, "bias": kernel.new_zeros(1)}
    names = dict(layer.layer.named_parameters())
    with torch.no_grad():
        along = functional_call(
            layer.layer, {name: as_weights[name] for name in names}, (x.double(),)
        )
    along = use.layout(along).reshape(-1)
    square = whole.weight_square - 2 * along + mean.square().sum()
    return square.clamp(min=0)[:, None]


def _all_rows(use: Use, gradient: Tensor) -> Rows:
    return Rows(tuple(use.layout(gradient).shape[:-1]), None, gradient.device)


def _dense(use: Use, rows: Rows) -> Float[Tensor, "rows groups n_feat"]:
    features = use.features(rows)
    assert isinstance(features, DenseFeatures) and features.phi is not None
    return features.phi


def _measured(G: Tensor, e: Tensor, scale: Tensor) -> Step:
    """Return the measures of the active rows, those with a gradient."""
    rows = len(G)
    sample = Sample(np.array([float(rows)]), np.ones((1, rows), dtype=bool))

    def summed(a: Tensor, b: Tensor) -> Sum:
        return Sum(np.array([float((a * b).sum())]), np.zeros((1, rows)))

    e_G, G_G = summed(e, G), summed(G, G)
    count, total = _one(scale.numel()), _one(scale.sum())
    spread = _one((scale - scale.mean()).square().sum())
    return Step(
        gradient_cosine=float(measures.gradient_cosine(e_G, summed(e, e), G_G, sample).value[0]),
        effective_lr=float(measures.effective_lr(e_G, G_G, sample).value[0]),
        scale_mean=float(scale.mean()),
        scale_cv=float(measures.scale_cv(spread, total, count)[0]),
    )


def _one(value: Tensor | float) -> PerLayer:
    return np.array([float(value)])
