"""Finds the uses of parameters among the functions and modules that a forward pass calls."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from adiv_layers.autocast import without_autocast
from torch import Tensor, nn

from adiv_monitor.capture.batch import sums_of
from adiv_monitor.capture.forwards import Called
from adiv_monitor.capture.hook import has_data, trains
from adiv_monitor.capture.layers import Layers
from adiv_monitor.capture.selection import Layer
from adiv_monitor.capture.site import SPECIAL, Site, site_of, versions
from adiv_monitor.capture.trace import Plan
from adiv_monitor.capture.weights.pieces import whole_of
from adiv_monitor.capture.weights.provenance import CASTS, NotFollowed
from adiv_monitor.capture.without_rule import ParametersWithoutRule, place_of_z
from adiv_monitor.features.recurrent import RECURRENT, RecurrentCall, read_call
from adiv_monitor.features.registry import use_of
from adiv_monitor.features.uses import (
    NESTED,
    FunctionCall,
    Refused,
    Use,
    found_by,
    name_of,
    unknown,
    uses_in,
)
from adiv_monitor.rerun.nested import tensors_in
from adiv_monitor.rerun.surroundings import reruns

_ATTRIBUTES = ("__get__", "__set__")


class Watching:
    """Finds the uses of parameters in a forward pass and passes them on.

    Args:
        layers: the layers that were found.
        take: receives a layer, its use, and the result of the function or of a whole module.
        take_maps: receives a recurrent call and its results; returns the weights that it accounts
            for.
        plan: the modules with known uses; None: none.

    Attributes:
        sites: the uses that were seen, by module, or `SPECIAL`; None: a module has none of its own.
        runs: the modules that ran, in the order in which they ended, and whether an input required
            a gradient; None: they ran without gradients alone.
        refused: id of a parameter → why the function that uses it can't be measured.
        first: the first module with parameters that ran; None: none did.
        batch: `sums_of` what entered it.
        on_call: called with a torch function's call, and the running forward calls.
        on_end: called as a forward call ends, with it and its arguments.
        active: whether it is still watching.
        differentiates_inputs: whether anything that entered it requires a gradient, in any call.
    """

    def __init__(
        self,
        layers: Layers,
        take: Callable[[Layer, Use, Tensor], None],
        take_maps: Callable[[RecurrentCall, tuple[Tensor, ...]], list[Tensor]],
        plan: Plan | None = None,
    ) -> None:
        self.sites: dict[nn.Module, Site | str | None] = {}
        self.runs: dict[nn.Module, bool | None] = {}
        self.first: nn.Module | None = None
        self.batch: tuple[Tensor, ...] = ()
        self.differentiates_inputs = False
        self.selection = selection = layers.selection
        self.forwards = layers.forwards
        known = plan.known.values() if plan is not None and plan.watched else ()
        layers_of_known = chain.from_iterable(site.layers for site in known)
        self._without_rule = ParametersWithoutRule(selection, layers_of_known)
        self.refused = self._without_rule.unmeasured
        self.layers = layers
        self._provenance = layers.provenance
        self._take, self._take_maps = take, take_maps
        self.on_call: Callable[..., None] = unknown
        self.on_end: Callable[..., None] = unknown
        self.active = True

    def detach(self) -> None:
        """Stop watching."""
        self.active = False

    # --- modules ---------------------------------------------------------------------------------

    def ran(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record that a module has run; its last run with gradients enabled counts."""
        enabled, carries = torch.is_grad_enabled(), self.runs.get(module)
        if enabled or carries is None:
            self.runs.pop(module, None)
            given = tensors_in(*args, *kwargs.values()) if enabled else ()
            carried = bool(carries) or any(tensor.requires_grad for tensor in given)
            self.runs[module] = carried if enabled else None

    def _enters(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at what enters the first module with parameters that has run."""
        if self.first is None and module in self.selection.owners and not reruns():
            self.layers.context.begins()
            self.first, self.batch = module, sums_of(args, kwargs)
        if module is self.first:
            given = tensors_in(*args, *kwargs.values())
            self.differentiates_inputs |= any(tensor.requires_grad for tensor in given)

    def known(
        self,
        module: nn.Module,
        site: Site | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Tensor,
    ) -> None:
        """Take the use of a module that is known from earlier steps; None: its class has a rule."""
        if self.first is None or module is self.first:
            self._enters(module, args, kwargs)
        path, rules = self.selection.modules[module], self.selection.rules
        try:
            if output.is_nested:
                raise Refused(NESTED)
            with without_autocast(output):
                if site is not None:
                    self._take_known(site, args, kwargs, output)
                    return
                use = use_of(rules[module], module, args, kwargs)
                layer = self.layers.of(use, path)
                if layer is not None:
                    self._take(layer, use, output)
        except Exception as error:
            self._fails(error, [*module.parameters(recurse=False)], path)

    def _take_known(
        self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        given = site.arguments(args, kwargs)
        if given is None:
            self.sites[site.module] = SPECIAL
            return
        call = FunctionCall(output, lambda value: all(each is not value for each in given[2]))
        found = found_by(site.rule, call, *given[:2])
        if len(found) != len(site.layers):
            self.sites[site.module] = SPECIAL
            return
        for use, layer in zip(found, site.layers, strict=True):
            is_frozen = False in [p.requires_grad for p in layer.parameters]
            now = self.layers.of(use, None if is_frozen else layer)
            if now is not None:
                self._take(now, use, output)

    def ends(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Handle the end of a module's forward."""
        self.on_end(self.forwards.forward, args, kwargs)
        if self._without_rule.may_be_in(module):
            self._look_at_whole(module, args, kwargs, output)
        called, site = self.forwards.forward.called, None
        if len(called) == 1:
            site = site_of(module, called[0], args, kwargs, output)
        is_alike = self.sites.get(module, site) == site and (site is not None or not called)
        self.sites[module] = site if is_alike else SPECIAL
        self._enters(module, args, kwargs)

    def _look_at_whole(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Measure through the module's output the parameters that no rule accounts for."""
        if not trains(output):
            return
        inputs = tensors_in(*args, *kwargs.values())
        if self.forwards.running[1:] and all(map(self._provenance.of_model, inputs)):
            return  # the module computes a weight, not activations
        place = place_of_z(output, inputs)
        if place is None:
            return
        z = tensors_in(output)[place]
        names = self._without_rule.claim(module, z, inputs)
        if not names:
            return
        self.sites.update(dict.fromkeys(module.modules(), SPECIAL))
        left = [module.get_parameter(name) for name in names]
        try:
            if any(x.is_nested for x in (z, *inputs)):
                raise Refused(NESTED)
            with torch.no_grad():
                random = self.forwards.forward.random
                use = self._without_rule.use(module, names, (args, kwargs), place, z, random)
                layer = self.layers.of_whole(use, module, left) if z.numel() else None
                if layer is not None:
                    self._take(layer, use, z)
        except Exception as error:
            self._fails(error, left, self.selection.modules[module])

    # --- functions -------------------------------------------------------------------------------

    def called(self, call: Called) -> None:
        """Find which parameters a torch function has used."""
        if not self.active or torch._C._functorch.peek_interpreter_stack() is not None:
            return
        self.on_call(call, self.forwards.running)
        provenance, args, made = self._provenance, call.args, call.result
        given = args[:1] if call.name in CASTS else (*args, *call.kwargs.values())
        values, used = tensors_in(*given), list[Tensor]()
        is_data, trained = not all(map(provenance.of_model, values)), list[Tensor]()
        if call.name not in _ATTRIBUTES:  # `.T` and `.data` are tensors of the model too
            trained = [value for value in values if provenance.parameters_of(value)]
            made = args[0] if made is None and args else made
        # In a rerun, checkpointed functions run without gradients.
        if trained and (torch.is_grad_enabled() or reruns() > 0):
            if not all(map(has_data, tensors_in(made))):
                return
            try:
                with torch.no_grad():
                    used = self._uses(call, made, trained)
            except Exception as error:
                self._fails(error, trained)
                used = trained
            if not used:
                self._is_special()
        if is_data or used:
            for tensor in used:
                self._without_rule.account(provenance.parameters_of(tensor))
            provenance.spend(made)
        else:
            provenance.computes(call.name, call.kwargs, values, made)

    def _uses(self, call: Called, made: object, trained: Sequence[Tensor]) -> list[Tensor]:
        """Pass on the uses in a call and return the trained tensors that these uses account for."""
        if call.function in RECURRENT:
            self._is_special()
            recurrent = read_call(call.function, call.args, call.kwargs)
            return self._take_maps(recurrent, tuple(tensors_in(made)))
        if not isinstance(made, Tensor):
            return []
        name, args, kwargs = name_of(call.function), call.args, call.kwargs
        used = list[Tensor]()
        with without_autocast(made):
            function = FunctionCall(made, self._provenance.of_model, self.forwards.inside)
            found = uses_in(name, function, args, kwargs)
            layers: list[Layer] = []
            for use in found:
                try:
                    layer = self.layers.of(use)
                except NotFollowed:  # left to the module around it
                    continue
                if layer is not None:
                    self._take(layer, use, made)
                    layers.append(layer)
                used += [t for t in trained if _is_of(t, use.weight) or _is_of(t, use.bias)]
            values = (*args, *kwargs.values())
            if len(layers) < len(found) or any(x is made for x in values):  # in place
                self._is_special()
            elif found:
                call.layers, call.versions = layers, versions(*values, made)
                self.forwards.forward.called.append(call)
        return used

    def _is_special(self) -> None:
        """Mark the running module as one whose uses a plain hook can't catch."""
        self.sites[self.forwards.innermost] = SPECIAL

    def _fails(self, error: Exception, trained: Sequence[Tensor], path: str | None = None) -> None:
        """Record that a use can't be measured, or that a layer has failed."""
        self._is_special()
        if isinstance(error, Refused):
            for tensor in trained:
                self._without_rule.refuse(self._provenance.parameters_of(tensor), str(error))
            return
        if path is None:
            path = self.layers.first(self._provenance.parameters_of(trained[0])).path
        self.layers.failed(path, error)


def _is_of(tensor: Tensor, used: Tensor | None) -> bool:
    """Return whether the used tensor is this tensor or shares its base."""
    if used is None or used is tensor:
        return used is tensor
    return used._base is not None and used._base is whole_of(tensor)
