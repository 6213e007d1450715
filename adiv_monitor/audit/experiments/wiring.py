"""What a model is wired from: does it multiply by zero?"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from adiv_monitor.audit.experiments.calls import MULTIPLIES, Call
from adiv_monitor.audit.experiments.questions import looks
from adiv_monitor.audit.training.setup import Fork
from adiv_monitor.diagnosis.record import Fact


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
