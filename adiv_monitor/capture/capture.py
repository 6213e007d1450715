"""Captures one measured step: which functions use which parameters, and the rows of each use.

`forwards` puts hooks on modules and intercepts the functions that run inside them. `watching` finds
the uses of parameters among these functions. `catch` samples rows of each use and waits for their
gradients. `layers` maps each use to its layer.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from adiv_monitor.capture.batch import sums_of
from adiv_monitor.capture.catch import Catch
from adiv_monitor.capture.context import Context
from adiv_monitor.capture.guard import call_all
from adiv_monitor.capture.layer_rows import LayerRows
from adiv_monitor.capture.layers import Layers
from adiv_monitor.capture.selection import Layer, Selection, named_modules
from adiv_monitor.capture.trace import Plan, Trace
from adiv_monitor.capture.watch import Watch
from adiv_monitor.capture.watching import Watching
from adiv_monitor.capture.weights.pieces import Piece, overlap
from adiv_monitor.capture.weights.shards import world_size
from adiv_monitor.report.wording import NO_GRADIENT

# Why a layer that was called has no rows.
_REMOVED = (
    "its gradient was removed after the backward pass (`zero_grad()`, `.grad = None`, a step that "
    "was taken within it?), so the optimizer's step does not use it"
)
_ELSEWHERE = (
    "its parameters have a gradient, but none came through the output of its forward pass: it is "
    "zero, set by hand, or of an earlier step or attempt; or it comes from a use of the weight "
    "outside the layer; or the output was changed in place as a view"
)
_DROPPED = (
    "Gradients were zeroed before a step was taken (of another loss, as in a GAN, of SAM's first "
    "pass, or because an AMP scaler skips steps that are not finite): their rows are not in this "
    "report."
)


class Capture:
    """Watches one step once it is attached.

    Args:
        model: the model.
        selection: the parameters to watch.
        context: the run around the step.
        plan: the modules with known uses, for which plain hooks suffice; None: there are none.

    Attributes:
        selection: the parameters to watch.
        layers: the layers found so far.
        rows: the rows of the watched layers, by path.
        watching: finds the uses, and the first module that runs.
        plan: the modules with known uses.
        passes: follows the backward passes.
        unreached: by path of a layer without a gradient, why it has none.
        removed: parameters that got a gradient in the backward pass, and have none any more.
        evaluated: see `StepReport.evaluated`.
        next_batch: sums of the batch of the next training step; empty: not known.
        norm_passes: see `StepReport.norm_passes`; on the device.
        without_gradient: ids of the parameters without a gradient as the hooks were removed.
    """

    def __init__(
        self, model: nn.Module, selection: Selection, context: Context, plan: Plan | None
    ) -> None:
        self.passes = context.passes
        self.unreached: dict[str, str] = {}
        self.removed: list[nn.Parameter] = []
        self.evaluated: tuple[str, ...] = ()
        self.next_batch: tuple[Tensor, ...] = ()
        self.norm_passes: list[Tensor] = []
        self.without_gradient: set[int] | None = None
        self._model = model
        self.selection = selection
        self.plan = plan
        self.layers = Layers(model, selection, context)
        self.rows = self.layers.rows
        self._catch = Catch(self.layers)
        self.watching = Watching(self.layers, self._catch.use, self._catch.maps, plan)
        self._watch = Watch(self.watching, context.guard, plan)

    def attach(self) -> None:
        """Put hooks on the modules. `detach` removes them, even if this method raises."""
        self._watch.put_on()

    def detach(self) -> None:
        """Remove every hook; hooks in graphs that are already built become inactive."""
        if self.without_gradient is None:  # `.grad` may be reset to None later
            parameters = self.selection.parameters
            self.without_gradient = {id(p) for p in parameters if p.grad is None}
        call_all(self.passes.detach, self._watch.remove, self._catch.detach)

    def next_ran(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Take `sums_of` the arguments with which the first module runs in the next step."""
        self.next_batch = sums_of(args, kwargs)

    def finish(self) -> dict[Layer, LayerRows]:
        """Hand over the layers that a gradient reached; the gradients are those of the step.

        Afterwards `unreached` names the others, and `evaluated` is set.
        """
        self.unreached.clear()
        self.removed.clear()
        found: dict[Layer, LayerRows] = {}
        lost: dict[Layer, str] = {}
        is_alone = world_size() == 1
        for rows in sorted(self.rows.values(), key=attrgetter("layer.place")):
            layer = rows.layer
            rows.is_shared = False  # of an earlier attempt
            if len(rows.passes) > 1:
                rows.settle()
            has_none = not [p for p in layer.parameters if p.grad is not None]
            is_reached = bool(rows.passes)
            if is_reached and has_none:
                self.removed += layer.parameters
            if is_reached and not (has_none and is_alone):
                found[layer] = rows
            else:
                lost[layer] = _REMOVED if is_reached else NO_GRADIENT if has_none else _ELSEWHERE
                rows.release()
        trained = {p for layer in found for p in layer.parameters} if lost else set()
        refused = self.watching.refused if lost else {}
        trained |= {self.selection.held[key] for key in refused}
        for layer, why in lost.items():  # a use without a gradient is none if others train it
            if not trained.issuperset(layer.parameters):
                self.unreached[layer.path] = why
        self.evaluated = tuple(_evaluated(self._model)) if self.layers.modes == {False} else ()
        self.passes.meant = is_alone and self.watching.differentiates_inputs
        self._share(found)
        return found

    def _share(self, reached: Mapping[Layer, LayerRows]) -> None:
        """Mark the layers that share at least one parameter entry with another use."""
        elsewhere = self.watching.refused
        users: dict[int, list[tuple[LayerRows, Piece]]] = defaultdict(list)
        for layer, rows in reached.items():
            for piece in layer.pieces:
                users[id(piece.parameter)].append((rows, piece))
        for key, uses in users.items():
            if key in elsewhere or (uses[1:] and overlap([piece for _, piece in uses])):
                for rows, _ in uses:
                    rows.is_shared = True

    def cut_off(self) -> list[nn.Parameter] | None:
        """Return the parameters that are cut off from the loss; None: not known in this step.

        No gradient reached them, although their modules ran before a layer with a gradient whose
        input carries none. Call this after `finish`.
        """
        if self.plan is not None:
            return None
        held = self.selection.owners
        trained = {id(p) for p in self.selection.parameters if p.grad is not None}
        trained.update(map(id, self.removed))
        reached = {m: not trained.isdisjoint(map(id, several)) for m, several in held.items()}
        ran = [(m, carries) for m, carries in self.watching.runs.items() if m in held]
        trains = [i for i, (m, carries) in enumerate(ran) if reached[m] and not carries]
        found: list[nn.Parameter] = []
        follows = False  # the output of a module that is cut off
        for module, carries in ran[: max(trains, default=0)]:
            follows = not reached[module] and (follows or not carries)
            found += held[module] if follows else ()
        return found

    def tell(self, trace: Trace) -> None:
        """Pass the recorded uses to the trace for later steps. Call this after `detach`."""
        held = {id(p) for layer in self.layers.found.values() for p in layer.parameters}
        without = self.without_gradient or set()
        unseen = set(map(id, self.selection.due_parameters)) - held - without
        watching, is_survey = self.watching, self.plan is None
        trace.learn(watching.sites, unseen, is_survey=is_survey)

    def notes(self) -> list[str]:
        """Return notes for the report."""
        return [_DROPPED] if any(rows.dropped for rows in self.rows.values()) else []


def _evaluated(model: nn.Module) -> Iterator[str]:
    """Yield the paths of the modules that compute otherwise in training, if all are in eval mode.

    If some are in training mode, the others are frozen on purpose.
    """
    found = {}
    for path, module in named_modules(model):
        drops = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", 0)
        is_random = type(drops) in (int, float) and drops > 0
        if is_random or (isinstance(module, _NormBase) and module.running_mean is not None):
            found[path] = module.training
    if not any(found.values()):
        yield from found
