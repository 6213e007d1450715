"""Fixes that replace functions which a pass calls: activations, attention, reshapes, the loss."""

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

Of = Callable[[Call], object]
_NOT_CALLED = "nothing of that kind is called"
_MAKE_VECTORS = ("embedding", "linear", "conv2d")


def replace_calls(fork: Fork, is_met: Of, instead: Of, otherwise: str = _NOT_CALLED) -> None:
    """Replace the results of calls of a kind from now on.

    Raises:
        DoesNotApply: Nothing of that kind is called; `otherwise` says so.
    """
    some(calls_of(fork, is_met), otherwise)
    change_calls(fork, lambda call: instead(call) if is_met(call) else NotImplemented)


def among(calls: Collection[Call]) -> Of:
    """Return the condition that a call is one of these of another pass, by number and name."""
    known = {(call.number, call.name) for call in calls}
    return lambda call: (call.number, call.name) in known


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
    return [*filter(None, [loss_inputs.activation(fork)])]


@fix("plain-outputs", rescales=True, find=_taken_for_logits)
@fix("outputs-without-dropout", find=loss_inputs.dropped)
@fix("outputs-without-norm", rescales=True, find=lambda of: loss_inputs.Normalised(of).calls(of))
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
    replace_calls(fork, among(found), instead, "no such function acts on the outputs")


@fix("uncut", rescales=True)
def _uncut(fork: Fork, layers: Layers, record: Record | None) -> None:
    undo(fork, some(cuts(fork), "nothing is cut in front of parameters"))


@fix("logits-times-10", rescales=True)
def _logits_times_10(fork: Fork, layers: Layers, record: Record | None) -> None:
    def instead(call: Call) -> object:
        given = {"input": call.argument(0, "input"), **call.kwargs}
        return call.function(10.0 * given.pop("input"), *call.args[1:], **given)

    replace_calls(fork, lambda call: call.name == "cross_entropy", instead)


@fix("positions", rescales=True)
def _positions(fork: Fork, layers: Layers, record: Record | None) -> None:
    """Add a random vector to each place's vector that the first layer gives, of their own rms."""

    def instead(call: Call) -> object:
        made = call.function(*call.args, **call.kwargs)
        drawn = torch.randn(made.shape[1:], generator=torch.Generator().manual_seed(fork.seed))
        return made + made.detach().square().mean().sqrt() * drawn.to(made)

    found = calls_of(fork, lambda call: call.name in _MAKE_VECTORS and call.result.ndim in (3, 4))
    replace_calls(fork, among(found[:1]), instead, "no layer gives each place a vector")


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
        def instead(call: Call) -> object:
            return call.argument(0, "input").softmax(axis)

        other = replace(fork)
        replace_calls(other, among(found), instead, nothing)
        return other

    most = max((call.argument(0, "input").ndim for call in found), default=2)
    axes = range(-1, -most, -1)  # never the first axis, that of the samples
    fitting = [axis for axis in axes if all(use.fits for use in uses(along(axis)))]
    fork.loss = along(some(fitting, "no axis of these softmaxes is summed over")[0]).loss
