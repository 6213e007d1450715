"""A layer between its gradient and the step: its rows, on the device, and what is known of them."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from adiv_monitor.capture.realised.rows import Calls
from adiv_monitor.capture.selection import Layer
from adiv_monitor.capture.weights.pieces import Parts
from adiv_monitor.capture.world import world_size
from adiv_monitor.features.features import Averaged, Features
from adiv_monitor.features.rows import Index, to_compute_dtype, to_device
from adiv_monitor.maths import totals
from adiv_monitor.maths.records import replaced
from adiv_monitor.maths.sums import Blocks, Common, LayerSums
from adiv_monitor.step.plain_step import WeightVersion
from adiv_monitor.step.row_vectors import RowProducts, RowVectors, products_of


def products(own: Parts, others: Parts) -> Float[Tensor, "1"]:
    """Their dot product over all pieces."""
    parts = [
        (to_compute_dtype(part) * to_compute_dtype(others[key])).sum() for key, part in own.items()
    ]
    return torch.stack(parts).sum().reshape(1)


@dataclass(slots=True)
class MeasuredLayer:
    """What is known of one layer so far.

    Attributes:
        layer: the layer.
        versions: as calls used it, with the rows of each.
        features: of the rows, of all calls.
        rows: what is known of the rows.
        calls: where the rows are.
        own: by a piece's key, the layer's part of a gradient that others have a part of; None: all
            is its own, or that is not known.
        sums: for the host; what the rows say is missing until `finished`.
    """

    layer: Layer
    versions: list[WeightVersion]
    features: Features
    rows: RowVectors
    calls: Calls
    own: Parts | None
    sums: LayerSums[Tensor]
    _entries: Index | None = None

    @property
    def size(self) -> int:
        """Entries of its largest piece."""
        return max(piece.value().numel() for piece in self.layer.pieces)

    def choose_entries(self, generator: np.random.Generator) -> None:
        """Which scales of a gain are to be told, one by one."""
        groups = self.features.groups
        count = len(self.rows.G) * groups
        if groups > 1 and count > totals.MOST_ENTRIES:
            self._entries = generator.choice(count, totals.MOST_ENTRIES, replace=False)

    def finished(self, *, expects_idle: bool) -> LayerSums[Tensor]:
        """The sums with the row products of all vectors, and the rows' scales.

        Args:
            expects_idle: rows may have no gradient, so that the mean feature is the sample's.

        Raises:
            ValueError: the features' scales are of another shape than theirs.
        """
        found, sums = products_of(self.rows, self.features), self.sums
        is_known = sums.totals is not None and sums.totals.weight_sum is not None
        # Rows without a gradient may be another rank's.
        asked = expects_idle or not is_known or world_size() > 1
        has_one = found.scale is not None and found.of_groups is None
        return replaced(
            sums,
            vectors=found.vectors,
            products=found.products,
            scale=found.scale[:, 0] if found.scale is not None and has_one else None,
            blocks=self._blocks(found),
            common=self._common(found) if asked else None,
            asked_common=asked,
        )

    def _blocks(self, found: RowProducts) -> Blocks[Tensor] | None:
        """Of a gain, a matrix as large as its features: of it, what is summed over the features."""
        if found.scale is None or found.of_groups is None:
            return None
        entries, chosen = found.scale.flatten(), self._entries
        if chosen is not None:
            entries = entries.index_select(0, to_device(chosen, entries.device))
        groups = found.scale.shape[1]
        rows = None if chosen is None else chosen // groups
        sums, norms, largest = found.of_groups
        return Blocks(groups, found.scale[:1, :1], sums, norms, largest, entries, rows)

    def _common(self, found: RowProducts) -> Common[Tensor] | None:
        """How alike the active rows are."""
        features = self.features
        if not isinstance(features, Averaged):
            return None
        active = found.products[:, 0, 0].sign()  # of ‖g_r‖²
        products = features.mean_products(active)
        if products is None:
            return None
        norms = features.weight_norms() if found.weight_norms is None else found.weight_norms
        return Common(products, norms, features.weight_sum(active) if world_size() > 1 else None)
