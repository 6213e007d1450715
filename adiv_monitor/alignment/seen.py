"""A layer of a model in one forward pass of the probe: its rows and its weight."""

from collections.abc import Sequence

import torch
from torch import Tensor

from adiv_monitor.capture.layer_rows import Call
from adiv_monitor.capture.weights.shards import is_shard, part_of, sharded_as
from adiv_monitor.features.features import BlockFeatures, DenseFeatures, Features, OneHotFeatures
from adiv_monitor.features.uses import Use


class Seen:
    """A layer in one forward pass of the probe; it refers to activations and must not be kept.

    Args:
        calls: its calls.
        use: the use of its weight in its first call.

    Attributes:
        layer: the layer.
        features: features of its sampled rows, over all calls.
        shapes: shape of all rows in each call.
        is_table: whether rows of its matrix are looked up instead of multiplied.
        rows: the inputs, (rows, groups, fan-in); of tables the tokens, (rows,), or none.
        block: index of the block of the weight that every row uses; None without blocks.
    """

    def __init__(self, calls: Sequence[Call], use: Use) -> None:
        self.layer, self.use = calls[0].layer, use
        first, *more = [call.features for call in calls]
        self.features: Features = first.joined(more)
        self.shapes = [call.rows.shape for call in calls]
        self.is_table = not isinstance(self.features, DenseFeatures | BlockFeatures)
        self.rows, self.block = torch.empty(0), None
        if isinstance(self.features, DenseFeatures):
            assert self.features.phi is not None
            self.rows = self.features.phi
        elif isinstance(self.features, BlockFeatures):
            self.rows, self.block = self.features.phi[:, None], self.features.block
        elif isinstance(self.features, OneHotFeatures):
            self.rows = self.features.token

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
