"""What the ceiling needs of all rows of a step: ΦᵀΦ and ΦᵀG, or the rows while they are few."""

import torch
from torch import Tensor

from adiv_monitor.features.features import DenseFeatures, Features, OneHotFeatures
from adiv_monitor.measures import attainable_cosine, attainable_cosine_of_rows


class Ceiling:
    """Gathers Φ and G of all rows, call by call, in float64; gives `attainable_cosine`."""

    def __init__(self) -> None:
        self._squared: Tensor | float = 0.0
        self._rows: list[tuple[Tensor, Tensor]] = []
        self._gram: Tensor | None = None
        self._cross: Tensor | None = None

    def add(self, features: Features, gradient: Tensor) -> None:
        """Add the rows of one call: features and ∂L/∂z (rows, n_total)."""
        gradient = gradient.double()
        self._squared = self._squared + torch.linalg.vecdot(gradient.flatten(), gradient.flatten())
        if isinstance(features, OneHotFeatures):
            self._add_tokens(features, gradient)
            return
        assert isinstance(features, DenseFeatures)
        phi = features.columns().double()
        self._rows.append((phi, gradient.reshape(len(phi), phi.shape[1], -1)))
        # As soon as there are more rows than features, the sums are the smaller of the two.
        if self._gram is not None or sum(len(phi) for phi, _ in self._rows) > phi.shape[2]:
            self._sum_up()

    def cosine(self) -> Tensor:
        """‖P_Φ G‖ / ‖G‖ over all rows added."""
        norm = torch.as_tensor(self._squared).sqrt()
        if self._gram is not None and self._cross is not None:
            return attainable_cosine(self._gram, self._cross, norm)
        phi, gradient = (torch.cat(parts) for parts in zip(*self._rows, strict=True))
        return attainable_cosine_of_rows(phi, gradient)

    def _sum_up(self) -> None:
        for phi, gradient in self._rows:
            phi, gradient = phi.transpose(0, 1), gradient.transpose(0, 1)
            gram, cross = phi.mT @ phi, phi.mT @ gradient
            self._gram = gram if self._gram is None else self._gram + gram
            self._cross = cross if self._cross is None else self._cross + cross
        self._rows.clear()

    def _add_tokens(self, features: OneHotFeatures, gradient: Tensor) -> None:
        # ΦᵀΦ is diagonal: how often each token came. Tokens are its groups, with one feature each.
        trained = features.trained.double()
        if self._gram is None or self._cross is None:
            self._gram = gradient.new_zeros(features.vocabulary, 1, 1)
            self._cross = gradient.new_zeros(features.vocabulary, 1, gradient.shape[1])
        self._gram[:, 0, 0].index_add_(0, features.token, trained)
        self._cross[:, 0].index_add_(0, features.token, trained[:, None] * gradient)
