"""The rows of one layer in one step: gathered call by call, thinned, matched with gradients."""

import weakref
from typing import Any

import torch
from torch import Tensor

from adiv_monitor.ceiling import Ceiling
from adiv_monitor.features.features import Features
from adiv_monitor.features.rows import Rows, sample


class Call:
    """The chosen rows of one call of a layer."""

    def __init__(self, rows: Rows, features: Features, z_squared: Tensor, counted: bool) -> None:
        self.rows = rows
        self.features = features
        self.z_squared = z_squared
        self.counted = counted
        self.gradient: Tensor | None = None
        self._arrived: Tensor | None = None  # since the parameters last accumulated
        self._backward = -1  # in which backward pass
        self.hook: weakref.ref[Any] | None = None  # dies with the graph
        self.every_row: Features | None = None  # only for the ceiling
        self.every_gradient: Tensor | None = None

    def arrive(self, gradient: Tensor) -> None:
        """Keep the rows of ∂L/∂z until the parameters accumulate.

        A backward pass that reaches no parameter (of an attack on the input, say, or with this
        layer frozen) is replaced by the next one.
        """
        self._arrived = gradient
        self._backward = torch._C._current_graph_task_id()

    def fold(self, reset: bool) -> None:
        """The parameters accumulate: this pass's gradient adds to what was there, if not zeroed."""
        if reset:
            self.gradient = None
        if self._arrived is not None and self._backward == torch._C._current_graph_task_id():
            self._add_arrived()

    def take_leftover(self) -> None:
        """No parameter accumulated: the gradients were set by hand, from this pass."""
        if self._arrived is not None:
            self._add_arrived()

    def _add_arrived(self) -> None:
        assert self._arrived is not None
        seen = self.gradient
        self.gradient = self._arrived if seen is None else seen + self._arrived
        self._arrived = None

    @property
    def arrived(self) -> bool:
        """Whether a gradient came since the parameters last accumulated."""
        return self._arrived is not None

    @property
    def dead(self) -> bool:
        """Whether no gradient came and none can come, because the graph is gone."""
        waiting = self.gradient is None and self._arrived is None
        return waiting and self.hook is not None and self.hook() is None

    def thin(self, start: int) -> None:
        """Keep every second row."""
        keep = torch.arange(start, len(self.z_squared), 2, device=self.z_squared.device)
        index = self.rows.index
        self.rows = Rows(self.rows.shape, keep if index is None else index[keep])
        self.features = self.features.pick(keep)
        self.z_squared = self.z_squared[keep]
        self.gradient = None if self.gradient is None else self.gradient[keep]
        self._arrived = None if self._arrived is None else self._arrived[keep]


class LayerRows:
    """The rows of one layer in one step: at most `max_rows`, each row as likely as any other."""

    def __init__(self, max_rows: int | None, generator: torch.Generator) -> None:
        self.calls: list[Call] = []
        self.dropped = False  # rows whose gradient was zeroed before a step was taken
        self.ceiling: Ceiling | None = None
        self.ceiling_is_whole = True
        self.linear: Tensor | None = None  # did the rule reproduce the output?
        self._max_rows = max_rows
        self._generator = generator
        self._rate = 1.0
        self._seen = 0

    def choose(self, shape: tuple[int, ...], device: torch.device, counted: bool) -> Rows:
        """Choose rows of a further call; halve all earlier choices when there is no room."""
        self._bury()
        total = Rows(shape).total
        if self._max_rows is not None and self._seen == 0 and total > self._max_rows:
            self._rate = min(self._rate, self._max_rows / total)
        count = self._share(total)
        while counted and self._max_rows is not None and self._seen + count > self._max_rows:
            self._halve()
            count = self._share(total)
        index = sample(total, count, self._generator)
        if counted:
            self._seen += total if index is None else len(index)
        return Rows(shape, None if index is None else index.to(device, non_blocking=True))

    def count(self, call: Call) -> None:
        """Count the rows of a recomputed call, which turned out to be the one with a gradient."""
        if not call.counted:
            call.counted = True
            self._seen += len(call.z_squared)
            while self._max_rows is not None and self._seen > self._max_rows:
                self._halve()

    def fold(self, reset: bool) -> None:
        """The layer's parameters accumulate a gradient; `reset`: what they held is gone."""
        if reset and any(call.gradient is not None for call in self.calls):
            self.dropped = True
            self._remove([c for c in self.calls if c.gradient is not None and not c.arrived])
            self.ceiling = None if self.ceiling is None else Ceiling()
        for call in self.calls:
            call.fold(reset)
            folded = call.gradient is not None and not call.arrived
            if folded and call.every_row is not None and call.every_gradient is not None:
                self.ceiling = self.ceiling or Ceiling()
                self.ceiling.add(call.every_row, call.every_gradient)
                call.every_row = call.every_gradient = None

    def finish(self) -> None:
        """The gradients are final. What reached no parameter is not part of them."""
        if not any(call.gradient is not None for call in self.calls):
            for call in self.calls:
                call.take_leftover()

    def _bury(self) -> None:
        """Forget calls whose graph is gone: evaluations, recomputations."""
        self._remove([call for call in self.calls if call.dead])

    def _remove(self, calls: list[Call]) -> None:
        self._seen -= sum(len(call.z_squared) for call in calls if call.counted)
        self.calls = [call for call in self.calls if call not in calls]

    def _share(self, total: int) -> int:
        if self._rate == 1.0:
            return total
        chance = torch.rand((), generator=self._generator, device="cpu").item()
        return min(total, int(self._rate * total + chance))

    def _halve(self) -> None:
        self._rate /= 2
        for call in self.calls:
            if call.counted:
                start = int(torch.randint(2, (), generator=self._generator, device="cpu"))
                before = len(call.z_squared)
                call.thin(start)
                self._seen -= before - len(call.z_squared)
