"""Fixes of the optimizer: its learning rates and other settings, what it holds, and clipping."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LinearLR

from adiv_monitor.audit.experiments.state import COARSE
from adiv_monitor.audit.experiments.state import USUAL as USUAL_EPSILON
from adiv_monitor.audit.training.batches import mapped
from adiv_monitor.audit.training.setup import Fork, without_gradient_hooks
from adiv_monitor.audit.training.train import held
from adiv_monitor.audit.trials.fixes import DoesNotApply, Layers, fix, some
from adiv_monitor.capture.selection import named_modules
from adiv_monitor.diagnosis.faults import remedies
from adiv_monitor.diagnosis.record import Record

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


def scale_rates(optimizer: Optimizer, factors: Mapping[int, float]) -> None:
    """Multiply the learning rates of single parameters, by id; parameter groups are split for that.

    Raises:
        DoesNotApply: The optimizer has no learning rate.
    """
    scale_rate(optimizer, 1.0)
    divided = []
    for group in optimizer.param_groups:
        by_factor: dict[float, list[Tensor]] = {}
        for parameter in group["params"]:
            by_factor.setdefault(factors.get(id(parameter), 1.0), []).append(parameter)
        for factor, parameters in by_factor.items():
            divided.append({**group, "params": parameters, "lr": group["lr"] * factor})
    optimizer.param_groups[:] = divided


def _rate(fork: Fork, layers: Layers, record: Record | None, factor: float) -> None:
    scale_rate(fork.optimizer, factor)


for _factor in (0.001, 0.01, 0.1, 0.3, 3.0, 10.0, *FAR_FACTORS):
    fix(rate_name(_factor), factor=_factor)(_rate)


@fix("rate-per-layer")
def _per_layer(fork: Fork, layers: Layers, record: Record | None) -> None:
    """Scale the learning rates as `remedies.rates_per_layer` recommends."""
    wanted = {} if record is None else remedies.rates_per_layer(record, layers)
    some(wanted, "no layer is known to move unlike the others")
    every = ((wanted.get(path), module) for path, module in named_modules(fork.model))
    scale_rates(
        fork.optimizer,
        {id(p): factor for factor, m in every if factor for p in m.parameters(recurse=False)},
    )


@fix("group-rate")
def _group_rate(fork: Fork, layers: Layers, record: Record | None) -> None:
    """Give the parameter groups of these layers the learning rate of most other layers."""
    found = None if record is None or not record.reports else remedies.group_rates(record, layers)
    if found is None:
        raise DoesNotApply("these layers have no learning rate of their own")
    groups = fork.optimizer.param_groups
    for group in found.own:
        groups[group]["lr"] = groups[found.like]["lr"]


@fix("warm-up")
def _warm_up(fork: Fork, layers: Layers, record: Record | None) -> None:
    """Raise the learning rate linearly from a hundredth over the first third of the steps."""
    scale_rate(fork.optimizer, 1.0)
    steps = max(len(fork.batches) // 3, 1)
    schedule = LinearLR(fork.optimizer, start_factor=0.01, total_iters=steps)
    fork.optimizer.register_step_post_hook(lambda *_: schedule.step())


@fix("no-decay", factor=0.0)
@fix("less-decay", factor=0.1)
def _decay(fork: Fork, layers: Layers, record: Record | None, factor: float) -> None:
    decayed = [g for g in fork.optimizer.param_groups if g.get("weight_decay")]
    for group in some(decayed, "there is no weight decay"):
        group["weight_decay"] = group["weight_decay"] * factor


@fix("less-momentum")
def _less_momentum(fork: Fork, layers: Layers, record: Record | None) -> None:
    """Lower the momentum to 0.9, or to half of a smaller value.

    Where momentum adds steps up, η/(1 − m), the learning rate in the long run, is kept.
    """
    groups = fork.optimizer.param_groups
    found = [g for g in groups if g.get("momentum") or g.get("betas", (0,))[0]]
    for group in some(found, "there is no momentum"):
        if before := group.get("momentum"):
            group["momentum"] = remedies.less_momentum(before)
            if not group.get("dampening"):
                group["lr"] = group["lr"] * (1 - group["momentum"]) / (1 - before)
        else:
            first, *others = group["betas"]
            group["betas"] = (remedies.less_momentum(first), *others)


@fix("usual-momentum", key="momentum", usual=remedies.USUAL)
@fix("usual-epsilon", key="eps", usual=USUAL_EPSILON, rescales=True)
def _usual(fork: Fork, layers: Layers, record: Record | None, key: str, usual: float) -> None:
    """Lower a setting to its usual value where it is larger: a typing error, undone."""
    larger = [g for g in fork.optimizer.param_groups if g.get(key, 0.0) > usual]
    for group in some(larger, f"no {key} is above {usual:g}"):
        group[key] = usual


@fix("no-clip")
def _no_clip(fork: Fork, layers: Layers, record: Record | None) -> None:
    some(fork.clip_norm is not None, "gradients are not clipped")
    fork.clip_norm = None


@fix("clip")
def _clip(fork: Fork, layers: Layers, record: Record | None) -> None:
    """Clip at the 90th percentile of the observed norms (Google's tuning playbook), else at 1."""
    some(fork.clip_norm is None, "gradients are clipped already")
    fork.clip_norm = 1.0 if record is None else remedies.clip_norm(record)


@fix("adamw", rescales=True)
def _adamw(fork: Fork, layers: Layers, record: Record | None) -> None:
    some(not isinstance(fork.optimizer, AdamW), "it is AdamW already")
    fork.optimizer = AdamW(held(fork.optimizer), lr=1e-3)


@fix("no-projection")
def _no_projection(fork: Fork, layers: Layers, record: Record | None) -> None:
    """Remove later changes of the stepped weights: the optimizer's hooks, embeddings' max_norm."""
    hooks = fork.optimizer._optimizer_step_post_hooks
    embeddings = (m for m in fork.model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)))
    bounded = [m for m in embeddings if m.max_norm is not None]
    some(hooks or bounded, "no hook of the optimizer, and no max_norm, changes weights")
    hooks.clear()
    for module in bounded:
        module.max_norm = None


@fix("without-hooks")
def _without_hooks(fork: Fork, layers: Layers, record: Record | None) -> None:
    some(without_gradient_hooks(fork.model, fork.optimizer), "no hook changes gradients")


@fix("float32-weights", rescales=True)
def _float32(fork: Fork, layers: Layers, record: Record | None) -> None:
    """Turn model and batches of 16 bits into float32."""

    def change(x: Tensor) -> Any:
        return x.float() if x.dtype in COARSE else x

    some(any(p.dtype in COARSE for p in held(fork.optimizer)), "no weights are of 16 bits")
    fork.model.float()
    fork.batches = [mapped(batch, change) for batch in fork.batches]
