"""Fixes of the optimizer: weight decay, momentum, clipping, another optimizer."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import SGD, AdamW

from adiv_monitor.audit.experiments.state import USUAL as USUAL_EPSILON
from adiv_monitor.audit.training.setup import Fork
from adiv_monitor.audit.training.train import held
from adiv_monitor.audit.trials.fixes.fix import DoesNotApply, Fix
from adiv_monitor.diagnosis.faults.remedies import USUAL, clip_norm, less_momentum
from adiv_monitor.diagnosis.record import Record


def _decay(factor: float) -> Callable[[Fork, Sequence[str], Record | None], None]:
    def change(fork: Fork, layers: Sequence[str], record: Record | None) -> None:
        groups = [g for g in fork.optimizer.param_groups if g.get("weight_decay")]
        if not groups:
            raise DoesNotApply("there is no weight decay")
        for group in groups:
            group["weight_decay"] = group["weight_decay"] * factor

    return change


def _less_momentum(fork: Fork, layers: Sequence[str], record: Record | None) -> None:
    """Lower the momentum to 0.9, or to half of a smaller value.

    Where momentum adds steps up, η/(1 − m), the learning rate in the long run, is kept.
    """
    changed = [_lowered(group) for group in fork.optimizer.param_groups]
    if not any(changed):
        raise DoesNotApply("there is no momentum")


def _usual_momentum(fork: Fork, layers: Sequence[str], record: Record | None) -> None:
    """Lower a momentum above 0.9 to 0.9, and keep the learning rate: a typing error, undone."""
    longer = [g for g in fork.optimizer.param_groups if g.get("momentum", 0.0) > USUAL]
    if not longer:
        raise DoesNotApply("no momentum is above 0.9")
    for group in longer:
        group["momentum"] = USUAL


def _lowered(group: dict[str, Any]) -> bool:
    if group.get("momentum"):
        before, after = group["momentum"], less_momentum(group["momentum"])
        group["momentum"] = after
        if not group.get("dampening"):
            group["lr"] = group["lr"] * (1 - after) / (1 - before)
        return True
    if "betas" in group and group["betas"][0]:
        group["betas"] = (less_momentum(group["betas"][0]), *group["betas"][1:])
        return True
    return False


def _no_clip(fork: Fork, layers: Sequence[str], record: Record | None) -> None:
    if fork.clip_norm is None:
        raise DoesNotApply("gradients are not clipped")
    fork.clip_norm = None


def _clip(fork: Fork, layers: Sequence[str], record: Record | None) -> None:
    """Clip at the 90th percentile of the observed norms (Google's tuning playbook), else at 1."""
    if fork.clip_norm is not None:
        raise DoesNotApply("gradients are clipped already")
    fork.clip_norm = 1.0 if record is None else clip_norm(record)


def _plain_sgd(fork: Fork, layers: Sequence[str], record: Record | None) -> None:
    """Use plain SGD.

    SGD with momentum keeps its learning rate in the long run; other optimizers get 0.1.
    """
    before = fork.optimizer
    if not isinstance(before, SGD):
        fork.optimizer = SGD(held(before), lr=0.1)
        return
    if not any(g["momentum"] or g["weight_decay"] for g in before.param_groups):
        raise DoesNotApply("it is plain SGD already")
    groups = [
        {"params": g["params"], "lr": g["lr"] / (1 - g["momentum"] * (1 - g["dampening"]))}
        for g in before.param_groups
    ]
    fork.optimizer = SGD(groups)


def _adamw(fork: Fork, layers: Sequence[str], record: Record | None) -> None:
    if isinstance(fork.optimizer, AdamW):
        raise DoesNotApply("it is AdamW already")
    fork.optimizer = AdamW(held(fork.optimizer), lr=1e-3)


def _usual_epsilon(fork: Fork, layers: Sequence[str], record: Record | None) -> None:
    larger = [g for g in fork.optimizer.param_groups if g.get("eps", 0.0) > USUAL_EPSILON]
    if not larger:
        raise DoesNotApply("no epsilon is above 1e-8")
    for group in larger:
        group["eps"] = USUAL_EPSILON


def _no_projection(fork: Fork, layers: Sequence[str], record: Record | None) -> None:
    """Remove later changes of the stepped weights: the optimizer's hooks, embeddings' max_norm."""
    hooks = fork.optimizer._optimizer_step_post_hooks
    bounded = [
        module
        for module in fork.model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None
    ]
    if not hooks and not bounded:
        raise DoesNotApply("no hook of the optimizer, and no max_norm, changes weights")
    hooks.clear()
    for module in bounded:
        module.max_norm = None


FIXES = [
    Fix("no-decay", "no weight decay", _decay(0.0)),
    Fix("less-decay", "a tenth of the weight decay", _decay(0.1)),
    Fix("less-momentum", "momentum of 0.9, or half of less", _less_momentum),
    Fix("usual-momentum", "momentum of 0.9 at the same learning rate", _usual_momentum),
    Fix("no-clip", "no clipping of gradients", _no_clip),
    Fix("clip", "gradients clipped at the 90th percentile of their norms", _clip),
    Fix("plain-sgd", "plain SGD, without momentum or decay", _plain_sgd, rescales=True),
    Fix("adamw", "AdamW with a learning rate of 0.001", _adamw, rescales=True),
    Fix("usual-epsilon", "an epsilon of 1e-8", _usual_epsilon, rescales=True),
    Fix("no-projection", "weights left as the optimizer's step leaves them", _no_projection),
]
