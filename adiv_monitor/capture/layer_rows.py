"""The rows of one layer in one step, gathered call by call, with their gradients pass by pass."""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adiv_monitor.capture.check import Equations, Products, added
from adiv_monitor.capture.passes import Passes
from adiv_monitor.capture.sampling import Threshold, draw, winners
from adiv_monitor.capture.selection import Layer
from adiv_monitor.features.features import Features
from adiv_monitor.features.rows import Rows, Whole, to_device
from adiv_monitor.maths.ceiling import Ceiling
from adiv_monitor.rerun.surroundings import version

# Up to so many calls without gradient are looked at whenever rows are chosen.
_FEW = 32


@dataclass(slots=True, eq=False)
class Arrived:
    """What one backward pass brought to a call.

    Attributes:
        gradient: ∂L/∂z of the chosen rows.
        norms: ‖g_r‖ of all rows.
        sums: h of the pass, see `Products`; None: not checked.
        counts: whether the pass accumulates the gradient of the layer's parameters.
    """

    gradient: Tensor
    norms: Tensor
    sums: Equations | None
    counts: bool


class Call:
    """The record of one call of a layer: the chosen rows and sums over all rows.

    Attributes:
        layer: the layer with the weights that this call used.
        features: φ of the chosen rows; `look` sets it.
        z: the outputs of the chosen rows; `look` sets it.
        whole: the statistics of all rows from the forward pass; `look` sets it.
        products: for the check of the gradient; None: it is not checked.
        known: whether `look` was called.
        arrived: what backward passes brought, by their graph tasks.
        gradient: ∂L/∂z of the chosen rows; `weigh` sets it.
        norms: see `Arrived`; `weigh` sets it. None once two backward passes have gone through one
            graph: then the sum is known for the chosen rows alone.
        precision: the rounding of the gradients that arrived.
        evaluates: whether the model was in eval mode.
        replay_error: the error of the replay that computed the rows; None: there was no replay.
        summed: the graph task with which the ceiling has the call's rows; None: it has none.
    """

    features: Features
    z: Tensor

    def __init__(self, layer: Layer, rows: Rows) -> None:
        self.layer = layer
        self.rows = rows
        self.known = False
        self.whole: Whole | None = None
        self.products: Products | None = None
        self.arrived: dict[int, Arrived] = {}
        self.gradient: Tensor | None = None
        self.norms: Tensor | None = None
        self.precision = 0.0
        self.replay_error: Tensor | None = None
        self.hook: weakref.ref[Any] | None = None  # dies with the graph
        self.every_row: Features | None = None  # only for the ceiling
        self.summed: int | None = None
        self.evaluates = False

    def look(
        self, features: Features, z: Tensor, whole: Whole | None, products: Products | None = None
    ) -> None:
        """Set features, outputs and statistics of the rows."""
        self.features, self.z, self.whole, self.products = features, z, whole, products
        self.known = True

    @property
    def dead(self) -> bool:
        """Whether no gradient arrived and none can arrive because the graph is gone."""
        return not self.arrived and self.hook is not None and self.hook() is None

    def weigh(self, factors: Mapping[int, float]) -> None:
        """Add up the gradients of all passes, multiplied by these factors; 1 where none is given.

        Args:
            factors: by graph task.
        """
        self.products = self.gradient = self.norms = None
        for task, found in self.arrived.items():
            factor = factors.get(task, 1.0)
            gradient = found.gradient if factor == 1 else found.gradient * factor
            if self.gradient is None:
                self.gradient = gradient
                self.norms = found.norms if factor == 1 else found.norms * abs(factor)
            else:
                self.gradient, self.norms = self.gradient + gradient, None

    def keep(self, kept: np.ndarray | None) -> None:
        """Drop all chosen rows except these; None: keep all."""
        if kept is None:
            return
        index = to_device(kept, self.rows.device)
        self.features = self.features.pick(index)
        self.z = self.z.index_select(0, index)
        if self.gradient is not None:
            self.gradient = self.gradient.index_select(0, index)
        chosen = kept if self.rows.chosen is None else self.rows.chosen[kept]
        self.rows = Rows(self.rows.shape, chosen, self.rows.device)


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

    Attributes:
        calls: the calls of which rows are kept, in order.
        dropped: whether rows were dropped because their gradient was zeroed before a step.
        ceiling: sums over all rows, if requested.
        linear: how well the rule reproduced the output; None: not checked.
        task: the graph task of the last pass that reached the layer.
        at: the version of the first parameter, and the steps of optimizers, at every pass.
        earlier: γv of the gradient that was there before the first pass; None: there was none.
        versions: of the parameters when their gradient last arrived.
        v: the vectors of the check, if its weight is checked.
        is_shared: whether other uses have a share in its parameters' gradient.
    """

    def __init__(self, chooser: Chooser) -> None:
        self.calls: dict[Call, None] = {}
        self.dropped = False
        self.ceiling: Ceiling | None = None
        self.linear: Tensor | None = None
        self.task = -1
        self.at: dict[int, tuple[int, int]] = {}
        self.earlier: Equations | None = None
        self.versions: list[int] = []
        self.v: Tensor | None = None
        self.is_shared = False
        self._ceilings: dict[int, Ceiling] = {}  # by graph task
        self._chooser = chooser
        self._max_rows = chooser.max_rows
        self._most_waiting = 0  # up to this many calls without gradient are not checked
        self._bound: Threshold | None = None  # of all calls; a single call needs none

    def choose(self, shape: tuple[int, ...], device: torch.device) -> Rows:
        """Choose rows of the next call, which compete with those of all calls that may count."""
        waiting = [call for call in self.calls if not call.arrived]
        if len(waiting) >= self._most_waiting:
            dead = [call for call in waiting if call.dead]
            for call in dead:
                del self.calls[call]
                self._bound = None
            left = len(waiting) - len(dead)
            self._most_waiting = 2 * left if left > _FEW else 0
        if not self.calls:
            return self._chooser.first(shape, device)
        if self._bound is None:
            self._bound = Threshold(self._max_rows, (call.rows for call in self.calls))
        return self._chooser.further(shape, device, self._bound.bound)

    def add(self, call: Call) -> None:
        """Add a call whose rows were chosen."""
        self.calls[call] = None
        if self._bound is not None:
            self._bound.add(call.rows)

    def release(self) -> None:
        """Release all calls."""
        self.calls, self._ceilings, self._bound = {}, {}, None

    @property
    def tasks(self) -> dict[int, bool]:
        """The backward passes that reached the layer, in order, and whether they count."""
        found = {task: a.counts for call in self.calls for task, a in call.arrived.items()}
        return dict(sorted(found.items()))

    def arrive(self, call: Call, task: int, found: Arrived) -> None:
        """Take what a backward pass brought to a call."""
        if call not in self.calls:
            return
        call.arrived[task] = found
        if call.products is not None:
            self.v = call.products.v
        self._most_waiting = 0  # others may be dead now

    def add_to_ceiling(self, call: Call, task: int, gradient: Tensor) -> None:
        """Add the rows of a call, with the gradient of all of them, to the sums for the ceiling."""
        if call.every_row is not None:
            self._ceilings.setdefault(task, Ceiling()).add(call.every_row, gradient)
            call.every_row, call.summed = None, task

    def forget(self, tasks: Iterable[int]) -> None:
        """Forget what some passes brought. Calls may get another gradient later."""
        for task in tasks:
            self._ceilings.pop(task, None)
            for call in self.calls:
                call.arrived.pop(task, None)

    def zeroed(self, tasks: Sequence[int], passes: Passes, key: int) -> None:
        """Drop the rows of passes whose gradient was zeroed.

        Args:
            tasks: the passes.
            passes: is told.
            key: id of the first parameter.
        """
        if not tasks:
            return
        self.dropped = True
        found = [a.gradient for call in self.calls for t, a in call.arrived.items() if t in tasks]
        norm = torch.stack([torch.linalg.vector_norm(gradient) for gradient in found]).sum()
        last = max(tasks)
        after = min((task for task in self.at if task > last), default=last)
        passes.were_zeroed(key, tasks, norm, is_other=self.at[after] != self.at[last])
        self.forget(tasks)

    @property
    def ceiling_is_whole(self) -> bool:
        """Whether the ceiling accounts for every call in the parameters' gradient."""
        return all(
            [*call.arrived] == [call.summed]
            for call in self.calls
            if call.arrived and call.summed is not None
        )

    def settle(self) -> list[Call]:
        """Return the calls that a gradient reached.

        If no pass accumulated a gradient, the user assigned those of all passes.
        """
        tasks = self.tasks
        if any(tasks.values()):
            self.forget([task for task, counts in tasks.items() if not counts])
        return [call for call in self.calls if call.arrived]

    def sums(self) -> dict[int, Equations] | None:
        """Return h of each pass, over all calls; None if it is not known for one."""
        found: dict[int, Equations] = {}
        for call in self.calls:
            for task, of in call.arrived.items():
                if of.sums is None:
                    return None
                found[task] = added([found[task], of.sums]) if task in found else of.sums
        return found or None

    def finish(self, factors: Mapping[int, float]) -> list[Call]:
        """Return the calls that are part of the final gradient, reduced to the sampled rows.

        Args:
            factors: the factors of the passes; 1 where none is given.
        """
        reached = [call for call in self.calls if call.arrived]
        for call in reached:
            call.weigh(factors)
        self.ceiling = Ceiling.joined(
            [of.rescaled(factors.get(task, 1.0)) for task, of in self._ceilings.items()]
        )
        if len(self.calls) > 1:  # the rows of a single call are all kept
            kept = winners([call.rows for call in reached], self._max_rows)
            for call, rows in zip(reached, kept, strict=True):
                call.keep(rows)
        return reached


def versions(layer: Layer) -> list[int]:
    """Return the versions of a layer's parameters, which increase with every write."""
    return [version(parameter) for parameter in layer.parameters]
