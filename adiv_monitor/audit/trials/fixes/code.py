"""Fixes of faults in a run's code, applied to a copy."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from adiv_monitor.audit.experiments import loss_inputs
from adiv_monitor.audit.experiments.backward import cuts, undo
from adiv_monitor.audit.experiments.calls import Call, change_calls, see_calls
from adiv_monitor.audit.experiments.dropout import rate_of, with_rate
from adiv_monitor.audit.experiments.exchange import ORDERED
from adiv_monitor.audit.experiments.modules import BATCH_NORM, HIGH, NORMS
from adiv_monitor.audit.experiments.operands import Hidden, OneSided
from adiv_monitor.audit.experiments.reshapes import FUNCTIONS, permuted, scrambles
from adiv_monitor.audit.experiments.state import COARSE
from adiv_monitor.audit.training.batches import size_of
from adiv_monitor.audit.training.hooks import without_gradient_hooks
from adiv_monitor.audit.training.setup import Fork
from adiv_monitor.audit.training.train import held
from adiv_monitor.audit.trials.fixes.fix import DoesNotApply, Fix, replace_calls
from adiv_monitor.audit.trials.fixes.wiring import hold
from adiv_monitor.diagnosis.record import Record

Layers = Sequence[str]


def _register(fork: Fork, layers: Layers, record: Record | None) -> None:
    hidden = Hidden(fork).hidden(fork.first_loss())
    if not hold(fork, list(hidden.values())):
        raise DoesNotApply("the optimizer holds all that gets a gradient")


def _rate_as_others(fork: Fork, layers: Layers, record: Record | None) -> None:
    """Replace learning rates of zero.

    The new one is the group's initial learning rate, else the largest of all groups, else 0.001.
    """
    groups = fork.optimizer.param_groups
    still = [group for group in groups if group.get("lr") == 0]
    if not still:
        raise DoesNotApply("no learning rate is zero")
    others = max((float(group["lr"]) for group in groups), default=0.0)
    for group in still:
        group["lr"] = float(group.get("initial_lr", 0.0)) or others or 1e-3


def _float32(fork: Fork, layers: Layers, record: Record | None) -> None:
    """Let the optimizer step float32 copies, from which the weights are rounded."""
    coarse = [p for p in held(fork.optimizer) if p.dtype in COARSE]
    if not coarse:
        raise DoesNotApply("no weights are of 16 bits")
    masters = {id(p): p.detach().float().requires_grad_() for p in coarse}
    for group in fork.optimizer.param_groups:
        group["params"] = [masters.get(id(p), p) for p in group["params"]]

    def give(*_: object) -> None:
        for p in coarse:
            masters[id(p)].grad = None if p.grad is None else p.grad.float()
            p.grad = None

    @torch.no_grad()
    def take(*_: object) -> None:
        for p in coarse:
            p.copy_(masters[id(p)])

    fork.optimizer.register_step_pre_hook(give)
    fork.optimizer.register_step_post_hook(take)


def _without_hooks(fork: Fork, layers: Layers, record: Record | None) -> None:
    if not without_gradient_hooks(fork.model, fork.optimizer):
        raise DoesNotApply("no hook changes gradients")


def _train_mode(fork: Fork, layers: Layers, record: Record | None) -> None:
    still = [m for m in fork.model.modules() if isinstance(m, NORMS) and not m.training]
    if not still:
        raise DoesNotApply("no normalisation is in evaluation mode")
    for module in fork.model.modules():  # a train() of the model's own may leave parts as they are
        module.training = True
    for module in still:  # a forward pass may call eval()
        module.train = partial(_stays, module)  # type: ignore[assignment, method-assign]


def _stays(module: nn.Module, mode: bool = True) -> nn.Module:
    """Stand in for `train`, and so for `eval`: the mode stays as it is."""
    return module


def _group_norm(fork: Fork, layers: Layers, record: Record | None) -> None:
    """Replace batch normalisations by GroupNorm of one group with the same parameters."""
    found = [(path, m) for path, m in fork.model.named_modules()
             if isinstance(m, BATCH_NORM)]  # fmt: skip
    if not found:
        raise DoesNotApply("there is no batch normalisation")
    for path, norm in found:
        group = nn.GroupNorm(1, norm.num_features, norm.eps, norm.affine)
        group.weight, group.bias = norm.weight, norm.bias
        parent, _, name = path.rpartition(".")
        setattr(fork.model.get_submodule(parent), name, group)


def _less_dropout(fork: Fork, layers: Layers, record: Record | None) -> None:
    replace_calls(fork, lambda call: rate_of(call) > HIGH, lambda call: with_rate(call, 0.1))


def _matched_shapes(fork: Fork, layers: Layers, record: Record | None) -> None:
    """Reshape the first operand of each broadcasting function to the shape of the second."""
    found = loss_inputs.those(fork, loss_inputs.is_broadcast)
    numbers = {c.number for c in found if c.args[0].numel() == c.args[1].numel()}

    def instead(call: Call) -> object:
        a, b, *others = call.args
        return call.function(a.reshape(b.shape), b, *others, **call.kwargs)

    replace_calls(fork, lambda call: call.number in numbers, instead)


def _no_softmax(fork: Fork, layers: Layers, record: Record | None) -> None:
    """Leave out softmaxes of one class; use a sigmoid if the loss takes probabilities."""
    samples = size_of(fork.batches[0])
    names = _names(fork)

    def instead(call: Call) -> object:
        x = call.argument(0, "input")
        return x.sigmoid() if "binary_cross_entropy" in names else x

    def is_met(call: Call) -> bool:
        return call.name in loss_inputs.SOFTMAXES and loss_inputs.is_of_one(call, samples)

    replace_calls(fork, is_met, instead)


def _over_classes(fork: Fork, layers: Layers, record: Record | None) -> None:
    """Take softmaxes over samples over the classes; leave them out if the loss takes one itself."""
    samples = size_of(fork.batches[0])
    names = _names(fork)

    def instead(call: Call) -> object:
        x = call.argument(0, "input")
        return x if names & {*loss_inputs.OWN} else call.function(x, dim=1)

    replace_calls(fork, lambda call: loss_inputs.is_over_samples(call, samples), instead)


def _unbounded_outputs(fork: Fork, layers: Layers, record: Record | None) -> None:
    """Leave out the function before the difference, identified by its number in the pass."""
    numbers = _out_of_range(fork, loss_inputs.BOUNDED)
    replace_calls(fork, lambda call: call.number in numbers, lambda call: call.argument(0, "input"))


def _sigmoids(fork: Fork, layers: Layers, record: Record | None) -> None:
    """Replace softmaxes that are compared with targets of several classes by sigmoids."""
    numbers = _out_of_range(fork, ("softmax",))
    replace_calls(
        fork,
        lambda call: call.number in numbers,
        lambda call: call.argument(0, "input").sigmoid(),
    )


def _out_of_range(fork: Fork, names: Sequence[str]) -> set[int]:
    """Return the numbers of the calls of some functions that can't reach the targets."""
    look = loss_inputs.OutOfRange(fork)
    with torch.enable_grad():
        loss = see_calls(fork, look.see)
    return {call.number for call, _ in look.found(loss) if call.name in names}


def _batch_first(fork: Fork, layers: Layers, record: Record | None) -> None:
    found = [m for m in fork.model.modules() if isinstance(m, ORDERED)]
    still = [m for m in found if not m.batch_first]
    if not still:
        raise DoesNotApply("no recurrent layer or attention lacks batch_first=True")
    for module in still:
        module.batch_first = True


def _permute(fork: Fork, layers: Layers, record: Record | None) -> None:
    """Replace a reshape that cuts across axes by a permutation of the axes or of their parts."""
    made: dict[int, tuple[int, ...]] = {}

    def look(call: Call) -> None:
        if scrambles(call):
            shape = tuple(call.result.shape)
            if permuted(call.args[0], shape) is not None:
                made[call.number] = shape

    def change(call: Call) -> object:
        if call.number not in made or call.name not in FUNCTIONS:
            return NotImplemented
        # The first axis, the samples, may differ in length between batches.
        x, shape = call.args[0], made[call.number]
        found = permuted(x, (len(x), *shape[1:]))
        return NotImplemented if found is None else found.contiguous()

    see_calls(fork, look)
    if not made:
        raise DoesNotApply("no permutation has that shape")
    change_calls(fork, change)


def _uncut(fork: Fork, layers: Layers, record: Record | None) -> None:
    found = cuts(fork)
    if not found:
        raise DoesNotApply("nothing is cut in front of parameters")
    undo(fork, found)


def _centred_weights(fork: Fork, layers: Layers, record: Record | None) -> None:
    """Draw Xavier's N(0, 2/(fan-in + fan-out)), which is symmetric in the two axes."""
    found = OneSided(fork)
    see_calls(fork, found.see)
    if not found.weights:
        raise DoesNotApply("no weights lie on one side of zero")
    for weight in found.weights.values():
        nn.init.xavier_normal_(weight)


def _logits_times_10(fork: Fork, layers: Layers, record: Record | None) -> None:
    def instead(call: Call) -> object:
        others = {name: x for name, x in call.kwargs.items() if name != "input"}
        return call.function(10.0 * call.argument(0, "input"), *call.args[1:], **others)

    replace_calls(fork, lambda call: call.name == "cross_entropy", instead)


def _outputs_without_dropout(fork: Fork, layers: Layers, record: Record | None) -> None:
    found = loss_inputs.dropped(fork)
    if not found:
        raise DoesNotApply("no dropout acts on the outputs")
    loss_inputs.leave_out(fork, found)


def _outputs_without_norm(fork: Fork, layers: Layers, record: Record | None) -> None:
    found = loss_inputs.norms(fork)
    if not found:
        raise DoesNotApply("no normalisation acts on the outputs")
    loss_inputs.leave_out(fork, found)


def _names(fork: Fork) -> set[str]:
    """Return the names of all functions that a pass calls."""
    names: set[str] = set()
    see_calls(fork, lambda call: names.add(call.name))
    return names


FIXES = [
    Fix("register-parameters", "give the optimizer what the model does not know of", _register),
    Fix("rate-as-others", "a learning rate above zero", _rate_as_others),
    Fix("float32-weights", "weights of 32 bits, which are rounded after each step", _float32,
         rescales=True),
    Fix("without-hooks", "no hooks that change gradients", _without_hooks),
    Fix("train-mode", "all modules in training mode", _train_mode),
    Fix("group-norm", "GroupNorm of one group in place of batch normalisation", _group_norm,
         rescales=True),
    Fix("matched-shapes", "outputs of the targets' shape", _matched_shapes, rescales=True),
    Fix("no-softmax", "outputs without a softmax", _no_softmax, rescales=True),
    Fix("softmax-over-classes", "the softmax over the classes", _over_classes, rescales=True),
    Fix("unbounded-outputs", "outputs of any value", _unbounded_outputs, rescales=True),
    Fix("sigmoids", "a sigmoid for each class in place of the softmax", _sigmoids, rescales=True),
    Fix("batch-first", "batch_first=True", _batch_first, rescales=True),
    Fix("permute", "axes exchanged by a permutation", _permute, rescales=True),
    Fix("uncut", "no cut of the gradient", _uncut, rescales=True),
    Fix("centred-weights", "weights drawn around zero", _centred_weights, rescales=True),
    Fix("logits-times-10", "logits ten times as large", _logits_times_10, rescales=True),
    Fix("outputs-without-dropout", "no dropout on the outputs", _outputs_without_dropout),
    Fix("outputs-without-norm", "no normalisation of the outputs", _outputs_without_norm,
         rescales=True),
    Fix("dropout-0.1", "dropout of 0.1 where it is above 0.7", _less_dropout),
]  # fmt: skip
