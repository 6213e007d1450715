"""Fixes that replace functions which a pass calls: activations, attention, reshapes, the loss."""

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from adiv_monitor.audit.experiments import loss_inputs
from adiv_monitor.audit.experiments.attention import spreads, uses
from adiv_monitor.audit.experiments.backward import cuts, undo
from adiv_monitor.audit.experiments.calls import Call, change_calls, see_calls
from adiv_monitor.audit.experiments.changed_inputs import ChangedInputs
from adiv_monitor.audit.experiments.dropout import rate_of, with_rate
from adiv_monitor.audit.experiments.exchange import mask_of, patch_of, patch_size, places
from adiv_monitor.audit.experiments.modules import HIGH
from adiv_monitor.audit.experiments.operands import maps_that_run
from adiv_monitor.audit.experiments.reshapes import FUNCTIONS, permuted, scrambles
from adiv_monitor.audit.training.batches import size_of
from adiv_monitor.audit.training.setup import Fork
from adiv_monitor.audit.trials.fixes.fix import DoesNotApply, Layers, fix, some
from adiv_monitor.audit.trials.fixes.layers import modules_at
from adiv_monitor.diagnosis.faults.initialisation import SPREAD
from adiv_monitor.diagnosis.record import Record

_SATURATING = ("sigmoid", "tanh", "hardsigmoid", "hardtanh", "softsign")


def replace_calls(
    fork: Fork, is_met: Callable[[Call], bool], instead: Callable[[Call], object]
) -> None:
    """Replace the results of calls of a kind from now on.

    Raises:
        DoesNotApply: Nothing of that kind is called.
    """
    some(loss_inputs.those(fork, is_met), "nothing of that kind is called")
    change_calls(fork, lambda call: instead(call) if is_met(call) else NotImplemented)


def with_input(call: Call, x: object) -> object:
    """Return the result of a call's function with another first argument, `input`."""
    others = {name: value for name, value in call.kwargs.items() if name != "input"}
    return call.function(x, *call.args[1:], **others)


@fix("leaky-relu", "leaky ReLU in place of ReLU", names=("relu",), slope=0.1)
@fix("relu", "ReLU in place of activation functions that saturate", rescales=True,
     names=_SATURATING, slope=0.0)  # fmt: skip
def _replaced(
    fork: Fork, layers: Layers, record: Record | None, names: Collection[str], slope: float
) -> None:
    """Replace the functions wherever the named modules, or modules inside them, call one.

    If none of them does, replace them in the whole model. A ReLU is a leaky ReLU of slope 0.
    """
    chosen = {m for module in modules_at(fork.model, layers).values() for m in module.modules()}
    paths = {path for path, module in fork.model.named_modules() if module in chosen}

    def is_met(call: Call) -> bool:
        return call.name in names and call.path in paths

    def instead(call: Call) -> Tensor:
        # The only boolean argument of these functions is `inplace`.
        given = call.kwargs.get("inplace", any(x is True for x in call.args))
        in_place = call.function.__name__.endswith("_") or given
        return functional.leaky_relu(call.argument(0, "input"), slope, in_place)

    try:
        replace_calls(fork, is_met, instead)
    except DoesNotApply:
        some(layers, "no such activation function runs here")
        _replaced(fork, (), record, names, slope)


@fix("plain-outputs", "outputs without an activation function", rescales=True)
def _plain_outputs(fork: Fork, layers: Layers, record: Record | None) -> None:
    """Remove the activation function whose outputs a loss takes for logits: a module, or a call."""
    nothing = "no activation function stands in front of the loss"
    found = some(loss_inputs.activation(fork), nothing)
    module = None if found.path is None else fork.model.get_submodule(found.path)
    if module is not None and type(module).__module__.startswith("torch.nn.modules.activation"):
        module.forward = nn.Identity().forward
    else:
        loss_inputs.leave_out(fork, [found])


@fix("relu-between", "a ReLU between the layers", rescales=True)
def _relu_between(fork: Fork, layers: Layers, record: Record | None) -> None:
    """Put a ReLU behind each linear or convolutional layer that runs, but the last."""
    for path in some(maps_that_run(fork)[:-1], "fewer than two layers run"):
        fork.model.get_submodule(path).register_forward_hook(
            lambda module, args, output: functional.relu(output)
        )


@fix("dropout-0.1", "dropout of 0.1 where it is above 0.7")
def _less_dropout(fork: Fork, layers: Layers, record: Record | None) -> None:
    replace_calls(fork, lambda call: rate_of(call) > HIGH, lambda call: with_rate(call, 0.1))


@fix("matched-shapes", "outputs of the targets' shape", rescales=True)
def _matched_shapes(fork: Fork, layers: Layers, record: Record | None) -> None:
    """Reshape the first operand of each broadcasting function to the shape of the second."""
    found = loss_inputs.those(fork, loss_inputs.is_broadcast)
    numbers = {c.number for c in found if c.args[0].numel() == c.args[1].numel()}

    def instead(call: Call) -> object:
        a, b, *others = call.args
        return call.function(a.reshape(b.shape), b, *others, **call.kwargs)

    replace_calls(fork, lambda call: call.number in numbers, instead)


@fix("no-softmax", "outputs without a softmax", rescales=True)
def _no_softmax(fork: Fork, layers: Layers, record: Record | None) -> None:
    """Leave out softmaxes of one class; use a sigmoid if the loss takes probabilities."""
    samples = size_of(fork.batches[0])
    of_probabilities = loss_inputs.those(fork, lambda call: call.name == "binary_cross_entropy")

    def is_met(call: Call) -> bool:
        return call.name in loss_inputs.SOFTMAXES and loss_inputs.is_of_one(call, samples)

    def instead(call: Call) -> object:
        x = call.argument(0, "input")
        return x.sigmoid() if of_probabilities else x

    replace_calls(fork, is_met, instead)


@fix("softmax-over-classes", "the softmax over the classes", rescales=True)
def _over_classes(fork: Fork, layers: Layers, record: Record | None) -> None:
    """Take softmaxes over samples over the classes; leave them out if the loss takes one itself."""
    samples = size_of(fork.batches[0])
    own = loss_inputs.those(fork, lambda call: call.name in loss_inputs.OWN)

    def instead(call: Call) -> object:
        x = call.argument(0, "input")
        return x if own else call.function(x, dim=1)

    replace_calls(fork, lambda call: loss_inputs.is_over_samples(call, samples), instead)


@fix("unbounded-outputs", "outputs of any value", rescales=True,
     names=loss_inputs.BOUNDED, sigmoid=False)  # fmt: skip
@fix("sigmoids", "a sigmoid for each class in place of the softmax", rescales=True,
     names=("softmax",), sigmoid=True)  # fmt: skip
def _within_range(
    fork: Fork, layers: Layers, record: Record | None, names: Collection[str], sigmoid: bool
) -> None:
    """Replace functions on the outputs that can't reach the targets."""
    look = loss_inputs.OutOfRange(fork)
    with torch.enable_grad():
        loss = see_calls(fork, look.see)
    numbers = {call.number for call, _ in look.found(loss) if call.name in names}

    def instead(call: Call) -> object:
        x = call.argument(0, "input")
        return x.sigmoid() if sigmoid else x

    replace_calls(fork, lambda call: call.number in numbers, instead)


@fix("permute", "axes exchanged by a permutation", rescales=True)
def _permute(fork: Fork, layers: Layers, record: Record | None) -> None:
    """Replace a reshape that cuts across axes by a permutation of the axes or of their parts."""

    def is_met(call: Call) -> bool:
        return scrambles(call) and permuted(call.args[0], tuple(call.result.shape)) is not None

    found = some(loss_inputs.those(fork, is_met), "no permutation has that shape")
    made = {call.number: tuple(call.result.shape) for call in found}

    def change(call: Call) -> object:
        if call.number not in made or call.name not in FUNCTIONS:
            return NotImplemented
        # The first axis, the samples, may differ in length between batches.
        x, shape = call.args[0], made[call.number]
        moved = permuted(x, (len(x), *shape[1:]))
        return NotImplemented if moved is None else moved.contiguous()

    change_calls(fork, change)


@fix("uncut", "no cut of the gradient", rescales=True)
def _uncut(fork: Fork, layers: Layers, record: Record | None) -> None:
    undo(fork, some(cuts(fork), "nothing is cut in front of parameters"))


@fix("logits-times-10", "logits ten times as large", rescales=True)
def _logits_times_10(fork: Fork, layers: Layers, record: Record | None) -> None:
    replace_calls(
        fork,
        lambda call: call.name == "cross_entropy",
        lambda call: with_input(call, 10.0 * call.argument(0, "input")),
    )


@fix("outputs-without-dropout", "no dropout on the outputs")
def _outputs_without_dropout(fork: Fork, layers: Layers, record: Record | None) -> None:
    found = loss_inputs.dropped(fork)
    loss_inputs.leave_out(fork, some(found, "no dropout acts on the outputs"))


@fix("outputs-without-norm", "no normalisation of the outputs", rescales=True)
def _outputs_without_norm(fork: Fork, layers: Layers, record: Record | None) -> None:
    found = loss_inputs.norms(fork)
    loss_inputs.leave_out(fork, some(found, "no normalisation acts on the outputs"))


def _sinusoids(length: int, width: int) -> Tensor:
    """Return sines and cosines of place / 10000^(2i/width), (length, width).

    Source: Vaswani et al. 2017, section 3.5.
    """
    rates = torch.exp(-math.log(1e4) * torch.arange(0, width, 2) / width)
    angles = torch.arange(length)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :width]


@fix("positions", "sinusoids added to what the first layer gives", rescales=True)
def _positions(fork: Fork, layers: Layers, record: Record | None) -> None:
    """Add sinusoids to the first layer's vectors of the places, with the vectors' own rms."""
    batch = fork.batches[0]
    inputs = ChangedInputs(fork, batch).inputs
    count = places(inputs[0], patch_size(fork, batch)) if inputs else 0
    found = loss_inputs.those(fork, lambda call: count > 0 and _makes_places(call, count))
    first = some(found, "no layer gives each place a vector")[0]

    def change(call: Call) -> object:
        if (call.number, call.name) != (first.number, first.name):
            return NotImplemented
        made = call.function(*call.args, **call.kwargs)
        rows = made.flatten(2).transpose(1, 2) if made.ndim == 4 else made
        added = _sinusoids(rows.shape[1], rows.shape[2]).to(made)
        added = rows.detach().square().mean().sqrt() * math.sqrt(2) * added
        return made + (added.T.reshape(made.shape[1:]) if made.ndim == 4 else added)

    change_calls(fork, change)


def _makes_places(call: Call, count: int) -> bool:
    """Return whether the call is a layer that gives a vector for each place."""
    made = call.result
    if not isinstance(made, Tensor) or not any(
        isinstance(x, Tensor) and x.requires_grad and x.is_leaf
        for x in (*call.args, *call.kwargs.values())
    ):
        return False
    if made.ndim == 4:
        return patch_of(call) > 0 and made.shape[2] * made.shape[3] == count
    return made.ndim == 3 and made.shape[1] == count and made.shape[2] > 1


@fix("inverted-masks", "masks the other way round", rescales=True)
def _inverted_masks(fork: Fork, layers: Layers, record: Record | None) -> None:
    found = loss_inputs.those(fork, lambda call: mask_of(call) is not None)
    some(found, "no mask of booleans is used")

    def change(call: Call) -> object:
        told = mask_of(call)
        if told is None:
            return NotImplemented
        place, name, mask = told
        args = [~mask if i == place else x for i, x in enumerate(call.args)]
        others = {key: ~mask if key == name else x for key, x in call.kwargs.items()}
        return call.function(*args, **others)

    change_calls(fork, change)


@fix("summed-axis", "the softmax over the axis that is summed over", rescales=True)
def _summed_axis(fork: Fork, layers: Layers, record: Record | None) -> None:
    """Take the softmaxes over the axis along which their products sum, if one suits all of them."""
    found = {use.softmax.number: use.softmax for use in uses(fork) if not use.fits}
    some(found, "all weights sum to 1 along the axis that is summed over")
    most = max(call.argument(0, "input").ndim for call in found.values())
    for axis in range(-1, -most, -1):  # never the first axis, that of the samples
        change = partial(_along, found, axis)
        tried = replace(fork)
        change_calls(tried, change)
        if all(use.fits for use in uses(tried)):
            change_calls(fork, change)
            return
    raise DoesNotApply("no axis of these softmaxes is the one that is summed over")


def _along(numbers: Collection[int], axis: int, call: Call) -> object:
    if call.name != "softmax" or call.number not in numbers:
        return NotImplemented
    others = {name: x for name, x in call.kwargs.items() if name not in ("input", "dim")}
    return call.function(call.argument(0, "input"), dim=axis, **others)


@fix("unit-scores", "scores with a standard deviation of 1 before training", rescales=True)
def _unit_scores(fork: Fork, layers: Layers, record: Record | None) -> None:
    """Divide the scores of saturated attentions by their standard deviation before training."""
    found = {call.number: size for call, size in spreads(uses(fork)) if size > SPREAD}
    some(found, "no scores differ so much")

    def change(call: Call) -> object:
        if call.name != "softmax" or call.number not in found:
            return NotImplemented
        return with_input(call, call.argument(0, "input") / found[call.number])

    change_calls(fork, change)
