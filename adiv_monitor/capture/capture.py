"""Hooks that gather some rows of every layer during one step: features, output norms, gradients.

The gradient of a layer's output is caught by a hook on the output tensor, so that in-place
activations, modules that are called several times and checkpointing all work:

- several calls and micro-batches: every call is kept with its own gradient;
- re-entrant checkpointing: the first pass has no gradient graph and is skipped;
- other checkpointing: the recomputation's output never receives a gradient and is dropped;
- gradients that are zeroed before a step is taken (a skipped AMP step): their rows go with them;
- recurrent functions, which hide their rows: a replay tells them in the backward pass;
- parameters that no rule accounts for: through the output of the module that holds them.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count, takewhile
from typing import Any

import numpy as np
import torch
from adiv_layers.autocast import without_autocast
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from adiv_monitor.capture.accumulation import Accumulation
from adiv_monitor.capture.again.forward_calls import ForwardCalls
from adiv_monitor.capture.again.leftovers import Leftovers
from adiv_monitor.capture.again.outputs import Outputs
from adiv_monitor.capture.again.randomness import random_state
from adiv_monitor.capture.again.replay import Arguments
from adiv_monitor.capture.attention.attention_calls import AttentionCalls
from adiv_monitor.capture.forwards import Forward, Forwards, Function
from adiv_monitor.capture.hook import Hook, trains
from adiv_monitor.capture.late_rows import LateRows
from adiv_monitor.capture.layer_rows import Call, Chooser, LayerRows
from adiv_monitor.capture.selection import Layer, Place, Selection, inside_wrappers, listed
from adiv_monitor.capture.weights.origin import Origin
from adiv_monitor.capture.weights.pieces import Piece, Pieces, Source, Together, overlap
from adiv_monitor.capture.weights.repetitions import Repetition, Repetitions, fits, replaced
from adiv_monitor.capture.weights.tape import is_in_place, is_retyped, tensors_in, values_in
from adiv_monitor.features.features import Features
from adiv_monitor.features.functions.attention import part_of
from adiv_monitor.features.functions.linear import affine
from adiv_monitor.features.functions.tokens import REPEATING
from adiv_monitor.features.recurrent import Map, Returned, uses_of
from adiv_monitor.features.recurrent_call import RECURRENT, RecurrentCall, read_call
from adiv_monitor.features.registry import use_of
from adiv_monitor.features.rows import Rows
from adiv_monitor.features.uses import (
    FunctionCall,
    Refused,
    Use,
    as_it_is,
    name_of,
    shape_alike,
    uses_in,
)
from adiv_monitor.features.whole import squares
from adiv_monitor.maths import ceiling, dots

# These overwrite what they were given, which the rows need.
_OVERWRITE = ("mul_", "multiply_", "__imul__", "lerp_")
_MOST_NAMES = 4  # of parameters, in the name of a layer
_ATTRIBUTES = ("__get__", "__set__")
# These are Python, and use parameters in the functions that they call.
_OPENED = ("multi_head_attention_forward",)


class Capture:
    """All that is seen of one measured step: which functions use which parameters, and their rows.

    Args:
        model: the model.
        selection: the parameters to watch.
        max_rows: rows to look at per layer; None: all.
        generator: the monitor's own source of chance.
        attainable: gather all rows too, for the ceiling.
        checked: paths of the layers whose module's rule was already checked against the output.
        switched_off: paths of the layers that must not be watched.
        fail: called with a layer's path and the exception that its hook met; from then on the layer
            is not watched any more.
        begins: called when the first layer's forward pass with gradients begins.
        calls: notes the forward passes, so that they can be run again.
        attention: gathers samples of attentions, if that is asked for.

    Attributes:
        layers: by path, the layers that were seen so far.
        rows: by path, their rows.
        accumulated: by id, what happened to the gradients of parameters.
    """

    _repeated = False  # whether it watches forward passes that are run again

    def __init__(
        self,
        model: nn.Module,
        selection: Selection,
        *,
        max_rows: int | None,
        generator: np.random.Generator,
        attainable: bool,
        checked: set[str],
        switched_off: set[str],
        fail: Callable[[str, Exception], None],
        begins: Callable[[], object],
        calls: ForwardCalls | None = None,
        attention: AttentionCalls | None = None,
    ) -> None:
        self.layers: dict[str, Layer] = {}
        self.rows: dict[str, LayerRows] = {}
        self.accumulated: dict[int, Accumulation] = {}
        self.refused: dict[str, str] = {}
        self._replacements: dict[str, str] = {}  # path of a layer → whose reading stands for it
        self.attention = attention
        self._selection = selection
        self._model_class = type(inside_wrappers(model)).__name__
        self._chooser = Chooser(max_rows, generator)
        self._attainable = attainable
        self._checked = checked
        self._off = set(switched_off)
        self._fail = fail
        self._first_begins = begins
        self._hooks: list[RemovableHandle] = []  # on tensors
        self._active = True  # hooks in graphs that are already built outlive their removal
        self._verdict = (-1, False)
        self._origin = Origin(model, selection.parameters)
        self._order = {key: i for i, key in enumerate(selection.places)}
        self._leftovers = Leftovers(selection)
        self._owners = set(selection.owners)
        self._repetitions = Repetitions()
        self._calls = calls
        self._late: weakref.WeakSet[LateRows] = weakref.WeakSet()
        devices = {p.device for p in selection.parameters} | {torch.device("cpu")}
        watchers = self._called, self._begins, self._ends
        self._forwards = Forwards(
            *(selection.modules, selection.closed, *watchers, devices), repeated=self._repeated
        )

    @property
    def pieces(self) -> Pieces:
        """All pieces of parameters that were seen."""
        return self._origin.pieces

    def detach(self) -> None:
        """Remove every hook; those in graphs that are already built fall silent."""
        self._active = False
        if self.attention is not None:
            self.attention.detach()
        self._forwards.remove()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for accumulated in self.accumulated.values():
            accumulated.remove()
        self.accumulated.clear()  # they refer to this: a cycle that would hold gradients back
        for late in list(self._late):
            late.release()
        self._leftovers.release()

    def saw_calls(self) -> bool:
        """Whether any layer was called with gradients enabled."""
        return any(rows.calls for rows in self.rows.values())

    def dropped(self) -> bool:
        """Whether rows were thrown away because their gradient never made a step."""
        return any(rows.dropped for rows in self.rows.values())

    def accumulation_of(self, layer: Layer) -> Accumulation:
        """What happened to the gradient of the layer's first parameter."""
        return self.accumulated[id(layer.parameters[0])]

    def in_order(self) -> list[Layer]:
        """The layers that were seen, in the model's order."""
        return sorted(self.layers.values(), key=lambda layer: layer.place)

    def shared(self) -> set[str]:
        """Paths of the layers whose parameters are used by others too, entry by entry."""
        uses: dict[int, list[tuple[Layer, Piece]]] = defaultdict(list)
        for layer in self.layers.values():
            for piece in layer.pieces:
                uses[id(piece.parameter)].append((layer, piece))
        found = set()
        for key, users in uses.items():
            pieces = [piece for _, piece in users]
            if self._leftovers.has(key) or overlap(pieces[0].parameter, pieces):
                found |= {layer.path for layer, _ in users}
        return found

    def notes(self) -> list[str]:
        """What a reader must know about which uses of parameters are measured."""
        notes = []
        if self._replacements:
            by = list(dict.fromkeys(self._replacements.values()))
            notes.append(
                f"Functions without a rule use the weights of {listed(list(self._replacements))} "
                f"too, inside one module: what all uses do there is measured as {listed(by)}."
            )
        partly = defaultdict(list)
        for parameter in self._selection.parameters:
            why = self._leftovers.why(id(parameter))
            if why is not None and self._measures(parameter):
                partly[why].append(self._selection.names[id(parameter)])
        for why, names in partly.items():
            notes.append(f"Not all uses of {listed(names)} are measured: {why}.")
        return notes

    def why_unmeasured(self, parameter: nn.Parameter) -> str:
        """Why there is no layer for a parameter."""
        key = id(parameter)
        place = self._selection.places[key][0]
        kind = type(place.module)
        rule = self._selection.rules.get(place.module)
        if place.path in self.refused:
            return self.refused[place.path]
        if parameter.grad is None:
            return "no gradient reached it in this step"
        if rule is not None and place.name not in (rule.weight, rule.bias):
            reason = (
                f"its rule knows the parameters {rule.weight} and {rule.bias}: name this one in "
                f'register_features({kind.__name__}, weight="…", bias="…")'
            )
        elif self._forwards.strangers:
            reason = (
                "another module ran in its place: it was replaced, or replicated (nn.DataParallel)"
            )
        elif (found := self._leftovers.why(key)) is not None:
            reason = found
        elif (ended := self._origin.tape.ended_in(parameter)) and not self._measures(parameter):
            reason = f"it went through torch's {ended}, whose result no function was seen to use"
        else:
            reason = (
                "it has a gradient, but no function was seen to use it inside the forward of a "
                "module: compiled or scripted code, a copy of the module, or code outside"
            )
        return f"{kind.__module__}.{kind.__qualname__}: {reason}"

    def _measures(self, parameter: Tensor) -> bool:
        """Whether any of it is part of a layer."""
        return any(piece.parameter is parameter for x in self.layers.values() for piece in x.pieces)

    # --- what is seen of a forward pass ----------------------------------------------------------

    def _begins(self, forward: Forward) -> None:
        if self.attention is not None:
            self.attention.begins(forward)
        if forward.module in self._owners:
            begins, self._first_begins = self._first_begins, lambda: None
            begins()
        if self._calls is not None:
            around = self._forwards.around
            self._calls.began(forward.module, forward.args, forward.kwargs, around)

    def _ends(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """A module's forward has run; `output` is None if it raised."""
        if self._repetitions and output is not None:
            for repetition in self._repetitions.unknown(self._forwards.forward.number):
                self._is_offset(repetition)
        if self._forwards.is_outermost:
            self._repetitions.clear()
        if output is not None and trains(output):
            if module in self._selection.rules:
                self._look_at_ruled(module, args, kwargs, output)
            else:
                self._look_at_whole(module, args, kwargs, output)
        if self._calls is not None:
            self._calls.ended(module, output, self._forwards.around)

    def _look_at_ruled(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """The rows of a module whose class has a rule."""
        path, rule = self._selection.modules[module], self._selection.rules[module]
        try:
            if not isinstance(output, Tensor):
                raise TypeError(f"its forward gave a {type(output).__name__}, expected a tensor")
            if output.requires_grad:
                with torch.no_grad():
                    self._note(use_of(rule, module, args, kwargs), output, path, checked=False)
        except Exception as error:
            self._failed(path, error)

    def _look_at_whole(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Measure through a module's own output what no rule accounts for."""
        path = self._selection.modules[module]
        if path in self._off or not self._leftovers.may_be_in(module):
            return
        try:
            inputs = list(tensors_in(*args, *kwargs.values()))
            if not self._forwards.is_outermost and all(map(self._origin.of_model, inputs)):
                return  # it makes a weight, no activations
            outputs = Outputs(output, inputs)
            tensors = outputs.of(output)
            names = self._leftovers.claim(module, tensors, inputs) if tensors else []
            if names:
                with torch.no_grad():
                    self._note_whole(module, names, (args, kwargs), outputs, tensors)
        except Exception as error:
            self._failed(path, error)

    def _called(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a torch function, and note the parameters that it uses."""
        name = getattr(function, "__name__", "")
        if self._active and (name.endswith("_") or "out" in kwargs):
            buffer = self._origin.buffer(kwargs.get("out", args[0] if args else None))
            if buffer is not None:
                self._forwards.is_written(buffer)
        if not self._is_looking():
            return function(*args, **kwargs)
        if name in _ATTRIBUTES:
            return self._read(function, args)
        if self.attention is not None:
            function = self.attention.watched(function, self._forwards)
        values = values_in(name, args, kwargs)
        repeated = self._repetitions.among(values) if self._repetitions else []
        if repeated and self._looks_for_uses():
            return self._called_with_repeated(repeated, function, name, args, kwargs, values)
        return self._watched(function, name, args, kwargs, values)

    def _watched(
        self,
        function: Function,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        values: Iterable[Tensor],
    ) -> Any:
        origin = self._origin
        trained, data = [], False
        for tensor in values:
            if not origin.of_model(tensor):
                data = True
            elif origin.is_trained(tensor):
                trained.append(tensor)
        if trained:
            return self._called_with(trained, function, name, args, kwargs, data=data)
        result = function(*args, **kwargs)
        if not data:
            origin.remember(result)
        elif args and (result is args[0] or result is None):
            origin.spend(args[0], written=True)  # it may have been of zeros so far
        return result

    def _called_with_repeated(
        self,
        repeated: list[Repetition],
        function: Function,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        values: list[Tensor],
    ) -> Any:
        """Call a function that takes repetitions of a weight, which may show what they are."""
        if is_in_place(name):
            for repetition in repeated:
                self._is_offset(repetition)
        result = self._watched(function, name, args, kwargs, values)
        # Where no gradients are recorded, it is checkpointing that runs again.
        if any(t.requires_grad or not torch.is_grad_enabled() for t in tensors_in(result)):
            for repetition in repeated:
                is_view = self._repetitions.is_view(result, repetition)
                if not is_view and not self._is_linear(repetition, function, args, kwargs, result):
                    self._is_offset(repetition)
        return result

    def _is_linear(
        self,
        repetition: Repetition,
        function: Function,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> bool:
        """Note the use of a repeated weight in a product; False if this is none."""
        shown = [t for t in tensors_in(args, kwargs) if self._repetitions.of(t) is repetition]
        if len(shown) != 1 or not isinstance(result, Tensor) or not trains(result):
            return False
        weight = repetition.once(shown[0])
        if not self._origin.is_trained(weight):
            return False
        given, named = replaced((args, kwargs), {id(shown[0]): weight})
        call = FunctionCall(result, self._origin.of_model, self._forwards.inside)
        with self._noting([weight]), without_autocast(result):
            uses = uses_in(name_of(function), call, given, named)
            found = [use for use in uses if use.weight is weight and use.kind == "linear"]
            if len(found) != 1 or not fits(found[0], result):
                return False
            noted = self._note(found[0], result)
            repetition.calls += [] if noted is None else [noted]
            repetition.known = True
        return True

    def _is_offset(self, repetition: Repetition) -> None:
        """A repeated weight is not in products alone: it is read where it was repeated."""
        self._repetitions.drop(repetition)
        self._withdraw(repetition.calls)
        use, result = repetition.use, repetition.result
        weight = use.bias if use.weight is None else use.weight
        assert weight is not None
        with self._noting([weight]), without_autocast(result):
            self._note(use, result)

    def _is_looking(self) -> bool:
        """Whether what is called can be part of what is measured."""
        return (
            self._active
            and torch._C._functorch.peek_interpreter_stack() is None
            and self._forwards.innermost not in self._selection.rules
        )

    def _looks_for_uses(self) -> bool:
        """Not without gradients; when run again, there runs what checkpointing recomputes."""
        return torch.is_grad_enabled() or self._repeated

    def _new_call(self, layer: Layer, shape: tuple[int, ...], device: torch.device) -> Call:
        """A further call of a layer, in which rows are chosen."""
        call = Call(layer, *self.rows[layer.path].choose(shape, device))
        call.place = None if self._calls is None else self._calls.place(layer.path)
        call.forward = self._forwards.forward.number
        return call

    def _read(self, function: Function, args: tuple[Any, ...]) -> Any:
        """An attribute of a tensor: `.T` and `.data` are tensors too."""
        result = function(*args)
        if isinstance(result, Tensor) and self._origin.of_model(args[0]):
            self._origin.remember(result)
        repetition = self._repetitions.of(args[0])
        if repetition is not None:
            self._repetitions.is_view(result, repetition)
        return result

    def _called_with(
        self,
        trained: list[Tensor],
        function: Function,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        data: bool,
    ) -> Any:
        """Call a function that takes what is trained; `data`: and something of the batch."""
        gradients = self._looks_for_uses()
        if gradients and name in _OPENED:
            return self._forwards.opened(function, args, kwargs)
        if gradients and function in RECURRENT:
            return self._recurrent(function, args, kwargs, trained)
        origin, begun = self._origin, None
        data = data or any(map(is_retyped, trained))  # no change can be followed through that
        if not data and trains(trained[0]):
            with self._noting(trained):
                begun = origin.tape.begin(function, args, kwargs, gradients=gradients)
        kept = args
        if name in _OVERWRITE and not origin.of_model(args[0]):
            kept = (args[0].detach().clone(), *args[1:])
        result = function(*args, **kwargs)
        made = args[0] if name == "__setitem__" else result
        if not all(map(trains, tensors_in(made))):
            return result
        used: list[Tensor] = []
        if gradients and isinstance(made, Tensor):
            call = FunctionCall(made, origin.of_model, self._forwards.inside)
            used = self._uses(name_of(function), call, kept, kwargs, trained)
        if begun is not None:
            with self._noting(trained):
                origin.tape.end(begun, () if used else tensors_in(result))
        if data or used:
            self._explain(name, trained if gradients else [], used)
            origin.spend(made, written=bool(args) and made is args[0])
        else:
            origin.remember(result)
        return result

    def _uses(
        self,
        name: str,
        call: FunctionCall,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        trained: list[Tensor],
    ) -> list[Tensor]:
        """Note the uses in a call; the tensors that they account for."""
        if self._is_off(trained):
            return trained
        with self._noting(trained) as used, without_autocast(call.result):
            for use in uses_in(name, call, args, kwargs):
                used += [t for t in trained if _is_of(t, use.weight) or _is_of(t, use.bias)]
                if name in REPEATING:
                    number = self._forwards.forward.number
                    self._repetitions.add(Repetition(use, call.result, number))
                else:
                    self._note(use, call.result)
        return used

    def _recurrent(
        self,
        function: Function,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        trained: list[Tensor],
    ) -> Any:
        """Call a recurrent function, and note the linear maps in it."""
        call = rng_state = None
        if not self._is_off(trained):
            with self._noting(trained):
                call = read_call(function, args, kwargs)
                if call.draws and call.refusal is None:
                    rng_state = random_state(call.input.device)
        result = function(*args, **kwargs)
        outputs = tuple(tensors_in(result))
        if call is not None and trains(outputs[0]):
            with self._noting(trained) as used:
                used += self._note_maps(call, outputs, rng_state)
            self._explain(function.__name__, trained, used)
        elif call is None:
            self._explain(function.__name__, trained, trained)
        return result

    @contextmanager
    def _noting(self, trained: list[Tensor]) -> Iterator[list[Tensor]]:
        """While uses of these are noted: collects those accounted for; if that fails, all are."""
        place = self._place(self._first(trained[0]))
        used: list[Tensor] = []
        try:
            with torch.no_grad():
                yield used
        except Refused as refusal:
            self.refused[place.path] = str(refusal)
            used += trained
        except Exception as error:
            self._failed(place.full_name, error)
            used += trained

    def _is_off(self, trained: list[Tensor]) -> bool:
        return bool(self._off) and self._place(self._first(trained[0])).full_name in self._off

    def _explain(self, name: str, trained: list[Tensor], used: list[Tensor]) -> None:
        """Keep in mind what parameters went into where no rule can follow."""
        for tensor in trained:
            keys = self._origin.parameters_of(tensor)
            if any(tensor is other for other in used):
                self._leftovers.account(keys)
            else:
                self._leftovers.leave(keys, f"torch's {name}")

    def _note(
        self, use: Use, output: Tensor, path: str | None = None, *, checked: bool = True
    ) -> Call | None:
        """Gather rows of a use, and put a hook on its output."""
        layer = self._layer(use, path)
        if layer is None or layer.path not in self.rows:
            return None
        z = use.layout(output)
        rows_of_layer = self.rows[layer.path]
        call = self._new_call(layer, tuple(z.shape[:-1]), output.device)
        features = self._look(call, use, z)
        if not checked and layer.path not in self._checked and len(call.z):
            rows_of_layer.linear = reproduces(use, features, call.z)
        rows_of_layer.calls.append(call)
        if self.attention is not None:
            self.attention.last_used = layer.pieces[0].parameter
        path = layer.path
        arrive = partial(
            self._guarded, lambda: [path], partial(self._on_gradient, path, use.layout, call)
        )
        call.hook = weakref.ref(arrive)
        # Taken off in the end: some tensors outlive their graph, and would keep all of this.
        self._hooks.append(output.register_hook(arrive))  # type: ignore[no-untyped-call]
        return call

    def _look(self, call: Call, use: Use, z: Tensor) -> Features:
        """Gather the rows of a call; their features, trained or not."""
        layer, features = call.layer, use.features(call.rows)
        whole = use.whole() if layer.weight is not None else None
        if whole is not None:
            whole = whole.restrict(weight=True, bias=layer.bias is not None)
        call.look(_trained(layer, features), call.rows.take(z), whole)
        if self._attainable and call.rows.total and isinstance(features, ceiling.KNOWN):
            every = Rows(call.rows.shape, None, call.rows.device)
            call.every_row = _trained(layer, use.features(every))
        return features

    def _note_maps(
        self, made: RecurrentCall, outputs: tuple[Tensor, ...], rng_state: Tensor | None
    ) -> list[Tensor]:
        """Choose rows of the maps in a recurrent call, and put hooks on its outputs."""
        if made.refusal is not None:
            raise Refused(made.refusal)
        calls: dict[str, Call] = {}
        used: list[Tensor] = []
        for use in uses_of(made):
            used += [tensor for tensor in (use.weight, use.bias) if tensor is not None]
            layer = self._layer(use, None)
            if layer is not None and layer.path in self.rows:
                calls[use.part] = self._new_call(layer, (made.rows,), made.input.device)
        if not calls:
            return used
        late = LateRows(made, Returned.of(made, outputs), rng_state, calls, self._on_replay)
        for call in calls.values():
            call.precision = made.precision
            call.late = call.hook = weakref.ref(late)
            self.rows[call.layer.path].calls.append(call)
        paths = [call.layer.path for call in calls.values()]
        late.watch(outputs, lambda hook: partial(self._guarded, lambda: paths, hook))
        self._late.add(late)
        return used

    def _note_whole(
        self,
        module: nn.Module,
        names: list[str],
        arguments: Arguments,
        outputs: Outputs,
        tensors: list[Tensor],
    ) -> None:
        """Gather rows of a module that is measured as a whole, and hook its output."""
        left = [module.get_parameter(name) for name in names]
        try:
            others, names = self._others(module, left)
        except Refused as refusal:
            self._leftovers.refuse(left, str(refusal))
            return
        layer = self._whole(module, [module.get_parameter(name) for name in names])
        if layer is None or layer.path not in self.rows:
            return
        path, rows_of_layer = layer.path, self.rows[layer.path]
        z = outputs.rows(tensors)
        call = self._new_call(layer, tuple(z.shape[:-1]), z.device)
        taken = call.rows.take(z)
        try:
            features = self._leftovers.features(
                module, names, arguments, outputs, taken, self._forwards.forward, call.rows
            )
            if any(other.z.shape[1] != taken.shape[1] for other in rows_of_layer.calls):
                raise Refused("its output has rows of another length at every call")
        except Refused as refusal:
            self._leftovers.refuse(left, str(refusal))
            del self.layers[path], self.rows[path]
            return
        self._replace(others, path)
        call.look(features, taken, None)
        rows_of_layer.calls.append(call)
        arrive = partial(
            self._guarded, lambda: [path], partial(self._on_gradient, path, as_it_is, call)
        )
        call.hook = weakref.ref(arrive)
        outputs.hook(tensors, arrive)

    def _others(
        self, module: nn.Module, parameters: list[nn.Parameter]
    ) -> tuple[list[Call], list[str]]:
        """The calls that a module's reading replaces, and the names of all that it reads.

        When the module runs again, a parameter moves wherever it is used there: what rules say of
        these uses would count them twice. What else those calls use goes with them.

        Raises:
            Refused: one of these calls uses what the module does not hold.
        """
        began = self._forwards.forward.number
        inside = [c for rows in self.rows.values() for c in rows.calls if c.forward >= began]
        moving, others = set(parameters), list[Call]()
        while found := [c for c in inside if not moving.isdisjoint(c.layer.parameters)]:
            inside = [call for call in inside if call not in found]
            others += found
            moving.update(*(call.layer.parameters for call in found))
        names = [name for name, parameter in module.named_parameters() if parameter in moving]
        if len(names) < len(moving):
            raise Refused(
                "functions without a rule use it in a module that uses it together with "
                "parameters of other modules, too: these uses can't be told apart"
            )
        return others, names

    def _replace(self, calls: list[Call], path: str) -> None:
        """Another layer's reading stands for these calls."""
        for withdrawn in self._withdraw(calls):
            later = {p: path for p, by in self._replacements.items() if by == withdrawn}
            self._replacements |= {**later, withdrawn: path}

    def _withdraw(self, calls: list[Call]) -> list[str]:
        """These calls are no uses after all; the paths of their layers."""
        paths = list(dict.fromkeys(call.layer.path for call in calls))
        for path in paths:
            rows = self.rows.get(path)
            if rows is not None:
                rows.calls = [call for call in rows.calls if call not in calls]
                if not rows.calls:
                    del self.layers[path], self.rows[path]
                    if self._calls is not None:
                        self._calls.forget(path)
        return paths

    # --- layers ----------------------------------------------------------------------------------

    def _layer(self, use: Use, path: str | None) -> Layer | None:
        """The layer that a use belongs to; None if none of its parameters is measured."""
        weight, bias = self._origin.source(use.weight), self._origin.source(use.bias)
        lead = weight or bias
        if lead is None:
            return None
        names = self._names(use, lead) if path is None else [path]
        return self._find(names, use, weight, bias)

    def _whole(self, module: nn.Module, parameters: list[nn.Parameter]) -> Layer | None:
        """The layer that a module as a whole is, as far as these parameters are concerned."""
        source = Together([self._origin.pieces.of(p) for p in parameters], module)
        use = Use("module", None, None, _no_features)
        return self._find(self._whole_names(module, parameters), use, source, None)

    def _find(
        self, names: Iterable[str], use: Use, weight: Source | None, bias: Source | None
    ) -> Layer | None:
        """The layer of one of these names that is made alike, or a new one."""
        path = ""
        for path in names:
            known = self.layers.get(path)
            if known is None:
                return self._new_layer(path, use, weight, bias)
            made = known.kind, known.form, _identity(known.weight, known.bias)
            alike = made == (use.kind, use.form, _identity(weight, bias))
            if alike and shape_alike(known.shaped, use.shaped, use.weight):
                return known.made_of(weight, bias)
        raise ValueError(f"'{path}' uses other parameters at every call")

    def _new_layer(
        self, path: str, use: Use, weight: Source | None, bias: Source | None
    ) -> Layer | None:
        lead = weight or bias
        assert lead is not None
        parameter = lead.pieces[0].parameter
        place = self._place(id(parameter))
        order = self._order[id(parameter)]
        layer = Layer(path, place.module, use.kind, weight, bias, use.shaped, order, use.form)
        self.layers[path] = layer
        if path in self._off:
            return layer
        self.rows[path] = LayerRows(self._chooser)
        if id(parameter) not in self.accumulated:
            self.accumulated[id(parameter)] = Accumulation(
                parameter,
                partial(self._rows_of, parameter),
                self._was_zeroed,
                partial(self._hook, parameter),
            )
        return layer

    def _first(self, tensor: Tensor) -> int:
        """The first parameter in the model of which the tensor is made."""
        return min(self._origin.parameters_of(tensor), key=self._order.__getitem__)

    def _place(self, parameter: int) -> Place:
        """Where a parameter is: in the module that runs, if that holds it too."""
        places = self._selection.places[parameter]
        running = self._forwards.innermost
        return next((place for place in places if place.module is running), places[0])

    def _names(self, use: Use, lead: Source) -> Iterator[str]:
        """What a layer may be called: as its module, as its parameter, with who uses it.

        Of parameters of several modules: as the module that these are in. If that is the model
        itself, then by their own names (`query+key`), or as the model's class if they are many.
        """
        pieces = sorted(lead.pieces, key=lambda piece: self._order[id(piece.parameter)])
        places = [self._place(id(piece.parameter)) for piece in pieces]
        homes = list(dict.fromkeys(place.home for place in places))
        path, name = homes[0] if len(homes) == 1 else (self._common(homes), "")
        rows = lead.pieces[0].name if len(lead.pieces) == 1 else ""
        part = use.part or part_of(places[0].module, places[0].name)
        full = ".".join(filter(None, (path, part or name))) + ("" if part else rows)
        if part == "" and name in ("weight", "bias") and not rows:
            yield path
        yield full
        yield from self._with_user(full, use.kind)

    def _whole_names(self, module: nn.Module, parameters: list[nn.Parameter]) -> Iterator[str]:
        """What a module measured as a whole may be called: as it is, or as its one parameter.

        The model itself is called by its class.
        """
        name = self._selection.modules[module] or self._model_class
        if len(parameters) == 1:
            place = self._place(id(parameters[0]))
            is_whole = place.path and place.name in ("weight", "bias")
            name = place.path if is_whole else place.full_name
        yield from (name, f"{name}@module")
        yield from self._with_user(name, "module")

    def _common(self, homes: Sequence[tuple[str, str]]) -> str:
        """What parameters of these modules and names are called together."""
        steps = zip(*(path.split(".") for path, _ in homes), strict=False)
        shared = takewhile(lambda several: len(set(several)) == 1, steps)
        if holder := ".".join(several[0] for several in shared):
            return holder
        names = dict.fromkeys(
            path if path and name in ("weight", "bias") else ".".join(filter(None, (path, name)))
            for path, name in homes
        )
        return "+".join(names) if len(names) <= _MOST_NAMES else self._model_class

    def _with_user(self, name: str, kind: str) -> Iterator[str]:
        user = self._selection.modules[self._forwards.innermost] or kind
        yield f"{name}@{user}"
        yield from (f"{name}@{user}#{i}" for i in count(2))

    def _rows_of(self, parameter: nn.Parameter) -> list[LayerRows]:
        """Rows of the layers whose gradient is told by this parameter's."""
        found = [
            self.rows[path]
            for path, layer in self.layers.items()
            if path in self.rows and layer.pieces[0].parameter is parameter
        ]
        return found if self.attention is None else found + self.attention.rows_of(parameter)

    # --- what is seen of a backward pass ---------------------------------------------------------

    def _hook(self, parameter: nn.Parameter, function: Callable[..., None]) -> Hook:
        def paths() -> list[str]:
            return [p for p, x in self.layers.items() if x.pieces[0].parameter is parameter]

        return Hook(partial(self._guarded, paths, function))

    def _guarded(
        self, paths: Callable[[], list[str]], function: Callable[..., None], *args: Any
    ) -> None:
        """Run a hook's body for some layers, which are not watched any more if it fails.

        It is given no gradient where the loss leaves this output of a function out.
        """
        if not self._active or args[-1] is None or not trains(args[-1]):
            return
        watched = [path for path in paths() if path in self.rows]
        if not watched:
            return
        try:
            with torch.no_grad(), torch._C.DisableTorchFunction(), without_autocast(args[-1]):
                function(*args)
        except Exception as error:
            for path in watched:
                self._failed(path, error)

    def _failed(self, path: str, error: Exception) -> None:
        self._off.add(path)
        self.rows.pop(path, None)
        self._fail(path, error)

    def _was_zeroed(self, now: Tensor, left: Tensor) -> bool:
        """Whether `.grad` was zeroed in place: at one parameter of every pass, the device tells.

        At the first whose gradient was not zero anyway.
        """
        task = torch._C._current_graph_task_id()
        if self._verdict[0] != task:
            is_zero, was_zero = torch.stack([now == 0, left == 0]).tolist()
            if was_zero:
                return False
            self._verdict = task, is_zero
        return self._verdict[1]

    def _on_gradient(
        self, path: str, layout: Callable[[Tensor], Tensor], call: Call, gradient: Tensor
    ) -> None:
        whole, gradient = gradient, layout(gradient)
        if call.whole is not None:
            size = squares(gradient).reshape(-1)
        else:  # as it lies in memory, if the layout has all of it
            has_all = gradient.data_ptr() == whole.data_ptr() and gradient.numel() == whole.numel()
            size = dots.sample_norms(whole if has_all else gradient)
        call.arrive(call.rows.take(gradient), size, torch.finfo(gradient.dtype).eps)
        if call.every_row is not None:
            call.every_gradient = Rows(call.rows.shape).take(gradient)
        elif self._attainable and call.rows.total:
            # A second pass through one graph: its rows are summed up already.
            self.rows[path].ceiling_is_whole = False

    def _on_replay(self, call: Call, linear: Map, error: Tensor) -> None:
        """A replay has told the rows of one of the layers in a recurrent call."""
        path = call.layer.path
        if path not in self.rows:
            return
        try:
            if not call.known:
                self._look(call, affine(linear.inputs, linear.weight, linear.bias), linear.z)
            self._on_gradient(path, as_it_is, call, linear.gradient)
        except Exception as failure:
            self._failed(path, failure)
        call.replay_error = error


def reproduces(use: Use, features: Features, z: Tensor) -> Tensor:
    """‖Θφ − z‖ / ‖z‖ on the rows: 0 up to rounding if the rule describes this layer."""
    rest = z
    if use.weight is not None and (part := features.by_weight(use.shaped(use.weight))) is not None:
        rest = rest - part
    if use.bias is not None and (part := features.by_bias(use.bias)) is not None:
        rest = rest - part
    error: Tensor = torch.linalg.vector_norm(rest) / torch.linalg.vector_norm(z)
    return error


def _no_features(rows: Rows) -> Features:
    raise NotImplementedError("what a module as a whole does to its rows is told by a replay")


def _trained(layer: Layer, features: Features) -> Features:
    return features.restrict(weight=layer.weight is not None, bias=layer.bias is not None)


def _is_of(tensor: Tensor, used: Tensor | None) -> bool:
    """Whether what was used is the tensor, or a part of it."""
    if used is None or used is tensor:
        return used is tensor
    return used._base is not None and used._base is (
        tensor if tensor._base is None else tensor._base
    )


def _identity(weight: Source | None, bias: Source | None) -> tuple[object, ...]:
    return weight and weight.identity, bias and bias.identity
