"""Does a loss of log-probabilities receive probabilities, logits, or those over another axis?"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from adiv_monitor.audit.experiments.calls import Call, see_calls
from adiv_monitor.audit.experiments.questions import asks
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact

CLASSES = {"nll_loss": 1, "kl_div": -1, "ctc_loss": -1}  # the axis of the classes, by loss
_CLOSE = 1e-3  # rounding of a sum of probabilities
# Distances of the logarithm of the sum from 0: one that no rounding explains, and one that it may.
_FAR, _NEAR = 0.1, 0.02


@asks("no-log")
def ask(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Report inputs of losses of log-probabilities whose exponentials do not sum to 1.

    A loss that adds their `logsumexp` itself is a cross-entropy.
    """
    found: dict[str, Fact] = {}
    inputs: dict[str, Tensor] = {}
    added: list[Tensor] = []

    def look(call: Call) -> None:
        x = call.argument(0, "input")
        if call.name == "logsumexp" and isinstance(x, Tensor):
            added.append(x.clone())
        if given := given_to(call):
            words = {"function": call.name, "given": given}
            found.setdefault(call.place, Fact(call.place, {}, words))
            inputs.setdefault(call.place, _scores(call).clone())

    with torch.no_grad():
        see_calls(setup.fork(), look)
    for place, x in inputs.items():
        if any(y.shape == x.shape and torch.allclose(x, y) for y in added):
            del found[place]
    return tuple(found.values())


@torch.no_grad()
def given_to(call: Call) -> str:
    """Return what a loss receives in place of log-probabilities; "": nothing else, as far as known.

    Probabilities are not negative and sum to 1, over the classes or the last axis. The exponentials
    of log-probabilities sum to 1: "another axis" if they do so along another one than that of the
    classes. Scores of which most rows violate this along all axes, some with positive entries,
    are "logits". Over which axes `kl_div` sums is not known.
    """
    x = _scores(call)
    if call.name not in CLASSES or not isinstance(x, Tensor) or not x.is_floating_point():
        return ""
    if x.ndim < 2 or not x.numel():
        return ""
    classes = CLASSES[call.name] % x.ndim
    several = [axis for axis in range(x.ndim) if x.shape[axis] > 1]
    likely = {classes, 1, x.ndim - 1}.intersection(several)
    if any(_is_one(x, axis) and not _is_one(x.exp(), axis) for axis in likely):
        return "probabilities"
    if call.name == "kl_div" or classes not in several or not bool(x.isfinite().all()):
        return ""
    sums = {axis: x.float().logsumexp(axis).abs() for axis in several}
    if all(bool(off.median() > _FAR) for off in sums.values()):
        return "logits" if bool(x.max() > 0) else ""
    if call.name == "nll_loss" and x.ndim == 2:
        return ""  # this is softmax-over-samples
    is_other = any(bool(off.max() < _NEAR) for off in sums.values())
    return "another axis" if is_other and bool(sums[classes].median() > _FAR) else ""


def _scores(call: Call) -> Any:
    return call.argument(0, "log_probs" if call.name == "ctc_loss" else "input")


def _is_one(x: Tensor, axis: int) -> bool:
    return bool(x.min() >= 0) and bool((x.float().sum(axis) - 1).abs().max() < _CLOSE)
