"""Finds the uses of parameters among the functions and modules that a forward pass calls."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from adiv_layers.autocast import without_autocast
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from adiv_monitor.capture.batch import sums_of
from adiv_monitor.capture.forwards import Forward, Forwards, FunctionToCall, Watcher
from adiv_monitor.capture.hook import has_data, trains
from adiv_monitor.capture.layer_rows import Call
from adiv_monitor.capture.layers import Layers
from adiv_monitor.capture.selection import Place, Selection
from adiv_monitor.capture.takes import Takes
from adiv_monitor.capture.trace import Called, Given, Known, Record, versions
from adiv_monitor.capture.weights.computed import CASTS, NotFollowed
from adiv_monitor.capture.weights.pieces import whole_of
from adiv_monitor.capture.whole_modules.outputs import Outputs
from adiv_monitor.capture.whole_modules.without_rule import ParametersWithoutRule
from adiv_monitor.features.recurrent import RECURRENT, read_call
from adiv_monitor.features.registry import use_of
from adiv_monitor.features.uses import NESTED, FunctionCall, Refused, found_by, name_of, uses_in
from adiv_monitor.rerun.nested import tensors_in
from adiv_monitor.rerun.randomness import Randomness
from adiv_monitor.rerun.thread import apart

# These functions overwrite an input that the rows need.
_OVERWRITE = ("mul_", "multiply_", "__imul__")
_ATTRIBUTES = ("__get__", "__set__")
# These functions use only shape, dtype and device of a tensor.
_FORMS = ("zeros_like", "ones_like", "empty_like", "new_zeros", "new_ones", "new_empty")
_IN_PLACE = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__")
# These functions are written in Python; the functions that they call use the parameters.
OPENED = ("multi_head_attention_forward",)


class Watching(Watcher):
    """Finds the uses of parameters in a forward pass and passes them to `takes`.

    Args:
        selection: the parameters to measure.
        forwards: the running forward calls; it reports their functions to this watcher.
        layers: the layers that were found.
        without_rule: records which parameters the rules account for and which they do not.
        takes: receives the uses.
        repeated: whether the watched forward passes are reruns.

    Attributes:
        record: the uses that were seen, by module.
        refused: id of a parameter → why the function that uses it can't be measured.
        first: the first module with parameters that ran; None: none did.
        batch: `sums_of` what entered it.
        differentiates_inputs: whether anything that entered it requires a gradient, in any call.
    """

    def __init__(
        self,
        selection: Selection,
        forwards: Forwards,
        layers: Layers,
        without_rule: ParametersWithoutRule,
        takes: Takes,
        *,
        repeated: bool = False,
    ) -> None:
        self.record = Record()
        self.refused = without_rule.unmeasured
        self.first: nn.Module | None = None
        self.batch: tuple[Tensor, ...] = ()
        self.differentiates_inputs = False
        self._selection = selection
        self._owners = set(selection.owners)
        self._ruled = selection.rules.keys()
        self._forwards = forwards
        self._layers = layers
        self._provenance = layers.provenance
        self._without_rule = without_rule
        self._takes = takes
        self._first_begins: Callable[[], object] | None = layers.context.begins
        self._repeated = repeated
        self._accounts = forwards.watches or bool(selection.shards)
        self._active = True

    def detach(self) -> None:
        """Stop watching."""
        self._active = False

    # --- modules ---------------------------------------------------------------------------------

    def begins(self, forward: Forward) -> None:
        """Record that a module's forward begins."""
        if self._first_begins is not None and forward.module in self._owners:
            self._layer_begins()

    def _layer_begins(self) -> None:
        begins, self._first_begins = self._first_begins, None
        if begins is not None:
            begins()

    def _ran(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at what enters the first module with parameters that has run."""
        if self.first is None and module in self._owners and not self._repeated:
            self.first, self.batch = module, sums_of(args, kwargs)
        if module is self.first:
            given = tensors_in(*args, *kwargs.values())
            self.differentiates_inputs |= any(tensor.requires_grad for tensor in given)

    def plain(
        self, known: Known, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        """Take the use of a module whose use of its parameters is known from earlier steps."""
        module = known.module
        if self.first is None or module is self.first:
            self._layer_begins()
            self._ran(module, args, kwargs)
        if known.rule is None:
            self._look_at_ruled(module, args, kwargs, output)
            return
        given = known.call(args, kwargs)
        if given is None:
            self.record.others.add(module)
            return
        if self._accounts:
            for p in given.trained:
                self._without_rule.account(self._provenance.parameters_of(p))
        if not given.trained:  # frozen for now
            return
        try:
            if torch._C._is_any_autocast_enabled():
                with without_autocast(output):
                    self._take_known(known, given, output)
            else:
                self._take_known(known, given, output)
        except Exception as error:
            self._fails(error, given.trained)

    def _take_known(self, known: Known, given: Given, output: Tensor) -> None:
        inputs = given.inputs

        def of_model(value: object) -> bool:
            for each in inputs:  # noqa: SIM110
                if each is value:
                    return False
            return True

        assert known.rule is not None
        found = found_by(known.rule, FunctionCall(output, of_model), given.args, given.kwargs)
        if len(found) != len(known.layers):
            self.record.others.add(known.module)
            return
        for use, layer in zip(found, known.layers, strict=True):
            same = False not in [p.requires_grad for p in layer.parameters]
            self._takes.use(use, output, layer if same else None)

    def ends(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Handle the end of a module's forward."""
        if isinstance(module, ParametrizationList) and isinstance(output, Tensor):
            self.record.others.update(module.modules())
            with self._noting([*module.parameters()]):
                self._provenance.parametrized(module, output, self._forwards.forward.random)
        if module in self._ruled:
            self._look_at_ruled(module, args, kwargs, output)
            self.record.ruled(module)
        else:
            if self._without_rule.may_be_in(module):
                self._look_at_whole(module, args, kwargs, output)
            self.record.ended(module, self._forwards.forward.called, args, kwargs, output)
        self._ran(module, args, kwargs)

    def _look_at_ruled(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Take the use of a module whose class has a rule."""
        path, rule = self._selection.modules[module], self._selection.rules[module]
        if not trains(output):
            return
        with self._noting([*module.parameters(recurse=False)], path):
            if not isinstance(output, Tensor):
                raise TypeError(
                    f"its forward returned a {type(output).__name__}, expected a tensor"
                )
            if output.is_nested:
                raise Refused(NESTED)
            if output.requires_grad:
                use = use_of(rule, module, args, kwargs)
                self._takes.use(use, output, path)

    def _look_at_whole(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Measure through the module's output the parameters that no rule accounts for."""
        if not trains(output):
            return
        with self._noting([], self._selection.modules[module]):
            inputs = tensors_in(*args, *kwargs.values())
            if self._forwards.running[1:] and all(map(self._provenance.of_model, inputs)):
                return  # the module computes a weight, not activations
            outputs = Outputs(output, inputs)
            tensors = outputs.of(output)
            names = self._without_rule.claim(module, tensors, inputs) if tensors else []
            if names:
                self.record.others.update(module.modules())
                self._takes.whole(module, names, (args, kwargs), outputs, tensors)

    # --- functions -------------------------------------------------------------------------------

    def called(self, call: FunctionToCall) -> Any:
        """Call a torch function and find which parameters it uses."""
        args, kwargs, provenance = call.args, call.kwargs, self._provenance
        name = getattr(call.function, "__name__", "")
        if not self._is_looking():
            return call()
        if name in _ATTRIBUTES:  # `.T` and `.data` are tensors of the model too
            data = [] if provenance.of_model(args[0]) else [args[0]]
        else:
            values = _values_in(name, args, kwargs)
            data = [value for value in values if not provenance.of_model(value)]
            if trained := [value for value in values if provenance.parameters_of(value)]:
                return self._called_with(trained, call, name, is_data=bool(data))
        result = call()
        if not data:
            provenance.remember(result)
        elif name not in _ATTRIBUTES and args and (result is args[0] or result is None):
            provenance.spend(args[0], written=True)  # it may have been constant zeros
        else:
            provenance.spend(result, written=False)
        return result

    def _is_looking(self) -> bool:
        """Return whether functions called now can be part of a measured use."""
        return (
            self._active
            and torch._C._functorch.peek_interpreter_stack() is None
            and not (self._ruled and self._forwards.innermost in self._ruled)
        )

    def _called_with(
        self, trained: list[Tensor], to_call: FunctionToCall, name: str, *, is_data: bool
    ) -> Any:
        """Call a function that takes trained tensors, and possibly data from the batch."""
        function, args, kwargs = to_call.function, to_call.args, to_call.kwargs
        # In a rerun, checkpointed functions run only with gradients disabled.
        gradients = torch.is_grad_enabled() or self._repeated
        if gradients and name in OPENED:
            self._is_special()
            return self._forwards.opened(to_call)
        if gradients and function in RECURRENT:
            self._is_special()
            return self._recurrent(to_call, trained)
        provenance = self._provenance
        kept = args
        if name in _OVERWRITE and not provenance.of_model(args[0]):
            kept = (args[0].detach().clone(), *args[1:])
        result = to_call()
        made = args[0] if name == "__setitem__" else result
        if not all(map(has_data, tensors_in(made))):
            return result
        used: list[Tensor] = []
        if gradients and isinstance(made, Tensor):
            call = FunctionCall(made, provenance.of_model, self._forwards.inside)
            used = self._uses(name_of(function), call, kept, kwargs, trained)
        if (gradients and not used) or kept is not args:
            self._is_special()
        if is_data or used:
            self._explain(name, trained if gradients else [], used)
            provenance.spend(made, written=bool(args) and made is args[0])
        else:
            with self._noting(trained):
                provenance.computes(function, args, kwargs, made, trained)
        return result

    def _uses(
        self,
        name: str,
        call: FunctionCall,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        trained: list[Tensor],
    ) -> list[Tensor]:
        """Pass on the uses in a call and return the trained tensors that these uses account for."""
        with self._noting(trained) as used, without_autocast(call.result):
            found = uses_in(name, call, args, kwargs)
            taken: list[Call | None] = []
            for use in found:
                try:
                    taken.append(self._takes.use(use, call.result))
                except NotFollowed:  # left to the module around it
                    continue
                used += [t for t in trained if _is_of(t, use.weight) or _is_of(t, use.bias)]
            layers = [noted.layer for noted in taken if noted is not None]
            if len(layers) < len(found) or is_in_place(name) or "out" in kwargs:
                self._is_special()
            elif found:
                at = versions(args, kwargs, call.result)
                called = Called(name, args, kwargs, call.result, at, layers)
                self._forwards.forward.called.append(called)
        return used

    def _is_special(self) -> None:
        """Mark the running module as one whose uses a plain hook can't capture."""
        self.record.others.add(self._forwards.innermost)

    def _recurrent(self, to_call: FunctionToCall, trained: list[Tensor]) -> Any:
        """Call a recurrent function and pass on the linear maps inside it."""
        function, args, kwargs = to_call.function, to_call.args, to_call.kwargs
        call = random = None
        with self._noting(trained):
            call = read_call(function, args, kwargs)
            if call.draws and call.refusal is None:
                random = Randomness([call.input.device])
        result = to_call()
        outputs, used = tuple(tensors_in(result)), trained
        if call is not None and trains(outputs[0]):
            with self._noting(trained) as used:
                used += self._takes.maps(call, outputs, random)
        self._explain(function.__name__, trained, used)
        return result

    @contextmanager
    def _noting(self, trained: Sequence[Tensor], path: str | None = None) -> Iterator[list[Tensor]]:
        """Collect accounted tensors without gradients, and all of them if the body fails.

        Args:
            trained: the tensors that the body looks at.
            path: the layer that fails with it; None: that of the first tensor.
        """
        used: list[Tensor] = []
        try:
            with apart(), torch.no_grad(), torch._C.DisableTorchFunction():
                yield used
        except Exception as error:
            self._fails(error, trained, path)
            used += trained

    def _fails(self, error: Exception, trained: Sequence[Tensor], path: str | None = None) -> None:
        """Record that a use can't be measured, or that a layer has failed."""
        self._is_special()
        if not isinstance(error, Refused):
            self._layers.failed(self._place(trained[0]).full_name if path is None else path, error)
            return
        for tensor in trained:
            keys = self._provenance.parameters_of(tensor)
            self.refused |= dict.fromkeys(keys, str(error))

    def _place(self, tensor: Tensor) -> Place:
        """Return the place of the first parameter that a tensor is made of."""
        return self._layers.names.first(self._provenance.parameters_of(tensor))

    def _explain(self, name: str, trained: list[Tensor], used: list[Tensor]) -> None:
        """Record which parameters the uses account for and which no rule can follow."""
        accounted = set(map(id, used))
        for tensor in trained:
            keys = self._provenance.parameters_of(tensor)
            if id(tensor) in accounted:
                self._without_rule.account(keys)
            else:
                self._without_rule.leave(keys, name)


def _is_of(tensor: Tensor, used: Tensor | None) -> bool:
    """Return whether the used tensor is this tensor or shares its base."""
    if used is None or used is tensor:
        return used is tensor
    return used._base is not None and used._base is whole_of(tensor)


def is_in_place(name: str) -> bool:
    """Return whether a function of this name writes to its first argument."""
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _values_in(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors in a function's arguments whose values matter, not just dtype or shape."""
    if name in CASTS:
        return tensors_in(*args[:1])
    return [] if name in _FORMS else tensors_in(*args, *kwargs.values())
