"""What is known of one layer in a measured step, on the device."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from adiv_monitor.capture.again.again import Calls
from adiv_monitor.capture.processes import processes
from adiv_monitor.capture.selection import Layer
from adiv_monitor.features.features import Averaged, Features
from adiv_monitor.features.rows import to_device
from adiv_monitor.maths import totals
from adiv_monitor.step.part import Looked
from adiv_monitor.step.plain_step import Making


@dataclass
class MeasuredLayer:
    """What is known of one layer so far.

    Attributes:
        layer: the layer.
        makings: as calls used it, with the rows of each.
        looked: what the host must know of it.
        features: of the rows, of all calls.
        vectors: name → a vector for each row, (rows, n_total).
        calls: where the rows are.
        values: name → numbers for the host.
    """

    layer: Layer
    makings: list[Making]
    looked: Looked
    features: Features
    vectors: dict[str, Tensor]
    calls: Calls
    values: dict[str, Tensor] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Entries of its largest piece."""
        return max(piece.value().numel() for piece in self.layer.pieces)

    def release(self) -> None:
        """Let go of the rows, and of what made their weights."""
        del self.features, self.vectors, self.makings

    def add_scale(self, generator: np.random.Generator) -> None:
        """The rows' own parts of e, and what the others did to them.

        Raises:
            ValueError: the features' scales are of another shape than theirs.
        """
        vectors, values, features = self.vectors, self.values, self.features
        G, e = vectors["G"], vectors["e"]
        scale = features.scale()
        if scale is None:
            return
        if scale.shape != (len(G), features.groups) or not scale.is_floating_point():
            raise ValueError(
                f"the features' scale() gave {scale.dtype} of shape {tuple(scale.shape)}, expected "
                f"real numbers of shape (rows, groups) = {(len(G), features.groups)}: ‖φ‖² of "
                "every row"
            )
        scale = scale.to(G.dtype)
        if scale.shape[1] == 1:
            vectors["rest"] = torch.addcmul(e, scale, G, value=-1)
            values["scale"] = scale[:, 0]
            return
        blocks = G.view(*scale.shape, G.shape[1] // scale.shape[1])
        own = (scale[..., None] * blocks).flatten(1)
        vectors["own"], vectors["rest"] = own, e - own
        # Of a gain, a matrix as large as its features: of it, what is summed over the features.
        pivot = scale[:1, :1]
        shifted = scale - pivot
        values["scale_pivot"] = pivot
        values["scale_sums"] = shifted.sum(1)
        values["scale_norms"] = torch.linalg.vector_norm(shifted, dim=1)
        values["scale_largest"] = scale.amax(1)
        entries = scale.flatten()
        if len(entries) > totals.MOST_ENTRIES:
            some = generator.choice(len(entries), totals.MOST_ENTRIES, replace=False)
            self.looked.entry_rows = some // scale.shape[1]
            entries = entries.index_select(0, to_device(some, scale.device))
        values["scale_entries_of_rows"] = entries

    def add_common(self) -> None:
        """How alike the active rows are."""
        features, self.looked.asked_common = self.features, True
        if not isinstance(features, Averaged):
            return
        active = self.values["products"][:, 0, 0].sign()  # of ‖g_r‖²
        products = features.mean_products(active)
        if products is not None:
            self.values["common"] = products
            self.values["weight_norms"] = features.weight_norms()
            if processes() > 1:
                self.values["common_sum"] = features.weight_sum(active)
