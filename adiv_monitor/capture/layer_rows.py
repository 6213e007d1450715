"""The rows of one layer in one step, gathered call by call, with their gradients pass by pass."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from adiv_monitor.capture.check import Equations, Products, added
from adiv_monitor.capture.passes import Pass, Passes, Zeroed
from adiv_monitor.capture.sampling import draw, winners
from adiv_monitor.capture.selection import Layer
from adiv_monitor.features.features import Features
from adiv_monitor.features.rows import Rows, Whole, to_compute_dtype, to_device


class Arrived(NamedTuple):
    """What one backward pass brought to a call.

    Attributes:
        gradient: ∂L/∂z of the chosen rows.
        norms: ‖g_r‖ of all rows.
        sums: h of the pass, see `Products`; None: not checked.
    """

    gradient: Tensor
    norms: Tensor
    sums: Equations | None


@dataclass(eq=False)
class Call:
    """The record of one call of a layer: the chosen rows and sums over all rows.

    Attributes:
        layer: the layer with the weights that this call used.
        rows: the chosen rows.
        precision: the rounding of the gradients that arrived.
        features: φ of the chosen rows.
        z: the outputs of the chosen rows.
        whole: the statistics of all rows from the forward pass.
        products: for the check of the gradient; None: it is not checked.
        gradient: ∂L/∂z of the chosen rows; `add_up` sets it.
        norms: see `Arrived`; `add_up` sets it. None once two backward passes have gone through one
            graph: then the sum is known for the chosen rows alone.
    """

    layer: Layer
    rows: Rows
    precision: float = 0.0
    features: Features = field(init=False)
    z: Tensor = field(init=False)
    whole: Whole | None = None
    products: Products | None = None
    gradient: Tensor | None = None
    norms: Tensor | None = None

    def add_up(self, arrived: Sequence[Arrived]) -> None:
        """Add up the gradients of all passes, given what each of them brought."""
        self.products = None
        first, *others = arrived
        several = (to_compute_dtype(of.gradient) for of in arrived)
        self.gradient = reduce(torch.add, several) if others else first.gradient
        self.norms = None if others else first.norms

    def keep(self, kept: np.ndarray) -> None:
        """Drop all chosen rows except these."""
        index = to_device(kept, self.rows.device)
        self.features = self.features.pick(index)
        self.z = self.z.index_select(0, index)
        if self.gradient is not None:
            self.gradient = self.gradient.index_select(0, index)
        chosen = kept if self.rows.chosen is None else self.rows.chosen[kept]
        self.rows = Rows(self.rows.shape, chosen, self.rows.device)


class Chooser:
    """Chooses the rows of calls for all layers of one step.

    Layers with outputs of the same shape use the same rows in their first call, and in each later
    one, so that these are drawn and copied to the device once. Only the uniformity within each
    layer matters.

    Args:
        max_rows: the number of rows to sample per layer; None: all rows.
        generator: the monitor's own random number generator.
    """

    def __init__(self, max_rows: int | None, generator: np.random.Generator) -> None:
        self.max_rows = max_rows
        self._generator = generator
        self._drawn: dict[object, Rows] = {}

    def rows(self, number: int, shape: tuple[int, ...], device: torch.device) -> Rows:
        """Return the rows of a layer's call of this number."""
        alike = number, shape, device
        if alike not in self._drawn:
            self._drawn[alike] = draw(shape, self.max_rows, self._generator, device)
        return self._drawn[alike]


class LayerRows:
    """The rows of one layer in one step: at most `max_rows`, each row with equal probability.

    A call without a gradient is held by its graph alone: it is gone once none can arrive.

    Args:
        layer: the layer.
        chooser: chooses rows.

    Attributes:
        passes: the backward passes that brought gradients, the running one included, and what each
            brought to every call.
        counted: those that accumulate the gradient of the layer's parameters.
        dropped: whether rows were dropped because their gradient was zeroed before a step.
        linear: how well the rule reproduced the output; None: not checked.
        earlier: γv of the gradient that was there before the first pass; None: there was none.
        versions: of the parameters when their gradient last arrived.
        v: the vectors of the check, if its weight is checked.
        is_shared: whether other uses have a share in its parameters' gradient.
    """

    def __init__(self, layer: Layer, chooser: Chooser) -> None:
        self.layer = layer
        self.passes: dict[Pass, dict[Call, Arrived]] = {}
        self.counted: list[Pass] = []
        self.dropped = False
        self.linear: Tensor | None = None
        self.earlier: Equations | None = None
        self.versions: list[int] = []
        self.v: Tensor | None = None
        self.is_shared = False
        self._chooser = chooser
        self._called = 0

    @property
    def calls(self) -> list[Call]:
        """The calls with a gradient."""
        return [*dict.fromkeys(chain.from_iterable(self.passes.values()))]

    def new_call(self, shape: tuple[int, ...], device: torch.device) -> Call:
        """Create a call.

        Args:
            shape: the shape of z without its channels.
            device: the device of z.
        """
        self._called += 1
        return Call(self.layer, self._chooser.rows(self._called, shape, device))

    def release(self) -> None:
        """Release all calls."""
        self.passes, self.counted = {}, []

    def zeroed(self, now: Pass, passes: Passes) -> None:
        """Forget all passes, because the gradient was zeroed before the running one."""
        if self.counted:
            found = [x.gradient for of in self.counted for x in self.passes[of].values()]
            norm = torch.stack([*map(torch.linalg.vector_norm, found)]).sum()
            last = self.counted[-1]
            is_other = now.steps != last.steps or self.versions != versions(self.layer)
            passes.zeroed.append(Zeroed([of.task for of in self.counted], norm, is_other))
            self.dropped = True
        self.release()

    def settle(self) -> None:
        """Forget passes that do not count; if none does, the user assigned the gradients of all."""
        if self.counted:
            self.passes = {of: self.passes[of] for of in self.counted}

    def sums(self) -> Equations | None:
        """Return h, over all passes and calls; None if it is not known for one."""
        several = [arrived.sums for of in self.passes.values() for arrived in of.values()]
        known = [sums for sums in several if sums is not None]
        return added(known) if len(known) == len(several) > 0 else None

    def finish(self) -> list[Call]:
        """Return the calls that are part of the final gradient, reduced to the sampled rows."""
        arrived: dict[Call, list[Arrived]] = {}
        for call, found in chain.from_iterable(of.items() for of in self.passes.values()):
            arrived.setdefault(call, []).append(found)
        for call in (reached := [*arrived]):
            call.add_up(arrived[call])
        if reached[1:]:  # the rows of a single call are all kept
            kept = winners([call.rows for call in reached], self._chooser.max_rows)
            for call, rows in zip(reached, kept, strict=True):
                if rows is not None:
                    call.keep(rows)
        return reached


def versions(layer: Layer) -> list[int]:
    """Return the versions of a layer's parameters, which increase with every write."""
    return [p._version for p in layer.parameters]
