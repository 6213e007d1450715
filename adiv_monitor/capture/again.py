"""Runs the forward passes of a step again, and gathers the rows that were looked at then."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor, nn

from adiv_monitor.capture.capture import Capture
from adiv_monitor.capture.forward_calls import ForwardCalls, NotRepeatable, Place
from adiv_monitor.capture.losses import Losses
from adiv_monitor.capture.pieces import Source
from adiv_monitor.capture.selection import Layer, Selection
from adiv_monitor.features.rows import Rows, joined
from adiv_monitor.features.uses import Use

# By layer, of each of its calls: where it was made, and the rows that were looked at.
Wanted = Mapping[str, Sequence[tuple[Place | None, Rows]]]


class Again(Capture):
    """Sees the layers that another capture has seen, and takes z of some rows.

    Args:
        model: the model.
        selection: of the other.
        first: the other, which watched the step.
        wanted: the rows.

    Attributes:
        running: the number of the forward pass that runs.
    """

    _repeated = True

    def __init__(
        self, model: nn.Module, selection: Selection, first: Capture, wanted: Wanted
    ) -> None:
        super().__init__(
            model,
            selection,
            max_rows=None,
            generator=np.random.default_rng(0),
            attainable=False,
            checked=set(),
            switched_off=set(),
            fail=self._failed,
            begins=lambda: None,
        )
        self.running = -1
        self._wanted = wanted
        self._rows = {place: rows for calls in wanted.values() for place, rows in calls if place}
        self._found: dict[Place, Tensor] = {}
        self._counts: Counter[tuple[int, bool, str]] = Counter()
        self._lost: dict[str, str] = {}
        self.layers = first.layers
        self._origin.pieces = first.pieces

    @property
    def forward_passes(self) -> set[int]:
        """The numbers of those in which wanted rows were."""
        return {place.call for place in self._rows}

    def gathered(self, path: str, counts: Mapping[tuple[int, bool, str], int]) -> Tensor:
        """A layer's rows of z, call after call.

        Args:
            path: the layer.
            counts: how often layers were called in each of the forward passes at first.

        Raises:
            NotRepeatable: it was not called as it was at first.
        """
        if path in self._lost:
            raise NotRepeatable(self._lost[path])
        parts = []
        for place, _ in self._wanted[path]:
            if place is None or (place.recomputed and counts[place[:3]] > 1):
                raise NotRepeatable("in which forward pass its rows were is not known")
            if self._counts[place[:3]] != counts[place[:3]]:
                raise NotRepeatable(
                    f"called {counts[place[:3]]} times at first and {self._counts[place[:3]]} "
                    "times when the forward pass ran again"
                )
            parts.append(self._found[place])
        return joined(parts)

    def _note(
        self, use: Use, output: Tensor, path: str | None = None, *, checked: bool = True
    ) -> None:
        layer = self._layer(use, path)
        if layer is None:
            return
        # What checkpointing recomputes runs here without gradients.
        key = self.running, not output.requires_grad, layer.path
        self._counts[key] += 1
        place = Place(*key, self._counts[key] - 1)
        if place not in self._rows:
            return
        rows, z = self._rows[place], use.layout(output)
        if tuple(z.shape[:-1]) == rows.shape:
            self._found[place] = rows.take(z.detach())
        else:
            self._lost[layer.path] = "it had other rows when the forward pass ran again"

    def _new_layer(
        self, path: str, use: Use, weight: Source | None, bias: Source | None
    ) -> Layer | None:
        return None  # which was not seen at first

    def _failed(self, path: str, error: Exception) -> None:
        raise error  # which did not come at first


def run_again(calls: ForwardCalls, again: Again, losses: Losses | None) -> None:
    """Run the forward passes in which wanted rows were, and those of which the loss was made.

    Raises:
        NotRepeatable: they can't be.
    """
    if calls.refusal:
        raise NotRepeatable(calls.refusal)
    given: dict[int, list[Tensor]] = {}
    for number in calls.in_order(again.forward_passes | (losses.needed if losses else set())):
        again.running = number
        if losses is not None:
            losses.runs_again(number)
        given[number] = calls.calls[number].run(given)
