"""The loss of every step, kept where it is until a report tells it."""

from collections import defaultdict, deque
from numbers import Real

import torch
from torch import Tensor

from adiv_monitor.capture.hook import has_data
from adiv_monitor.capture.weights.shards import is_shard
from adiv_monitor.rerun.thread import ThreadState
from adiv_monitor.step.transfer import fetch_numbers

# Tensors that become one, and values that are kept at most, between two reports.
_CHUNK, _MOST = 512, 2**14
_EXPECTED = "a number, or a tensor of real numbers"

Value = float | Tensor  # tensors: one number, on a device that nothing waits for


def value_of(loss: object) -> Value | None:
    """A loss without its graph: the mean, where it is several numbers; None where it has no data.

    Numbers on the host are read; of what is on another device a copy is made there.

    Raises:
        TypeError: it is no number, nor a tensor of real numbers.
        ValueError: it is an empty tensor.
    """
    if type(loss) is float:
        return loss
    if not isinstance(loss, Tensor):
        if not isinstance(loss, bool) and isinstance(loss, Real):
            return float(loss)
        raise TypeError(f"the loss: got {type(loss).__name__}, expected {_EXPECTED}")
    if not (has_data(loss) or is_shard(loss)):  # a run without data, or a function over the model
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
        self._numbers: deque[tuple[int, float]] = deque(maxlen=_MOST)
        self._tensors: list[tuple[int, Tensor]] = []
        self._chunks: deque[tuple[list[int], Tensor]] = deque(maxlen=_MOST // _CHUNK - 1)

    def add(self, step: int, value: Value | None) -> None:
        if value is None or self.room == 0:
            return
        if self.room is not None:
            self.room -= 1
        if not isinstance(value, Tensor):
            self._numbers.append((step, value))
            return
        self._tensors.append((step, value))
        if len(self._tensors) >= _CHUNK:
            self._fold()

    def _fold(self) -> None:
        """One tensor for all new ones of each device: they take hardly any memory then."""
        by_device: dict[torch.device, list[tuple[int, Tensor]]] = defaultdict(list)
        for step, value in self._tensors:
            by_device[value.device].append((step, value))
        for several in by_device.values():
            self._chunks.append(([s for s, _ in several], torch.stack([x for _, x in several])))
        self._tensors.clear()

    def take(self, last: int) -> dict[int, float]:
        held = [*self._chunks, *(([step], value) for step, value in self._tensors)]
        steps = [step for several, _ in held for step in several]
        numbers = fetch_numbers([tensor for _, tensor in held])
        values = [*self._numbers, *zip(steps, numbers, strict=True)]
        for kept in (self._numbers, self._tensors, self._chunks):
            kept.clear()
        by_step: dict[int, list[float]] = defaultdict(list)
        for step, value in values:
            if step <= last:
                by_step[step].append(value)
            else:
                self._numbers.append((step, value))
        return {step: sum(several) / len(several) for step, several in by_step.items()}
