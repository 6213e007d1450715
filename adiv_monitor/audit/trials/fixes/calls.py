"""Fixes that replace functions which a pass calls: activations, attention, reshapes, the loss."""

import math
from collections.abc import Callable, Collection
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from adiv_monitor.audit.experiments import loss_inputs
from adiv_monitor.audit.experiments.activations import maps_that_run
from adiv_monitor.audit.experiments.axes import uses
from adiv_monitor.audit.experiments.backward import cuts, undo
from adiv_monitor.audit.experiments.calls import (
    Call,
    calls_of,
    change_calls,
    rate_of,
    see_calls,
    with_rate,
)
from adiv_monitor.audit.experiments.exchange import mask_of
from adiv_monitor.audit.experiments.modules import HIGH
from adiv_monitor.audit.training.setup import Fork
from adiv_monitor.audit.trials.fixes import Layers, fix, some
from adiv_monitor.diagnosis.record import Record

_MAKE_VECTORS = ("embedding", "linear", "conv2d")


def replace_calls(
    fork: Fork, is_met: Callable[[Call], object], instead: Callable[[Call], object]
) -> None:
    """Replace the results of calls of a kind from now on.

    Raises:
        DoesNotApply: Nothing of that kind is called.
    """
    some(calls_of(fork, is_met), "nothing of that kind is called")
    change_calls(fork, lambda call: instead(call) if is_met(call) else NotImplemented)


def replace_those(
    fork: Fork, calls: Collection[Call], instead: Callable[[Call], object], otherwise: str
) -> None:
    """Replace the results of these calls of a pass, known by their numbers, from now on.

    Raises:
        DoesNotApply: There are none; `otherwise` says so.
    """
    names = {call.number: call.name for call in some(calls, otherwise)}

    def change(call: Call) -> object:
        return instead(call) if names.get(call.number) == call.name else NotImplemented

    change_calls(fork, change)


@fix("leaky-relu")
def _leaky_relu(fork: Fork, layers: Layers, record: Record | None) -> None:
    """Replace ReLUs by leaky ReLUs of slope 0.1, in the whole model."""

    def instead(call: Call) -> Tensor:
        # The only boolean argument of a ReLU is `inplace`.
        given = call.kwargs.get("inplace", any(x is True for x in call.args))
        in_place = call.function.__name__.endswith("_") or given
        return functional.leaky_relu(call.argument(0, "input"), 0.1, in_place)

    replace_calls(fork, lambda call: call.name == "relu", instead)


def _taken_for_logits(fork: Fork) -> list[Call]:
    return [call for call in (loss_inputs.activation(fork),) if call is not None]


def _normalised(fork: Fork) -> list[Call]:
    return loss_inputs.Normalised(fork).calls(fork)


@fix("plain-outputs", rescales=True, find=_taken_for_logits)
@fix("outputs-without-dropout", find=loss_inputs.dropped)
@fix("outputs-without-norm", rescales=True, find=_normalised)
def _left_out(
    fork: Fork, layers: Layers, record: Record | None, find: Callable[[Fork], list[Call]]
) -> None:
    """Leave out functions that act on the outputs, in front of the loss."""
    nothing = "no such function stands in front of the loss"
    loss_inputs.leave_out(fork, some(find(fork), nothing))


@fix("relu-between", rescales=True)
def _relu_between(fork: Fork, layers: Layers, record: Record | None) -> None:
    """Put a ReLU behind each linear or convolutional layer that runs, but the last."""
    for path in some(maps_that_run(fork)[:-1], "fewer than two layers run"):
        fork.model.get_submodule(path).register_forward_hook(
            lambda module, args, output: functional.relu(output)
        )


@fix("dropout-0.1")
def _less_dropout(fork: Fork, layers: Layers, record: Record | None) -> None:
    replace_calls(fork, lambda call: rate_of(call) > HIGH, lambda call: with_rate(call, 0.1))


@fix("unbounded-outputs", rescales=True, names=loss_inputs.BOUNDED, sigmoid=False)
@fix("sigmoids", rescales=True, names=("softmax",), sigmoid=True)
def _within_range(
    fork: Fork, layers: Layers, record: Record | None, names: Collection[str], sigmoid: bool
) -> None:
    """Replace functions on the outputs that can't reach the targets by a sigmoid, or by nothing."""

    def instead(call: Call) -> object:
        x = call.argument(0, "input")
        return x.sigmoid() if sigmoid else x

    look = loss_inputs.OutOfRange(fork)
    with torch.enable_grad():
        loss = see_calls(fork, look.see)
    found = [call for call, _ in look.found(loss) if call.name in names]
    replace_those(fork, found, instead, "no such function acts on the outputs")


@fix("uncut", rescales=True)
def _uncut(fork: Fork, layers: Layers, record: Record | None) -> None:
    undo(fork, some(cuts(fork), "nothing is cut in front of parameters"))


@fix("logits-times-10", rescales=True)
def _logits_times_10(fork: Fork, layers: Layers, record: Record | None) -> None:
    def instead(call: Call) -> object:
        given = {"input": call.argument(0, "input"), **call.kwargs}
        return call.function(10.0 * given.pop("input"), *call.args[1:], **given)

    replace_calls(fork, lambda call: call.name == "cross_entropy", instead)


def _sinusoids(length: int, width: int) -> Tensor:
    """Return sines and cosines of place / 10000^(2i/width), (length, width).

    Source: Vaswani et al. 2017, section 3.5.
    """
    rates = torch.exp(-math.log(1e4) * torch.arange(0, width, 2) / width)
    angles = torch.arange(length)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :width]


@fix("positions", rescales=True)
def _positions(fork: Fork, layers: Layers, record: Record | None) -> None:
    """Add sinusoids to the vectors of places that the first layer gives, with their own rms."""

    def instead(call: Call) -> object:
        made = call.function(*call.args, **call.kwargs)
        rows = made if made.ndim == 3 else made.flatten(2).mT  # of images, (B, C, H, W)
        added = _sinusoids(rows.shape[1], rows.shape[2]).to(made)
        added = rows.detach().square().mean().sqrt() * math.sqrt(2) * added
        return made + (added if made.ndim == 3 else added.T.reshape(made.shape[1:]))

    found = calls_of(fork, lambda call: call.name in _MAKE_VECTORS and call.result.ndim in (3, 4))
    replace_those(fork, found[:1], instead, "no layer gives each place a vector")


@fix("inverted-masks", rescales=True)
def _inverted_masks(fork: Fork, layers: Layers, record: Record | None) -> None:
    def instead(call: Call) -> object:
        def flipped(x: object) -> object:
            return ~x if x is mask_of(call) and isinstance(x, Tensor) else x

        others = {name: flipped(x) for name, x in call.kwargs.items()}
        return call.function(*map(flipped, call.args), **others)

    replace_calls(fork, lambda call: mask_of(call) is not None, instead)


@fix("summed-axis", rescales=True)
def _summed_axis(fork: Fork, layers: Layers, record: Record | None) -> None:
    """Take the softmaxes over the axis along which their products sum, if one suits all of them."""
    found = [use.softmax for use in uses(fork) if not use.fits]
    nothing = "all weights sum to 1 along the axis that is summed over"

    def along(axis: int) -> Fork:
        other = replace(fork)
        replace_those(other, found, lambda call: call.argument(0, "input").softmax(axis), nothing)
        return other

    most = max((call.argument(0, "input").ndim for call in found), default=2)
    axes = range(-1, -most, -1)  # never the first axis, that of the samples
    fitting = [axis for axis in axes if all(use.fits for use in uses(along(axis)))]
    fork.loss = along(some(fitting, "no axis of these softmaxes is summed over")[0]).loss
