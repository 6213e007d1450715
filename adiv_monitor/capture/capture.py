"""Captures one measured step: which functions use which parameters, and the rows of each use.

`forwards` puts hooks on modules and intercepts the functions that run inside them. `watching` finds
the uses of parameters among these functions. `gathering` samples rows of each use and waits for
their gradients. `layers` maps each use to its layer.
"""

from collections import defaultdict
from collections.abc import Container

from torch import nn

from adiv_monitor.capture.context import Context
from adiv_monitor.capture.forwards import Forwards
from adiv_monitor.capture.gathering import Gathering
from adiv_monitor.capture.guard import call_all
from adiv_monitor.capture.layer_rows import Chooser
from adiv_monitor.capture.layers import Layers
from adiv_monitor.capture.names import Names
from adiv_monitor.capture.selection import FROZEN, Layer, Selection, listed
from adiv_monitor.capture.trace import Plan, Trace
from adiv_monitor.capture.watching import Watching
from adiv_monitor.capture.weights.pieces import Pieces
from adiv_monitor.capture.weights.provenance import Provenance
from adiv_monitor.capture.whole_modules.without_rule import ParametersWithoutRule


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
        layers: the layers found so far.
        rows: the rows of the watched layers, by path.
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
        self.attention = context.attention
        self._selection = selection
        self._without_gradient: set[int] | None = None
        self._frozen = set[int]()
        is_watched = plan is None or bool(plan.watched)
        self._provenance = Provenance(model, selection.parameters, pieces, is_asked=is_watched)
        self._without_rule = ParametersWithoutRule(selection, context.guard)
        self.plan = plan
        self.forwards = Forwards.of(selection, context.guard, context.renew, plan)
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
            parameters = self._selection.parameters
            self._without_gradient = {id(p) for p in parameters if p.grad is None}
            self._frozen = {id(p) for p in parameters if not p.requires_grad}
        call_all(
            *(() if self.attention is None else (self.attention.detach,)),
            *(self._watching.detach, self.forwards.remove, self._gathering.detach),
            *(self.layers.detach, self._without_rule.release),
        )

    def saw_calls(self) -> bool:
        """Return whether any layer was called with gradients enabled."""
        return any(rows.calls for rows in self.rows.values())

    def dropped(self) -> bool:
        """Return whether rows were discarded because their gradient never led to a step."""
        return any(rows.dropped for rows in self.rows.values())

    def first_called(self) -> list[nn.Module]:
        """Return the modules with parameters that may be the first to run in the next forward pass.

        These are the first one that ran in this step, and those that did not run.
        """
        owners, ran = self._selection.owners, self._watching.record.calls
        held = set(owners)
        first = next((module for module in ran if module in held), None)
        return [module for module in owners if module is first or module not in ran]

    def shared(self, reached: Container[Layer]) -> set[str]:
        """Return the paths of the layers that share at least one parameter entry with another use.

        Args:
            reached: the layers that a gradient reached.
        """
        return self.layers.shared(reached, self._without_rule.unmeasured)

    def trains(self, parameter: nn.Parameter) -> bool:
        """Return whether an unmeasured use of the parameter received a gradient."""
        return self._without_rule.why(id(parameter)) is not None

    def tell(self, trace: Trace) -> None:
        """Pass the recorded uses to the trace for later steps. Call this after `detach`."""
        held = {id(p) for layer in self.layers.found.values() for p in layer.parameters}
        without = self._without_gradient or set()
        unseen = set(map(id, self._selection.due_parameters)) - held - without
        trace.learn(self._selection, self.plan, self._watching.record, unseen)

    def notes(self) -> list[str]:
        """Return notes for the report about uses of parameters that are measured only partly."""
        notes = []
        replacements = self.layers.replacements
        if replacements:
            by = list(dict.fromkeys(replacements.values()))
            notes.append(
                f"Functions without a rule use the weights of {listed(list(replacements))} too, "
                f"inside one module: all uses there are measured together, as {listed(by)}."
            )
        partly = defaultdict(list)
        unmeasured = self._without_rule.unmeasured
        for parameter in self._selection.due_parameters if unmeasured else ():
            why = self._without_rule.why(id(parameter))
            if why is not None and self.layers.of_parts(parameter):
                partly[why].append(self._selection.names[id(parameter)])
        for why, names in partly.items():
            notes.append(f"Not all uses of {listed(names)} are measured: {why}.")
        return notes

    def why_unmeasured(self, parameter: nn.Parameter) -> str:
        """Return the reason why a parameter, or a part of it, belongs to no layer."""
        key = id(parameter)
        place = self._selection.places[key][0]
        kind = type(place.module)
        rule = self._selection.rules.get(place.module)
        if key in (self._without_gradient or ()):
            return "no gradient reached it in this step"
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
        elif ended := self._provenance.tape.ended_in(parameter):
            reason = f"it goes into torch's {ended}, whose result no function was seen to use"
        elif kind in self.forwards.strangers:
            reason = (
                "another module ran in its place: it was replaced, or replicated (nn.DataParallel)"
            )
        elif self.plan is not None and key not in self.plan.unseen:
            reason = (
                "it has a gradient, but it was not used where earlier steps used it (the gradient "
                "is zero, or of an earlier step?): at the next measured step all functions are "
                "watched again"
            )
        else:
            reason = (
                "it has a gradient, but no function was seen to use it inside the forward pass "
                "of a module: it is used by compiled or scripted code, by a copy of the module, "
                "through torch.func, under re-entrant checkpointing (`use_reentrant=False` is "
                "seen) or outside of `forward`, or its gradient is zero, set by hand or of an "
                "earlier step"
            )
        return f"{kind.__module__}.{kind.__qualname__}: {reason}"
