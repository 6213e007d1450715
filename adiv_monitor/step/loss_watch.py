"""Finds losses far above those before them, as they arrive; a device is not waited for."""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median

import torch
from torch import Tensor

from adiv_monitor.capture.hook import is_captured
from adiv_monitor.report import Spike

# Losses by which the next ones are judged: those that say what is usual now, those that say how far
# losses lie from it, and how many of these are needed; how many in a row are judged together; and
# the limit in standard deviations.
_NEAR, _FAR, _LEAST, _ROW, _SIGMAS = 16, 128, 32, 4, 8.0
_UNDONE = 0.02  # least share of the fall so far that a spike undoes: else it is of no account
_COMING = 64  # losses that may be on their way from a device


class LossWatch:
    """Watches for spikes.

    A loss is a spike if it is not finite, or the first of k in a row, at most 4, of which each has
    log x − log m > 8 s/√k: m is the median of the 16 losses before them, s the root mean square of
    the same difference, of single losses, over the 128 before, of at least 32. What falls steadily,
    and losses of which a few are always large, are no spikes: on a logarithmic scale these are few
    deviations away. In the 16 steps after a spike, only a loss that is not finite is one. Once a
    loss is not above zero, losses stand in place of their logarithms.
    """

    def __init__(self) -> None:
        self._scale: Callable[[float], float] = math.log
        self._near: deque[tuple[int, float]] = deque(maxlen=_NEAR + _ROW)
        self._off: deque[float] = deque(maxlen=_FAR)
        self._highest = -math.inf  # of the medians so far
        self._was_finite = True
        self._quiet = -1  # until this step there is no other spike
        # Each with its step; the function returns None while it is on its way from its device.
        self._coming: deque[tuple[int, Callable[[], float | None]]] = deque(maxlen=_COMING)
        self._found: list[Spike] = []

    def spikes(self, losses: Mapping[int, Sequence[float | Tensor]]) -> bool:
        """Judge the losses that have arrived; return whether one of them is a spike.

        Args:
            losses: those of further steps, of each of which the mean counts: numbers, or tensors of
                one element.
        """
        for step, several in losses.items():
            if (number := _arriving(several)) is not None:
                self._coming.append((step, number))
        before = len(self._found)
        while self._coming and (loss := self._coming[0][1]()) is not None:
            self.sees(self._coming.popleft()[0], loss)
        return len(self._found) > before

    def sees(self, step: int, loss: float) -> None:
        """Judge the loss of a step, the next one after those before."""
        if not math.isfinite(loss):
            if self._was_finite:
                before = [x for _, x in self._near][-_NEAR:]
                usual = median(before) if before else math.nan
                self._found.append(Spike(step, loss, usual, math.inf))
            self._was_finite = False
            return
        self._was_finite = True
        if loss <= 0 and self._scale is math.log:
            self._scale = float
            self._near.clear()
            self._off.clear()
        self._near.append((step, loss))
        near, offs = [*self._near], [*self._off]
        for count in range(1, min(_ROW, len(near) - _NEAR) + 1):
            usual = median([x for _, x in near[-_NEAR - count : -count]])
            lowest = min([x for _, x in near[-count:]])
            off = self._scale(lowest) - self._scale(usual)
            if count == 1:
                self._highest = max(self._highest, usual)
                self._off.append(off)
            before = offs[: len(offs) + 1 - count]
            if off <= 0 or len(before) < _LEAST or step <= self._quiet:
                break
            deviation = math.hypot(*before) / math.sqrt(len(before) * count)
            is_far = off > _SIGMAS * deviation
            if is_far and lowest - usual > _UNDONE * (self._highest - usual):
                sigmas = off / deviation if deviation else math.inf
                self._found.append(Spike(*near[-count], usual, sigmas))
                self._quiet = step + _NEAR

    def take(self, last: int) -> tuple[Spike, ...]:
        """Remove and return the spikes of steps up to this one."""
        found = tuple(spike for spike in self._found if spike.step <= last)
        self._found = [spike for spike in self._found if spike.step > last]
        return found


def _arriving(losses: Sequence[float | Tensor]) -> Callable[[], float | None] | None:
    """Return what says the mean of losses once it is on the host; None: it is not known in time."""
    tensors = [loss for loss in losses if isinstance(loss, Tensor)]
    if not tensors:
        mean = fmean(losses)
        return lambda: mean
    if len(tensors) < len(losses) or not tensors[0].is_cuda or is_captured():
        return None
    value = tensors[0] if len(tensors) == 1 else torch.stack(tensors).float().mean()
    host = value.to("cpu", non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(value.device))
    return lambda: host.item() if event.query() else None  # type: ignore[no-untyped-call]
