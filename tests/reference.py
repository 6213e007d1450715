"""Slow reference for all measures: take the step, and recompute every layer from its saved input.

It uses no code of the monitor. The scale of a row is the squared norm of the gradient of one of
its outputs with respect to the layer's own parameters, by autograd. e is z before minus z after a
plain gradient step with η = 1, d the same for the optimizer's step.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call

# Measures that have errors where rows are sampled, also where one pass tells all scales.
SAMPLED = {
    *("update_cosine", "gradient_cosine", "interference_ratio", "row_cosine_mean"),
    *("row_cosine_p05", "row_cosine_p50", "row_cosine_p95", "harmed_fraction"),
    *("bias_share", "update_ratio", "common_share", "activation_rms"),
    *("activation_max", "activation_kurtosis", "zero_share", "silent_share"),
    *("scale_p05", "scale_p50", "scale_p95"),
}


@dataclass
class LayerTruth:
    """All rows of one layer at one step, concatenated over its calls: (rows, n_total)."""

    G: Tensor
    z: Tensor
    e: Tensor
    d: Tensor
    by_weight: Tensor
    by_bias: Tensor
    scale: Tensor  # (rows, groups)
    features: Tensor  # (rows, ·): φ_W, of all groups
    gamma: Tensor
    u: Tensor
    theta: Tensor
    outputs: Callable[..., Tensor]  # of values of the layer's own parameters
    values: list[Tensor]


@dataclass
class _Saved:
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)


def rows_of(module: nn.Module, tensor: Tensor) -> Tensor:
    """Reshape a tensor of the shape of the module's output to (rows, n_total)."""
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.BatchNorm2d | nn.GroupNorm):
        tensor = tensor.movedim(1, -1)
    return tensor.reshape(-1, tensor.shape[-1])


def groups_of(module: nn.Module, n_total: int) -> int:
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return module.groups
    gains = nn.BatchNorm2d | nn.GroupNorm | nn.LayerNorm | nn.RMSNorm
    return n_total if isinstance(module, gains) else 1


def take_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, backward: Callable[[nn.Module], None]
) -> dict[str, LayerTruth]:
    """Take one step, with gradients from `backward`; return the truth of every layer used in it."""
    saved: dict[str, _Saved] = defaultdict(_Saved)
    layers = {
        path: m
        for path, m in model.named_modules()
        if any(p.requires_grad for p in m._parameters.values() if p is not None)
    }

    def save(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
            if output.requires_grad:
                saved[path].inputs.append(args[0].detach().clone())
                seen = torch.zeros_like(output)
                padding = getattr(module, "padding_idx", None)
                saved[path].outputs.append(seen)
                # A padding token has no gradient: its rows are zero-gradient rows.
                asks = 1.0 if padding is None else (args[0] != padding)[..., None]
                output.register_hook(lambda gradient: seen.add_(gradient * asks))

        return hook

    handles = [m.register_forward_hook(save(path)) for path, m in layers.items()]
    optimizer.zero_grad()
    backward(model)
    for handle in handles:
        handle.remove()
    before = {path: copy.deepcopy(module) for path, module in layers.items()}
    gradient = {path: [_grad(p) for p in m.parameters(recurse=False)] for path, m in layers.items()}
    optimizer.step()
    return {
        path: _truth(before[path], layers[path], gradient[path], saved[path])
        for path in layers
        if saved[path].inputs
    }


def _grad(p: Tensor) -> Tensor:
    return torch.zeros_like(p) if p.grad is None else p.grad.clone()


def _truth(old: nn.Module, new: nn.Module, gradient: Sequence[Tensor], saved: _Saved) -> LayerTruth:
    def outputs(parameters: Mapping[str, Tensor]) -> Tensor:
        calls = [functional_call(old, dict(parameters), (x,)) for x in saved.inputs]
        return torch.cat([rows_of(old, z) for z in calls])

    old_p = {name: p.detach() for name, p in old._parameters.items() if p is not None}
    new_p = {name: p.detach() for name, p in new._parameters.items() if p is not None}
    G = torch.cat([rows_of(old, g) for g in saved.outputs])
    return function_truth(
        *(outputs, old_p, new_p, dict(zip(old_p, gradient, strict=True)), G),
        weight="weight",
        bias="bias" if "bias" in old_p else None,
        groups=groups_of(old, G.shape[1]),
    )


def _squares(values: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return ‖∂v/∂Θ‖² for every entry v of a matrix."""
    squares = [g.square().sum(1) for g in _each(values.flatten(), parameters)]
    return torch.stack(squares).sum(0).reshape(values.shape)


def _each(values: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return ∂v/∂Θ of every entry v of a vector, for each parameter a matrix of one row per v."""
    one_hot = torch.eye(len(values), dtype=values.dtype)
    gradients = torch.autograd.grad(
        values, parameters, one_hot, retain_graph=True, is_grads_batched=True
    )
    return [g.reshape(len(values), -1) for g in gradients]


def function_truth(
    outputs: Callable[[Mapping[str, Tensor]], Tensor],
    old: Mapping[str, Tensor],
    new: Mapping[str, Tensor],
    gradient: Mapping[str, Tensor],
    G: Tensor,
    *,
    weight: str | None,
    bias: str | None,
    groups: int,
) -> LayerTruth:
    """Return the truth of one use of parameters by a function, which is called with other values.

    Args:
        outputs: (parameters) → z's rows, (rows, n_total).
        old: all parameters before the step, detached; those of other uses keep these values.
        new: all parameters after the step.
        gradient: their gradients.
        G: ∂L/∂z's rows.
        weight: name of the weight; None if the use has none.
        bias: name of the bias; None if the use has none.
        groups: number of groups of z's channels with a scale each.
    """
    names = [name for name in (weight, bias) if name is not None]

    def changed(values: Mapping[str, Tensor], *only: str | None) -> Tensor:
        with torch.no_grad():
            return outputs({**old, **{name: values[name] for name in only if name is not None}})

    z = changed(old)
    leaves = {name: old[name].clone().requires_grad_() for name in names}
    first = outputs({**old, **leaves})
    first = first[:, :: first.shape[1] // groups]
    lead = leaves[names[0]]
    return LayerTruth(
        G=G,
        z=z,
        e=z - changed({name: old[name] - gradient[name] for name in names}, *names),
        d=z - changed(new, *names),
        by_weight=changed(new, weight) - z,
        by_bias=changed(new, bias) - z,
        scale=_squares(first, list(leaves.values())),
        features=_each(first.sum(1), [lead])[0],
        gamma=torch.cat([gradient[name].flatten() for name in names]),
        u=torch.cat([(new[name] - old[name]).flatten() for name in names]),
        theta=torch.cat([old[name].flatten() for name in names]),
        outputs=lambda *values: outputs({**old, **dict(zip(names, values, strict=True))}),
        values=[old[name] for name in names],
    )


def attainable_cosine(truth: LayerTruth) -> float:
    """Return the ceiling: cosine of the nonzero rows of G and their projection onto ∂z/∂Θ."""
    active = truth.G.norm(dim=1) > 0
    jacobians = torch.autograd.functional.jacobian(
        lambda *parts: truth.outputs(*parts)[active].flatten(), tuple(truth.values), vectorize=True
    )
    columns = torch.cat([j.reshape(len(j), -1) for j in jacobians], dim=1)
    G = truth.G[active].flatten()
    return float((columns @ torch.linalg.pinv(columns) @ G).norm() / G.norm())


def measures(truth: LayerTruth, seen: Sequence[int] | None = None) -> dict[str, float]:
    """Return every measure over all rows with a gradient, computed from its definition.

    Args:
        truth: the layer.
        seen: indices of the rows to use; None for all.
    """
    chosen = range(len(truth.G)) if seen is None else seen
    idle = [r for r in chosen if truth.G[r].norm() == 0]
    rows = [r for r in chosen if truth.G[r].norm() > 0]
    G, e, d = (t[rows].double() for t in (truth.G, truth.e, truth.d))
    scale = truth.scale[rows]
    own = (scale[:, :, None] * G.reshape(*scale.shape, -1)).reshape(G.shape)
    row_cosines = [c for r in range(len(G)) if not math.isnan(c := _cos(d[r], G[r]))]
    a, b = truth.by_weight[rows].norm(), truth.by_bias[rows].norm()
    features = truth.features[rows]
    whole = {
        "update_cosine": _cos(d, G),
        "gradient_cosine": _cos(e, G),
        "diagonal_cosine": _cos(own, G),
        "effective_lr": (d * G).sum() / G.square().sum(),
        "scale_mean": scale.mean(),
        "scale_cv": scale.std(correction=0) / scale.mean(),
        "scale_max": scale.max() if len(rows) else math.nan,
        "common_share": features.mean(0).square().sum() / features.square().sum(1).mean(),
        "interference_ratio": (e - own).norm() / own.norm(),
        "row_cosine_mean": _mean(row_cosines),
        "harmed_fraction": _mean([float(d[r] @ G[r] < 0) for r in range(len(G))]),
        "idle_share": len(idle) / max(len(chosen), 1),
        "bias_share": b / (a + b),
        "update_ratio": d.norm() / truth.z[rows].norm(),
        "descent": -(truth.gamma @ truth.u),
        "parameter_cosine": _cos(truth.u, -truth.gamma),
        "projection_cosine": _cos(truth.u, truth.u),
        "applied_cosine": _cos(truth.u, -truth.gamma),
        "activation_rms": truth.z[rows].square().mean().sqrt(),
        "activation_gradient_rms": G.square().mean().sqrt() if len(rows) else math.nan,
        "activation_max": truth.z[rows].abs().max() if len(rows) else math.nan,
        "activation_kurtosis": truth.z[rows].pow(4).mean() / truth.z[rows].square().mean() ** 2,
        "zero_share": (G == 0).double().mean(),
        "silent_share": (G == 0).all(0).double().mean() if len(rows) else math.nan,
        "gradient_norm": truth.gamma.norm(),
        "update_norm": truth.u.norm(),
        "weight_norm": truth.theta.norm(),
        "weight_update_ratio": truth.u.norm() / truth.theta.norm(),
        "update_rms": truth.u.square().mean().sqrt(),  # at a learning rate of 1
        "unchanged_share": (truth.u[truth.gamma != 0] == 0).double().mean(),
    }
    for name, values in (
        ("scale", scale.flatten()),
        ("row_cosine", torch.tensor(row_cosines, dtype=torch.float64)),
    ):
        for level in (0.05, 0.5, 0.95):
            quantile = values.quantile(level) if len(values) else math.nan
            whole[f"{name}_p{int(100 * level):02}"] = quantile
    return {name: float(value) for name, value in whole.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _cos(a: Tensor, b: Tensor) -> float:
    norms = float(a.norm()) * float(b.norm())
    return float((a * b).sum()) / norms if norms else math.nan
