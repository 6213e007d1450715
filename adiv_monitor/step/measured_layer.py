"""What is known of one layer in a measured step, on the device."""

from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from adiv_monitor.capture.again.again import Calls
from adiv_monitor.capture.processes import processes
from adiv_monitor.capture.selection import Layer
from adiv_monitor.capture.weights.pieces import Parts
from adiv_monitor.features.features import Averaged, Features
from adiv_monitor.features.rows import Index, exact, to_device
from adiv_monitor.maths import totals
from adiv_monitor.step.part import Looked
from adiv_monitor.step.plain_step import Making
from adiv_monitor.step.row_vectors import RowVectors, products_of


def products(own: Parts, others: Parts) -> Float[Tensor, "1"]:
    """Their dot product over all pieces."""
    parts = [(exact(part) * exact(others[key])).sum() for key, part in own.items()]
    return torch.stack(parts).sum().reshape(1)


@dataclass
class MeasuredLayer:
    """What is known of one layer so far.

    Attributes:
        layer: the layer.
        makings: as calls used it, with the rows of each.
        looked: what the host must know of it.
        features: of the rows, of all calls.
        rows: what is known of the rows.
        calls: where the rows are.
        values: name → numbers for the host.
        own: by a piece's key, the layer's part of a gradient that others have a part of; None: all
            is its own, or that is not known.
    """

    layer: Layer
    makings: list[Making]
    looked: Looked
    features: Features
    rows: RowVectors
    calls: Calls
    values: dict[str, Tensor] = field(default_factory=dict)
    own: Parts | None = None
    _entries: Index | None = field(default=None, init=False)
    _weight_norms: Tensor | None = field(default=None, init=False)

    @property
    def size(self) -> int:
        """Entries of its largest piece."""
        return max(piece.value().numel() for piece in self.layer.pieces)

    def release(self) -> None:
        """Let go of the rows, and of what made their weights."""
        del self.features, self.rows, self.makings, self.own

    def choose_entries(self, generator: np.random.Generator) -> None:
        """Which scales of a gain are to be told, one by one."""
        groups = self.features.groups
        count = len(self.rows.G) * groups
        if groups > 1 and count > totals.MOST_ENTRIES:
            self._entries = generator.choice(count, totals.MOST_ENTRIES, replace=False)
            self.looked.entry_rows = self._entries // groups

    def add_products(self) -> None:
        """Row products of all vectors, and the rows' scales.

        Raises:
            ValueError: the features' scales are of another shape than theirs.
        """
        found = products_of(self.rows, self.features)
        self.looked.vectors = found.vectors
        self.values |= found.values
        self._weight_norms = found.weight_norms
        if found.scale is None:
            return
        if found.scale.shape[1] == 1:
            self.values["scale"] = found.scale[:, 0]
            return
        # Of a gain, a matrix as large as its features: of it, what is summed over the features.
        self.values["scale_pivot"] = found.scale[:1, :1]
        entries = found.scale.flatten()
        if self._entries is not None:
            entries = entries.index_select(0, to_device(self._entries, entries.device))
        self.values["scale_entries_of_rows"] = entries

    def add_common(self) -> None:
        """How alike the active rows are."""
        features, self.looked.asked_common = self.features, True
        if not isinstance(features, Averaged):
            return
        active = self.values["products"][:, 0, 0].sign()  # of ‖g_r‖²
        products = features.mean_products(active)
        if products is not None:
            self.values["common"] = products
            norms = self._weight_norms
            self.values["weight_norms"] = features.weight_norms() if norms is None else norms
            if processes() > 1:
                self.values["common_sum"] = features.weight_sum(active)
