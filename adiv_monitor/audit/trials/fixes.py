"""Fixes: changes of a fork before its training, by name.

Those of the optimizer come first, then those of modules and inputs, and those of called functions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from adiv_layers import convert
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer

from adiv_monitor.audit.experiments.backward import cuts, undo
from adiv_monitor.audit.experiments.calls import Call, calls_of, change_calls, rate_of, with_rate
from adiv_monitor.audit.experiments.changed_inputs import change_inputs
from adiv_monitor.audit.experiments.data import features, inputs_of
from adiv_monitor.audit.experiments.loss_inputs import HIGH, activation, dropped
from adiv_monitor.audit.experiments.modules import maps_that_run
from adiv_monitor.audit.experiments.state import MAPS, bare_weights
from adiv_monitor.audit.training.batches import mapped
from adiv_monitor.audit.training.setup import Fork, seeded
from adiv_monitor.audit.training.train import held
from adiv_monitor.capture.selection import named_modules
from adiv_monitor.diagnosis.faults import rates
from adiv_monitor.diagnosis.record import Record

T = TypeVar("T")
Change = TypeVar("Change", bound=Callable[..., None])
Layers = Sequence[str]
Normaliser = Callable[[Tensor, int], Tensor]  # of rows, with the number of axes of space
Seen = Record | None  # what is known of the run that the fix is for


class DoesNotApply(ValueError):
    """Raised if a fix has nothing to change in a fork; the message says why."""


@dataclass(frozen=True)
class Fix:
    """A change of a fork: of its model, optimizer, batches, loss or clipping.

    Attributes:
        change: Function that changes a fork in place, from fork, paths of layers (empty: wherever
            it applies) and the record of the run that the fix is for (None: unknown).
        rescales: Whether the fix may need another learning rate, so that a fair trial uses several,
            as for the unchanged model.
    """

    change: Callable[[Fork, Layers, Seen], None]
    rescales: bool = False

    def apply(self, fork: Fork, layers: Layers = (), record: Seen = None) -> None:
        """Change a fork in place; random numbers follow from the fork's seed.

        Raises:
            DoesNotApply: There is nothing to change.
        """
        with seeded(fork.seed):
            self.change(fork, layers, record)


FIXES: dict[str, Fix] = {}  # by the name that rules use in `Advice.fix`


def fix(name: str, *, rescales: bool = False, **given: object) -> Callable[[Change], Change]:
    """Register the function below as the change of a fix, with these further arguments."""

    def register(change: Change) -> Change:
        FIXES[name] = Fix(partial(change, **given), rescales)
        return change

    return register


def some(found: T | None, otherwise: str) -> T:
    """Return what a fix found to change.

    Raises:
        DoesNotApply: It found nothing; `otherwise` says so.
    """
    if not found:
        raise DoesNotApply(otherwise)
    return found


# Optimizers

FAR_FACTORS = tuple(10.0**n for n in range(2, 10))  # for layers that hardly move


def rate_name(factor: float) -> str:
    """Return the name of the fix that multiplies the learning rate by this factor."""
    return f"rate*{factor:g}"


def scale_rate(optimizer: Optimizer, factor: float) -> None:
    """Multiply every learning rate by a factor.

    Raises:
        DoesNotApply: The optimizer has no learning rate.
    """
    for group in optimizer.param_groups:
        if not isinstance(group.get("lr"), (float, int, Tensor)):
            raise DoesNotApply(f"{type(optimizer).__name__} has no learning rate that is a number")
        group["lr"] = group["lr"] * factor


def _rate(fork: Fork, layers: Layers, record: Seen, factor: float) -> None:
    scale_rate(fork.optimizer, factor)


for _factor in (0.001, 0.01, 0.1, 0.3, 3.0, 10.0, *FAR_FACTORS):
    fix(rate_name(_factor), factor=_factor)(_rate)


@fix("rate-per-layer")
def _per_layer(fork: Fork, layers: Layers, record: Seen) -> None:
    """Scale the learning rates as `rates.rates_per_layer` recommends, in groups of their own."""
    wanted = {} if record is None else rates.rates_per_layer(record, layers)
    some(wanted, "no layer is known to move unlike the others")
    scale_rate(fork.optimizer, 1.0)  # there are rates
    factors: dict[nn.Parameter, float] = {}
    for path, module in named_modules(fork.model):
        factors |= dict.fromkeys(module.parameters(recurse=False), wanted.get(path, 1.0))
    fork.optimizer.param_groups[:] = [
        {**group, "params": [p], "lr": group["lr"] * factors.get(p, 1.0)}
        for group in fork.optimizer.param_groups
        for p in group["params"]
    ]


@fix("less-momentum", rescales=True)
def _less_momentum(fork: Fork, layers: Layers, record: Seen) -> None:
    """Lower the momentum to 0.9, or to half of a smaller value."""
    groups = fork.optimizer.param_groups
    found = [g for g in groups if g.get("momentum") or g.get("betas", (0,))[0]]
    for group in some(found, "there is no momentum"):
        if before := group.get("momentum"):
            group["momentum"] = rates.less_momentum(before)
        else:
            first, *others = group["betas"]
            group["betas"] = (rates.less_momentum(first), *others)


@fix("no-decay")
def _no_decay(fork: Fork, layers: Layers, record: Seen) -> None:
    decayed = [g for g in fork.optimizer.param_groups if g.get("weight_decay", 0.0) > 0]
    for group in some(decayed, "there is no weight decay"):
        group["weight_decay"] = 0.0


@fix("no-clip", clips=False)
@fix("clip", clips=True)
def _clip(fork: Fork, layers: Layers, record: Seen, clips: bool) -> None:
    """Clip at the 90th percentile of the observed norms (Google's tuning playbook), else at 1."""
    some((fork.clip_norm is None) is clips, f"gradients are {'not ' * (not clips)}clipped already")
    norm = 1.0 if record is None else rates.clip_norm(record)
    fork.clip_norm = norm if clips else None


@fix("adamw", rescales=True)
def _adamw(fork: Fork, layers: Layers, record: Seen) -> None:
    some(not isinstance(fork.optimizer, AdamW), "it is AdamW already")
    fork.optimizer = AdamW(held(fork.optimizer), lr=1e-3)


COARSE = (torch.bfloat16, torch.float16)


@fix("float32-weights", rescales=True)
def _float32(fork: Fork, layers: Layers, record: Seen) -> None:
    """Turn model and batches of 16 bits into float32."""

    def change(x: Tensor) -> Any:
        return x.float() if x.dtype in COARSE else x

    some(any(p.dtype in COARSE for p in held(fork.optimizer)), "no weights are of 16 bits")
    fork.model.float()
    fork.batches = [mapped(batch, change) for batch in fork.batches]


# Modules


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
    found: list[tuple[nn.Module, nn.Module]] = []
    for module in _modules_at(model, layers):
        inside = [m for m in module.modules() if isinstance(m, MAPS)]
        before = [m for m in order[: order.index(module)] if isinstance(m, MAPS)]
        found += [(m, m) for m in inside] or [(module, m) for m in before[-1:]]
    return list(dict.fromkeys(some(found, "there is no linear layer or convolution here")))


def _affine_at(model: nn.Module, layers: Layers) -> list[Any]:
    """Return the affine layers of `_in_front`, which raises DoesNotApply if there are none."""
    return list(dict.fromkeys(layer for _, layer in _in_front(model, layers)))


@fix("affine-like", rescales=True)
def _converted(fork: Fork, layers: Layers, record: Seen) -> None:
    """Convert layers in place: (Wx + b)/√(‖x‖² + 1).

    The new layers hold the same parameters, so that the optimizer's state stays valid.
    """
    wanted = {id(module) for module in _affine_at(fork.model, layers)}
    report = convert(fork.model, "affine-like", lambda path, module: id(module) in wanted)
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
def _normalised(fork: Fork, layers: Layers, record: Seen, norm: Normaliser) -> None:
    """Normalise the inputs of these modules by a forward pre-hook, without parameters.

    A normaliser gets the number of axes of space: 0 for a linear layer.
    """

    def hook(axes: int, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (norm(args[0], axes), *args[1:])

    for module, layer in _in_front(fork.model, layers):
        axes = len(getattr(layer, "kernel_size", ()))
        module.register_forward_pre_hook(partial(hook, axes))


@fix("reinitialise")
def _reinitialise(fork: Fork, layers: Layers, record: Seen) -> None:
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
    others = [m for m in named if hasattr(m, "reset_parameters") and not isinstance(m, MAPS)]
    for module in others:
        module.reset_parameters()  # type: ignore[operator]
    if (bare or others) and len(others) == len(named):
        return
    affine = [m for m in fork.model.modules() if isinstance(m, MAPS)]
    for module in _affine_at(fork.model, layers):
        linear = saturating or module is affine[-1]
        nn.init.kaiming_normal_(module.weight, nonlinearity="linear" if linear else "relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)


# Inputs

_CONSTANT = 1e-6  # a smaller standard deviation relative to the largest is rounding


@fix("standardise-inputs", rescales=True)
def _standardised(fork: Fork, layers: Layers, record: Seen) -> None:
    """Standardise each feature of the model's inputs by a forward pre-hook.

    Features are the channels, axis 1, of four or more axes, and the last axis otherwise; a vector
    is of one feature. Mean and standard deviation are those over the different batches. The model
    itself does not run for that.
    """
    seen = inputs_of(fork, {id(batch): batch for batch in fork.batches}.values())  # each once
    maps = {name: _scale(parts) for name, parts in seen.items() if parts[0].is_floating_point()}
    some(maps, "the model is called with no real numbers")

    def change(name: str, x: Tensor) -> Tensor:
        if name not in maps or not x.is_floating_point():
            return x
        mean, std = (y.to(x.device) for y in maps[name])
        return ((x.double() - mean) / std).to(x.dtype)

    change_inputs(fork.model, change)


def _scale(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of an input's features, in a shape that fits the input."""
    rows, ndim = features(parts), parts[0].ndim
    some(bool(rows.isfinite().all()), "inputs are not finite")
    std, mean = torch.std_mean(rows, dim=0, correction=0)
    std = std.where(std > _CONSTANT * std.amax(), 1.0)
    shape = (-1, *(1 for _ in range(ndim - 2))) if ndim > 3 else (-1,)
    return mean.reshape(shape), std.reshape(shape)


# Called functions

Of = Callable[[Call], object]


def replace_calls(fork: Fork, is_met: Of, instead: Of) -> None:
    """Replace the results of calls of a kind from now on.

    Raises:
        DoesNotApply: Nothing of that kind is called.
    """
    some(calls_of(fork, is_met), "nothing of that kind is called")
    change_calls(fork, lambda call: instead(call) if is_met(call) else NotImplemented)


@fix("plain-outputs", rescales=True, find=lambda fork: [*filter(None, [activation(fork)])])
@fix("outputs-without-dropout", find=dropped)
def _left_out(fork: Fork, layers: Layers, record: Seen, find: Callable[[Fork], list[Call]]) -> None:
    """Leave out functions that act on the outputs, in front of the loss."""
    found = some(find(fork), "no such function stands in front of the loss")
    left = {(call.number, call.name) for call in found}
    replace_calls(
        fork, lambda call: (call.number, call.name) in left, lambda call: call.argument(0, "input")
    )


@fix("relu-between", rescales=True)
def _relu_between(fork: Fork, layers: Layers, record: Seen) -> None:
    """Put a ReLU behind each linear or convolutional layer that runs, but the last."""
    paths = some(maps_that_run(fork)[:-1], "fewer than two layers run")
    fork.change_outputs(paths, functional.relu)


@fix("dropout-0.1")
def _less_dropout(fork: Fork, layers: Layers, record: Seen) -> None:
    replace_calls(fork, lambda call: rate_of(call) > HIGH, lambda call: with_rate(call, 0.1))


@fix("uncut", rescales=True)
def _uncut(fork: Fork, layers: Layers, record: Seen) -> None:
    undo(fork, some(cuts(fork), "nothing is cut in front of parameters"))


@fix("logits-times-10", rescales=True)
def _logits_times_10(fork: Fork, layers: Layers, record: Seen) -> None:
    def instead(call: Call) -> object:
        given = {"input": call.argument(0, "input"), **call.kwargs}
        return call.function(10.0 * given.pop("input"), *call.args[1:], **given)

    replace_calls(fork, lambda call: call.name == "cross_entropy", instead)


@fix("positions")
def _positions(fork: Fork, layers: Layers, record: Seen) -> None:
    """Add a random vector to each place's vector that the first layer gives, of their own rms."""

    def instead(call: Call) -> object:
        made = call.function(*call.args, **call.kwargs)
        drawn = torch.randn(made.shape[1:], generator=torch.Generator().manual_seed(fork.seed))
        return made + made.detach().square().mean().sqrt() * drawn.to(made)

    kinds = ("embedding", "linear", "conv2d")
    found = calls_of(fork, lambda call: call.name in kinds and call.result.ndim in (3, 4))
    first = some(found, "no layer gives each place a vector")[0].number
    replace_calls(fork, lambda call: call.number == first, instead)
