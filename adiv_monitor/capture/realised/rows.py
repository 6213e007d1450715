"""Takes the sampled rows of a step again while its forward passes are rerun."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from torch import Tensor, nn

from adiv_monitor.capture.capture import Capture
from adiv_monitor.capture.context import Context
from adiv_monitor.capture.forwards import Forwards
from adiv_monitor.capture.guard import Guard, call_all
from adiv_monitor.capture.layer_rows import Chooser
from adiv_monitor.capture.layers import Layers
from adiv_monitor.capture.names import Names
from adiv_monitor.capture.realised.forward_calls import CallPlace, ForwardCalls, NotRepeatable
from adiv_monitor.capture.realised.losses import Losses
from adiv_monitor.capture.selection import Layer, Selection
from adiv_monitor.capture.watching import Watching
from adiv_monitor.capture.weights.pieces import Source
from adiv_monitor.capture.weights.provenance import Provenance
from adiv_monitor.capture.whole_modules.outputs import Outputs
from adiv_monitor.capture.whole_modules.without_rule import ParametersWithoutRule
from adiv_monitor.features.recurrent import RecurrentCall, maps_of, uses_of
from adiv_monitor.features.rows import Rows, joined
from adiv_monitor.features.uses import Use
from adiv_monitor.rerun.randomness import Randomness
from adiv_monitor.rerun.twin import Arguments

# The place of each call of a layer, and the rows that were sampled of it.
Calls = Sequence[tuple[CallPlace | None, Rows]]


class _KnownLayers(Layers):
    """The layers that were found in the step, without new ones."""

    def _new(self, path: str, use: Use, weight: Source | None, bias: Source | None) -> Layer | None:
        return None

    def failed(self, path: str, error: Exception) -> None:
        """Raise the error: the same code did not fail in the step."""
        raise error


class RerunRows:
    """Finds the layers of a captured step in a rerun and takes z of its rows. See `Takes`.

    Args:
        model: the model.
        selection: the selection of the captured step.
        first: the capture of the step.
        wanted: the rows, by layer.
    """

    def __init__(
        self, model: nn.Module, selection: Selection, first: Capture, wanted: Mapping[str, Calls]
    ) -> None:
        self._running = -1
        self._wanted = wanted
        self._rows = {place: rows for calls in wanted.values() for place, rows in calls if place}
        self._found: dict[CallPlace, Tensor] = {}
        self._counts: dict[str, Counter[tuple[int, bool]]] = defaultdict(Counter)
        self._lost: dict[str, str] = {}
        self._provenance = Provenance(model, selection.parameters, first.pieces)
        guard = Guard()  # no training step runs that an error could disturb
        self._forwards = Forwards.of(selection, guard, repeated=True)
        names = Names(model, selection, self._forwards)
        chooser = Chooser(None, np.random.default_rng(0))
        context = Context(guard)
        self._layers = _KnownLayers(names, self._provenance, chooser, context)
        self._layers.found = first.layers.found
        self._without_rule = ParametersWithoutRule(selection, guard)
        self._watching = Watching(
            selection,
            self._forwards,
            self._layers,
            self._without_rule,
            self,
            repeated=True,
        )

    def attach(self) -> None:
        """Register the hooks. `detach` removes them, even if this method raises."""
        self._forwards.watch(self._watching)

    def detach(self) -> None:
        """Remove the hooks."""
        call_all(self._watching.detach, self._without_rule.release, self._forwards.remove)

    def begin(self, number: int) -> None:
        """Begin a forward pass, after the buffers that it uses are restored."""
        self._running = number
        self._provenance.start()

    @property
    def forward_passes(self) -> set[int]:
        """The numbers of the forward passes that contain wanted rows."""
        return {place.call for place in self._rows}

    def gathered(self, path: str, counts: Mapping[tuple[int, bool], int]) -> Tensor:
        """Return a layer's rows of z, call after call.

        Args:
            path: the path of the layer.
            counts: the number of calls of the layer in each forward pass of the step.

        Raises:
            NotRepeatable: the calls in the rerun differ from those in the step.
        """
        if path in self._lost:
            raise NotRepeatable(self._lost[path])
        parts, found = [], self._counts[path]
        for place, _ in self._wanted[path]:
            if place is None or (place.recomputed and counts[place[:2]] > 1):
                raise NotRepeatable("the forward pass to which its rows belong is not known")
            if found[place[:2]] != counts[place[:2]]:
                raise NotRepeatable(
                    f"called {counts[place[:2]]} times at first, and {found[place[:2]]} times "
                    "when the forward pass ran again"
                )
            parts.append(self._found[place])
        return joined(parts)

    def use(
        self,
        use: Use,
        output: Tensor,
        known: Layer | str | None = None,
        *,
        checked: bool = True,
        inputs: object = None,
    ) -> None:
        """Take z of a use."""
        layer = self._layers.of(use, known)
        if layer is not None:
            self._take(layer, use.layout(output), recomputed=not output.requires_grad)

    def maps(
        self,
        made: RecurrentCall,
        outputs: tuple[Tensor, ...],
        random: Randomness | None,
        inputs: object,
    ) -> list[Tensor]:
        """Take z of the maps in a recurrent call."""
        if made.refusal is not None:  # it was refused in the step, too
            return []
        rows = maps_of(made, outputs[0].dtype, random)
        for use in uses_of(made):
            layer = self._layers.of(use)
            if layer is not None:
                self._take(layer, rows[use.part][1], recomputed=not outputs[0].requires_grad)
        return []

    def whole(
        self,
        module: nn.Module,
        names: list[str],
        arguments: Arguments,
        outputs: Outputs,
        tensors: list[Tensor],
        inputs: object,
    ) -> None:
        """Take z of a module that is measured as a whole."""
        left = {module.get_parameter(name) for name in names}
        layers = (x for x in self._layers.found.values() if x.is_through(module))
        layer = next((x for x in layers if left.issubset(x.parameters)), None)
        if layer is not None:
            self._take(layer, outputs.rows(tensors), recomputed=False)

    def _take(self, layer: Layer, z: Tensor, *, recomputed: bool) -> None:
        """Take rows of z; `recomputed` marks checkpointed calls, which have no gradients here."""
        key, counts = (self._running, recomputed), self._counts[layer.path]
        counts[key] += 1
        place = CallPlace(*key, layer.path, counts[key] - 1)
        if place not in self._rows:
            return
        rows = self._rows[place]
        if tuple(z.shape[:-1]) == rows.shape:
            self._found[place] = rows.take(z.detach())
        else:
            self._lost[layer.path] = "it has other rows when the forward pass ran again"


def run_again(calls: ForwardCalls, rows: RerunRows, losses: Losses | None) -> None:
    """Rerun the forward passes that contain wanted rows, and those that the loss depends on.

    Raises:
        NotRepeatable: they can't be rerun.
    """
    if calls.refusal:
        raise NotRepeatable(calls.refusal)
    given: dict[int, list[Tensor]] = {}
    for number in calls.in_order(rows.forward_passes | (losses.needed if losses else set())):
        if losses is not None:
            losses.runs_again(number)
        given[number] = calls.calls[number].run(given, partial(rows.begin, number))
