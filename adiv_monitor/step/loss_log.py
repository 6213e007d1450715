"""The loss of every step, kept where it is until a report tells it."""

from collections import defaultdict, deque
from numbers import Real

import torch
from torch import Tensor

from adiv_monitor.capture.hook import has_data
from adiv_monitor.capture.weights.shards import is_shard
from adiv_monitor.step.transfer import fetch_numbers

# Values that become one tensor, and values that are kept at most, between two reports.
_CHUNK, _MOST = 512, 2**14

Value = float | Tensor  # tensors: one number, on a device that nothing waits for


def value_of(loss: object) -> Value | None:
    """A loss without its graph: the mean, where it is several numbers; None where it has no data.

    Numbers on the host are read; of what is on another device a copy is made there.

    Raises:
        TypeError: it is no number, nor a tensor of real numbers.
        ValueError: it is an empty tensor.
    """
    if not isinstance(loss, bool) and isinstance(loss, Real):
        return float(loss)
    if not isinstance(loss, Tensor) or loss.is_complex():
        got = "complex numbers" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"the loss: got {got}, expected a number, or a tensor of real numbers")
    if not has_data(loss) and not is_shard(
        loss
    ):  # a run without data, or a function over the model
        return None
    if not loss.numel():
        raise ValueError("the loss: got a tensor without elements, expected a number or more")
    with torch.no_grad(), torch._C.DisableTorchFunction():
        own = loss.full_tensor() if is_shard(loss) else loss.detach()  # type: ignore[attr-defined]
        if own.numel() > 1:
            own = own.mean(dtype=torch.promote_types(own.dtype, torch.float32))
        return float(own) if own.device.type == "cpu" else own.reshape(()).clone()


class LossLog:
    """Keeps losses by their steps until they are taken.

    What the training loop says of a step goes before what hooks have seen of it. Of both, several
    values of one step have their mean: those of micro-batches. Where an optimizer's step evaluates
    a closure, only the first value during that counts, since the weights have moved before the
    next one.

    At most 16,384 values of each kind are kept; then the oldest go.
    """

    def __init__(self) -> None:
        self._said, self._seen = _Values(), _Values()

    def say(self, step: int, loss: object) -> None:
        """The training loop says what the loss of a step's batch is.

        Raises:
            TypeError, ValueError: see `value_of`.
        """
        self._said.add(step, value_of(loss))

    def see(self, step: int, loss: object) -> None:
        """A hook has seen it; otherwise as `say`."""
        self._seen.add(step, value_of(loss))

    def step_begins(self) -> None:
        """The optimizer's step begins: it may evaluate a closure."""
        for values in (self._said, self._seen):
            values.room = 1

    def step_ends(self) -> None:
        """The optimizer's step has ended."""
        for values in (self._said, self._seen):
            values.room = None

    def take(self, last: int) -> dict[int, float]:
        """By step, in their order, the losses of the steps up to this one; they are gone then."""
        found = self._seen.take(last) | self._said.take(last)
        return {step: found[step] for step in sorted(found)}


class _Values:
    """Values by step, of one kind.

    Attributes:
        room: how many more count; None: all.
    """

    def __init__(self) -> None:
        self.room: int | None = None
        self._new: list[tuple[int, Value]] = []
        self._chunks: deque[tuple[list[int], Tensor]] = deque(maxlen=_MOST // _CHUNK - 1)

    def add(self, step: int, value: Value | None) -> None:
        if value is None:
            return
        if self.room is not None:
            if not self.room:
                return
            self.room -= 1
        self._new.append((step, value))
        if len(self._new) >= _CHUNK:
            self._fold()

    def _fold(self) -> None:
        """One tensor for all new values of each device: they take hardly any memory then."""
        by_device: dict[torch.device, list[tuple[int, Tensor]]] = defaultdict(list)
        for step, value in self._new:
            tensor = torch.as_tensor(
                value, dtype=None if isinstance(value, Tensor) else torch.double
            )
            by_device[tensor.device].append((step, tensor))
        for several in by_device.values():
            steps, tensors = zip(*several, strict=True)
            self._chunks.append((list(steps), torch.stack(tensors)))
        self._new.clear()

    def take(self, last: int) -> dict[int, float]:
        steps = [step for chunk, _ in self._chunks for step in chunk]
        steps += [step for step, _ in self._new]
        values = [*(chunk for _, chunk in self._chunks), *(value for _, value in self._new)]
        numbers = fetch_numbers(values)
        by_step: dict[int, list[float]] = defaultdict(list)
        later: list[tuple[int, Value]] = []
        for step, number in zip(steps, numbers, strict=True):
            if step <= last:
                by_step[step].append(number)
            else:
                later.append((step, number))
        self._chunks.clear()
        self._new = later
        return {step: sum(values) / len(values) for step, values in by_step.items()}
