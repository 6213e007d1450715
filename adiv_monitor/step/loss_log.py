"""The loss of every step, kept on its device until the next report."""

from collections import defaultdict, deque
from numbers import Real

import torch
from torch import Tensor

from adiv_monitor.capture.hook import has_data
from adiv_monitor.capture.weights.shards import is_shard
from adiv_monitor.rerun.thread import ThreadState
from adiv_monitor.step.transfer import fetch_numbers

_MOST = 2**14  # number of values between two reports
_EXPECTED = "a number, or a tensor of real numbers"

Value = float | Tensor  # a tensor holds one number, on a device that is not waited for


def value_of(loss: object) -> Value | None:
    """Return a loss without its graph, the mean of several numbers; None if it has no data.

    Numbers on the host are read; a tensor on another device is copied there.

    Raises:
        TypeError: the loss is no number and no tensor of real numbers.
        ValueError: the loss is an empty tensor.
    """
    if type(loss) is float:
        return loss
    if not isinstance(loss, Tensor):
        if not isinstance(loss, bool) and isinstance(loss, Real):
            return float(loss)
        raise TypeError(f"the loss: got {type(loss).__name__}, expected {_EXPECTED}")
    if not (has_data(loss) or is_shard(loss)):  # fake tensors, or a function transform
        return None
    if type(loss) is Tensor and not torch._C._len_torch_function_stack():
        return _own(loss)
    with ThreadState(), torch.no_grad(), torch._C.DisableTorchFunction():
        return _own(loss)


def _own(loss: Tensor) -> Value:
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
    step, as from micro-batches, are averaged. If an optimizer's step evaluates a closure, only the
    first value during the step counts, since the weights have moved before the next one.

    At most 16,384 values of each kind are kept; then the oldest are dropped.
    """

    def __init__(self) -> None:
        self._said, self._seen = _Values(), _Values()

    def say(self, step: int, loss: object) -> None:
        """Add the loss of a step's batch from the training loop.

        Raises:
            TypeError, ValueError: see `value_of`.
        """
        self._said.add(step, value_of(loss))

    def see(self, step: int, loss: object) -> None:
        """Add a loss that a hook has seen; otherwise as `say`."""
        self._seen.add(step, value_of(loss))

    def step_begins(self) -> None:
        """Count only one more value, as the optimizer's step begins: it may evaluate a closure."""
        self._said.room = self._seen.room = 1

    def step_ends(self) -> None:
        """Count all values again, after the optimizer's step."""
        self._said.room = self._seen.room = None

    def take(self, last: int) -> dict[int, float]:
        """Remove and return the losses by step, sorted, of the steps up to `last`."""
        found = self._seen.take(last) | self._said.take(last)
        return dict(sorted(found.items()))


class _Values:
    """Values by step, of one kind.

    Attributes:
        room: number of values that still count; None: all.
    """

    def __init__(self) -> None:
        self.room: int | None = None
        self._held: deque[tuple[int, Value]] = deque(maxlen=_MOST)

    def add(self, step: int, value: Value | None) -> None:
        if value is None or self.room == 0:
            return
        if self.room is not None:
            self.room -= 1
        self._held.append((step, value))

    def take(self, last: int) -> dict[int, float]:
        steps = [step for step, _ in self._held]
        values = fetch_numbers([value for _, value in self._held])
        self._held.clear()
        by_step: dict[int, list[float]] = defaultdict(list)
        for step, value in zip(steps, values, strict=True):
            if step <= last:
                by_step[step].append(value)
            else:
                self._held.append((step, value))
        return {step: sum(several) / len(several) for step, several in by_step.items()}
