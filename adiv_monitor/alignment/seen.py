"""A layer of a model in one forward pass of the probe: its rows, its weight, and what feeds it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import torch
from torch import Tensor, nn

from adiv_monitor.alignment.layers import AlignedLayer
from adiv_monitor.capture.selection import Layer, Place
from adiv_monitor.capture.weights.pieces import Piece, Source
from adiv_monitor.capture.weights.shards import is_shard, part_of, sharded_as
from adiv_monitor.features.features import BlockFeatures, DenseFeatures, Features, OneHotFeatures
from adiv_monitor.features.uses import Use


@dataclass(eq=False)
class Seen:
    """A layer in one forward pass of the probe; it refers to activations and must not be kept.

    Attributes:
        layer: the layer.
        use: the use of its weight in its first call.
        place: where the model holds its weight, or the first parameter of that.
        number: its number, in the order of first calls.
        calls: features of the sampled rows of each call.
        shapes: shape of all rows in each call.
        sources: layers whose outputs make up the input of any call.
        entrywise: parameters that are added to, or scale, values computed from its output.
    """

    layer: Layer
    use: Use
    place: Place
    number: int
    calls: list[Features] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    sources: set[str] = field(default_factory=set)
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

    @property
    def source(self) -> Source:
        """How the weight is computed from parameters."""
        assert self.layer.weight is not None
        return self.layer.weight

    @property
    def _piece(self) -> Piece | None:
        """The parameter of which the weight is all, or a view, so that the parameter tells it."""
        source = self.source
        is_told = len(source.pieces) == 1 and source.is_view
        return source.pieces[0] if is_told else None

    @property
    def name(self) -> str:
        """The weight's name in the model; that of a parametrization is the name that it gives."""
        home = ".".join(filter(None, self.place.home))
        return self.place.full_name if self._piece is not None else home

    def weight(self) -> Tensor:
        """Return what tells the weight: its parameter, of a shard this rank's part, or itself."""
        if self._piece is not None:
            return part_of(self._piece.parameter)
        assert self.use.weight is not None
        return self.use.weight.detach()

    def matrices(self, told: Tensor) -> Tensor:
        """Return (groups or blocks, outputs, fan-in) from what `weight` returned at some time.

        All ranks have to call for a shard. A table is one matrix, (rows, width).
        """
        assert self.use.weight is not None
        whole, features = told.to(self.use.weight.device, non_blocking=True), self.features
        if self._piece is not None:
            if is_shard(self._piece.parameter):
                whole = sharded_as(whole, self._piece.parameter).full_tensor()
            whole = self.source.of({self._piece.key: self._piece.of(whole)})
        made = self.use.shaped(whole)
        if isinstance(features, DenseFeatures) and not features.transposed:
            return made.reshape(self.rows.shape[1], -1, self.rows.shape[2])
        if isinstance(features, BlockFeatures):
            return made
        return (made.t() if isinstance(features, DenseFeatures) else made)[None]

    def aligned(self, path: str, order: Sequence[str]) -> AlignedLayer:
        """Return the `AlignedLayer` with this path.

        Args:
            path: the path.
            order: the paths of all layers, in the order of their first calls.
        """
        use = self.use
        assert use.weight is not None
        groups, outputs, fan_in = self.matrices(self.weight()).shape
        if self.is_table:  # rows that are repeated count once
            sizes = zip(use.weight.shape, use.weight.stride(), strict=True)
            outputs, fan_in = fan_in, prod(size for size, step in sizes if step) // fan_in
        of_torch = isinstance(self.layer.module, nn.Embedding | nn.EmbeddingBag)
        is_table = use.kind == "offset" or (use.kind == "embedding" and not of_torch)
        return AlignedLayer(
            path=path,
            kind="table" if is_table else use.kind,
            fan_in=fan_in,
            fan_out=outputs * (groups if self.block is None else 1),
            module=self.layer.module,
            name=self.place.home[1],
            weights=tuple(piece.parameter for piece in self.source.pieces),
            # Only earlier layers count, so that there are no cycles.
            predecessors=tuple(p for p in order[: self.number] if p in self.sources),
            entrywise=self.entrywise,
            is_table=self.is_table,
            groups=groups,
        )
