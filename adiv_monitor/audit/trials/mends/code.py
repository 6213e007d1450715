"""What is wrong in the code of a run, done otherwise in a copy."""

from collections.abc import Sequence

import torch
from torch import nn

from adiv_monitor.audit.seen.calls import Call, change_calls
from adiv_monitor.audit.seen.probes import dropout_too_high
from adiv_monitor.audit.seen.probes.hidden_parameters import hidden
from adiv_monitor.audit.seen.probes.left_in_eval import NORMS
from adiv_monitor.audit.seen.probes.rounded_away import COARSE
from adiv_monitor.audit.training.hooks import without_gradient_hooks
from adiv_monitor.audit.training.setup import Fork
from adiv_monitor.audit.training.train import held
from adiv_monitor.audit.trials.mends.mend import DoesNotApply, Mend
from adiv_monitor.audit.trials.mends.wiring import hold
from adiv_monitor.diagnosis.record import Record

Layers = Sequence[str]


def _register(fork: Fork, layers: Layers, record: Record | None) -> None:
    if not hold(fork, list(hidden(fork).values())):
        raise DoesNotApply("the optimizer holds all that gets a gradient")


def _rate_as_others(fork: Fork, layers: Layers, record: Record | None) -> None:
    """What a scheduler began with; else the largest of the other groups; else 0.001."""
    groups = fork.optimizer.param_groups
    still = [group for group in groups if group.get("lr") == 0]
    if not still:
        raise DoesNotApply("no learning rate is zero")
    others = max((float(group["lr"]) for group in groups), default=0.0)
    for group in still:
        group["lr"] = float(group.get("initial_lr", 0.0)) or others or 1e-3


def _float32(fork: Fork, layers: Layers, record: Record | None) -> None:
    """The optimizer steps copies of 32 bits, from which the weights are rounded."""
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
    fork.model.train()


def _group_norm(fork: Fork, layers: Layers, record: Record | None) -> None:
    """GroupNorm of one group, which has the same parameters."""
    found = [(path, m) for path, m in fork.model.named_modules()
             if isinstance(m, nn.modules.batchnorm._BatchNorm)]  # fmt: skip
    if not found:
        raise DoesNotApply("there is no batch normalisation")
    for path, norm in found:
        group = nn.GroupNorm(1, norm.num_features, norm.eps, norm.affine)
        group.weight, group.bias = norm.weight, norm.bias
        parent, _, name = path.rpartition(".")
        setattr(fork.model.get_submodule(parent), name, group)


def _less_dropout(fork: Fork, layers: Layers, record: Record | None) -> None:
    def change(call: Call) -> object:
        is_high = dropout_too_high.rate_of(call) > dropout_too_high.HIGH
        return dropout_too_high.with_rate(call, 0.1) if is_high else NotImplemented

    if not dropout_too_high.places(fork):
        raise DoesNotApply("no dropout is called with a rate above 0.7")
    change_calls(fork, change)


MENDS = [
    Mend("register-parameters", "give the optimizer what the model does not know of", _register),
    Mend("rate-as-others", "a learning rate above zero", _rate_as_others),
    Mend("float32-weights", "weights of 32 bits, which are rounded after each step", _float32,
         rescales=True),
    Mend("without-hooks", "no hooks that change gradients", _without_hooks),
    Mend("train-mode", "all modules in training mode", _train_mode),
    Mend("group-norm", "GroupNorm of one group in place of batch normalisation", _group_norm,
         rescales=True),
    Mend("dropout-0.1", "dropout of 0.1 where it is above 0.7", _less_dropout),
]  # fmt: skip
