"""What a case is: a training as people do it, and what was expected before it was run."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Batch = tuple[Tensor, Tensor]  # inputs and targets


class Part(NamedTuple):
    """What a seed trains on, and what tells how good the result is.

    Attributes:
        batches: yields batches without end; called anew, the same ones.
        score: of a model, on data held out; higher is better. It chooses the learning rate.
        result: of a model, on test data, in the case's unit.
    """

    batches: Callable[[], Iterator[Batch]]
    score: Callable[[nn.Module], float]
    result: Callable[[nn.Module], float]


class Case(NamedTuple):
    """A training as people do it.

    Attributes:
        title: heading of the page.
        setting: what is trained, in a sentence or two.
        data: what it is trained on.
        expected: stated before the run.
        unit: of the result.
        higher: whether a higher result is better.
        rates: learning rates of the sweep.
        steps: how long.
        model: makes a model; the caller sets the seed.
        optimizer: of a model, at a learning rate.
        scheduler: of an optimizer and the number of steps; None: the learning rate is constant.
        loss: of a model and a batch.
        part: of a seed.
        test_share: test rows over training rows, where every seed splits the same rows anew; else
            0. Results of such seeds are alike, for they share training rows.
    """

    title: str
    setting: str
    data: str
    expected: str
    unit: str
    higher: bool
    rates: tuple[float, ...]
    steps: int
    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module, float], Optimizer]
    scheduler: Callable[[Optimizer, int], LRScheduler] | None
    loss: Callable[[nn.Module, Batch], Tensor]
    part: Callable[[int], Part]
    test_share: float = 0.0
