"""The loss of every step, kept on its device until the next report."""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from itertools import takewhile
from numbers import Real
from typing import TypeVar

import torch
from torch import Tensor

from adiv_monitor.capture.hook import has_data
from adiv_monitor.capture.weights.shards import is_shard
from adiv_monitor.step.transfer import fetch_numbers

_MOST = 2**14  # number of values between two reports
_ROUNDING = 1e-3  # of a loss, of 16 bits
_EXPECTED = "a number, or a tensor of real numbers"

_V = TypeVar("_V")
Value = float | Tensor  # a tensor holds one number, on a device that is not waited for


def value_of(loss: object) -> Value | None:
    """Return a loss without its graph, the mean of several numbers; None if it has no data.

    Numbers on the host are read; a tensor on another device is copied there.

    Raises:
        TypeError: the loss is no number and no tensor of real numbers.
        ValueError: the loss is an empty tensor.
    """
    if not isinstance(loss, bool) and isinstance(loss, Real):
        return float(loss)
    if not isinstance(loss, Tensor):
        raise TypeError(f"the loss: got {type(loss).__name__}, expected {_EXPECTED}")
    if not (has_data(loss) or is_shard(loss)):  # fake tensors, or a function transform
        return None
    with torch.no_grad(), torch._C.DisableTorchFunction():
        if loss.is_complex():
            raise TypeError(f"the loss: got complex numbers, expected {_EXPECTED}")
        if not loss.numel():
            raise ValueError(f"the loss: got a tensor without elements, expected {_EXPECTED}")
        own = loss.full_tensor() if is_shard(loss) else loss.detach()  # type: ignore[attr-defined]
        if own.numel() > 1:
            own = own.mean(dtype=torch.promote_types(own.dtype, torch.float32))
        return own.item() if own.is_cpu else own.reshape(()).clone()


class LossLog:
    """Log of losses by step, until they are taken.

    A loss from the training loop takes precedence over one seen by hooks. Several values of one
    step, as from micro-batches, are averaged.

    At most 16,384 values are kept; then the oldest are dropped.
    """

    def __init__(self) -> None:
        # Each with its step, and whether the training loop said it.
        self._held: deque[tuple[int, bool, Value]] = deque(maxlen=_MOST)
        self._looked = -1  # the last step whose losses were looked at

    def add(self, step: int, loss: object, *, is_said: bool) -> None:
        """Add the loss of a step's batch, from the training loop or as a hook has seen it.

        Raises:
            TypeError, ValueError: see `value_of`.
        """
        if (value := value_of(loss)) is not None:
            self._held.append((step, is_said, value))

    def take(self, last: int) -> tuple[dict[int, float], dict[int, int], bool]:
        """Remove the losses of the steps up to `last`; return them by step, sorted.

        Returned are, too, the `StepReport.loss_counts` of these steps, and whether hooks saw the
        losses: what the training loop says may have further terms.
        """
        held = [entry for entry in self._held if entry[0] <= last]
        counts = dict(Counter(Counter(s for s, is_said, _ in held if not is_said).values()))
        self._held = deque([entry for entry in self._held if entry[0] > last], _MOST)
        numbers = fetch_numbers([value for _, _, value in held])
        every = [(*of[:2], number) for of, number in zip(held, numbers, strict=True)]
        losses, seen = map(_means, (every, [entry for entry in every if not entry[1]]))
        off = {step: abs(x - seen.get(step, math.inf)) for step, x in losses.items()}
        return losses, counts, not any(x > _ROUNDING * abs(losses[step]) for step, x in off.items())

    def of(self, step: int) -> int:
        """Return the number of losses of a step, each of which may be both said and seen."""
        return max(Counter(said for at, said, _ in self._held if at == step).values(), default=0)

    def looked_at(self, last: int) -> dict[int, list[Value]]:
        """Return the losses that count of steps up to `last`, each once; they stay in the log."""
        since, self._looked = self._looked, last
        new = takewhile(lambda entry: entry[0] > since, reversed(self._held))
        return _counted([entry for entry in new if entry[0] <= last][::-1])


def _means(entries: Iterable[tuple[int, bool, float]]) -> dict[int, float]:
    return {step: sum(several) / len(several) for step, several in _counted(entries).items()}


def _counted(entries: Iterable[tuple[int, bool, _V]]) -> dict[int, list[_V]]:
    """Return by step, sorted, the losses that the training loop said, or else those seen."""
    found: dict[int, tuple[list[_V], list[_V]]] = defaultdict(lambda: ([], []))
    for step, is_said, value in entries:
        found[step][is_said].append(value)
    return {step: said or seen for step, (seen, said) in sorted(found.items())}
