"""What a model is wired from: factors of zero, masks, and what it writes over."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from adiv_monitor.audit.experiments.calls import MULTIPLIES, Call, watched
from adiv_monitor.audit.experiments.changed_inputs import ChangedInputs, of_few, still
from adiv_monitor.audit.experiments.exchange import is_other
from adiv_monitor.audit.experiments.questions import asks, looks
from adiv_monitor.audit.training.batches import copied, tensors
from adiv_monitor.audit.training.setup import Fork, Setup, seeded
from adiv_monitor.diagnosis.record import Fact

ROUNDING = 1e-4  # of the length of a batch


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
        zeros = [name for name, p in self._model.named_parameters() if p.grad is not None
                 and not (p.any() or p.grad.to_dense().any() or name.endswith("bias"))]  # fmt: skip
        yield from (Fact(name, {"zeros": len(zeros)}) for name in zeros if len(zeros) > 1)


@asks("mask-ignored")
def mask_ignored(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return masks whose inversion changes no output, before and after training."""
    batch = of_few(setup).batches[0]
    runs = [ChangedInputs(still(fork), batch) for fork in (setup.fork(), setup.fork_like(trained))]
    runs[0].outputs(lambda x: x, everything=True)
    for number, (name, mask) in enumerate(zip(runs[0].names, runs[0].inputs, strict=True)):
        is_mask = mask.ndim > 1 and (mask.dtype == torch.bool or "mask" in name.lower())
        if is_mask and set(torch.unique(mask).tolist()) == {0, 1}:
            inverted = [run.outputs(lambda x: (x == 0).to(x.dtype), number, True) for run in runs]
            pairs = [*zip(runs[0].own + runs[1].own, inverted[0] + inverted[1], strict=True)]
            if pairs and not any(is_other(x, y).any() for x, y in pairs):
                yield Fact(f"input '{name}'")


@asks("input-written")
def input_written(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return by how much the loss changes its batch, and changes it again in another pass.

    Also return how often the run is given that batch.
    """
    fork, batch, places = setup.fork(), copied(setup.batches[0]), list[str]()
    own = [*tensors(batch)]
    versions, states = [x._version for x in own], [[x.double() for x in own]]

    def see(call: Call) -> None:
        if versions != [x._version for x in own]:
            places.append(call.place)

    with seeded(fork.seed), torch.set_grad_enabled(setup.differentiates):
        for _ in range(2):
            watched(fork.loss, see)(fork.model, batch)
            states.append([x.detach().double() for x in own])
    for x, once, twice in zip(*states, strict=True):
        change, again = (float((y - z).norm() / x.norm()) for y, z in ((once, x), (twice, once)))
        if places and min(change, again) > ROUNDING:
            times = sum(batch is setup.batches[0] for batch in setup.batches)
            yield Fact(places[0], {"change": change, "times": float(times)})
            return
