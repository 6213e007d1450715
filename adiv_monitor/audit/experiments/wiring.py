"""What a model is wired from: factors of zero, sums of one tensor, outputs of one module."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from adiv_monitor.audit.experiments.calls import ADDS, MULTIPLIES, Call
from adiv_monitor.audit.experiments.questions import asks, looks, of_each_call
from adiv_monitor.audit.training.batches import tensors
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact

APART = 1e-3  # difference of two gradients, relative to their size


@looks("zero-factor")
class ZeroFactor:
    """Does the model multiply what has a gradient by zero, in all calls of a place?

    Or by each other, as two factors that both begin at zero: parameters of zeros whose gradient is
    zero, too.
    """

    def __init__(self, fork: Fork) -> None:
        self._model = fork.model
        self._fixed = {id(x) for x in fork.model.buffers()}
        self._by_zero: dict[str, bool] = {}

    def see(self, call: Call) -> None:
        """Look at a product; its factor may be a number, one entry, or a buffer."""
        if call.name in MULTIPLIES and call.path is not None and call.result.requires_grad:
            is_zero = any(map(self._is_zero, call.args[:2]))
            self._by_zero[call.place] = is_zero and self._by_zero.get(call.place, True)

    def _is_zero(self, x: Any) -> bool:
        if isinstance(x, Tensor):
            is_fixed = not x.requires_grad and (x.numel() == 1 or id(x) in self._fixed)
            return is_fixed and not x.any()
        return type(x) in (int, float) and x == 0

    def facts(self, loss: Tensor) -> Iterable[Fact]:
        """Return the places, and the parameters."""
        yield from (Fact(place) for place, is_zero in self._by_zero.items() if is_zero)
        weights = dict(self._model.named_parameters())
        zeros = [name for name, p in weights.items() if p.grad is not None
                 and not (p.any() or p.grad.to_dense().any() or name.endswith("bias"))]  # fmt: skip
        # Zeros in place of all weights are no factors, but a bad start.
        if len(zeros) > 1 and any(p.any() for p in weights.values() if p.ndim > 1):
            yield from (Fact(name, {"zeros": len(zeros)}) for name in zeros)


@of_each_call("added-to-itself")
def added_to_itself(call: Call, fork: Fork) -> Fact | None:
    """Find sums in the model whose two operands are one computed tensor."""
    x, y = call.args[:2] if call.name in ADDS and len(call.args) > 1 else (None, None)
    is_one = x is y and isinstance(x, Tensor) and x.requires_grad and call.path is not None
    return Fact(call.place) if is_one else None


@asks("outputs-tied")
def outputs_tied(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return outputs that equal each other after training, though the loss moves them apart.

    Outputs are columns of the model's first call.
    """
    fork = setup.fork_like(trained)
    made: list[Tensor] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if not made:
            made.extend(x for x in tensors(output) if x.requires_grad and 0 < x.ndim < 3)

    with fork.model.register_forward_hook(note), torch.enable_grad():
        loss = fork.first_loss()
    if not made or any(len(x) != len(made[0]) for x in made):
        return
    found = torch.autograd.grad(loss, made, materialize_grads=True)
    columns, gradients = (torch.cat([x.detach().reshape(len(x), -1) for x in xs], 1)
                          for xs in (made, found))  # fmt: skip
    _, groups, counts = torch.unique(columns, dim=1, return_inverse=True, return_counts=True)
    for group in (counts > 1).nonzero():
        own, varies = gradients[:, groups == group], columns[:, groups == group].var(0).all()
        are_apart = float((own - own[:, :1]).norm()) > APART * float(own.norm())
        if varies and are_apart and own.any(0).all():
            yield Fact("outputs", {"outputs": float(own.shape[1])})
