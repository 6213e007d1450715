"""Fixes of modules: their maps, normalisers, modes and weights, at the places that a fix names."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from adiv_layers import convert
from torch import Tensor, nn
from torch.nn import functional

from adiv_monitor.audit.experiments.beginning import OneSided, bare_weights
from adiv_monitor.audit.experiments.calls import changed, is_input, see_calls
from adiv_monitor.audit.experiments.changed_inputs import arguments
from adiv_monitor.audit.experiments.exchange import ORDERED
from adiv_monitor.audit.experiments.modules import BATCH_NORM, NORMS
from adiv_monitor.audit.training.setup import Fork
from adiv_monitor.audit.trials.fixes import Layers, fix, some
from adiv_monitor.capture.selection import named_modules
from adiv_monitor.diagnosis.record import Record

_AFFINE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _modules_at(model: nn.Module, layers: Layers) -> list[nn.Module]:
    """Return the modules at these paths, as reports name them; the model if there are no paths.

    Several functions of one module have names such as `path#2`, which is the module at `path`.

    Raises:
        DoesNotApply: There are paths, but no module at any of them.
    """
    every = dict(named_modules(model))
    paths = dict.fromkeys(layer.partition("#")[0] for layer in layers)
    found = [every[path] for path in paths if path in every] if layers else [model]
    return some(found, f"the model has no module at {', '.join(map(repr, paths))}")


def _in_front(model: nn.Module, layers: Layers) -> list[tuple[nn.Module, nn.Module]]:
    """Return modules at or inside these paths, each with the affine layer that it is or follows.

    A module without such layers, such as an activation function, stands for the layer before it, in
    the model's order. Without paths all affine layers are returned.

    Raises:
        DoesNotApply: There are none.
    """
    order = list(model.modules())
    # Attention uses the weight of its last layer without a call of that layer.
    read = {m.out_proj for m in order if isinstance(m, nn.MultiheadAttention)}
    affine: set[nn.Module] = {m for m in order if isinstance(m, _AFFINE) and m not in read}
    found: list[tuple[nn.Module, nn.Module]] = []
    for module in _modules_at(model, layers):
        inside = [m for m in module.modules() if m in affine]
        before = [m for m in order[: order.index(module)] if m in affine]
        found += [(m, m) for m in inside] or [(module, m) for m in before[-1:]]
    return list(dict.fromkeys(some(found, "there is no linear layer or convolution here")))


def _affine_at(model: nn.Module, layers: Layers) -> list[Any]:
    """Return the affine layers of `_in_front`, which raises DoesNotApply if there are none."""
    return list(dict.fromkeys(layer for _, layer in _in_front(model, layers)))


@fix("affine-like", rescales=True, to="affine-like")
@fix("norm-like", rescales=True, to="norm-like")
def _converted(
    fork: Fork, layers: Layers, record: Record | None, to: Literal["affine-like", "norm-like"]
) -> None:
    """Convert layers in place: (Wx + b)/√(‖x‖² + 1), or Wx/‖x‖ + b.

    The new layers hold the same parameters, so that the optimizer's state stays valid.
    """
    wanted = {id(module) for module in _affine_at(fork.model, layers)}
    report = convert(fork.model, to, lambda path, module: id(module) in wanted)
    some(report.swapped, "; ".join(dict.fromkeys(report.left.values())))


def _layer_norm(x: Tensor, axes: int) -> Tensor:
    """Return (x − mean)/std over a row's features; for convolutions, over a whole sample."""
    return functional.layer_norm(x, x.shape[-axes - 1 :])


def _batch_norm(x: Tensor, axes: int) -> Tensor:
    """Return (x − mean)/std of every feature, or channel, over the batch's rows, as in training.

    Raises:
        ValueError: There is only one row.
    """
    rows = x.reshape(-1, *x.shape[-axes - 1 :])
    return functional.batch_norm(rows, None, None, training=True).reshape(x.shape)


@fix("layer-norm", rescales=True, norm=_layer_norm)
@fix("batch-norm", rescales=True, norm=_batch_norm)
def _normalised(
    fork: Fork, layers: Layers, record: Record | None, norm: Callable[[Tensor, int], Tensor]
) -> None:
    """Normalise the inputs of these modules by a forward pre-hook, without parameters.

    A normaliser gets the number of axes of space: 0 for a linear layer.
    """

    def hook(axes: int, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (norm(args[0], axes), *args[1:])

    for module, layer in _in_front(fork.model, layers):
        axes = len(getattr(layer, "kernel_size", ()))
        module.register_forward_pre_hook(partial(hook, axes))


@fix("group-norm", rescales=True)
def _group_norm(fork: Fork, layers: Layers, record: Record | None) -> None:
    """Replace batch normalisations by GroupNorm of one group with the same parameters."""
    found = [(path, m) for path, m in fork.model.named_modules() if isinstance(m, BATCH_NORM)]
    for path, norm in some(found, "there is no batch normalisation"):
        group = nn.GroupNorm(1, norm.num_features, norm.eps, norm.affine)
        group.weight, group.bias = norm.weight, norm.bias
        fork.model.set_submodule(path, group)


@fix("train-mode")
def _train_mode(fork: Fork, layers: Layers, record: Record | None) -> None:
    still = [m for m in fork.model.modules() if isinstance(m, NORMS) and not m.training]
    some(still, "no normalisation is in evaluation mode")
    for module in fork.model.modules():  # a train() of the model's own may leave parts as they are
        module.training = True


@fix("batch-first", rescales=True)
def _batch_first(fork: Fork, layers: Layers, record: Record | None) -> None:
    found = [m for m in fork.model.modules() if isinstance(m, ORDERED) and not m.batch_first]
    for module in some(found, "no recurrent layer or attention lacks batch_first=True"):
        module.batch_first = True


@fix("centred-weights", rescales=True)
def _centred_weights(fork: Fork, layers: Layers, record: Record | None) -> None:
    """Draw Xavier's N(0, 2/(fan-in + fan-out)), which is symmetric in the two axes."""
    found = OneSided(fork)
    see_calls(fork, found.see)
    for weight in some(found.weights, "no weights lie on one side of zero").values():
        nn.init.xavier_normal_(weight)


@fix("reinitialise")
def _reinitialise(fork: Fork, layers: Layers, record: Record | None) -> None:
    """Draw weights from N(0, gain²/fan-in), biases as 0; reset other modules as torch does.

    Weights are those of affine layers, and parameters that no such layer holds, if they are named.

    The initialisation is that of He et al. 2015 and Glorot and Bengio 2010. The gain is √2, but 1
    if the model has saturating activations, and for the layer that is registered last.
    """
    saturating = any(isinstance(m, (nn.Tanh, nn.Sigmoid)) for m in fork.model.modules())
    bare = {name: rows for name, rows in bare_weights(fork).items() if name in layers}
    for rows in bare.values():
        nn.init.normal_(rows, std=(1 if saturating else 2) ** 0.5 * rows.shape[-1] ** -0.5)
    layers = [path for path in layers if path not in bare]
    named = _modules_at(fork.model, layers) if layers else []
    others = [m for m in named if hasattr(m, "reset_parameters") and not isinstance(m, _AFFINE)]
    for module in others:
        module.reset_parameters()  # type: ignore[operator]
    if (bare or others) and len(others) == len(named):
        return
    affine = [m for m in fork.model.modules() if isinstance(m, _AFFINE)]
    for module in _affine_at(fork.model, layers):
        linear = saturating or module is affine[-1]
        nn.init.kaiming_normal_(module.weight, nonlinearity="linear" if linear else "relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)


# Inputs

_CONSTANT = 1e-6  # a smaller standard deviation relative to the largest is rounding

Map = tuple[Tensor, Tensor]  # what is subtracted, and what the rest is divided by


def _standardised(features: Tensor) -> Map:
    std, mean = torch.std_mean(features, dim=0, correction=0)
    return mean, torch.where(std <= _CONSTANT * std.amax(), 1.0, std)


def _centred(features: Tensor) -> Map:
    return features.mean(0), features.new_ones(1)


def _scaled(features: Tensor) -> Map:
    rms = features.square().mean().sqrt()
    return features.new_zeros(1), torch.where(rms > 0, rms, 1.0)


@fix("standardise-inputs", rescales=True, map_of=_standardised)
@fix("centre-inputs", rescales=True, map_of=_centred)
@fix("scale-inputs", rescales=True, map_of=_scaled)
def _mapped(
    fork: Fork, layers: Layers, record: Record | None, map_of: Callable[[Tensor], Map]
) -> None:
    """Map the model's inputs by a forward pre-hook.

    The map of an input follows from its features over the different batches, one a column. The
    model itself does not run for that.
    """
    seen: dict[str, list[Tensor]] = {}
    for batch in {id(batch): batch for batch in fork.batches}.values():  # each once
        for name, x in arguments(fork, batch).items():
            if _is_mapped(name, x):
                seen.setdefault(name, []).append(x.detach())
    some(seen, "the model is called with no real numbers")
    maps = {}
    for name, tensors in seen.items():
        axis = feature_axis(tensors[0], fork.model)
        last = [x[..., None] if axis is None else x.movedim(axis, -1) for x in tensors]
        features = torch.cat([x.double().flatten(0, -2) for x in last])
        some(bool(features.isfinite().all()), "inputs are not finite")
        shape = [-1 if i == axis else 1 for i in range(tensors[0].dim())]
        maps[name] = [x.reshape(shape) for x in map_of(features)]

    def change(name: str, x: Any) -> Any:
        if name not in maps or not _is_mapped(name, x):
            return x
        less, over = maps[name]
        return ((x.double() - less) / over).to(x.dtype)

    fork.model.register_forward_pre_hook(partial(changed, change=change), with_kwargs=True)


def _is_mapped(name: str, x: Any) -> bool:
    """Return whether an argument is a floating-point input."""
    return is_input(name) and isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 0


def feature_axis(x: Tensor, model: nn.Module) -> int | None:
    """Return the axis of an input's features, or channels; None if each entry is a sample.

    It is the last of (samples, features) and (samples, places, features). It is the second for
    images, and before a one-dimensional convolution of as many channels. It is the last of an image
    if the second is longer than the last and the last has at most 4 entries, like colours.
    """
    if x.dim() < 3:
        return 1 if x.dim() == 2 else None
    if x.dim() == 3:
        channels = {m.in_channels for m in model.modules() if isinstance(m, nn.Conv1d)}
        return 1 if x.shape[1] in channels else 2
    return x.dim() - 1 if x.shape[1] > x.shape[-1] and x.shape[-1] <= 4 else 1
