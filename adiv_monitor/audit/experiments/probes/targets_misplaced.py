"""Are the outputs of a sample compared with the targets of the same sample?"""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from adiv_monitor.audit.experiments.concerned import few, passed, with_tensor
from adiv_monitor.audit.experiments.questions import Untold, asks
from adiv_monitor.audit.training.batches import size_of, tensors
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact

FEWEST = 4  # samples of the batch
# A sample's inputs and targets may concern this many times its share of the outputs; where they
# concern more, samples are mixed on purpose, as nodes of a graph are.
ITS_SHARE = 1.5


@asks("targets-misplaced")
def ask(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Change the first sample's inputs, then its targets, and see which outputs these concern.

    Inputs concern the outputs that change and count in the loss. Targets, which change no outputs,
    concern those whose gradient changes; outputs that no sample's inputs change, such as zeros of a
    ReLU, do not count. The share that both concern, of the fewer ones, is 1 if they belong
    together.
    """
    batch = few(setup, setup.batches[0])
    size = size_of(batch)
    if size < FEWEST:
        raise Untold(f"the batch has fewer than {FEWEST} samples")
    if any(x.ndim and len(x) != size for x in tensors(batch)):
        raise Untold("the tensors of a batch are of unlike length")
    own = passed(setup, batch)
    if not len(own.outputs):
        raise Untold("the loss calls no model that returns numbers")
    of_inputs = of_targets = alive = torch.zeros_like(own.outputs, dtype=torch.bool)
    counts = own.gradients != 0
    shapes = []
    for number, x in enumerate(tensors(batch)):
        if not x.ndim or (other := _other(x)) is None:
            continue
        changed = passed(setup, with_tensor(batch, number, partial(_put, row=other)))
        if changed.outputs.shape != own.outputs.shape:
            raise Untold("the number of outputs depends on the inputs")
        counts = counts | (changed.gradients != 0)
        moved = changed.outputs != own.outputs
        if bool(moved.any()):
            of_inputs = of_inputs | moved
            every = passed(setup, with_tensor(batch, number, partial(_turn, by=other)))
            alive = alive | moved | (every.outputs != own.outputs)
        else:
            of_targets = of_targets | (changed.gradients != own.gradients)
            shapes.append(str(tuple(x.shape)))
    its_share = ITS_SHARE * int(counts.sum()) / size
    if int(of_targets.sum()) > its_share:
        raise Untold("the loss compares each target with several samples")
    if int((of_inputs & counts).sum()) > its_share:
        raise Untold("the model computes the outputs of several samples from each")
    of_inputs, of_targets = of_inputs & counts, of_targets & alive
    fewer = min(int(of_inputs.sum()), int(of_targets.sum()))
    if not fewer:
        raise Untold("the batch holds no inputs and targets apart")
    share = float((of_inputs & of_targets).sum()) / fewer
    return (Fact("", {"share": share}, {"of": own.shape, "to": ", ".join(shapes)}),)


def _other(x: Tensor) -> int | None:
    """Return the first sample that differs from the first one; None: all are alike."""
    differ = (x != x[:1]).reshape(len(x), -1).any(1).nonzero()
    return int(differ[0]) if len(differ) else None


def _turn(x: Tensor, by: int) -> Tensor:
    """Return the samples in another order, in which the first one is that of this number."""
    return x.roll(-by, 0)


def _put(x: Tensor, row: int) -> Tensor:
    """Return a copy whose first sample is like the one of this number."""
    changed = x.clone()
    changed[0] = x[row]
    return changed
