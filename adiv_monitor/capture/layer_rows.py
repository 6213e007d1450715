"""The rows of one layer in one step, gathered call by call and matched with gradients."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adiv_monitor.capture.sampling import Threshold, draw, winners
from adiv_monitor.capture.selection import Layer
from adiv_monitor.features.features import Features
from adiv_monitor.features.rows import Rows, Whole, to_device
from adiv_monitor.maths.ceiling import Ceiling

# Calls whose gradient never arrives still hold rows. The waiting calls may therefore hold up to
# this many times `max_rows`.
_WAITING = 8


class Call:
    """The record of one call of a layer: the chosen rows and sums over all rows.

    Attributes:
        layer: the layer with the weights that this call used.
        features: φ of the chosen rows; `look` sets it.
        z: the outputs of the chosen rows; `look` sets it.
        whole: the statistics of all rows from the forward pass; `look` sets it.
        known: whether `look` was called.
        gradient: ∂L/∂z of the chosen rows, once it is part of the parameters' gradient.
        rescaled: how many factors the parameters' gradient had when this call became part of it.
        norms: ‖g_r‖ of all rows; None once two backward passes have gone through one graph, or
            where ranks hold partial sums: then the sum is known for the chosen rows alone.
        precision: the rounding of the gradients that arrived.
        evaluates: whether the model was in eval mode.
        replay_error: the error of the replay that computed the rows; None: there was no replay.
    """

    features: Features
    z: Tensor

    def __init__(self, layer: Layer, rows: Rows) -> None:
        self.layer = layer
        self.rows = rows
        self.known = False
        self.whole: Whole | None = None
        self.gradient: Tensor | None = None
        self.rescaled = 0
        self.norms: Tensor | None = None
        self.precision = 0.0
        # The gradient that arrived since the parameters last accumulated, and ‖g_r‖ of all rows.
        self._arrived: tuple[Tensor, Tensor | None] | None = None
        self._backward = -1  # the backward pass in which it arrived
        self.replay_error: Tensor | None = None
        self.hook: weakref.ref[Any] | None = None  # dies with the graph
        self.replay: weakref.WeakMethod[Callable[[], None]] | None = None  # dies with it, too
        self.every_row: Features | None = None  # only for the ceiling
        self.every_gradient: Tensor | None = None
        self.tells_sums = False  # a second pass through the graph, or merged rows
        self.evaluates = False

    def look(self, features: Features, z: Tensor, whole: Whole | None) -> None:
        """Set features, outputs and statistics of the rows."""
        self.features, self.z, self.whole = features, z, whole
        self.known = True

    def settle(self) -> None:
        """Compute late rows, now that a gradient has arrived at the parameters."""
        replay = None if self.replay is None else self.replay()
        if replay is not None:
            replay()

    def arrive(self, gradient: Tensor, norms: Tensor | None, precision: float) -> None:
        """Keep ∂L/∂z of the chosen rows and ‖g_r‖ of all until the parameters accumulate.

        If the backward pass reaches no parameter (an attack on the input, for example, or a frozen
        layer), the next pass replaces this gradient.
        """
        self._arrived = gradient, norms
        self.precision = max(self.precision, precision)
        self._backward = torch._C._current_graph_task_id()

    def fold(self) -> None:
        """Add the gradient of the running backward pass when the parameters accumulate."""
        if self._arrived is not None and self._backward == torch._C._current_graph_task_id():
            self.take_arrived()

    def take_arrived(self) -> None:
        """Add the gradient that arrived to the gradient of this call."""
        if self._arrived is None:
            return
        gradient, norms = self._arrived
        self._arrived = None
        if self.gradient is None:
            self.gradient, self.norms = gradient, norms
        else:
            self.gradient, self.norms = self.gradient + gradient, None

    def rescale(self, factor: Tensor) -> None:
        """Scale the gradient by a factor that was applied to the parameters' gradient."""
        if self.gradient is not None:
            self.gradient = self.gradient * factor.to(self.gradient.dtype)
        if self.norms is not None:
            self.norms = self.norms * factor.to(self.norms.dtype).abs()

    @property
    def arrived(self) -> bool:
        """Whether a gradient arrived since the parameters last accumulated."""
        return self._arrived is not None

    @property
    def arrives_now(self) -> bool:
        """Whether the gradient arrived in the backward pass that is running."""
        return self._backward == torch._C._current_graph_task_id()

    @property
    def dead(self) -> bool:
        """Whether no gradient arrived and none can arrive because the graph is gone."""
        waiting = self.gradient is None and self._arrived is None
        return waiting and self.hook is not None and self.hook() is None

    def keep(self, kept: np.ndarray | None) -> None:
        """Drop all chosen rows except these; None: keep all."""
        if kept is None:
            return
        index = to_device(kept, self.rows.device)
        self.pick(index)
        if self.gradient is not None:
            self.gradient = self.gradient.index_select(0, index)
        chosen = kept if self.rows.chosen is None else self.rows.chosen[kept]
        self.rows = Rows(self.rows.shape, chosen, self.rows.device)

    def pick(self, index: Tensor) -> None:
        """Keep the features and outputs of these rows only."""
        self.features = self.features.pick(index)
        self.z = self.z.index_select(0, index)


class Chooser:
    """Chooses the rows of calls for all layers of one step.

    Layers with outputs of the same shape use the same rows in their first call, so that these are
    drawn and copied to the device once. Only the uniformity within each layer matters.

    Args:
        max_rows: the number of rows to sample per layer; None: all rows.
        generator: the monitor's own random number generator.
    """

    def __init__(self, max_rows: int | None, generator: np.random.Generator) -> None:
        self.max_rows = max_rows
        self._generator = generator
        self._first: dict[tuple[tuple[int, ...], torch.device], Rows] = {}

    def first(self, shape: tuple[int, ...], device: torch.device) -> Rows:
        """Return the rows of a layer's first call."""
        alike = shape, device
        if alike not in self._first:
            self._first[alike] = self.further(shape, device, np.inf)
        return self._first[alike]

    def further(self, shape: tuple[int, ...], device: torch.device, bound: float) -> Rows:
        """Return the rows of a later call with keys below a bound."""
        return draw(shape, self.max_rows, bound, self._generator, device)


class LayerRows:
    """The rows of one layer in one step: at most `max_rows`, each row with equal probability.

    A backward pass visits only the calls that it reaches, however many calls there were before.

    Attributes:
        calls: the calls of which rows are kept, in order.
        dropped: whether rows were dropped because their gradient was zeroed before a step.
        again: whether a pass went through calls once more whose gradient was zeroed.
        ceiling: sums over all rows, if requested.
        linear: how well the rule reproduced the output; None: not checked.
    """

    def __init__(self, chooser: Chooser, path: str) -> None:
        self._path, self._drawn = path, 0
        self.calls: dict[Call, None] = {}
        self.dropped = self.again = False
        self.ceiling: Ceiling | None = None
        self.linear: Tensor | None = None
        self._chooser = chooser
        self._max_rows = chooser.max_rows
        self._waiting: dict[Call, None] = {}  # calls without gradient
        self._reached: dict[Call, None] = {}  # calls that are part of the parameters' gradient
        self._most_waiting = 0  # up to this many are not checked for dead ones
        self._rows_waiting = 0
        # Of the reached calls and of all calls; None: not known, a single call needs neither.
        self._reached_bound: Threshold | None = None
        self._bound: Threshold | None = None
        # By backward pass, the calls whose gradient has not yet reached a parameter.
        self._arriving: dict[int, dict[Call, None]] = {}
        self._factors: tuple[Tensor, ...] = ()  # that scaled the parameters' gradient

    def choose(self, shape: tuple[int, ...], device: torch.device) -> Rows:
        """Choose rows of the next call."""
        if torch._C._current_graph_task_id() == -1:  # no running pass can deliver more
            self._arriving.clear()
        if self._waiting and len(self._waiting) >= self._most_waiting:
            self._remove([call for call in self._waiting if call.dead])
            self._most_waiting = 2 * len(self._waiting)
        if not self.calls:
            return self._chooser.first(shape, device)
        return self._chooser.further(shape, device, self._below(prod(shape)))

    def _below(self, total: int) -> float:
        """Return the bound below which a row's key must be for the row to have a chance."""
        if self._max_rows is None:
            return np.inf
        # New rows compete with the rows that have their gradient. They compete with the waiting
        # rows too if these become too many.
        if self._rows_waiting + min(total, self._max_rows) <= _WAITING * self._max_rows:
            if self._reached_bound is None:
                self._reached_bound = self._threshold(self._reached)
            return self._reached_bound.bound
        if self._bound is None:
            self._bound = self._threshold(self.calls)
        return self._bound.bound

    def _threshold(self, calls: Iterable[Call]) -> Threshold:
        return Threshold(self._max_rows, (call.rows for call in calls))

    def add(self, call: Call) -> None:
        """Add a call whose rows were chosen."""
        self.calls[call] = self._waiting[call] = None
        self._rows_waiting += call.rows.count
        if self._bound is not None:
            self._bound.add(call.rows)

    def _remove(self, calls: Sequence[Call]) -> None:
        for call in calls:
            del self.calls[call]
            if call in self._waiting:
                self._wait_no_more(call)
            else:
                del self._reached[call]
        if calls:
            self._reached_bound = self._bound = None

    def _wait_no_more(self, call: Call) -> None:
        del self._waiting[call]
        self._rows_waiting -= call.rows.count

    def release(self) -> None:
        """Release all calls."""
        self.calls, self._waiting, self._reached, self._arriving = {}, {}, {}, {}
        self._rows_waiting = 0
        self._reached_bound = self._bound = None

    def expect(self, call: Call) -> None:
        """Register that the running backward pass reached a call."""
        self._arriving.setdefault(torch._C._current_graph_task_id(), {})[call] = None

    def arrive(self, call: Call, gradient: Tensor, norms: Tensor | None, precision: float) -> None:
        """Take ∂L/∂z of a call; `Accumulation` calls `fold` once the parameters have theirs."""
        self.expect(call)
        call.arrive(gradient, norms, precision)

    def settle(self) -> None:
        """Compute late rows, now that a gradient has arrived at the layer's parameters."""
        for call in list(self._arriving.get(torch._C._current_graph_task_id(), ())):
            call.settle()

    def reset(self) -> None:
        """Drop the rows of the accumulated gradient, which was zeroed."""
        if not self._reached:
            return
        self.dropped = True
        self._factors = ()
        for call in [call for call in self._reached if not call.arrived]:
            del self._reached[call], self.calls[call]
        self.again |= bool(self._reached)
        for call in self._reached:
            call.gradient = call.norms = None
            self._waiting[call] = None
            self._rows_waiting += call.rows.count
        self._reached.clear()
        self._reached_bound = self._bound = None
        self.ceiling = None

    def rescale(self, factor: Tensor) -> None:
        """Scale the accumulated rows by a factor."""
        if self._reached:
            self._factors += (factor,)
        if self.ceiling is not None:
            self.ceiling.rescale(factor)

    def fold(self) -> None:
        """Add the gradients of this pass when the layer's parameters accumulate."""
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
            if self._reached_bound is not None:
                self._reached_bound.add(call.rows)

    def _add_to_ceiling(self, call: Call) -> None:
        folded = call.gradient is not None and not call.arrived
        if folded and call.every_row is not None and call.every_gradient is not None:
            self.ceiling = self.ceiling or Ceiling()
            self.ceiling.add(call.every_row, call.every_gradient)
            call.every_row = call.every_gradient = None

    @property
    def ceiling_is_whole(self) -> bool:
        """Whether the ceiling accounts for every call in the parameters' gradient."""
        return not any(call.tells_sums and call.gradient is not None for call in self.calls)

    def finish(self) -> list[Call]:
        """Return the calls that are part of the final gradient, reduced to the sampled rows."""
        self._rescale_reached()
        if not self._reached:
            # No parameter accumulated: the user assigned the gradients of this pass.
            for call in self.calls:
                call.take_arrived()
                self._add_to_ceiling(call)
        reached = [call for call in self.calls if call.gradient is not None]
        if len(self.calls) > 1:  # the rows of a single call are all kept
            kept = winners([call.rows for call in reached], self._max_rows)
            for call, rows in zip(reached, kept, strict=True):
                call.keep(rows)
        return reached

    def _rescale_reached(self) -> None:
        """Multiply the gradient of each call by the factors applied since it became part."""
        if not self._factors:
            return
        since = list(accumulate(reversed(self._factors), torch.mul))[::-1]
        for call in self._reached:
            if call.rescaled < len(since):
                call.rescale(since[call.rescaled])
            call.rescaled = 0
        self._factors = ()
