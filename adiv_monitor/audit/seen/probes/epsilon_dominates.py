"""Is the epsilon of an adaptive optimizer larger than the roots of the mean squared gradients?"""

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact, Probed

USUAL = 1e-8  # Adam's default; no smaller epsilon is a fault
FEWEST = 5  # steps after which the mean of the squared gradients counts
# Names under which optimizers keep the mean of squared gradients that they divide by the root of.
MEANS = ("max_exp_avg_sq", "exp_avg_sq", "square_avg")


def ask(setup: Setup, trained: Fork) -> Probed:
    """Return the share of the entries with a gradient whose √v̂ is below the optimizer's ε.

    The step is m̂ / (√v̂ + ε) times the learning rate. v̂ is the running mean of the squared
    gradients at the end of the run, corrected for its bias (Kingma and Ba 2015, algorithm 1).
    """
    found = [(eps, root[root > 0]) for eps, root in _roots(trained.optimizer)]
    entries = sum(root.numel() for _, root in found)
    smaller = {i: int((root < eps).sum()) for i, (eps, root) in enumerate(found) if eps > USUAL}
    if not any(smaller.values()):
        return Probed()
    worst = max(smaller, key=smaller.__getitem__)
    numbers = {
        "share": sum(smaller.values()) / entries,
        "epsilon": found[worst][0],
        "root": median(float(root.median()) for _, root in found if root.numel()),
    }
    return Probed((Fact("", numbers),))


def _roots(optimizer: Optimizer) -> Iterator[tuple[float, Tensor]]:
    """Yield ε and √v̂ of each parameter that has taken enough steps."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            mean = next((state[name] for name in MEANS if name in state), None)
            steps = float(state.get("step", 0))
            if isinstance(mean, Tensor) and "eps" in group and steps >= FEWEST and _divides(state):
                yield float(group["eps"]), (mean.detach() / _grown(group, state, steps)).sqrt()


def _divides(state: Mapping[str, Any]) -> bool:
    """Return whether ε is added to the root itself: Adadelta adds it under the root."""
    return "acc_delta" not in state


def _grown(group: Mapping[str, Any], state: Mapping[str, Any], steps: float) -> float:
    """Return the sum of the weights in a running mean that began at zero."""
    decay = group["betas"][1] if "exp_avg_sq" in state else group["alpha"]
    return 1.0 - decay**steps if 0.0 <= decay < 1.0 else 1.0
