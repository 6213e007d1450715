"""The probe's forward pass, free of side effects on the run, and all uses of weights in it."""

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain, count
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves, tree_map_only

from adiv_monitor.alignment.layers import is_matrix
from adiv_monitor.alignment.lineage import NONE, Lineage, Sources
from adiv_monitor.alignment.weights import Weight, Weights
from adiv_monitor.capture.forwards import Forwards, FunctionToCall, Watcher
from adiv_monitor.capture.guard import Guard
from adiv_monitor.capture.hook import has_data
from adiv_monitor.capture.selection import inside_wrappers, named_modules
from adiv_monitor.capture.watching import OPENED, is_in_place
from adiv_monitor.features.functions.linear import affine, part_of
from adiv_monitor.features.recurrent import RECURRENT, maps_of, read_call, uses_of
from adiv_monitor.features.registry import Rule, find_rule, use_of
from adiv_monitor.features.uses import NESTED, FunctionCall, Refused, Use, name_of, uses_in
from adiv_monitor.rerun.randomness import Randomness
from adiv_monitor.rerun.surroundings import Surroundings, devices_of, untouched

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
# Gets a layer at each of its calls: its path in reports, the use of its weight (its kind is "table"
# where the weight is indexed or added), the weight, the shape of the result without its channels,
# and the layers from whose outputs the input was computed. A use must not be kept.
See: TypeAlias = Callable[[str, Use, Weight, tuple[int, ...], Sources], None]
# Gets a parameter that is added to, or scales, the outputs of layers entry by entry.
Act: TypeAlias = Callable[[nn.Parameter, Sources], None]
_EMBEDDINGS = ("", "embedding", "embedding_bag")


def run_probe(model: nn.Module, arguments: Arguments, see: See, act: Act) -> dict[str, str]:
    """Run a forward pass in evaluation mode, without gradients or autocast.

    Random numbers, buffers, modes and attributes of modules are restored afterwards.

    Returns:
        By name of a weight that the pass uses, why it is not measured.
    """
    modules = list(model.modules())
    surroundings = Surroundings(Randomness(devices_of(modules)))

    def run() -> dict[str, str]:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for kind in {device.type for device in surroundings.devices}:
                stack.enter_context(torch.autocast(kind, enabled=False))
            # So that a weight is one tensor throughout. `untouched` resets it. The generator of
            # `parametrize.cached()`, left by an interrupt, would count down once more when it dies.
            parametrize._cache_enabled = 1
            for module in modules:  # without `eval()`, which some override to do more
                module.training = False
                reshard = getattr(module, "reshard", None)
                if callable(reshard):  # FSDP2 would keep the root's weights unsharded
                    stack.callback(reshard)
            watcher = _UsesOfWeights(model, see, act)
            stack.callback(watcher.forwards.remove)
            watcher.forwards.watch(watcher)
            # The model may change its arguments in place.
            args, kwargs = tree_map_only(Tensor, Tensor.clone, arguments)
            inside_wrappers(model)(*args, **kwargs)
            return watcher.refused

    return untouched(modules, surroundings, run)


class _UsesOfWeights(Watcher):
    """Watcher that reports the uses of weights in a forward pass; see `forwards.Watcher`.

    Args:
        model: the model.
        see: gets every layer at each of its calls.
        act: gets every parameter that acts entry by entry.

    Attributes:
        forwards: the forwards that it watches.
        refused: by name of a weight, why a use of it is not measured.
    """

    def __init__(self, model: nn.Module, see: See, act: Act) -> None:
        self.refused: dict[str, str] = {}
        self._paths = {
            module: path
            for path, module in named_modules(model)
            if not isinstance(module, torch.jit.ScriptModule)
        }
        self.forwards = Forwards(self._paths, Guard(), repeated=True)
        self._see, self._act = see, act
        self._weights = Weights(model)
        self._lineage = Lineage(model, self._weights)
        self._rules = {m: rule for m in self._paths if isinstance(rule := find_rule(m), Rule)}
        self._names: dict[object, str] = {}  # by weight, kind of use, and position in the weight

    def ends(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Handle the end of a module's forward; `output` is None if it raised."""
        outputs, inputs = (_tensors(value) for value in (output, (args, kwargs)))
        rule = self._rules.get(module)
        if rule is not None and isinstance(output, Tensor):
            use = use_of(rule, module, args, kwargs)
            weights = self._weights_among([t for t in (use.weight, use.bias) if t is not None])
            sources = self._lineage.sources(inputs)
            self._lineage.is_made((output,), self._used([use], output, weights, sources))
        self._lineage.ends(outputs, inputs)

    def called(self, call: FunctionToCall) -> Any:
        """Call a torch function, report the weights it uses, and return its result."""
        args, name = call.args, getattr(call.function, "__name__", "")
        tensors = _tensors((args, call.kwargs))
        if torch._C._functorch.peek_interpreter_stack() is not None:
            held = self._weights_among([t for t in tensors if has_data(t)])
            self._refuse(held.values(), "a transform of torch.func, which hides rows, uses it")
            return call()
        if name in OPENED:
            return self.forwards.opened(call)
        weights = self._weights_among(tensors)
        data = [t for t in tensors if not self._lineage.of_model(t)]
        sources = self._lineage.sources(data)
        result = call()
        if self.forwards.innermost in self._rules:
            weights = {}  # the module's rule covers them
        results = _tensors(result)
        if call.function in RECURRENT and weights:
            self._lineage.is_made(results, self._recurrent(call, weights, sources, results[0]))
            return result
        made = args[0] if name == "__setitem__" else result
        written = made is not result or is_in_place(name)
        uses: Sequence[Use] | None = ()
        if weights and isinstance(made, Tensor):
            uses = self._uses(call, made, weights)
            if uses and self._weights.of(made) is None:  # else it is only a view of a weight
                sources = self._used(uses, made, weights, sources, of=name)
                data, results = [made], [made]
        if data and args and written:
            self._lineage.is_written(args[0], sources)
        elif data or uses is None:
            self._lineage.is_made(results, sources)
        else:
            self._lineage.is_made((t for t in results if id(t) not in weights), None)
            if any(is_matrix(t) and self._weights.of(t) is None for t in results):
                self._refuse(weights.values(), "the forward pass computes a weight from it")
        return result

    @property
    def _running(self) -> str:
        return self._paths.get(self.forwards.innermost, "")

    def _weights_among(self, tensors: Sequence[Tensor]) -> dict[int, Weight]:
        """Return, by id of a tensor, the weight that it is or is a view of."""
        if not tensors:
            return {}
        running = self._running
        of = ((id(tensor), self._weights.of(tensor, running)) for tensor in tensors)
        return {key: weight for key, weight in of if weight is not None}

    def _uses(
        self, call: FunctionToCall, made: Tensor, weights: dict[int, Weight]
    ) -> Sequence[Use] | None:
        """Return the uses in a call by the monitor's rules; None if a rule refuses it."""
        of_model, inside = self._lineage.of_model, self.forwards.inside
        described = FunctionCall(made, of_model, inside, trains=False)
        try:
            if made.is_nested:
                raise Refused(NESTED)
            return uses_in(name_of(call.function), described, call.args, call.kwargs)
        except Refused as refusal:
            self._refuse(weights.values(), str(refusal))
            return None

    def _refuse(self, weights: Collection[Weight], reason: str) -> None:
        self.refused |= {weight.full_name: reason for weight in weights}

    def _used(
        self,
        uses: Sequence[Use],
        made: Tensor,
        weights: dict[int, Weight],
        sources: Sources,
        *,
        of: str = "",
    ) -> Sources:
        """Report uses, and return the sources of their result.

        Args:
            uses: the uses.
            made: the result of the function or the module.
            weights: the weights that it uses, by id of an argument.
            sources: the layers from whose outputs its inputs were computed.
            of: name of the function.
        """
        maps, tables, others = set[str](), set[str](), dict.fromkeys(weights.values())
        for use in uses:
            weight = self._weight(use.weight)
            if weight is None or _is_entrywise(use):
                continue
            others.pop(weight, None)
            is_added = use.kind == "offset"
            if is_added or (use.kind == "embedding" and of not in _EMBEDDINGS):
                use = replace(use, kind="table")
            path, shape = self._name(use, weight), tuple(use.layout(made).shape[:-1])
            self._see(path, use, weight, shape, NONE if is_added else sources)
            (tables if is_added else maps).add(path)
        whence = (frozenset(maps) or sources) | tables
        self._act_all(others, whence)
        return whence

    def _act_all(self, weights: Collection[Weight], sources: Sources) -> None:
        for parameter in (p for weight in weights for p in weight.parameters):
            self._act(parameter, sources)

    def _weight(self, tensor: Tensor | None) -> Weight | None:
        return None if tensor is None else self._weights.of(tensor, self._running)

    def _recurrent(
        self, to_call: FunctionToCall, weights: dict[int, Weight], sources: Sources, output: Tensor
    ) -> Sources:
        """Report the linear maps in a recurrent call, and return the sources of its results."""
        call = read_call(to_call.function, to_call.args, to_call.kwargs)
        found = {use.part: self._weight(use.weight) for use in uses_of(call)}
        held = {part: weight for part, weight in found.items() if weight is not None}
        if call.draws or len(held) < len(found):
            self._refuse(weights.values(), "it draws random numbers, or some weights are computed")
            return sources
        rows = maps_of(call, output.dtype)
        names = {use.part: self._name(use, held[use.part]) for use in uses_of(call)}
        for first in range(0, len(call.maps), call.directions):
            gave = NONE
            for uses in call.maps[first : first + call.directions]:
                paths = [names[use.part] for use in uses]
                state = frozenset(paths[2:] or paths)
                # The input map gets the layer's input, the other maps its state.
                into = sources, sources | state, frozenset(paths[:2])
                for use, path, whence in zip(uses, paths, into, strict=False):
                    x = rows[use.part][0]
                    use = replace(use, features=affine(x, use.weight, None).features)
                    self._see(path, use, held[use.part], tuple(x.shape[:-1]), whence)
                    bias = self._weight(use.bias)
                    self._act_all(() if bias is None else (bias,), frozenset((path,)))
                gave |= state
            sources = gave
        return sources

    def _name(self, use: Use, weight: Weight) -> str:
        """Return the layer's path; a second use of a weight adds the module that makes it."""
        part = use.part or part_of(weight.module, weight.name)
        path = weight.full_name
        if part:
            path = ".".join(filter(None, (weight.path, part)))
        elif weight.name == "weight":
            path = weight.path
        assert use.weight is not None
        places = (weight.place(x) for x in (use.weight, use.shaped(use.weight.detach())))
        key = path, weight.full_name, use.kind, use.form, *places
        if key not in self._names:
            taken, user = set(self._names.values()), f"{path}@{self._running or use.kind}"
            names = chain((path, user), (f"{user}#{i}" for i in count(2)))
            self._names[key] = next(name for name in names if name not in taken)
        return self._names[key]


def _is_entrywise(use: Use) -> bool:
    """Whether a use acts entry by entry, as neither a linear map nor a table."""
    assert use.weight is not None
    sizes = zip(use.weight.shape, use.weight.stride(), strict=True)
    is_vector = sum(size > 1 and step != 0 for size, step in sizes) < 2
    return use.kind == "gain" or (use.kind == "offset" and is_vector)


def _tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
