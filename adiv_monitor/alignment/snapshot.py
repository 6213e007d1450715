"""The reference point of a model: its weights, and sampled rows of its layers' inputs."""

import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from adiv_monitor.alignment.layers import AlignedLayer
from adiv_monitor.alignment.passes import Entrywise, Found, run_probe
from adiv_monitor.alignment.probe import Probe
from adiv_monitor.alignment.weights import Matrices, Weight
from adiv_monitor.capture.selection import inside_wrappers, is_chosen
from adiv_monitor.capture.weights.shards import is_parallel, is_shard, part_of, sharded_as
from adiv_monitor.errors import AdivError
from adiv_monitor.features.features import BlockFeatures, DenseFeatures, Features, OneHotFeatures
from adiv_monitor.features.rows import Rows


@dataclass(eq=False)
class Seen:
    """A layer in one forward pass of the probe.

    Attributes:
        kind: how its weight is used, as in `AlignedLayer`.
        weight: the weight that holds its matrices.
        matrices: position of the matrices in the weight.
        number: its number, in the order of first calls.
        calls: features of the sampled rows of each call.
        shapes: shape of all rows in each call.
        sources: layers whose outputs make up the input of any call.
        predecessors: the earlier ones of them.
        entrywise: parameters that are added to, or scale, values computed from its output.
    """

    kind: str
    weight: Weight
    matrices: Matrices
    number: int
    calls: list[Features] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    sources: set[str] = field(default_factory=set)
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
    def fan_in(self) -> int:
        """Number of inputs of an output; of a table, number of rows."""
        return self.matrices.lines if self.is_table else self.matrices.fan_in

    @property
    def fan_out(self) -> int:
        """Number of outputs, of each block if there are blocks; of a table, its width."""
        if self.is_table:
            return self.matrices.fan_in
        count = self.matrices.count if isinstance(self.features, BlockFeatures) else 1
        return self.matrices.outputs // count

    def aligned(self, path: str) -> AlignedLayer:
        """Return the `AlignedLayer` with this path."""
        weight = self.weight
        return AlignedLayer(
            path=path,
            kind=self.kind,
            fan_in=self.fan_in,
            fan_out=self.fan_out,
            module=weight.module,
            name=weight.name,
            weights=weight.parameters,
            predecessors=self.predecessors,
            entrywise=self.entrywise,
            is_table=self.is_table,
            is_made=weight.number > 0,
            groups=self.matrices.count,
        )

    @property
    def rows(self) -> Tensor:
        """The inputs, (rows, groups, fan-in); of tables the tokens, (rows,), or none."""
        if isinstance(self.features, DenseFeatures):
            assert self.features.phi is not None
            return self.features.phi
        if isinstance(self.features, BlockFeatures):
            return self.features.phi[:, None]
        if isinstance(self.features, OneHotFeatures):
            return self.features.token
        return torch.empty(0)

    @property
    def block(self) -> Tensor | None:
        """Index of the block of the weight that every row uses; None without blocks."""
        return self.features.block if isinstance(self.features, BlockFeatures) else None


@dataclass(frozen=True, eq=False)
class Kept:
    """A copy on the host of a weight, or of this rank's part of a sharded weight.

    Attributes:
        values: the copy.
        like: the sharded parameter with the placement of the parts; None if it is not sharded.
    """

    values: Tensor
    like: Any = None

    @classmethod
    def of(cls, weight: Weight) -> "Kept":
        """Copy a weight."""
        sharded = _sharded(weight)
        if sharded is not None:
            return cls(part_of(sharded).to("cpu", copy=True), sharded)
        return cls(weight.value.detach().to("cpu", copy=True))

    def whole(self, device: torch.device) -> Tensor:
        """Return the unsharded weight on a device; for a sharded one, all ranks have to call."""
        values = self.values.to(device, non_blocking=True)
        if self.like is None:
            return values
        whole: Tensor = sharded_as(values, self.like).full_tensor()
        return whole


def present(weight: Weight) -> Tensor:
    """Return the present value of a weight; a sharded weight is all-gathered."""
    sharded = _sharded(weight)
    if sharded is not None:
        gathered: Tensor = sharded.detach().full_tensor()  # type: ignore[attr-defined]
        return gathered
    return weight.value.detach()


def _sharded(weight: Weight) -> Tensor | None:
    parameter = None if weight.number else weight.module._parameters.get(weight.name)
    return parameter if is_shard(parameter) else None


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The reference point.

    Attributes:
        rows: sampled inputs at that point, by path of the layer.
        weights: copies of the weights by name.
    """

    rows: Mapping[str, Tensor]
    weights: Mapping[str, Kept]

    @classmethod
    def of(cls, seen: Mapping[str, Seen]) -> "Snapshot":
        """Copy weights and inputs of the layers in a forward pass."""
        held = {layer.weight.key: layer.weight for layer in seen.values()}
        return cls(
            {path: layer.rows for path, layer in seen.items()},
            {key: Kept.of(weight) for key, weight in held.items()},
        )


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
    passed: dict[str, set[str]] = {}
    acting: dict[str, dict[nn.Parameter, None]] = defaultdict(dict)

    def see(found: Found) -> None:
        path, use, weight = found.path, found.use, found.weight
        if not is_chosen(path, weight.module, probe.layers):
            # Its predecessors become those of its successors.
            passed.setdefault(path, set()).update(found.sources)
            return
        known = layers.get(path)
        # The choice of rows depends only on the layer's number and the number of the call.
        key = [len(layers), 0] if known is None else [known.number, len(known.shapes)]
        rows = Rows(found.shape, choose(found.shape, probe, key), weight.value.device)
        features = use.features(rows)
        if known is None:
            matrices = Matrices.of(use, features, weight.value)
            known = layers[path] = Seen(use.kind, weight, matrices, len(layers))
        known.calls.append(features)
        known.shapes.append(found.shape)
        known.sources |= found.sources

    def act(entrywise: Entrywise) -> None:
        for path in entrywise.sources:
            acting[path][entrywise.parameter] = None

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
        reached = _reached(layer.sources, passed)
        layer.predecessors = tuple(p for p in order[: layer.number] if p in reached)
        layer.entrywise = tuple(acting[path])
    return layers, refused


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


def choose(
    shape: tuple[int, ...], probe: Probe, key: list[int]
) -> "np.ndarray[tuple[int], np.dtype[np.int64]] | None":
    """Return the sampled rows of a call; None: all."""
    total = int(np.prod(shape))
    if probe.max_rows is None or total <= probe.max_rows:
        return None
    generator = np.random.default_rng([probe.seed, *key])
    return np.sort(generator.choice(total, probe.max_rows, replace=False))


def _reached(sources: set[str], passed: Mapping[str, set[str]]) -> set[str]:
    """Return the sources with layers that are left out replaced by their own sources."""
    found: set[str] = set()
    waiting = list(sources)
    while waiting:
        path = waiting.pop()
        if path in passed:
            waiting += passed[path]
        else:
            found.add(path)
    return found
