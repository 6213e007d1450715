"""Modules that lose what their inputs tell: modes, normalisations, dropout, constant outputs."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from adiv_monitor.audit.experiments.calls import Call, calls_of, change_calls, rate_of, with_rate
from adiv_monitor.audit.experiments.changed_inputs import RepeatedLoss
from adiv_monitor.audit.experiments.questions import (
    Look,
    Untold,
    asks,
    looks,
    of_each_call,
)
from adiv_monitor.audit.training.batches import mapped, size_of, tensors
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact

BATCH_NORM = nn.modules.batchnorm._BatchNorm
NORMS = (BATCH_NORM, nn.modules.instancenorm._InstanceNorm)
FEW = 4  # values: the variance's relative error, √(2/(n−1)), is 82 % for four
# Momentum, the share of the last batch in running statistics: these are its own, or hardly follow.
ONE_BATCH, SLOW = 0.9, 0.005
HIGH = 0.7  # share that dropout drops
FEWEST = 3  # samples of a batch
VARIES = 1e-4  # share of the mean square, from which inputs vary over samples
CONSTANT = 1e-6  # share below which outputs do not
ROUNDING = 1e-9  # share of the inputs' variance: what is left of x − x in single precision
LEFT = 0.5  # share of the outputs' variation that is left after training
_AS_LOW = 1e-2  # share of the fall of the loss: what training has still to go


def _batch_norm(call: Call, fork: Fork) -> nn.Module | None:
    """Return the batch normalisation that calls this, if it uses the batch's own statistics."""
    if call.name != "batch_norm" or call.path is None or not call.argument(5, "training"):
        return None
    module = fork.model.get_submodule(call.path)
    return module if isinstance(module, BATCH_NORM) else None


@of_each_call("batch-norm-starved")
def starved(call: Call, fork: Fork) -> Fact | None:
    """Return samples × positions per channel of a batch normalisation, if four or fewer."""
    if _batch_norm(call, fork) is None:
        return None
    x = call.argument(0, "input")
    numbers = {"values": x.numel() / x.shape[1], "samples": float(len(x))}
    return Fact(str(call.path), numbers) if numbers["values"] <= FEW else None


@of_each_call("running-statistics")
def running(call: Call, fork: Fork) -> Fact | None:
    """Return the momentum of running statistics that stay as they began, or are of one batch."""
    norm: Any = _batch_norm(call, fork)
    momentum = getattr(norm, "momentum", None)
    if norm is None or norm.num_batches_tracked is None or momentum is None:
        return None
    is_told = momentum >= ONE_BATCH or (momentum < SLOW and int(norm.num_batches_tracked) <= 1)
    return Fact(str(call.path), {"momentum": float(momentum)}) if is_told else None


@asks("left-in-eval")
def left_in_eval(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return normalisations in evaluation mode with mean exactly 0 and variance exactly 1.

    They are those of a pass in training mode, or else those of a model that was given in the other.
    """
    fork = setup.fork()
    with torch.no_grad():
        fork.first_loss()  # a forward pass may call eval()
    return _unused(fork.model, 0.0) or _unused(setup.model, 1.0)


def _unused(model: nn.Module, given: float) -> list[Fact]:
    return [Fact(path, {"given": given}, {"class": type(m).__name__})
            for path, m in model.named_modules()
            if not m.training and isinstance(m, NORMS) and _is_unused(m)]  # fmt: skip


def _is_unused(norm: nn.Module) -> bool:
    mean, variance = getattr(norm, "running_mean", None), getattr(norm, "running_var", None)
    if mean is None or variance is None:
        return False
    return not bool(mean.any()) and bool((variance == 1).all())


@asks("dropout-in-eval")
def dropout_in_eval(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return dropout that drops where the module that calls it is in evaluation mode.

    A model that keeps its modules in training mode, to sample its outputs, does so on purpose.
    """
    fork = setup.fork()
    fork.model.eval()

    def rate(call: Call) -> float:
        if call.path is None or fork.model.get_submodule(call.path).training:
            return 0.0
        is_fused = call.name == "scaled_dot_product_attention"
        return call.argument(4, "dropout_p", 0.0) if is_fused else rate_of(call)

    drops = calls_of(fork, lambda call: rate(call) > 0)
    return (Fact(call.place, {"rate": rate(call)}) for call in drops)


@asks("dropout-too-high")
def dropout_too_high(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return dropout rates above 0.7, and the trained model's losses with and without it."""
    drops = calls_of(setup.fork(), lambda call: rate_of(call) > HIGH)
    if not drops:
        return ()
    batch, bare = trained.batches[-1], replace(trained)
    change_calls(bare, lambda c: with_rate(c, 0.0) if rate_of(c) > HIGH else NotImplemented)
    price = {"with": RepeatedLoss(trained).of(batch), "without": RepeatedLoss(bare).of(batch)}
    return (Fact(c.place, {"rate": rate_of(c), **price}) for c in drops)


@looks("outputs-constant")
class Constant(Look):
    """Are a module's outputs, and with them the model's, the same for all samples?

    The variance over samples is compared with the mean square, both summed over all entries of a
    sample. The module's inputs vary, and the outputs of the model do not. A last layer whose
    weights are zero begins with constant outputs on purpose.
    """

    def __init__(self, fork: Fork) -> None:
        self._size = size_of(fork.batches[0])
        self._found: list[Fact] = []
        self._outputs: list[tuple[float, float]] = []
        self._last: nn.Module | None = None
        for path, module in fork.model.named_modules():
            if path and not [*module.children()]:
                module.register_forward_hook(partial(self._after, path))
        fork.model.register_forward_hook(lambda m, _, out: self._outputs.extend(self._spreads(out)))

    def facts(self, loss: Tensor) -> Iterable[Fact]:
        """Return the first leaf module whose outputs no longer vary over samples."""
        if self._size < FEWEST:
            raise Untold(f"the batch has fewer than {FEWEST} samples")
        is_constant = all(v <= CONSTANT * square for v, square in self._outputs)
        return self._found[:1] if self._outputs and is_constant and not _is_zero(self._last) else ()

    def _after(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        if [*module.parameters()]:
            self._last = module
        given, made = self._spreads(args[:1]), self._spreads(output)
        if not given or not made:
            return
        (before, square_before), (variance, square) = given[0], made[0]
        is_constant = variance <= max(CONSTANT * square, ROUNDING * min(before, 1.0))
        if variance > max(CONSTANT * square, ROUNDING):
            self._found.clear()  # a later sum varies again
        elif is_constant and before > VARIES * square_before:
            is_norm = "Norm" in type(module).__name__
            by = "weight" if _is_zero(module) else "norm" if is_norm else "zeros" * (square == 0)
            share = min(variance / square, variance / before) if square else 0.0
            words = {"class": type(module).__name__, "by": by}
            words |= {"before": "all layers"} if self._last is None else {}
            self._found.append(Fact(path, {"share": share}, words))

    def _spreads(self, x: Any) -> list[tuple[float, float]]:
        """Return variance over samples and mean square of each tensor that has all samples."""
        each = [y.detach().double() for y in tensors(x) if y.is_floating_point() and y.numel()
                and y.shape[:1] == (self._size,) and y.layout is torch.strided]  # fmt: skip
        return [(float(y.var(0, correction=0).mean()), float(y.square().mean())) for y in each]


def _is_zero(module: nn.Module | None) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and not weight.any()


@asks("collapsed")
def collapsed(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """See how much less outputs vary after training, where one output for all gives as low a loss.

    Before training, all samples get the outputs of the first one, and then these times −1. A convex
    loss of outputs and targets is not below that of outputs of zero both times.
    """
    if size_of(setup.batches[0]) < FEWEST:
        raise Untold(f"the batch has fewer than {FEWEST} samples")
    (first, start), (last, end) = _passed(setup.fork()), _passed(setup.fork_like(trained))
    if end >= LEFT * start or first <= last:
        return ()
    loss = max(_passed(setup.fork(), sign)[0] for sign in (1, -1))
    is_lowest = loss <= last + _AS_LOW * (first - last)
    return (Fact("", {"before": start, "after": end, "loss": loss}),) if is_lowest else ()


def _passed(fork: Fork, sign: int = 0) -> tuple[float, float]:
    """Run a fork's loss with the samples' own outputs (0), or the first one's times a sign.

    These are the outputs of the modules that no other module calls, if they depend on trained
    parameters: a teacher keeps its own. Every call with outputs of the same shape then gives the
    same ones, so two views of a sample do not differ either.

    Returns:
        The loss, and the variance over the samples of the last such outputs over their mean square.
    """
    size = size_of(fork.batches[0])
    running: list[nn.Module] = []
    outputs: list[Tensor] = []
    of_all: dict[torch.Size, Tensor] = {}

    def in_place_of(x: Tensor) -> Tensor:
        if not x.requires_grad or not x.ndim or not len(x) or len(x) % size:
            return x
        outputs.append(x.detach().double())
        return of_all.setdefault(x.shape[1:], sign * x[0]).expand_as(x).clone() if sign else x

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        running.pop()
        return None if running else mapped(output, in_place_of)

    for module in fork.model.modules():
        module.register_forward_pre_hook(lambda module, args: running.append(module))
        module.register_forward_hook(after)
    with torch.enable_grad():
        loss = float(fork.first_loss().detach())
    if not outputs:
        raise Untold("no trained module that the loss calls returns outputs of the samples")
    square = float(outputs[-1].square().mean())
    return loss, float(outputs[-1].var(0, correction=0).mean()) / square if square else 0.0
