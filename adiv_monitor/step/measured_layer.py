"""A layer between its final gradient and the optimizer's step, with its rows on the device."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from adiv_monitor.capture.realised.rows import Calls
from adiv_monitor.capture.selection import Layer
from adiv_monitor.capture.weights.pieces import Parts
from adiv_monitor.features.features import Averaged, Features
from adiv_monitor.features.rows import Index, to_compute_dtype, to_device
from adiv_monitor.maths import totals
from adiv_monitor.maths.records import replaced
from adiv_monitor.maths.sums import Blocks, Common, LayerSums, Vector, column_of, pairs_of
from adiv_monitor.step.plain_step import WeightVersion
from adiv_monitor.step.row_vectors import RowProducts, RowVectors, products_of


def products(own: Parts, others: Parts) -> Float[Tensor, "1"]:
    """Return the dot product of two sets of pieces."""
    parts = [
        (to_compute_dtype(part) * to_compute_dtype(others[key])).sum() for key, part in own.items()
    ]
    return torch.stack(parts).sum().reshape(1)


@dataclass(slots=True)
class MeasuredLayer:
    """The state of one layer's measurement.

    Attributes:
        layer: the layer.
        versions: the weight versions that its calls used, with the number of rows of each.
        features: Φ of the sampled rows of all calls.
        rows: the vectors of these rows.
        calls: the place and the sampled rows of each call.
        own: by a piece's key, the layer's share of a gradient that several layers contribute to;
            None: the whole gradient is its own, or its share is not known.
        sums: the numbers for the host, without those of the rows until `finished`.
        knows_sum: whether the sum of the features over all rows is known.
    """

    layer: Layer
    versions: list[WeightVersion]
    features: Features
    rows: RowVectors
    calls: Calls
    own: Parts | None
    sums: LayerSums[Tensor]
    knows_sum: bool = False
    _entries: Index | None = None

    @property
    def size(self) -> int:
        """The number of entries of its largest piece."""
        return max(self.layer.sizes)

    def choose_entries(self, generator: np.random.Generator) -> None:
        """Choose the entries whose scales are reported one by one, if the layer has too many."""
        groups = self.features.groups
        count = self.rows.G.shape[0] * groups
        if groups > 1 and count > totals.MOST_ENTRIES:
            self._entries = generator.choice(count, totals.MOST_ENTRIES, replace=False)

    def finished(self, *, expects_idle: bool, is_alone: bool) -> LayerSums[Tensor]:
        """Return the sums with the products of each row's vectors, and the rows' scales.

        Args:
            expects_idle: there may be zero-gradient rows; the mean feature is then taken over the
                sample.
            is_alone: there is one rank; another one may have zero-gradient rows.

        Raises:
            ValueError: the features' scales are of another shape than theirs.
        """
        found, sums = products_of(self.rows, self.features), self.sums
        asked = expects_idle or not self.knows_sum or not is_alone
        has_one = found.scale is not None and found.of_groups is None
        return replaced(
            sums,
            vectors=found.vectors,
            products=found.products,
            scale=found.scale[:, 0] if found.scale is not None and has_one else None,
            blocks=self._blocks(found),
            common=self._common(found, is_alone=is_alone) if asked else None,
            asked_common=asked,
        )

    def _blocks(self, found: RowProducts) -> Blocks[Tensor] | None:
        """Return the sums over each row's scales, if rows have several; see `Blocks`."""
        if found.scale is None or found.of_groups is None:
            return None
        entries, chosen = found.scale.flatten(), self._entries
        if chosen is not None:
            entries = entries.index_select(0, to_device(chosen, entries.device))
        groups = found.scale.shape[1]
        rows = None if chosen is None else chosen // groups
        sums, norms, largest = found.of_groups
        return Blocks(groups, found.scale[:1, :1], sums, norms, largest, entries, rows)

    def _common(self, found: RowProducts, *, is_alone: bool) -> Common[Tensor] | None:
        """Return the sums for `common_share`: how alike the features of the active rows are."""
        features = self.features
        if not isinstance(features, Averaged):
            return None
        squares = found.products[:, column_of(pairs_of(found.vectors), Vector.G, Vector.G)]
        active = squares.sign()  # of ‖g_r‖²
        products = features.mean_products(active)
        if products is None:
            return None
        return Common(
            products, features.weight_norms(), None if is_alone else features.weight_sum(active)
        )
