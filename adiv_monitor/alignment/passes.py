"""The probe's forward pass, free of side effects on the run, and all uses of weights in it."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves, tree_map_only

from adiv_monitor.alignment.lineage import NONE, Lineage, Sources
from adiv_monitor.alignment.weights import Weight, Weights
from adiv_monitor.capture.forwards import Forwards, FunctionToCall, Watcher
from adiv_monitor.capture.guard import Guard
from adiv_monitor.capture.hook import has_data
from adiv_monitor.capture.selection import inside_wrappers, named_modules
from adiv_monitor.capture.watching import OPENED, is_in_place
from adiv_monitor.capture.weights.pieces import Strides, whole_of
from adiv_monitor.features.features import DenseFeatures
from adiv_monitor.features.functions.linear import affine, part_of
from adiv_monitor.features.recurrent import RECURRENT, maps_of, read_call, uses_of
from adiv_monitor.features.registry import Rule, find_rule, use_of
from adiv_monitor.features.rows import Rows
from adiv_monitor.features.uses import NESTED, FunctionCall, Refused, Use, name_of, uses_in
from adiv_monitor.rerun.kept import is_writable, may_be_written
from adiv_monitor.rerun.surroundings import is_plain, untouched
from adiv_monitor.rerun.thread import surely

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_EMBEDDINGS = ("", "embedding", "embedding_bag")


@dataclass(frozen=True, eq=False)
class Found:
    """A layer at one of its calls; it refers to activations and must not be kept.

    Attributes:
        path: name of the layer in reports.
        use: the use of its weight; its kind is "table" where the weight is indexed or added.
        weight: the present weight.
        shape: shape of the result, without its channels.
        sources: the layers from whose outputs the input was computed.
    """

    path: str
    use: Use
    weight: Weight
    shape: tuple[int, ...]
    sources: Sources


@dataclass(frozen=True, eq=False)
class Entrywise:
    """A parameter that is added to layers' outputs, or scales them, entry by entry.

    Attributes:
        parameter: the parameter.
        sources: the layers.
    """

    parameter: nn.Parameter
    sources: Sources


def run_probe(
    model: nn.Module,
    arguments: Arguments,
    found: Callable[[Found], None],
    entrywise: Callable[[Entrywise], None],
) -> dict[str, str]:
    """Run a forward pass in evaluation mode, without gradients or autocast.

    `found` gets every layer at each call, `entrywise` every parameter that acts entry by entry.
    Random numbers, buffers, modes and attributes of modules are restored afterwards.

    Returns:
        By name of a weight that the pass uses, why it is not measured.
    """
    modules = list(model.modules())
    devices = {p.device for p in model.parameters()} | {b.device for b in model.buffers()}
    others = {device for device in devices if device.type not in ("cpu", "meta")}

    def run() -> dict[str, str]:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for device_type in {"cpu", *(device.type for device in others)}:
                stack.enter_context(torch.autocast(device_type, enabled=False))
            # So that a weight is one tensor throughout. `untouched` resets it. The generator of
            # `parametrize.cached()`, left by an interrupt, would count down once more when it dies.
            parametrize._cache_enabled = 1
            _evaluating(modules)
            seeing = stack.enter_context(_seeing(model, found, entrywise))
            # The model may change its arguments in place.
            args, kwargs = tree_map_only(Tensor, Tensor.clone, arguments)
            try:
                inside_wrappers(model)(*args, **kwargs)
            finally:
                for module in modules:
                    reshard = getattr(module, "reshard", None)
                    if callable(reshard):  # FSDP2 would keep the root's weights unsharded
                        reshard()
            return seeing.refused

    # The forward may write to parameters: the average of a teacher, a codebook, a clamp.
    kept = {p: (p.data, p.data.clone()) for p in model.parameters() if _is_kept(p)}

    def put_back() -> None:
        for parameter, (data, values) in kept.items():
            parameter.data = data.copy_(values)

    try:
        return untouched(modules, others, run)
    finally:
        surely(put_back)


def _is_kept(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is saved and written back: if no other process writes to it."""
    if not is_plain(parameter) or (parameter.device.type == "cpu" and parameter.is_shared()):  # type: ignore[no-untyped-call]
        return False
    return is_writable(parameter) if parameter.requires_grad else may_be_written(parameter)


def _evaluating(modules: list[nn.Module]) -> None:
    """Set evaluation mode without `eval()`, which some modules override to do more."""
    copies: dict[int, Tensor] = {}
    for module in modules:
        module.training = False
        for name, buffer in module._buffers.items():
            if buffer is not None:  # the pass may write to buffers in place
                module._buffers[name] = copies.setdefault(id(buffer), buffer.clone())


@contextmanager
def _seeing(
    model: nn.Module,
    found: Callable[[Found], None],
    entrywise: Callable[[Entrywise], None],
) -> Iterator["_Seeing"]:
    paths = {
        module: path
        for path, module in named_modules(model)
        if not isinstance(module, torch.jit.ScriptModule)
    }
    forwards = Forwards(paths, Guard(), repeated=True)
    seeing = _Seeing(model, paths, forwards, found, entrywise)
    try:
        forwards.watch(seeing)
        yield seeing
        forwards.remove()
    finally:  # once more, in case an interrupt hit the first call
        forwards.remove()


class _Seeing(Watcher):
    """Watcher that reports the uses of weights in a forward pass; see `forwards.Watcher`.

    Args:
        model: the model.
        paths: of its modules.
        forwards: the forwards that run.
        found: gets every layer at each of its calls.
        entrywise: gets parameters that act entry by entry.

    Attributes:
        refused: by name of a weight, why a use of it is not measured.
    """

    def __init__(
        self,
        model: nn.Module,
        paths: dict[nn.Module, str],
        forwards: Forwards,
        found: Callable[[Found], None],
        entrywise: Callable[[Entrywise], None],
    ) -> None:
        self.refused: dict[str, str] = {}
        self._paths = paths
        self._forwards = forwards
        self._found = found
        self._entrywise = entrywise
        self._weights = Weights(model)
        self._lineage = Lineage(model)
        self._rules = {m: rule for m in paths if isinstance(rule := find_rule(m), Rule)}
        self._names: dict[object, str] = {}  # by weight, kind of use, and position in the weight

    # --- modules ---------------------------------------------------------------------------------

    def ends(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Handle the end of a module's forward; `output` is None if it raised."""
        outputs, inputs = (_tensors(value) for value in (output, (args, kwargs)))
        rule = self._rules.get(module)
        if rule is not None and isinstance(output, Tensor):
            use = use_of(rule, module, args, kwargs)
            self._is_used([use], output, self._lineage.sources(inputs))
        self._lineage.ends(outputs, inputs)

    # --- functions -------------------------------------------------------------------------------

    def called(self, call: FunctionToCall) -> Any:
        """Call a torch function, report the weights it uses, and return its result."""
        function, args, kwargs = call.function, call.args, call.kwargs
        name = getattr(function, "__name__", "")
        if torch._C._functorch.peek_interpreter_stack() is not None:
            held = self._weights_among([t for t in _tensors((args, kwargs)) if has_data(t)])
            self._refuse(held.values(), "a transform of torch.func, which hides rows, uses it")
            return call()
        if name in OPENED:
            return self._forwards.opened(call)
        tensors = _tensors((args, kwargs))
        weights = self._weights_among(tensors)
        data = [t for t in tensors if id(t) not in weights and not self._lineage.of_model(t)]
        sources = self._lineage.sources(data)
        result = call()
        if self._forwards.innermost in self._rules:
            weights = {}  # the module's rule covers them
        uses: Sequence[Use] | None = ()
        if function in RECURRENT and weights:
            self._recurrent(call, weights, sources, result)
            return result
        made = args[0] if name == "__setitem__" else result
        if weights and isinstance(made, Tensor):
            uses = self._uses(call, made, weights)
        if uses and self._is_used(uses, made, sources, of=name):
            return result
        results = _tensors(result)
        if data and args and (is_in_place(name) or made is not result):
            self._lineage.is_written(args[0], sources)
        elif data or uses is None:
            self._lineage.is_made(results, sources)
        else:
            self._lineage.is_made((t for t in results if id(t) not in weights), None)
            if weights and len(results) == 1:
                self._weights.is_made(results[0], list(weights.values()))
        return result

    @property
    def _running(self) -> str:
        return self._paths.get(self._forwards.innermost, "")

    def _weights_among(self, tensors: Sequence[Tensor]) -> dict[int, Weight]:
        """Return, by id of a tensor, the weight that it is or is a view of."""
        if not tensors:
            return {}
        running = self._running
        of = ((id(tensor), self._weights.of(tensor, running)) for tensor in tensors)
        return {key: weight for key, weight in of if weight is not None}

    def _given(self, call: FunctionToCall, weights: dict[int, Weight]) -> Arguments:
        """Return a function's arguments with stand-ins for weights."""

        def stand_in(tensor: Tensor) -> Tensor:
            weight = weights.get(id(tensor))
            return tensor if weight is None else weight.view(tensor)

        args, kwargs = tree_map_only(Tensor, stand_in, (call.args, call.kwargs))
        return args, kwargs

    def _uses(
        self, call: FunctionToCall, made: Tensor, weights: dict[int, Weight]
    ) -> Sequence[Use] | None:
        """Return the uses in a call by the monitor's rules; None if a rule refuses it."""
        stand_ins = {id(weight.stand_in) for weight in weights.values()}

        def of_model(value: object) -> bool:
            if isinstance(value, Tensor) and id(whole_of(value)) in stand_ins:
                return True
            return self._lineage.of_model(value)

        args, kwargs = self._given(call, weights)
        described = FunctionCall(made, of_model, self._forwards.inside, trains=False)
        name = name_of(call.function)
        try:
            if made.is_nested:
                raise Refused(NESTED)
            return uses_in(name, described, args, kwargs)
        except Refused as refusal:
            self._refuse(weights.values(), str(refusal))
            return None

    def _refuse(self, weights: Collection[Weight], reason: str) -> None:
        self.refused |= {weight.full_name: reason for weight in weights}

    def _is_used(
        self, uses: Sequence[Use], made: Tensor, sources: Sources, *, of: str = ""
    ) -> bool:
        """Report uses; return False if the result is only a view of a weight.

        Args:
            uses: the uses.
            made: the result of the function or the module.
            sources: the layers from whose outputs its inputs were computed.
            of: name of the function.
        """
        if self._weights.of(made) is not None:
            return False
        maps, tables, vectors = set[str](), set[str](), list[nn.Parameter]()
        for use in uses:
            weight = self._weight(use.weight)
            if weight is None or _is_entrywise(use, made):
                held = (weight, self._weight(use.bias))
                vectors += [p for w in held if w is not None for p in w.parameters]
                continue
            is_added = use.kind == "offset"
            is_table = is_added or (use.kind == "embedding" and of not in _EMBEDDINGS)
            use = replace(use, kind="table") if is_table else use
            path = self._name(use, weight)
            self._hand_on(path, use, weight, made, NONE if is_added else sources)
            (tables if is_added else maps).add(path)
        whence = (frozenset(maps) or sources) | tables
        for parameter in vectors:
            self._entrywise(Entrywise(parameter, whence))
        if is_in_place(of):
            self._lineage.is_written(made, whence)
        else:
            self._lineage.is_made((made,), whence)
        return True

    def _hand_on(self, path: str, use: Use, weight: Weight, made: Tensor, sources: Sources) -> None:
        shape = tuple(use.layout(made).shape[:-1])
        self._found(Found(path, use, weight, shape, sources))
        bias = self._weight(use.bias)
        for parameter in () if bias is None else bias.parameters:
            self._entrywise(Entrywise(parameter, frozenset((path,))))

    def _weight(self, tensor: Tensor | None) -> Weight | None:
        return None if tensor is None else self._weights.of(tensor, self._running)

    def _recurrent(
        self, to_call: FunctionToCall, weights: dict[int, Weight], sources: Sources, result: Any
    ) -> None:
        """Report the linear maps in a recurrent call, after the call."""
        call = read_call(to_call.function, *self._given(to_call, weights))
        outputs = _tensors(result)
        if call.draws:
            self._refuse(
                weights.values(), "it draws random numbers in evaluation, which are drawn anew"
            )
            self._lineage.is_made(outputs, sources)
            return
        rows = maps_of(call, outputs[0].dtype)
        uses, names = {use.part: use for use in uses_of(call)}, dict[str, str]()
        held = {part: self._weight(use.weight) for part, use in uses.items()}
        for part, weight in held.items():
            if weight is not None:
                names[part] = self._name(uses[part], weight)
        fed = sources
        for first in range(0, len(call.maps), call.directions):
            gave = NONE
            for of_direction in call.maps[first : first + call.directions]:
                parts = [use.part for use in of_direction]
                state = frozenset(names[part] for part in parts[2:] or parts if part in names)
                inner = frozenset(names[part] for part in parts[:2] if part in names)
                # The input map gets the layer's input, the other maps its state.
                for part, into in zip(parts, (fed, sources | state, inner), strict=False):
                    weight, x = held[part], rows[part][0]
                    if weight is not None:
                        features = affine(x, weight.stand_in, None).features
                        use = replace(uses[part], features=features)
                        self._hand_on(names[part], use, weight, x, into)
                gave |= state
            fed = gave or fed
        self._lineage.is_made(outputs, fed)

    def _name(self, use: Use, weight: Weight) -> str:
        """Return the layer's path; a second use of a weight adds the module that makes it."""
        part = use.part or part_of(weight.module, weight.name)
        path = weight.full_name
        if part:
            path = ".".join(filter(None, (weight.path, part)))
        elif weight.name == "weight":
            path = weight.path
        assert use.weight is not None
        shaped = use.shaped(use.weight.detach())
        lies = Strides.between(use.weight, weight.value), Strides.between(shaped, weight.value)
        key = path, weight.key, use.kind, use.form, lies
        if key not in self._names:
            taken, user = set(self._names.values()), f"{path}@{self._running or use.kind}"
            names = (path, user, *(f"{user}#{i}" for i in range(2, len(taken) + 3)))
            self._names[key] = next(name for name in names if name not in taken)
        return self._names[key]


def _is_entrywise(use: Use, made: Tensor) -> bool:
    """Whether a use acts entry by entry, as neither a linear map nor a table."""
    if use.kind != "offset" or use.weight is None:
        return use.kind in ("gain", "offset")
    sizes = zip(use.weight.shape, use.weight.stride(), strict=True)
    if sum(size > 1 and stride != 0 for size, stride in sizes) < 2:
        return True
    none = Rows(tuple(use.layout(made).shape[:-1]), np.empty(0, np.int64), made.device)
    return isinstance(use.features(none), DenseFeatures)


def _tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
