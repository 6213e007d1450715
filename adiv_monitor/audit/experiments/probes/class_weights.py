"""Do the weights of classes in the loss grow with the numbers of their samples?"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from adiv_monitor.audit.experiments.calls import Call, see_calls
from adiv_monitor.audit.experiments.questions import asks
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact

BATCHES = 8  # most batches whose targets are counted
TWICE = math.log(2.0)  # smallest spread of counts, and of weights, in which a trend is seen
_PAIRS = ("binary_cross_entropy_with_logits",)  # losses with a weight of the positive class


@asks("class-weights")
def ask(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return the slope of the logarithm of weights over that of counts, where they differ.

    Weights that balance classes have a slope of −1, the square root of these −0.5, and counts in
    place of their inverses 1.
    """
    fork = setup.fork()
    weights: dict[str, Tensor] = {}
    counts: dict[str, Tensor] = {}

    def look(call: Call) -> None:
        found = _of_classes(call) or _of_pairs(call)
        if found is not None:
            weights[call.place] = found[0]
            counts[call.place] = counts.get(call.place, torch.zeros(())) + found[1]

    with torch.no_grad():
        for batch in _spread(setup.batches):
            see_calls(fork, look, batch)
            if not weights:
                return ()
    facts = (_fact(place, weights[place], counts[place]) for place in weights)
    return tuple(fact for fact in facts if fact is not None)


def _spread(batches: Sequence[Any]) -> list[Any]:
    count = min(BATCHES, len(batches))
    return [batches[i * len(batches) // count] for i in range(count)]


def _of_classes(call: Call) -> tuple[Tensor, Tensor] | None:
    """Return the weights of classes, and the number of targets of each."""
    if call.name not in ("cross_entropy", "nll_loss"):
        return None
    weight, target = call.argument(2, "weight"), call.argument(1, "target")
    if not isinstance(weight, Tensor) or target.is_floating_point():
        return None
    known = target[(target >= 0) & (target < len(weight))]
    counted = torch.bincount(known.flatten().cpu(), minlength=len(weight))
    ignored = int(call.argument(4, "ignore_index", -100))
    if 0 <= ignored < len(weight):
        counted[ignored] = 0
    return weight.detach().double().cpu(), counted.double()


def _of_pairs(call: Call) -> tuple[Tensor, Tensor] | None:
    """Return the weights 1 and `pos_weight`, and the numbers of targets of 0 and of 1.

    Of several labels, the weight is their geometric mean.
    """
    if call.name not in _PAIRS:
        return None
    weight, target = call.argument(6, "pos_weight"), call.argument(1, "target")
    if not isinstance(weight, Tensor):
        return None
    positive = float(target.double().sum())
    counted = torch.tensor([target.numel() - positive, positive], dtype=torch.float64)
    mean = float(weight.detach().double().log().mean().exp())
    return torch.tensor([1.0, mean], dtype=torch.float64), counted


def _fact(place: str, weight: Tensor, counted: Tensor) -> Fact | None:
    used = (weight > 0) & (counted > 0)
    w, n = weight[used].log(), counted[used].log()
    if len(w) < 2 or min(float(w.max() - w.min()), float(n.max() - n.min())) < TWICE:
        return None
    w, n = w - w.mean(), n - n.mean()
    slope = float((w * n).sum() / n.square().sum())
    correlation = float((w * n).sum() / (w.norm() * n.norm()))
    common, rare = int(counted.argmax()), int(counted.masked_fill(~used, math.inf).argmin())
    numbers = {
        "slope": slope,
        "correlation": correlation,
        "times": float(weight[common] / weight[rare]),
        "more": float(counted[common] / counted[rare]),
    }
    return Fact(place, numbers, {"common": str(common), "rare": str(rare)})
