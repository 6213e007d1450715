"""The chosen layers of a model in one forward pass of the probe."""

import inspect
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from math import prod

import numpy as np
import torch
from torch import Tensor, nn

from adiv_monitor.alignment.layers import AlignedLayer
from adiv_monitor.alignment.lineage import NONE, Sources
from adiv_monitor.alignment.passes import run_probe
from adiv_monitor.alignment.probe import Probe
from adiv_monitor.alignment.weights import Weight
from adiv_monitor.capture.selection import inside_wrappers, is_chosen
from adiv_monitor.capture.weights.shards import is_parallel
from adiv_monitor.errors import AdivError
from adiv_monitor.features.features import BlockFeatures, DenseFeatures, Features, OneHotFeatures
from adiv_monitor.features.rows import Rows
from adiv_monitor.features.uses import Use


@dataclass(eq=False)
class Seen:
    """A layer in one forward pass of the probe; it refers to activations and must not be kept.

    Attributes:
        use: the use of its weight in its first call.
        weight: the weight that holds its matrices.
        number: its number, in the order of first calls.
        calls: features of the sampled rows of each call.
        shapes: shape of all rows in each call.
        sources: layers whose outputs make up the input of any call.
        predecessors: the earlier ones of them.
        entrywise: parameters that are added to, or scale, values computed from its output.
    """

    use: Use
    weight: Weight
    number: int
    calls: list[Features] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    sources: Sources = NONE
    predecessors: tuple[str, ...] = ()
    entrywise: tuple[nn.Parameter, ...] = ()

    @cached_property
    def features(self) -> Features:
        """Features of its sampled rows, over all calls."""
        return self.calls[0].joined(self.calls[1:])

    @property
    def is_table(self) -> bool:
        """Whether rows of its matrix are looked up instead of multiplied."""
        return not isinstance(self.features, DenseFeatures | BlockFeatures)

    @property
    def rows(self) -> Tensor:
        """The inputs, (rows, groups, fan-in); of tables the tokens, (rows,), or none."""
        if isinstance(self.features, DenseFeatures):
            assert self.features.phi is not None
            return self.features.phi
        if isinstance(self.features, BlockFeatures):
            return self.features.phi[:, None]
        return self.features.token if isinstance(self.features, OneHotFeatures) else torch.empty(0)

    @property
    def block(self) -> Tensor | None:
        """Index of the block of the weight that every row uses; None without blocks."""
        return self.features.block if isinstance(self.features, BlockFeatures) else None

    def matrices(self, tensor: Tensor) -> Tensor:
        """Return (groups or blocks, outputs, fan-in) from a tensor laid out as the weight is.

        A table is one matrix, (rows, width).
        """
        assert self.use.weight is not None
        size, stride, offset = self.weight.place(self.use.weight)
        view = tensor.as_strided(size, stride, tensor.storage_offset() + offset)
        shaped, features = self.use.shaped(view), self.features
        if isinstance(features, DenseFeatures) and features.transposed:
            return shaped.t()[None]
        if isinstance(features, DenseFeatures):
            return shaped.reshape(self.rows.shape[1], -1, self.rows.shape[2])
        return shaped if isinstance(features, BlockFeatures) else shaped[None]

    def aligned(self, path: str) -> AlignedLayer:
        """Return the `AlignedLayer` with this path."""
        weight, value, use = self.weight, self.weight.value, self.use
        assert use.weight is not None
        like = torch.empty_strided(value.size(), value.stride(), device="meta")
        groups, outputs, fan_in = self.matrices(like).shape
        if self.is_table:  # rows that are repeated count once
            sizes = zip(use.weight.shape, use.weight.stride(), strict=True)
            outputs, fan_in = fan_in, prod(size for size, step in sizes if step) // fan_in
        return AlignedLayer(
            path=path,
            kind=use.kind,
            fan_in=fan_in,
            fan_out=outputs * (groups if self.block is None else 1),
            module=weight.module,
            name=weight.name,
            weights=weight.parameters,
            predecessors=self.predecessors,
            entrywise=self.entrywise,
            is_table=self.is_table,
            groups=groups,
        )


def look(model: nn.Module, probe: Probe) -> tuple[dict[str, Seen], dict[str, str]]:
    """Run the probe; return the chosen layers in the order of their first calls.

    The second result has, by name of a weight that the pass uses, why it is not measured.

    Raises:
        AdivError: none of the layers is called, or the model uses tensor parallelism.
        ValueError: a pattern fits no layer.
        TypeError: the model can't be called with the batch.
    """
    _check_arguments(model, probe)
    if is_parallel(model):
        raise AdivError(
            "Probe: some layers are computed by several ranks together (tensor parallelism), "
            "expected layers of which each rank has all"
        )
    layers: dict[str, Seen] = {}
    passed: dict[str, Sources] = {}  # sources of layers that are left out
    entrywise: dict[str, dict[nn.Parameter, None]] = defaultdict(dict)

    def through(sources: Sources) -> Sources:
        """Return the sources with layers that are left out replaced by their own sources."""
        return NONE.union(*(passed.get(path, {path}) for path in sources))

    def see(path: str, use: Use, weight: Weight, shape: tuple[int, ...], whence: Sources) -> None:
        sources = through(whence)
        if not is_chosen(path, weight.module, probe.layers):
            passed[path] = passed.get(path, NONE) | sources - {path}
            return
        layer = layers.setdefault(path, Seen(use, weight, len(layers)))
        # The choice of rows depends only on the layer's number and the number of the call.
        chosen = _choose(shape, probe, (layer.number, len(layer.shapes)))
        layer.calls.append(use.features(Rows(shape, chosen, weight.value.device)))
        layer.shapes.append(shape)
        layer.sources |= sources

    def act(parameter: nn.Parameter, sources: Sources) -> None:
        for path in sources:
            entrywise[path][parameter] = None

    refused = run_probe(model, probe.arguments, see, act)
    _check_patterns(probe, model, [*layers, *passed])
    if not layers:
        raise AdivError(
            f"Probe: the forward pass of {type(model).__name__} shows no layer to measure, "
            "expected linear layers, convolutions or embeddings that Probe(layers=…) takes"
        )
    order = list(layers)
    for path, layer in layers.items():
        # Only earlier layers count, so that there are no cycles.
        layer.predecessors = tuple(p for p in order[: layer.number] if p in layer.sources)
        layer.entrywise = tuple(entrywise[path])
    return layers, refused


def _choose(
    shape: tuple[int, ...], probe: Probe, key: tuple[int, int]
) -> "np.ndarray[tuple[int], np.dtype[np.int64]] | None":
    """Return the sampled rows of a call; None: all."""
    total = prod(shape)
    if probe.max_rows is None or total <= probe.max_rows:
        return None
    generator = np.random.default_rng([probe.seed, *key])
    return np.sort(generator.choice(total, probe.max_rows, replace=False))


def _check_patterns(probe: Probe, model: nn.Module, paths: Sequence[str]) -> None:
    """Check that each pattern fits a layer, or a module that this forward pass does not reach."""
    if probe.layers is None or callable(probe.layers):
        return
    known = [*paths, *(path for path, _ in model.named_modules())]
    idle = [x for x in probe.layers if not any(fnmatchcase(path, x) for path in known)]
    if idle and paths:
        raise ValueError(
            f"Probe(layers=…): {idle[0]!r} fits no layer, expected patterns over {', '.join(paths)}"
        )


def _check_arguments(model: nn.Module, probe: Probe) -> None:
    """Check the batch against forward's signature; errors inside forward are left to the model."""
    try:
        signature = inspect.signature(inside_wrappers(model).forward)
    except ValueError:  # compiled code has none
        return
    try:
        signature.bind(*probe.arguments[0], **probe.arguments[1])
    except TypeError as error:
        raise TypeError(
            f"Probe(batch=…): {type(inside_wrappers(model)).__name__}.forward{signature} can't be "
            f"called with it ({error}), expected the model's arguments alone, without targets"
        ) from None
