"""The probe's forward pass, and the uses of weights in it, found by the monitor's rules.

The pass records a graph, of which nothing is differentiated: it tells which layers feed which.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from inspect import signature
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_map_only

from adiv_monitor.alignment.probe import Probe
from adiv_monitor.alignment.seen import Seen
from adiv_monitor.capture.second_pass import SecondPass
from adiv_monitor.capture.selection import Layer, inside_wrappers, is_chosen, select
from adiv_monitor.capture.weights.shards import is_parallel, is_shard
from adiv_monitor.errors import AdivError
from adiv_monitor.features.functions.linear import affine
from adiv_monitor.features.recurrent import RecurrentCall, maps_of, uses_of
from adiv_monitor.features.rows import Rows
from adiv_monitor.features.uses import Refused, Use
from adiv_monitor.probe.run import run
from adiv_monitor.rerun.randomness import Randomness
from adiv_monitor.rerun.surroundings import Surroundings, devices_of


def look(model: nn.Module, probe: Probe) -> tuple[dict[str, Seen], dict[str, str]]:
    """Run the probe; return the chosen layers in the order of their first calls.

    The pass is in evaluation mode, without autocast; it leaves no trace. The second result has, by
    name of a parameter that the pass uses, why it is not measured.

    Raises:
        AdivError: none of the layers is called, or the model uses tensor parallelism.
        ValueError: a pattern fits no layer.
        TypeError: the model can't be called with the batch.
        Refused: a module is scripted.
    """
    inside, (args, kwargs) = inside_wrappers(model), probe.arguments
    with suppress(ValueError):  # compiled code has no signature
        expected = signature(inside.forward)
        try:
            expected.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(
                f"Probe(batch=…): {type(inside).__name__}.forward{expected} can't be called with "
                f"it ({error}), expected the model's arguments alone, without targets"
            ) from None
    if is_parallel(model):
        raise AdivError(
            "Probe: some layers are computed by several ranks together (tensor parallelism), "
            "expected layers of which each rank has all"
        )
    modules = list(model.modules())
    surroundings = Surroundings(Randomness(devices_of(modules)))

    def look_at_uses() -> _Uses:
        with ExitStack() as stack:
            for kind in {device.type for device in surroundings.devices}:
                stack.enter_context(torch.autocast(kind, enabled=False))
            # So that a weight is one tensor throughout. `untouched` resets it. The generator of
            # `parametrize.cached()`, left by an interrupt, would count down once more when it dies.
            parametrize._cache_enabled = 1
            for module in modules:
                reshard = getattr(module, "reshard", None)
                if callable(reshard):  # FSDP2 would keep the root's weights unsharded
                    stack.callback(reshard)
            for p in model.parameters():  # the graph has to lead to frozen ones, too
                if p.is_floating_point() and not (p.requires_grad or is_shard(p)):
                    stack.callback(p.requires_grad_, False)
                    p.requires_grad_()
            # The model may change its arguments in place.
            args, kwargs = tree_map_only(Tensor, Tensor.clone, probe.arguments)
            with (uses := _Uses(model, probe)):
                inside(*args, **kwargs)
            return uses

    uses = run(modules, surroundings, None, look_at_uses, by_all_ranks=True, keeps=())
    paths = [*uses.seen, *uses.passed]
    if isinstance(probe.layers, Sequence) and paths:  # some may fit what this pass does not reach
        known = [*paths, *(path for path, _ in model.named_modules())]
        if idle := [x for x in probe.layers if not any(fnmatchcase(path, x) for path in known)]:
            raise ValueError(
                f"Probe(layers=…): {idle[0]!r} fits no layer, expected patterns over "
                f"{', '.join(paths)}"
            )
    if not uses.seen:
        raise AdivError(
            f"Probe: the forward pass of {type(model).__name__} shows no layer to measure, "
            "expected linear layers, convolutions or embeddings that Probe(layers=…) takes"
        )
    return uses.seen, uses.refused


class _Uses(SecondPass):
    """Takes the uses of weights in a forward pass. See `Takes`.

    Args:
        model: the model.
        probe: the probe.

    Attributes:
        seen: the chosen layers by path, in the order of their first calls.
        passed: path of a layer that is not chosen → the chosen ones that feed it.
        refused: by name of a parameter that the pass uses, why it is not measured.
    """

    follows_all = False  # the weight's values suffice

    def __init__(self, model: nn.Module, probe: Probe) -> None:
        self.seen: dict[str, Seen] = {}
        self.passed: dict[str, set[str]] = {}
        self.refused: dict[str, str] = {}
        self._probe = probe
        # By node of the graph, the layers whose output it makes; beyond a table lies its sum.
        self._made: dict[Any, Collection[str]] = {}
        self._tables = set[str]()
        self._acting: dict[str, dict[nn.Parameter, None]] = defaultdict(dict)
        selection = select(model, None, None)
        self._parameters = selection.names
        super().__init__(model, selection)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for key, reason in self.watching.refused.items():
            self.refused.setdefault(self._parameters[key], reason)
        for path, layer in self.seen.items():
            layer.entrywise = tuple(self._acting[path])
        self._made.clear()

    def use(self, use: Use, output: Tensor, known: Layer | str | None = None) -> None:
        """Take a use of weights."""
        layer = self.layers.of(use, known)
        if layer is None:
            return
        if use.kind == "module":
            why = "no rule describes how it is used, or a transform of torch.func hides its rows"
            self.refused |= {self._parameters[id(p)]: why for p in layer.parameters}
            return
        sources = self._sources(output)
        if layer.weight is None or _is_entrywise(use):
            self._act(layer.parameters, sources)
            return
        shape = tuple(use.layout(output).shape[:-1])
        if use.kind == "offset":
            self._tables.add(layer.path)
            self._see(layer, use, shape, set())
        else:
            self._see(layer, use, shape, sources)
        self._makes([output], [layer.path])

    def maps(self, made: RecurrentCall, outputs: tuple[Tensor, ...], *_: Any) -> list[Tensor]:
        """Take the linear maps in a recurrent call."""
        layers = {use.part: self.layers.of(use) for use in uses_of(made)}
        if not all(layer and layer.weight for layer in layers.values()):
            raise Refused("some of its weights are not known")
        rows, sources = maps_of(made, outputs[0].dtype), self._sources(outputs[0])
        paths = {part: layer.path for part, layer in layers.items() if layer is not None}
        for first in range(0, len(made.maps), made.directions):
            gave = set[str]()
            for uses in made.maps[first : first + made.directions]:
                own = [paths[use.part] for use in uses]
                state = set(own[2:] or own)
                # The input map gets the layer's input, the other maps its state.
                into = sources, sources | state, set(own[:2])
                for use, whence in zip(uses, into, strict=False):
                    x, layer = rows[use.part][0], layers[use.part]
                    assert layer is not None
                    known = replace(use, features=affine(x, use.weight, None).features)
                    self._see(layer, known, tuple(x.shape[:-1]), whence)
                gave |= state
            sources = gave
        self._makes(outputs, sources)
        return [x for use in uses_of(made) for x in (use.weight, use.bias) if x is not None]

    def _see(self, layer: Layer, use: Use, shape: tuple[int, ...], sources: set[str]) -> None:
        """Take a call of a layer, which gets the outputs of other layers."""
        path = layer.path
        if layer.bias is not None:
            self._act((piece.parameter for piece in layer.bias.pieces), [path])
        # Layers that are not chosen stand for those that feed them.
        sources = set[str]().union(*(self.passed.get(x, {x}) for x in sources))
        if not is_chosen(path, layer.module, self._probe.layers):
            self.passed[path] = self.passed.get(path, set()) | sources - {path}
            return
        assert layer.weight is not None and use.weight is not None
        if path not in self.seen:
            place = self.layers.names.place(id(layer.weight.pieces[0].parameter))
            self.seen[path] = Seen(layer, use, place, len(self.seen))
        seen = self.seen[path]
        # The choice of rows depends only on the layer's number and the number of the call.
        chosen = _choose(shape, self._probe, (seen.number, len(seen.shapes)))
        features = use.features(Rows(shape, chosen, use.weight.device))
        seen.calls.append(features.restrict(weight=True, bias=False))
        seen.shapes.append(shape)
        seen.sources |= sources

    def _act(self, parameters: Iterable[nn.Parameter], paths: Iterable[str]) -> None:
        """Note parameters that are added to, or scale, the outputs of layers entry by entry."""
        parameters = list(parameters)
        for path in paths:
            self._acting[path].update(dict.fromkeys(parameters))

    def _makes(self, outputs: Iterable[Tensor], paths: Collection[str]) -> None:
        for tensor in outputs:
            for made in (tensor, tensor._base):
                if made is not None and made.grad_fn is not None:
                    self._made[made.grad_fn] = {*self._made.get(made.grad_fn, ()), *paths}

    def _sources(self, output: Tensor) -> set[str]:
        """Return the layers from whose outputs the inputs of a function were computed."""
        found, nodes, seen = set[str](), [output.grad_fn], set[Any]()
        while nodes:
            node = nodes.pop()
            for above, _ in () if node is None else node.next_functions:
                if above is None or above in seen:
                    continue
                seen.add(above)
                paths = self._made.get(above, ())
                found.update(paths)
                if self._tables.issuperset(paths):
                    nodes.append(above)
        return found


def _is_entrywise(use: Use) -> bool:
    """Whether a use acts entry by entry, as neither a linear map nor a table."""
    assert use.weight is not None
    sizes = zip(use.weight.shape, use.weight.stride(), strict=True)
    is_vector = sum(size > 1 and step != 0 for size, step in sizes) < 2
    return use.kind == "gain" or (use.kind == "offset" and is_vector)


def _choose(
    shape: tuple[int, ...], probe: Probe, key: tuple[int, int]
) -> "np.ndarray[tuple[int], np.dtype[np.int64]] | None":
    """Return the sampled rows of a call; None: all."""
    total = prod(shape)
    if probe.max_rows is None or total <= probe.max_rows:
        return None
    generator = np.random.default_rng([probe.seed, *key])
    return np.sort(generator.choice(total, probe.max_rows, replace=False))
