"""What is remembered of a model at one point: its weights, and rows of the inputs of its layers."""

import inspect
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from adiv_monitor.alignment.layers import AlignedLayer
from adiv_monitor.alignment.passes import Entrywise, Found, run_probe
from adiv_monitor.alignment.probe import Probe
from adiv_monitor.alignment.weights import Matrices, Weight
from adiv_monitor.capture.selection import inside_wrappers, is_chosen
from adiv_monitor.capture.weights.shards import is_shard, part_of, peers, sharded_as
from adiv_monitor.errors import AdivError
from adiv_monitor.features.features import DenseFeatures, Features, OneHotFeatures
from adiv_monitor.features.functions.blocks import BlockFeatures
from adiv_monitor.features.rows import Rows


@dataclass(frozen=True, eq=False)
class Seen:
    """A layer in one forward pass of the probe.

    Attributes:
        kind: what is done with its weight.
        weight: the weight in which its matrices are.
        matrices: where in it.
        features: of its rows, over all calls.
        shapes: rows that there were in each call.
        predecessors: layers that came before and whose outputs make up the input of any call.
        entrywise: parameters that are added to what is made of its output, or scale that.
    """

    kind: str
    weight: Weight
    matrices: Matrices
    features: Features
    shapes: tuple[tuple[int, ...], ...]
    predecessors: tuple[str, ...]
    entrywise: tuple[nn.Parameter, ...]

    @property
    def is_table(self) -> bool:
        """Whether rows of its matrix are looked up, and none multiplied."""
        return not isinstance(self.features, DenseFeatures | BlockFeatures)

    @property
    def fan_in(self) -> int:
        """How many inputs an output has; of a table, how many rows."""
        return self.matrices.lines if self.is_table else self.matrices.fan_in

    @property
    def fan_out(self) -> int:
        """How many outputs there are, of blocks those of each; of a table, how wide it is."""
        if self.is_table:
            return self.matrices.fan_in
        count = self.matrices.count if isinstance(self.features, BlockFeatures) else 1
        return self.matrices.outputs // count

    def aligned(self, path: str) -> AlignedLayer:
        """The layer, of this path."""
        weight = self.weight
        return AlignedLayer(
            *(path, self.kind, self.fan_in, self.fan_out, weight.module, weight.name),
            *(weight.parameters, self.predecessors, self.entrywise),
            is_table=self.is_table,
            is_made=weight.number > 0,
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
        """Which block of the weight every row uses."""
        return self.features.block if isinstance(self.features, BlockFeatures) else None


@dataclass(frozen=True, eq=False)
class Kept:
    """A copy of a weight on the host; of a sharded one, of the part that this rank holds.

    Attributes:
        values: the copy.
        like: what tells how the parts make up the whole; None where there are no parts.
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
        """All of it, on a device; a sharded one takes all ranks to call this."""
        values = self.values.to(device, non_blocking=True)
        if self.like is None:
            return values
        whole: Tensor = sharded_as(values, self.like).full_tensor()
        return whole


def present(weight: Weight) -> Tensor:
    """The present value of a weight; a sharded one is gathered again."""
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
        rows: layer → its inputs then.
        weights: name of a weight → a copy.
    """

    rows: Mapping[str, Tensor]
    weights: Mapping[str, Kept]

    @classmethod
    def of(cls, seen: Mapping[str, Seen]) -> "Snapshot":
        """Remember what a forward pass has shown."""
        held = {layer.weight.key: layer.weight for layer in seen.values()}
        return cls(
            {path: layer.rows for path, layer in seen.items()},
            {key: Kept.of(weight) for key, weight in held.items()},
        )


@dataclass
class _Calls:
    """The calls of a layer so far."""

    number: int
    weight: Weight
    matrices: Matrices
    kind: str
    features: list[Features] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    sources: set[str] = field(default_factory=set)


def look(model: nn.Module, probe: Probe) -> tuple[dict[str, Seen], dict[str, str]]:
    """Run the probe: the chosen layers in the order in which they are first called.

    Also, by name, why weights that the pass uses are not measured.

    Raises:
        AdivError: none of the layers is called, or ranks compute some together.
        TypeError: the model takes other arguments than the batch has.
    """
    _check_arguments(model, probe)
    if peers(model) is not None:
        raise AdivError(
            "Probe: some layers are computed by several ranks together (tensor parallelism), "
            "expected layers of which each rank has all"
        )
    layers: dict[str, _Calls] = {}
    count = Counter[bool]()
    passed: dict[str, set[str]] = {}
    acting: dict[str, dict[nn.Parameter, None]] = defaultdict(dict)

    def see(found: Found) -> None:
        path, use, weight = found.path, found.use, found.weight
        if not is_chosen(path, weight.module, probe.layers):
            # What feeds it feeds what it feeds.
            passed.setdefault(path, set()).update(found.sources)
            return
        known = layers.get(path)
        number = count[found.is_late] if known is None else known.number
        # A layer's rows depend on nothing but its place among layers and calls.
        key = [number, 0 if known is None else len(known.shapes)]
        rows = Rows(found.shape, choose(found.shape, probe, key), weight.value.device)
        features = use.features(rows)
        if known is None:
            matrices = Matrices.of(use, features, weight.value)
            known = layers[path] = _Calls(number, weight, matrices, use.kind)
            count[found.is_late] += 1
        known.features.append(features)
        known.shapes.append(found.shape)
        known.sources |= found.sources

    def act(entrywise: Entrywise) -> None:
        for path in entrywise.sources:
            acting[path][entrywise.parameter] = None

    refused = run_probe(model, probe.arguments, see, act)
    if not layers:
        raise AdivError(
            f"Probe: the forward pass of {type(model).__name__} shows no layer to measure, "
            "expected linear layers, convolutions or embeddings that Probe(layers=…) takes"
        )
    order = list(layers)
    seen = {
        path: Seen(
            *(layer.kind, layer.weight, layer.matrices),
            layer.features[0].joined(layer.features[1:]),
            tuple(layer.shapes),
            # A loop is cut where a layer would come before itself.
            tuple(p for p in order[:place] if p in _reached(layer.sources, passed)),
            tuple(acting[path]),
        )
        for place, (path, layer) in enumerate(layers.items())
    }
    return seen, refused


def _check_arguments(model: nn.Module, probe: Probe) -> None:
    """Before the forward pass, whose own errors are the model's affair."""
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
    """Which rows of a call are looked at; None: all."""
    total = int(np.prod(shape))
    if probe.max_rows is None or total <= probe.max_rows:
        return None
    generator = np.random.default_rng([probe.seed, *key])
    return np.sort(generator.choice(total, probe.max_rows, replace=False))


def _reached(sources: set[str], passed: Mapping[str, set[str]]) -> set[str]:
    """The sources, through layers that are left out."""
    found: set[str] = set()
    waiting = list(sources)
    while waiting:
        path = waiting.pop()
        if path in passed:
            waiting += passed[path]
        else:
            found.add(path)
    return found
