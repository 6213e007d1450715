"""A layer between its final gradient and the end of the step, with its rows on the device."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from adiv_monitor.capture.selection import Layer
from adiv_monitor.features.features import Features
from adiv_monitor.features.rows import Index
from adiv_monitor.maths import totals
from adiv_monitor.maths.sums import LayerSums
from adiv_monitor.step.row_moves import Change


@dataclass(slots=True)
class LayerInProgress:
    """The state of one layer's measurement. The vectors of its sampled rows are (rows, n_total).

    Attributes:
        layer: the layer.
        features: Φ of the rows of all calls; None once they are no longer needed.
        sums: the numbers for the host, without those of the rows until they are finished.
        G: ∂L/∂z, as the backward pass left it.
        factor: the factor from G to the units of the optimizer's gradient; None: 1.
        z: the outputs.
        e: the move of a plain gradient step.
        scale: ‖φ‖² of every row and group, (rows, groups); None: it is not the row's scale.
        entries: places of the scales that are reported one by one; None: all.
        d: the move of the optimizer's step, by weight and by bias; None: no step was taken.
        asks_common: whether the mean feature is that of the sampled rows, not of all rows.
    """

    layer: Layer
    features: Features | None
    sums: LayerSums[Tensor]
    G: Tensor
    factor: Tensor | None
    z: Tensor
    e: Tensor
    scale: Tensor | None = None
    entries: Index | None = None
    d: Change | None = None
    asks_common: bool = True

    @property
    def largest(self) -> int:
        """The number of entries of its largest piece."""
        return max(self.layer.sizes)

    def take_scale(self, generator: np.random.Generator) -> None:
        """Compute the scales, and choose those to report one by one if there are too many.

        Raises:
            ValueError: the features' scales are of another shape than theirs.
        """
        assert self.features is not None
        shape = rows, groups = len(self.G), self.features.groups
        scale = self.features.scale() if self.layer.is_direct else None
        if scale is not None:
            if scale.shape != shape or not scale.is_floating_point():
                raise ValueError(
                    f"the features' scale() gave {scale.dtype} of shape {tuple(scale.shape)}, "
                    f"expected real numbers of shape (rows, groups) = {shape}: ‖φ‖² of every row"
                )
            self.scale = scale.to(self.G.dtype)
        if groups > 1 and rows * groups > totals.MOST_ENTRIES:
            self.entries = generator.choice(rows * groups, totals.MOST_ENTRIES, replace=False)
