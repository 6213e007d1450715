"""What does the loss make of outputs of free choice, in place of the model's?

They tell the loss from the model: if no outputs lower it, the fault is in the loss or its targets.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from adiv_monitor.audit.experiments.backward import nodes_of
from adiv_monitor.audit.experiments.calls import calls_of, given
from adiv_monitor.audit.experiments.changed_inputs import RepeatedLoss, of_few, still
from adiv_monitor.audit.experiments.questions import Untold, asks
from adiv_monitor.audit.experiments.state import last_maps
from adiv_monitor.audit.training.batches import copied
from adiv_monitor.audit.training.setup import Fork, Setup, seeded
from adiv_monitor.diagnosis.record import Fact

STEPS = 20  # of the minimisation
FEW = 64  # most entries of a weight of the loss


class Free:
    """The first batch's loss as a function of what the last layers return, in order.

    Attributes:
        outputs: the outputs, which begin as the model's own.
        fork: the copy that runs.
    """

    def __init__(self, setup: Setup) -> None:
        self.outputs: list[Tensor] = []
        self.fork, self._next, self._batch = still(setup.fork()), 0, of_few(setup).batches[0]
        self.fork.change_outputs(last_maps(setup.fork())[0], self._instead)
        with seeded(setup.seed):
            self._again = RepeatedLoss(self.fork)  # a queue that it fills begins anew each time
        self.first = self.loss()

    def _instead(self, output: Tensor) -> Tensor:
        if self._next == len(self.outputs):
            own = output.detach().clone(memory_format=torch.contiguous_format)
            self.outputs.append(own.requires_grad_())
        self._next += 1
        return self.outputs[self._next - 1]

    def loss(self) -> Tensor:
        """Return the loss of the outputs as they are."""
        self._next = 0
        return self._again.with_graph(self._batch)

    def lowest(self, over: Sequence[Tensor]) -> float:
        """Return the lowest loss that L-BFGS finds over some tensors."""
        lowest, optimizer = float(self.first.detach()), torch.optim.LBFGS(
            over, max_iter=STEPS, line_search_fn="strong_wolfe"
        )  # fmt: skip

        def closure() -> Tensor:
            nonlocal lowest
            found = self.loss()
            gradients = torch.autograd.grad(found, over, materialize_grads=True, allow_unused=True)
            for x, g in zip(over, gradients, strict=True):
                x.grad = g.contiguous()
            lowest = min(lowest, float(found.detach()))
            return found

        optimizer.step(closure)  # type: ignore[no-untyped-call]
        return lowest


@asks("outputs-in-vain")
def in_vain(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return the loss of the model's outputs, that of outputs of zero, and the lowest one."""
    if setup.is_costly:
        raise Untold("steps are costly")
    free = Free(setup)
    own = [x.data for x in free.outputs]
    for x in free.outputs:
        x.data = torch.zeros_like(x)
    first, zeros = (float(x.detach()) for x in (free.first, free.loss()))
    for x, before in zip(free.outputs, own, strict=True):
        x.data = before
    if free.first.grad_fn is None or not min(first, zeros) > 0:
        raise Untold("the loss is not above zero, or depends on no linear layer's outputs alone")
    slopes = torch.autograd.grad(free.first, free.outputs, retain_graph=True, allow_unused=True)
    known = [g for g in slopes if g is not None]
    if not any(g.any() for g in known) or not all(g.isfinite().all() for g in known):
        raise Untold("the loss has no slope at the model's outputs, or one that is not finite")
    lowest = free.lowest(free.outputs)
    share = lowest / min(first, zeros)
    yield Fact("", {"share": share, "first": first, "zeros": zeros, "lowest": lowest})


@asks("weighs-itself")
def weighs_itself(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return the lowest loss over parameters that the loss itself reads, for the same outputs.

    They have few entries, no part of the model uses them, and their gradient does not come through
    the outputs.
    """
    free, fork = Free(setup), setup.fork()
    used = {id(x) for call in calls_of(fork, lambda call: call.path) for x in given(call)}
    inside = {name for name, p in fork.model.named_parameters() if id(p) in used}
    reached = {id(getattr(node, "variable", None)) for node in nodes_of([free.first.grad_fn])}
    own = {name: p for name, p in free.fork.model.named_parameters()
           if id(p) in reached and name not in inside and p.numel() <= FEW}  # fmt: skip
    if own and (first := float(free.first.detach())) > 0:
        lowest = free.lowest([*own.values()])
        yield Fact(next(iter(own)), {"share": lowest / first, "first": first, "lowest": lowest})


@asks("seed-again")
def seed_again(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Find a loss that ends with the same random state whatever the state it begins with."""
    ends = []
    for seed in (setup.seed, setup.seed + 1):
        with seeded(seed), torch.enable_grad():
            fork = setup.fork()
            fork.loss(fork.model, copied(setup.batches[0]))
            ends.append(torch.get_rng_state())
    if torch.equal(*ends):
        yield Fact("")
