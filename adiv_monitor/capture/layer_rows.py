"""The rows of one layer in one step: gathered call by call, matched with gradients."""

import weakref
import zlib
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import prod
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from adiv_monitor.capture.realised.forward_calls import CallPlace
from adiv_monitor.capture.sampling import Draw, Threshold, draw, winners
from adiv_monitor.capture.selection import Layer
from adiv_monitor.capture.split_calls import Split
from adiv_monitor.features.features import Features
from adiv_monitor.features.rows import Rows, to_device
from adiv_monitor.features.whole import LateScales, Whole
from adiv_monitor.maths.ceiling import Ceiling

# Rows that wait for their gradient may be more than are wanted in the end, since some of them may
# never get one; this many times `max_rows`.
_WAITING = 8


class Late(Protocol):
    """Tells features, outputs and gradients together, where only a backward pass lets it."""

    def settle(self) -> None:
        """Tell them if they are complete."""
        ...


class Call:
    """What is kept of one call of a layer: the chosen rows, and what all rows say together.

    Attributes:
        layer: with the weights that this call used; None of what is no layer.
        features: φ of the chosen rows; `look` gives them.
        z: of the chosen rows, likewise.
        whole: what one pass said of all rows, likewise.
        late: what one pass can say of all rows once the gradient comes; None: nothing.
        known: whether `look` was called.
        gradient: ∂L/∂z of the chosen rows, once it is part of the parameters' gradient.
        rescaled: how often the parameters' gradient had been multiplied when this became a part.
        size: ‖g_r‖² of all rows, (1, rows), or what `LateScales.of_gradient` found; None once two
            backward passes have gone through one graph, or where ranks have terms of it: the
            sum of these is known of the chosen rows alone.
        precision: rounding of the gradients that came.
        place: where in the step the call was made, if the forward passes are noted.
        forward: the number of the module's forward in which it was made.
        replay_error: how far off the replay was that told the rows; None: they were seen.
        split: how this call and those of other ranks make one; None: it is no part of one.
        total: how many rows of the call this rank stands for; `rows` may be chosen of more.
    """

    features: Features
    z: Tensor

    def __init__(self, layer: Layer | None, rows: Rows, chosen: Draw) -> None:
        self._layer = layer
        self.rows = rows
        self.draw = chosen
        self.known = False
        self.whole: Whole | None = None
        self.late: LateScales | None = None
        self.gradient: Tensor | None = None
        self.rescaled = 0
        self.size: Tensor | None = None
        self.precision = 0.0
        # Since the parameters last accumulated.
        self._arrived: tuple[Tensor, Tensor | None] | None = None
        self._backward = -1  # in which backward pass
        self.replay_error: Tensor | None = None
        self.hook: weakref.ref[Any] | None = None  # dies with the graph
        self.replay: weakref.ref[Late] | None = None  # so does this
        self.every_row: Features | None = None  # only for the ceiling
        self.every_gradient: Tensor | None = None
        self.tells_sums = False  # of a further pass through the graph, or of rows put together
        self.place: CallPlace | None = None
        self.forward = -1
        self.split: Split | None = None
        self.total = rows.total

    @property
    def layer(self) -> Layer:
        """What was called, with the weights that this call used; attention has none."""
        assert self._layer is not None
        return self._layer

    def look(
        self, features: Features, z: Tensor, whole: Whole | None, late: LateScales | None = None
    ) -> None:
        """Keep what the rows are."""
        self.features, self.z, self.whole, self.late = features, z, whole, late
        self.known = True

    def settle(self) -> None:
        """A gradient has come to the parameters: all that is late can be told."""
        replay = None if self.replay is None else self.replay()
        if replay is not None:
            replay.settle()

    def arrive(self, gradient: Tensor, size: Tensor | None, precision: float) -> None:
        """Keep ∂L/∂z of the rows, and what all say, until the parameters accumulate.

        A backward pass that reaches no parameter (of an attack on the input, say, or with this
        layer frozen) is replaced by the next one.
        """
        self._arrived = gradient, size
        self.precision = max(self.precision, precision)
        self._backward = torch._C._current_graph_task_id()

    def fold(self) -> None:
        """The parameters accumulate: this pass's gradient adds to what was there."""
        if self._arrived is not None and self._backward == torch._C._current_graph_task_id():
            self.take_arrived()

    def take_arrived(self) -> None:
        """What arrived is part of the parameters' gradient."""
        if self._arrived is None:
            return
        gradient, size = self._arrived
        self._arrived = self.late = None
        if self.gradient is None:
            self.gradient, self.size = gradient, size
        else:
            self.gradient, self.size = self.gradient + gradient, None

    def rescale(self, factor: Tensor) -> None:
        """The parameters' gradient was multiplied since this call became a part of it."""
        if self.gradient is not None:
            self.gradient = self.gradient * factor.to(self.gradient.dtype)
        self.size = self._times(self.size, factor)

    def rescale_arrived(self, factor: Tensor) -> None:
        """The gradient that is about to accumulate was multiplied by a hook of the user's."""
        if self._arrived is not None and self._backward == torch._C._current_graph_task_id():
            gradient, size = self._arrived
            self._arrived = gradient * factor.to(gradient.dtype), self._times(size, factor)
            if self.every_gradient is not None:
                self.every_gradient = self.every_gradient * factor.to(self.every_gradient.dtype)

    def _times(self, size: Tensor | None, factor: Tensor) -> Tensor | None:
        if size is None:
            return None
        return size * factor.to(size.dtype) ** 2

    @property
    def arrived(self) -> bool:
        """Whether a gradient came since the parameters last accumulated."""
        return self._arrived is not None

    @property
    def arrives_now(self) -> bool:
        """Whether the backward pass that runs brought its gradient."""
        return self._backward == torch._C._current_graph_task_id()

    @property
    def dead(self) -> bool:
        """Whether no gradient came and none can come, because the graph is gone."""
        waiting = self.gradient is None and self._arrived is None
        return waiting and self.hook is not None and self.hook() is None

    def keep(self, kept: np.ndarray | None) -> None:
        """Give up all chosen rows but these."""
        if kept is None:
            return
        index = to_device(kept, self.rows.device)
        self.pick(index)
        if self.gradient is not None:
            self.gradient = self.gradient.index_select(0, index)
        chosen = kept if self.rows.chosen is None else self.rows.chosen[kept]
        self.rows = Rows(self.rows.shape, chosen, self.rows.device)

    def pick(self, index: Tensor) -> None:
        """Keep of what the rows are no more than of these."""
        self.features = self.features.pick(index)
        self.z = self.z.index_select(0, index)


class Chooser:
    """Chooses the rows of calls, for all layers of one step.

    Layers whose outputs are alike look at the same rows of their first call, so that those are
    drawn and travel to the device once: what matters is that each layer's rows are even.

    Args:
        max_rows: rows to look at per layer; None: all.
        generator: the monitor's own source of chance.
        shared: numbers for a source of chance that other ranks have too, which are given the
            same data: what they draw for a call must not depend on what they drew before.
    """

    def __init__(
        self,
        max_rows: int | None,
        generator: np.random.Generator,
        shared: Sequence[int] | None = None,
    ) -> None:
        self.max_rows = max_rows
        self._generator = generator
        self._shared = shared
        self._first: dict[tuple[tuple[int, ...], torch.device], tuple[Rows, Draw]] = {}

    def first(self, shape: tuple[int, ...], device: torch.device) -> tuple[Rows, Draw]:
        """Rows of a layer's first call."""
        alike = shape, device
        if alike not in self._first:
            self._first[alike] = self.further(shape, device, np.inf, shape)
        return self._first[alike]

    def further(
        self, shape: tuple[int, ...], device: torch.device, bound: float, call: object
    ) -> tuple[Rows, Draw]:
        """Rows of another one, with keys below a bound; `call`: which it is."""
        generator = self._generator
        if self._shared is not None:
            generator = np.random.default_rng([*self._shared, zlib.crc32(repr(call).encode())])
        chosen = draw(prod(shape), self.max_rows, bound, generator)
        return Rows(shape, chosen.chosen, device), chosen


class LayerRows:
    """The rows of one layer in one step: at most `max_rows`, each row as likely as any other.

    A backward pass looks only at the calls that it reaches, however many there were before.

    Attributes:
        calls: of which rows are kept, in their order.
        dropped: rows were, because their gradient was zeroed before a step was taken.
        ceiling: sums over all rows, if they are asked for.
        linear: how well the rule reproduced the output; None: that was not looked at.
    """

    def __init__(self, chooser: Chooser, path: str) -> None:
        self._path, self._drawn = path, 0
        self.calls: dict[Call, None] = {}
        self.dropped = False
        self.ceiling: Ceiling | None = None
        self.linear: Tensor | None = None
        self._chooser = chooser
        self._max_rows = chooser.max_rows
        self._waiting: dict[Call, None] = {}  # calls without gradient
        self._reached: dict[Call, None] = {}  # those whose gradient is part of the parameters'
        self._most_waiting = 0  # so many are not looked through for dead ones
        self._rows_waiting = 0
        self._reached_bound = Threshold(self._max_rows)  # of those that are reached
        self._bound: Threshold | None = None  # of all; None: not known
        # By backward pass, the calls whose gradient it brought to no parameter yet.
        self._arriving: dict[int, dict[Call, None]] = {}
        self._factors: list[Tensor] = []  # by which the parameters' gradient was multiplied

    def choose(self, shape: tuple[int, ...], device: torch.device) -> tuple[Rows, Draw]:
        """Choose rows of a further call."""
        if torch._C._current_graph_task_id() == -1:  # no pass runs that could bring more
            self._arriving.clear()
        if len(self._waiting) >= self._most_waiting:
            self._remove([call for call in self._waiting if call.dead])
            self._most_waiting = 2 * len(self._waiting)
        if not self.calls:
            return self._chooser.first(shape, device)
        self._drawn += 1
        call = self._path, self._drawn
        return self._chooser.further(shape, device, self._below(prod(shape)), call)

    def _below(self, total: int) -> float:
        """Below which a row's key must be to have a chance."""
        if self._max_rows is None:
            return np.inf
        # Rows that have their gradient compete with all that come; so do those that wait for it
        # when they get too many.
        if self._rows_waiting + min(total, self._max_rows) <= _WAITING * self._max_rows:
            return self._reached_bound.bound
        if self._bound is None:
            self._bound = Threshold(self._max_rows, (call.draw for call in self.calls))
        return self._bound.bound

    def add(self, call: Call) -> None:
        """A further call, whose rows were chosen."""
        self.calls[call] = self._waiting[call] = None
        self._rows_waiting += len(call.draw.keys)
        if self._bound is not None:
            self._bound.add(call.draw)

    def withdraw(self, calls: Iterable[Call]) -> None:
        """Some calls are no uses after all."""
        self._remove([call for call in calls if call in self.calls])

    def _remove(self, calls: Sequence[Call]) -> None:
        for call in calls:
            del self.calls[call]
            if call in self._waiting:
                self._wait_no_more(call)
            else:
                del self._reached[call]
        if calls:
            self._reached_bound = Threshold(self._max_rows, (call.draw for call in self._reached))
            self._bound = None

    def _wait_no_more(self, call: Call) -> None:
        del self._waiting[call]
        self._rows_waiting -= len(call.draw.keys)

    def release(self) -> None:
        """Let go of all calls."""
        for calls in (self.calls, self._waiting, self._reached, self._arriving):
            calls.clear()
        self._rows_waiting = 0
        self._reached_bound, self._bound = Threshold(self._max_rows), None

    def expect(self, call: Call) -> None:
        """The backward pass that runs has come to a call."""
        self._arriving.setdefault(torch._C._current_graph_task_id(), {})[call] = None

    def arrive(self, call: Call, gradient: Tensor, size: Tensor | None, precision: float) -> None:
        """∂L/∂z of a call has come; see `Call.arrive`."""
        self.expect(call)
        call.arrive(gradient, size, precision)

    def _expected(self) -> list[Call]:
        """The calls to which the backward pass that runs has come."""
        return list(self._arriving.get(torch._C._current_graph_task_id(), ()))

    def settle(self) -> None:
        """A gradient has come to the layer's parameters."""
        for call in self._expected():
            call.settle()

    def reset(self) -> None:
        """What the parameters had accumulated is gone, and its rows with it."""
        if not self._reached:
            return
        self.dropped = True
        self._factors.clear()
        for call in [call for call in self._reached if not call.arrived]:
            del self._reached[call], self.calls[call]
        for call in self._reached:
            call.gradient = call.size = None
            self._waiting[call] = None
            self._rows_waiting += len(call.draw.keys)
        self._reached.clear()
        self._reached_bound, self._bound = Threshold(self._max_rows), None
        self.ceiling = None

    def rescale(self, factor: Tensor) -> None:
        """What the parameters had accumulated was multiplied by a factor since."""
        if self._reached:
            self._factors.append(factor)
        if self.ceiling is not None:
            self.ceiling.rescale(factor)

    def rescale_arrived(self, factor: Tensor) -> None:
        """What is about to be accumulated was multiplied by a factor."""
        for call in self._expected():
            call.rescale_arrived(factor)

    def fold(self) -> None:
        """The layer's parameters accumulate a gradient."""
        for call in self._arriving.pop(torch._C._current_graph_task_id(), ()):
            if call in self.calls:
                self._fold(call)
        self._most_waiting = 0  # others may be dead now

    def _fold(self, call: Call) -> None:
        for factor in self._factors[call.rescaled :] if call in self._reached else ():
            call.rescale(factor)
        call.fold()
        call.rescaled = len(self._factors)
        self._add_to_ceiling(call)
        if call.gradient is not None and call in self._waiting:
            self._wait_no_more(call)
            self._reached[call] = None
            self._reached_bound.add(call.draw)

    def _add_to_ceiling(self, call: Call) -> None:
        folded = call.gradient is not None and not call.arrived
        if folded and call.every_row is not None and call.every_gradient is not None:
            self.ceiling = self.ceiling or Ceiling()
            self.ceiling.add(call.every_row, call.every_gradient)
            call.every_row = call.every_gradient = None

    @property
    def ceiling_is_whole(self) -> bool:
        """Whether no gradient is part of the parameters' of which the ceiling knows nothing."""
        return not any(call.tells_sums and call.gradient is not None for call in self.calls)

    def finish(self) -> list[Call]:
        """The gradients are final: the calls that are part of them, with the sampled rows only."""
        self._rescale_reached()
        if not self._reached:
            # No parameter accumulated: the gradients were set by hand, from this pass.
            for call in self.calls:
                call.take_arrived()
                self._add_to_ceiling(call)
        reached = [call for call in self.calls if call.gradient is not None]
        if len(self.calls) > 1:  # the rows of one were drawn such that all of them are kept
            kept = winners([call.draw for call in reached], self._max_rows)
            for call, rows in zip(reached, kept, strict=True):
                call.keep(rows)
        return reached

    def _rescale_reached(self) -> None:
        """Multiply the gradient of each call by what the parameters' was multiplied by since."""
        if not self._factors:
            return
        since = list(accumulate(reversed(self._factors), torch.mul))[::-1]
        for call in self._reached:
            if call.rescaled < len(since):
                call.rescale(since[call.rescaled])
            call.rescaled = 0
        self._factors.clear()
