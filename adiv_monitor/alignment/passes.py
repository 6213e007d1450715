"""The probe's forward pass, and the uses of weights in it, found by the monitor's rules.

The pass records a graph, of which nothing is differentiated: it tells which layers feed which.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_map_only

from adiv_monitor.alignment.layers import AlignedLayer
from adiv_monitor.alignment.probe import Probe
from adiv_monitor.capture.layer_rows import Call
from adiv_monitor.capture.selection import Layer, inside_wrappers, is_chosen, select
from adiv_monitor.capture.weights.shards import is_parallel, is_shard, part_of, sharded_as
from adiv_monitor.errors import AdivError
from adiv_monitor.features.features import BlockFeatures, DenseFeatures
from adiv_monitor.features.uses import Use
from adiv_monitor.probe.recording import Recording, RowsOfLayer
from adiv_monitor.probe.run import run
from adiv_monitor.rerun.surroundings import Randomness, Surroundings, devices_of


def look(model: nn.Module, probe: Probe) -> "Uses":
    """Run the probe in evaluation mode, without autocast and without a trace; return the uses.

    Raises:
        AdivError: none of the chosen layers is called, or the model uses tensor parallelism.
        TypeError: the model can't be called with the batch.
        Refused: a module is scripted.
    """
    if is_parallel(model):
        raise AdivError(
            "Probe: some layers are computed by several ranks together (tensor parallelism), "
            "expected layers of which each rank has all"
        )
    inside, modules = inside_wrappers(model), list(model.modules())
    surroundings = Surroundings(Randomness(devices_of(modules)))

    def look_at_uses() -> Uses:
        with ExitStack() as stack:
            stack.enter_context(torch._C._DisableAutocast())
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
            with (uses := Uses(model, probe)):
                try:
                    inside(*args, **kwargs)
                except TypeError as error:
                    raise TypeError(
                        f"Probe(batch=…): {type(inside).__name__}.forward can't be called with it "
                        f"({error}), expected the model's arguments alone, without targets"
                    ) from error
            return uses

    uses = run(modules, surroundings, None, look_at_uses, by_all_ranks=True, keeps=())
    if not uses.seen:
        raise AdivError(
            f"Probe: the forward pass of {type(inside).__name__} shows no layer to measure, "
            "expected linear layers, convolutions or embeddings that Probe(layers=…) takes, among "
            f"{', '.join(uses.calls) or 'none'}"
        )
    return uses


class Seen(RowsOfLayer):
    """A layer in one forward pass of the probe; it refers to activations and must not be kept.

    Args:
        calls: its calls.
        use: the use of its weight in its first call.

    Attributes:
        layer: the layer.
        use: the use.
        is_table: whether rows of its matrix are looked up instead of multiplied.
        rows: the inputs, (rows, groups, fan-in); of tables none.
        block: index of the block of the weight that every row uses; None without blocks.
    """

    def __init__(self, calls: Sequence[Call], use: Use) -> None:
        super().__init__(calls, None)
        self.layer, self.use = calls[0].layer, use
        self.is_table = not isinstance(self.features, DenseFeatures | BlockFeatures)
        self.rows, self.block = torch.empty(0), None
        if isinstance(self.features, DenseFeatures):
            assert self.features.phi is not None
            self.rows = self.features.phi
        elif isinstance(self.features, BlockFeatures):
            self.rows, self.block = self.features.phi[:, None], self.features.block

    def weight(self) -> Tensor:
        """Return the weight as it was used, or this rank's part of the parameter that it is."""
        assert self.layer.weight is not None and self.use.weight is not None
        parameter = self.layer.weight.pieces[0].parameter
        return part_of(parameter) if is_shard(parameter) else self.use.weight.detach()

    def matrices(self, told: Tensor) -> Tensor:
        """Return (groups or blocks, outputs, fan-in) from what `weight` returned at some time.

        All ranks have to call for a shard. A table is one matrix, (rows, width).
        """
        assert self.layer.weight is not None and self.use.weight is not None
        piece = self.layer.weight.pieces[0]
        whole = told.to(self.use.weight.device, non_blocking=True)
        if is_shard(piece.parameter):
            whole = piece.of(sharded_as(whole, piece.parameter).full_tensor())
            whole = self.layer.weight.of({piece.key: whole})
        made = self.use.shaped(whole)
        if isinstance(self.features, BlockFeatures):
            return made
        if isinstance(self.features, DenseFeatures) and not self.features.transposed:
            return made.reshape(self.rows.shape[1], -1, self.rows.shape[2])
        return (made.t() if isinstance(self.features, DenseFeatures) else made)[None]


class Uses(Recording):
    """Records the uses of weights in a forward pass of the probe.

    Args:
        model: the model.
        probe: the probe.

    Attributes:
        refused: by name of a parameter that the pass uses, why it is not measured.
    """

    follows_all = False  # the weight's values suffice

    def __init__(self, model: nn.Module, probe: Probe) -> None:
        self.refused: dict[str, str] = {}
        self._probe = probe
        # By node of the graph, the layers whose output it makes; beyond a table lies its sum.
        self._made: dict[Any, set[str]] = defaultdict(set)
        self._tables = set[str]()
        self._names: dict[str, str] = {}  # of weights in their modules
        self._fed: dict[str, set[str]] = defaultdict(set)
        self._acting: dict[str, dict[nn.Parameter, None]] = defaultdict(dict)
        selection = select(model, None, None)
        self._parameters = selection.names
        super().__init__(model, selection, probe.max_rows, probe.seed)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for key, reason in self.watching.refused.items():
            self.refused.setdefault(self._parameters[key], reason)
        self._made.clear()

    @cached_property
    def seen(self) -> dict[str, Seen]:
        """The chosen layers by path, in the order of their first calls."""
        every = ((path, Seen(calls, self.uses[path])) for path, calls in self.calls.items())
        chosen = self._probe.layers
        return {path: x for path, x in every if is_chosen(path, x.layer.module, chosen)}

    def aligned(self) -> Iterator[AlignedLayer]:
        """Yield the same layers, without what refers to activations."""
        feeding = dict[str, set[str]]()  # by path, a chosen layer itself; else those that feed it
        for path in self.calls:
            # Only earlier layers count, so that there are no cycles.
            fed = set[str]().union(*(feeding.get(x, ()) for x in self._fed[path]))
            seen, feeding[path] = self.seen.get(path), {path} if path in self.seen else fed
            if seen is None:
                continue
            source, use = seen.layer.weight, seen.use
            assert source is not None and use.weight is not None
            groups, outputs, fan_in = seen.matrices(seen.weight()).shape
            if seen.is_table:  # rows that are repeated count once
                sizes = zip(use.weight.shape, use.weight.stride(), strict=True)
                outputs, fan_in = fan_in, prod(size for size, step in sizes if step) // fan_in
            of_torch = isinstance(seen.layer.module, nn.Embedding)
            is_table = use.kind == "offset" or (use.kind == "embedding" and not of_torch)
            yield AlignedLayer(
                path=path,
                kind="table" if is_table else use.kind,
                fan_in=fan_in,
                fan_out=outputs * (groups if seen.block is None else 1),
                module=seen.layer.module,
                name=self._names[path],
                weights=tuple(piece.parameter for piece in source.pieces),
                predecessors=tuple(x for x in feeding if x in fed),
                entrywise=tuple(self._acting[path]),
                is_table=seen.is_table,
                groups=groups,
            )

    def use(self, layer: Layer, use: Use, output: Tensor) -> None:
        """Take a use of weights."""
        if use.kind == "module":
            why = "no rule describes how it is used, or a transform of torch.func hides its rows"
            self.refused |= {self._parameters[id(p)]: why for p in layer.parameters}
            return
        sources = self._sources(output)
        if layer.weight is None or _is_entrywise(use):
            self._act(layer.parameters, sources)
            return
        if layer.bias is not None:
            self._act((piece.parameter for piece in layer.bias.pieces), [layer.path])
        if use.kind == "offset":
            self._tables.add(layer.path)
        else:
            self._fed[layer.path] |= sources
        place = self.layers.place(id(layer.weight.pieces[0].parameter))
        self._names.setdefault(layer.path, place.home[1])
        self.take(layer, use, use.layout(output))
        for made in (output, output._base):
            if made is not None and made.grad_fn is not None:
                self._made[made.grad_fn].add(layer.path)

    def _act(self, parameters: Iterable[nn.Parameter], paths: Iterable[str]) -> None:
        """Note parameters that are added to, or scale, the outputs of layers entry by entry."""
        parameters = list(parameters)
        for path in paths:
            self._acting[path].update(dict.fromkeys(parameters))

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
