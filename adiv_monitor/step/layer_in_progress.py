"""A layer between its final gradient and the optimizer's step, with its rows on the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from adiv_monitor.capture.selection import Layer
from adiv_monitor.features.features import Features
from adiv_monitor.features.rows import Index, to_device
from adiv_monitor.maths import dots, totals
from adiv_monitor.maths.records import replaced
from adiv_monitor.maths.sums import Blocks, Common, LayerSums, Vector, column_of, pairs_of
from adiv_monitor.step.row_moves import Change, WeightVersion, added

_ORDER = tuple(Vector)


@dataclass(slots=True)
class LayerInProgress:
    """The state of one layer's measurement. The vectors of its sampled rows are (rows, n_total).

    Attributes:
        layer: the layer.
        versions: the weight versions that its calls used, with the number of rows of each.
        features: Φ of the rows of all calls.
        sums: the numbers for the host, without those of the rows until `finished`.
        G: ∂L/∂z, as the backward pass left it.
        factor: the factor from G to the units of the optimizer's gradient; None: 1.
        z: the outputs.
        e: the move of a plain gradient step, by weight and by bias; (None, None): not computed yet.
        d: the move of the optimizer's step, by weight and by bias; None: no step was taken.
        own_scale: the scales of rows whose weight is computed from parameters; None: unknown.
        knows_sum: whether the sum of the features over all rows is known.
    """

    layer: Layer
    versions: list[WeightVersion]
    features: Features
    sums: LayerSums[Tensor]
    G: Tensor
    factor: Tensor | None
    z: Tensor
    e: Change = (None, None)
    d: Change | None = None
    own_scale: Tensor | None = None
    knows_sum: bool = False
    _entries: Index | None = None

    @property
    def largest(self) -> int:
        """The number of entries of its largest piece."""
        return max(self.layer.sizes)

    def scaled(self) -> Tensor:
        """Return G in the units of the gradient that the optimizer saw."""
        return self.G if self.factor is None else self.G * self.factor.to(self.G)

    def choose_entries(self, generator: np.random.Generator) -> None:
        """Choose the entries whose scales are reported one by one, if the layer has too many."""
        groups = self.features.groups if self.own_scale is None else self.own_scale.shape[1]
        count = self.G.shape[0] * groups
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
        scale = self._scale()
        vectors = self._vectors(scale)
        named = tuple([vector for vector in _ORDER if vector in vectors])
        products = dots.of_rows({vector: vectors[vector] for vector in named}, pairs_of(named))
        has_one = scale is not None and scale.shape[1] == 1
        asked = expects_idle or not self.knows_sum or not is_alone
        return replaced(
            self.sums,
            vectors=named,
            products=products,
            scale=scale[:, 0] if scale is not None and has_one else None,
            blocks=None if scale is None or has_one else self._blocks(scale),
            common=self._common(named, products, is_alone=is_alone) if asked else None,
            asked_common=asked,
        )

    def _vectors(self, scale: Tensor | None) -> dict[Vector, Tensor]:
        """Return the vectors of the rows, whose scales are these."""
        G, e = self.scaled(), added(*self.e)
        vectors = {Vector.G: G, Vector.E: e, Vector.Z: self.z}
        if scale is not None and scale.shape[1] == 1:
            vectors[Vector.REST] = torch.addcmul(e, scale, G, value=-1)
        elif scale is not None:
            blocks = G.view(*scale.shape, G.shape[1] // scale.shape[1])
            own = vectors[Vector.OWN] = (scale[..., None] * blocks).flatten(1)
            vectors[Vector.REST] = e - own
        if self.d is not None:
            by_weight, by_bias = self.d
            vectors[Vector.D] = added(by_weight, by_bias)
            if by_weight is not None and by_bias is not None:
                vectors[Vector.BIAS] = by_bias
        return vectors

    def _scale(self) -> Tensor | None:
        """Return ‖φ‖² of every row and group, (rows, groups); None: unknown."""
        if not self.layer.is_direct:
            return None if self.own_scale is None else self.own_scale.to(self.G.dtype)
        scale, shape = self.features.scale(), (len(self.G), self.features.groups)
        if scale is not None and (scale.shape != shape or not scale.is_floating_point()):
            raise ValueError(
                f"the features' scale() gave {scale.dtype} of shape {tuple(scale.shape)}, expected "
                f"real numbers of shape (rows, groups) = {shape}: ‖φ‖² of every row"
            )
        return None if scale is None else scale.to(self.G.dtype)

    def _blocks(self, scale: Tensor) -> Blocks[Tensor]:
        """Return the sums over each row's scales; see `Blocks`."""
        pivot, entries, chosen = scale[:1, :1], scale.flatten(), self._entries
        shifted, groups = scale - pivot, scale.shape[1]
        if chosen is not None:
            entries = entries.index_select(0, to_device(chosen, entries.device))
        return Blocks(
            groups,
            pivot,
            sums=shifted.sum(1),
            norms=torch.linalg.vector_norm(shifted, dim=1),
            largest=scale.amax(1),
            entries=entries,
            entry_rows=None if chosen is None else chosen // groups,
        )

    def _common(
        self, named: Sequence[Vector], products: Tensor, *, is_alone: bool
    ) -> Common[Tensor] | None:
        """Return the sums for `common_share`: how alike the features of the active rows are."""
        features = self.features
        active = products[:, column_of(pairs_of(named), Vector.G, Vector.G)].sign()  # of ‖g_r‖²
        found = features.common(active)
        return found and Common(*found, None if is_alone else features.weight_sum(active))
