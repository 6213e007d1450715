"""Fixes of learning rates: for all parameters, for each layer, and at the beginning."""

from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR

from adiv_monitor.audit.training.setup import Fork
from adiv_monitor.audit.trials.fixes.fix import DoesNotApply, Fix
from adiv_monitor.capture.selection import named_modules
from adiv_monitor.diagnosis.faults.remedies import group_rates, rates_per_layer
from adiv_monitor.diagnosis.record import Record

FACTORS = (0.001, 0.01, 0.1, 0.3, 3.0, 10.0, 100.0)
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
        DoesNotApply: The optimizer takes only one group, or has no learning rate.
    """
    if hasattr(optimizer, "_params"):  # LBFGS
        raise DoesNotApply(f"{type(optimizer).__name__} has one learning rate for all parameters")
    scale_rate(optimizer, 1.0)
    divided = []
    for group in optimizer.param_groups:
        by_factor: dict[float, list[Tensor]] = {}
        for parameter in group["params"]:
            by_factor.setdefault(factors.get(id(parameter), 1.0), []).append(parameter)
        for factor, parameters in by_factor.items():
            divided.append({**group, "params": parameters, "lr": group["lr"] * factor})
    optimizer.param_groups[:] = divided


def _rate(factor: float, fork: Fork, layers: Sequence[str], record: Record | None) -> None:
    scale_rate(fork.optimizer, factor)


def _per_layer(fork: Fork, layers: Sequence[str], record: Record | None) -> None:
    """Scale the learning rates as `remedies.rates_per_layer` recommends."""
    wanted = {} if record is None else rates_per_layer(record, layers)
    if not wanted:
        raise DoesNotApply("no layer is known to move unlike the others")
    factors: dict[int, float] = {}
    for path, module in named_modules(fork.model):
        if path in wanted:
            factors |= {id(p): wanted[path] for p in module.parameters(recurse=False)}
    if not factors:
        raise DoesNotApply("none of these layers was measured")
    scale_rates(fork.optimizer, factors)


def _group_rate(fork: Fork, layers: Sequence[str], record: Record | None) -> None:
    """Give the parameter groups of these layers the learning rate of most other layers."""
    found = None if record is None or not record.reports else group_rates(record, layers)
    groups = fork.optimizer.param_groups
    if found is None or max(*found.own, found.like) >= len(groups):
        raise DoesNotApply("these layers have no learning rate of their own")
    for group in found.own:
        groups[group]["lr"] = groups[found.like]["lr"]


def _warm_up(fork: Fork, layers: Sequence[str], record: Record | None) -> None:
    """Raise the learning rate linearly from a hundredth over the first third of the steps."""
    scale_rate(fork.optimizer, 1.0)
    steps = max(len(fork.batches) // 3, 1)
    schedule = LinearLR(fork.optimizer, start_factor=0.01, total_iters=steps)
    fork.optimizer.register_step_post_hook(lambda *_: schedule.step())


FIXES = [
    *(
        Fix(rate_name(factor), f"learning rate × {factor:g}", partial(_rate, factor))
        for factor in dict.fromkeys((*FACTORS, *FAR_FACTORS))
    ),
    Fix(
        "rate-per-layer",
        "a learning rate for each layer that evens out how fast the layers move",
        _per_layer,
    ),
    Fix("group-rate", "the learning rate of the other parameter groups", _group_rate),
    Fix("warm-up", "let the learning rate rise from near 0 at the beginning", _warm_up),
]
