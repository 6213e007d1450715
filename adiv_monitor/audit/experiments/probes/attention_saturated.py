"""Do the scores of an attention differ so much before training that its softmax is saturated?"""

from collections.abc import Iterable

import torch
from torch import Tensor

from adiv_monitor.audit.experiments.calls import Call
from adiv_monitor.audit.experiments.probes.attention_axis import uses
from adiv_monitor.audit.experiments.questions import asks
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact

FEWEST = 4  # keys: of fewer, one may well get most of the weight
_FAR = 50.0  # below a query's largest score; masks add −100 (Swin) to −∞


@asks("attention-saturated")
def ask(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return the spread of the scores of each attention, and the largest weight of a query."""
    found: dict[str, Fact] = {}
    for softmax, size in spreads(setup.fork()):
        axis = softmax.argument(1, "dim")
        largest = softmax.argument(0, "input").detach().double().softmax(axis).amax(axis)
        numbers = {"spread": size, "largest": float(largest.nanmean())}
        found.setdefault(softmax.place, Fact(softmax.place, numbers))
    return tuple(found.values())


def spreads(fork: Fork) -> list[tuple[Call, float]]:
    """Return the softmaxes of attentions, each with the standard deviation of a query's scores."""
    found: dict[int, tuple[Call, float]] = {}
    for use in uses(fork):
        axis = use.softmax.argument(1, "dim")
        x = use.softmax.argument(0, "input").detach().double()
        if x.shape[axis] >= FEWEST and set(use.sums_to_1) & set(use.over):
            found.setdefault(use.softmax.number, (use.softmax, spread(x, axis)))
    return [*found.values()]


def spread(scores: Tensor, axis: int) -> float:
    """Return the rms, over queries, of the standard deviation of a query's scores.

    Masked keys do not count: those whose weight is below e⁻⁵⁰ of the largest one.
    """
    kept = scores > scores.amax(axis, keepdim=True) - _FAR
    count = kept.sum(axis, keepdim=True).clamp(min=1)
    mean = torch.where(kept, scores, 0.0).sum(axis, keepdim=True) / count
    square = torch.where(kept, (scores - mean).square(), 0.0).sum(axis, keepdim=True) / count
    return float(square[count > 1].mean().sqrt())
