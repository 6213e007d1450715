"""Captures one measured step: which functions use which parameters, and the rows of each use.

`forwards` puts hooks on modules and intercepts the functions that run inside them. `watching` finds
the uses of parameters among these functions. `gathering` samples rows of each use and waits for
their gradients. `layers` maps each use to its layer.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from adiv_monitor.capture.batch import sums_of
from adiv_monitor.capture.context import Context
from adiv_monitor.capture.forwards import Forwards
from adiv_monitor.capture.gathering import Gathering
from adiv_monitor.capture.guard import call_all
from adiv_monitor.capture.layer_rows import Call, Chooser, LayerRows
from adiv_monitor.capture.layers import Layers
from adiv_monitor.capture.names import Names
from adiv_monitor.capture.selection import FROZEN, Layer, Selection, listed, named_modules
from adiv_monitor.capture.trace import Plan, Trace
from adiv_monitor.capture.watching import Watching
from adiv_monitor.capture.weights.pieces import Pieces
from adiv_monitor.capture.weights.provenance import Provenance
from adiv_monitor.capture.whole_modules.without_rule import ParametersWithoutRule
from adiv_monitor.capture.world import world_size
from adiv_monitor.report.wording import NO_GRADIENT

_REMOVED = (
    "its gradient was removed after the backward pass (`zero_grad()`, `.grad = None`, a step that "
    "was taken within it?), so the optimizer's step does not use it"
)
_CUT = (
    "No gradient came back through {}: these uses of weights, which other layers train, are not "
    "part of this step."
)
_DROPPED = (
    "Gradients were zeroed before a step was taken (of another loss, as in a GAN, of SAM's first "
    "pass, or of a step that an AMP scaler skipped?): their rows are not in this report."
)


class Capture:
    """Watches one step once it is attached.

    Args:
        model: the model.
        selection: the parameters to watch.
        chooser: chooses rows.
        context: the run around the step.
        plan: the modules with known uses, for which plain hooks suffice; None: there are none.
        pieces: the pieces of parameters that are known from earlier steps.

    Attributes:
        selection: the parameters to watch.
        layers: the layers found so far.
        rows: the rows of the watched layers, by path.
        unreached: by path of a layer without a gradient, why it has none.
        removed: parameters that got a gradient in the backward pass, and have none any more.
        evaluated: see `StepReport.evaluated`.
        passes: follows the backward passes.
        next_batch: `batch` of the next training step's forward pass; empty: not known.
    """

    def __init__(
        self,
        model: nn.Module,
        selection: Selection,
        chooser: Chooser,
        context: Context,
        plan: Plan | None,
        pieces: Pieces | None,
    ) -> None:
        self.passes = context.passes
        self.unreached: dict[str, str] = {}
        self.removed: list[nn.Parameter] = []
        self.evaluated: tuple[str, ...] = ()
        self.next_batch: tuple[Tensor, ...] = ()
        self._survey_note: str | None = None
        self._cut: list[str] = []  # paths of uses without a gradient, of weights that others train
        self._model = model
        self.selection = selection
        self._without_gradient: set[int] | None = None
        self._frozen = set[int]()
        is_watched = plan is None or bool(plan.watched)
        self._provenance = Provenance(model, selection.parameters, pieces, is_asked=is_watched)
        self._without_rule = ParametersWithoutRule(selection)
        self.plan = plan
        self.forwards = Forwards(selection, context.guard, plan)
        names = Names(model, selection, self.forwards)
        self.layers = Layers(names, self._provenance, chooser, context, selection.is_due)
        self.rows = self.layers.rows
        self._gathering = Gathering(self.layers, self.forwards, self._without_rule)
        self._watching = Watching(
            selection, self.forwards, self.layers, self._without_rule, self._gathering
        )

    def attach(self) -> None:
        """Put hooks on the modules. `detach` removes them, even if this method raises."""
        self.forwards.watch(self._watching)

    @property
    def pieces(self) -> Pieces:
        """All pieces of parameters that were seen."""
        return self._provenance.pieces

    def detach(self) -> None:
        """Remove every hook; hooks in graphs that are already built become inactive."""
        if self._without_gradient is None:  # `.grad` may be reset to None later
            parameters = self.selection.parameters
            self._without_gradient = {id(p) for p in parameters if p.grad is None}
            self._frozen = {id(p) for p in parameters if not p.requires_grad}
        call_all(
            self._watching.detach,
            self.passes.detach,
            self.forwards.remove,
            self._gathering.detach,
            self._without_rule.release,
        )

    def saw_calls(self) -> bool:
        """Return whether any layer was called with gradients enabled."""
        return any(rows.calls for rows in self.rows.values())

    def forward_passes(self) -> int:
        """Return the number of forward passes with gradients: of calls of the first layer."""
        return self._watching.passes

    @property
    def first(self) -> nn.Module | None:
        """The first module with parameters that ran."""
        return self._watching.first

    @property
    def batch(self) -> tuple[Tensor, ...]:
        """Sums of the tensors that entered the first module that ran; see `sums_of`."""
        return self._watching.batch

    def next_ran(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Take the same sums of the arguments with which `first` runs in the next step."""
        self.next_batch = sums_of(args, kwargs)

    def finish(self) -> dict[Layer, LayerRows]:
        """Hand over the layers that a gradient reached; the gradients are those of the step.

        Afterwards `unreached` names the others, and `evaluated` is set.
        """
        self.unreached.clear()
        self.removed.clear()
        self._cut.clear()
        reached: dict[Layer, list[Call]] = {}
        others: list[tuple[Layer, bool]] = []
        is_alone = world_size() == 1
        for layer in self.layers.in_order():
            rows = self.rows.get(layer.path)
            if rows is None:
                continue
            calls = rows.settle()
            lead = layer.parameters[0]  # looked at first: it has a gradient nearly always
            is_removed = bool(calls) and lead.grad is None and _has_none(layer)
            if is_removed:
                self.removed += layer.parameters
            if is_removed and is_alone:
                self.unreached[layer.path] = _REMOVED
                rows.release()
            elif calls:
                reached[layer] = calls
            else:
                others.append((layer, bool(rows.calls)))
        trained = {p for layer in reached for p in layer.parameters} if others else set()
        for layer, called in others:
            if called and all(p in trained or self._trains(p) for p in layer.parameters):
                self._cut.append(layer.path)
            else:
                self.unreached[layer.path] = _why_unreached(layer)
        modes = {call.evaluates for calls in reached.values() for call in calls}
        self.evaluated = tuple(_evaluated(self._model)) if modes == {True} else ()
        shared = self.layers.shared(reached, self._without_rule.unmeasured)
        self.passes.meant = is_alone and self._watching.differentiates_inputs
        found = {layer: self.rows[layer.path] for layer in reached}
        for layer, rows in found.items():
            rows.is_shared = layer.path in shared
        return found

    def cut_off(self) -> list[nn.Parameter] | None:
        """Return the parameters that are cut off from the loss; None: not known in this step.

        No gradient reached them, although their modules ran before a layer with a gradient whose
        input carries none. Call this after `finish`.
        """
        if self.plan is not None:
            return None
        held: dict[nn.Module, list[nn.Parameter]] = defaultdict(list)
        for key, places in self.selection.places.items():
            for place in places:
                held[place.module].append(self.selection.held[key])
        removed = set(map(id, self.removed))
        reached = {
            module: any(p.grad is not None or id(p) in removed for p in several)
            for module, several in held.items()
        }
        return [p for module in self.forwards.runs.cut_off(reached) for p in held[module]]

    def _trains(self, parameter: nn.Parameter) -> bool:
        """Return whether an unmeasured use of the parameter received a gradient."""
        return self._without_rule.why(id(parameter)) is not None

    def tell(self, trace: Trace) -> None:
        """Pass the recorded uses to the trace for later steps. Call this after `detach`."""
        held = {id(p) for layer in self.layers.found.values() for p in layer.parameters}
        without = self._without_gradient or set()
        unseen = set(map(id, self.selection.due_parameters)) - held - without
        self._survey_note = trace.learn(self.selection, self.plan, self._watching.record, unseen)

    def notes(self) -> list[str]:
        """Return notes for the report about uses of parameters that are measured only partly."""
        notes = [self._survey_note] if self._survey_note else []
        partly = defaultdict(list)
        unmeasured = self._without_rule.unmeasured
        for parameter in self.selection.due_parameters if unmeasured else ():
            why = self._without_rule.why(id(parameter))
            if why is not None and self.layers.of_parts(parameter):
                partly[why].append(self.selection.names[id(parameter)])
        for why, names in partly.items():
            notes.append(f"Not all uses of {listed(names)} are measured: {why}.")
        if self._cut:
            notes.append(_CUT.format(listed(self._cut)))
        if any(rows.dropped for rows in self.rows.values()):
            notes.append(_DROPPED)
        return notes

    def why_unmeasured(self, parameter: nn.Parameter) -> str:
        """Return the reason why a parameter, or a part of it, belongs to no layer."""
        key = id(parameter)
        place = self.selection.places[key][0]
        kind = type(place.module)
        rule = self.selection.rules.get(place.module)
        if key in (self._without_gradient or ()):
            return NO_GRADIENT
        if key in self._frozen:
            return FROZEN
        if key in self._watching.refused:
            return self._watching.refused[key]
        if rule is not None and place.name not in (rule.weight, rule.bias):
            reason = (
                f"its rule knows the parameters {rule.weight} and {rule.bias}: name this one in "
                f'register_features({kind.__name__}, weight="…", bias="…")'
            )
        elif (found := self._without_rule.why(key)) is not None:
            reason = found
        elif parts := self.layers.of_parts(parameter):
            return f"only a part of it was seen to be used, as {listed(parts)}"
        elif self.plan is not None and key not in self.plan.unseen:
            reason = (
                "it has a gradient, but it was not used where earlier steps used it (the gradient "
                "is zero, or of an earlier step?): at the next measured step all functions are "
                "watched again"
            )
        else:
            reason = (
                "it has a gradient, but no function was seen to use it inside the forward pass "
                "of a module: it is used by compiled or scripted code, by a copy of the module "
                "(nn.DataParallel?), "
                "through torch.func, under re-entrant checkpointing (`use_reentrant=False` is "
                "seen) or outside of `forward`, or its gradient is zero, set by hand or of an "
                "earlier step"
            )
        return f"{kind.__module__}.{kind.__qualname__}: {reason}"


def _evaluated(model: nn.Module) -> Iterator[str]:
    """Yield the paths of the modules that compute otherwise in training, if all are in eval mode.

    If some are in training mode, the others are frozen on purpose.
    """
    found = {}
    for path, module in named_modules(model):
        drops = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", 0)
        is_random = type(drops) in (int, float) and drops > 0
        if is_random or _has_statistics(module):
            found[path] = module.training
    if not any(found.values()):
        yield from found


def _has_statistics(module: nn.Module) -> bool:
    is_norm = isinstance(module, _NormBase) and module.track_running_stats
    return is_norm and module.running_mean is not None


def _has_none(layer: Layer) -> bool:
    return all(parameter.grad is None for parameter in layer.parameters)


def _why_unreached(layer: Layer) -> str:
    if _has_none(layer):
        return NO_GRADIENT
    return (
        "its parameters have a gradient, but none came through the output of its forward pass: it "
        "is zero, set by hand, or of an earlier step or attempt; or it comes from a use of the "
        "weight outside the layer; or the output was changed in place as a view"
    )
