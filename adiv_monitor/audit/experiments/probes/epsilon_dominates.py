"""Is the epsilon of an adaptive optimizer larger than the roots of the mean squared gradients?"""

from collections.abc import Iterable, Iterator, Mapping
from statistics import median
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from adiv_monitor.audit.experiments.questions import asks
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact

USUAL = 1e-8  # Adam's default; no smaller epsilon is a fault
FEWEST = 5  # steps after which the mean of the squared gradients counts
# Names under which optimizers keep what they divide by the root of: Adam and its kin, RMSprop,
# Adagrad.
SQUARES = ("max_exp_avg_sq", "exp_avg_sq", "square_avg", "sum")


@asks("epsilon-dominates")
def ask(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return the share of the entries with a gradient whose √v̂ is below the optimizer's ε.

    The step is m̂ / (√v̂ + ε) times the learning rate. v̂ is the running mean of the squared
    gradients at the end of the run; Adam corrects it for its bias (Kingma and Ba 2015, algorithm
    1), RMSprop does not, and Adagrad uses their sum.
    """
    found = [(eps, root[root > 0]) for eps, root in _roots(trained.optimizer)]
    entries = sum(root.numel() for _, root in found)
    smaller = {i: int((root < eps).sum()) for i, (eps, root) in enumerate(found) if eps > USUAL}
    if not any(smaller.values()):
        return ()
    worst = max(smaller, key=smaller.__getitem__)
    numbers = {
        "share": sum(smaller.values()) / entries,
        "epsilon": found[worst][0],
        "root": median(float(root.median()) for _, root in found if root.numel()),
    }
    return (Fact("", numbers),)


def _roots(optimizer: Optimizer) -> Iterator[tuple[float, Tensor]]:
    """Yield ε and √v̂ of each parameter that has taken enough steps."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if "acc_delta" in state:
                continue  # Adadelta adds ε under the root
            squares = next((state[name] for name in SQUARES if name in state), None)
            steps = float(state.get("step", 0))
            if isinstance(squares, Tensor) and "eps" in group and steps >= FEWEST:
                yield float(group["eps"]), (squares.detach() / _grown(group, steps)).sqrt()


def _grown(group: Mapping[str, Any], steps: float) -> float:
    """Return the factor by which Adam corrects the bias of a mean that began at zero; else 1."""
    return 1.0 - group["betas"][1] ** steps if "betas" in group else 1.0
