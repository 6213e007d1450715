"""`attainable_cosine` from all active rows: from ΦᵀΦ and ΦᵀG, or from the rows if they are few."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from adiv_monitor.features.features import BlockFeatures, DenseFeatures, Features, OneHotFeatures

KNOWN = DenseFeatures | OneHotFeatures | BlockFeatures


class Ceiling:
    """Accumulator of Φ and G of all active rows, call by call, in float64."""

    def __init__(self) -> None:
        self._squared: Tensor | float = 0.0
        self._rows: list[tuple[Tensor, Tensor]] = []
        self._gram: Tensor | None = None
        self._cross: Tensor | None = None

    def add(self, features: Features, gradient: Tensor) -> None:
        """Add the rows of one call: features and ∂L/∂z (rows, n_total)."""
        gradient = gradient.double()
        if isinstance(features, OneHotFeatures):  # the padding token is not trained
            gradient = gradient * features.trained[:, None]
        active = gradient.any(1).nonzero()[:, 0]
        features, gradient = features.pick(active), gradient.index_select(0, active)
        self._squared = self._squared + torch.linalg.vecdot(gradient.flatten(), gradient.flatten())
        if isinstance(features, OneHotFeatures):
            self._add_tokens(features, gradient)
            return
        if isinstance(features, BlockFeatures):
            self._add_blocks(features, gradient)
            return
        assert isinstance(features, DenseFeatures)
        phi = features.columns().double()
        width = gradient.shape[1] // phi.shape[1]
        self._rows.append((phi, gradient.reshape(*phi.shape[:2], width)))
        # Once there are more rows than features, the sums take less memory than the rows.
        if self._gram is not None or sum(len(phi) for phi, _ in self._rows) > phi.shape[2]:
            self._sum_up()

    @staticmethod
    def joined(several: "Sequence[Ceiling]") -> "Ceiling | None":
        """Return the sums over the rows of all of them; None if there are none."""
        for one in several[1:]:
            first = several[0]
            first._squared = first._squared + one._squared
            first._rows += one._rows
            if one._gram is not None and one._cross is not None:
                first._add_sums(one._gram, one._cross)
            if first._gram is not None:
                first._sum_up()
        return several[0] if several else None

    def cosine(self) -> Tensor:
        """Return ‖P_Φ G‖ / ‖G‖ over the active rows among all rows added."""
        norm = torch.as_tensor(self._squared).sqrt()
        if self._gram is not None and self._cross is not None:
            return attainable_cosine(self._gram, self._cross, norm)
        phi, gradient = (torch.cat(parts) for parts in zip(*self._rows, strict=True))
        return attainable_cosine_of_rows(phi, gradient)

    def _sum_up(self) -> None:
        for phi, gradient in self._rows:
            phi, gradient = phi.transpose(0, 1), gradient.transpose(0, 1)
            self._add_sums(phi.mT @ phi, phi.mT @ gradient)
        self._rows.clear()

    def _add_sums(self, gram: Tensor, cross: Tensor) -> None:
        self._gram = gram if self._gram is None else self._gram + gram
        self._cross = cross if self._cross is None else self._cross + cross

    def _add_tokens(self, features: OneHotFeatures, gradient: Tensor) -> None:
        # ΦᵀΦ is diagonal: the count of each token. Every token is a group with one feature.
        if self._gram is None or self._cross is None:
            self._gram = gradient.new_zeros(features.vocabulary, 1, 1)
            self._cross = gradient.new_zeros(features.vocabulary, 1, gradient.shape[1])
        self._gram[:, 0, 0].index_add_(0, features.token, gradient.new_ones(len(gradient)))
        self._cross[:, 0].index_add_(0, features.token, gradient)

    def _add_blocks(self, features: BlockFeatures, gradient: Tensor) -> None:
        # ΦᵀΦ is block-diagonal: every block is a group.
        self._add_sums(*features.sums_of_squares(gradient))


def attainable_cosine(
    gram: Float[Tensor, "groups n n"],
    cross: Float[Tensor, "groups n n_out"],
    G_norm: Float[Tensor, ""],
) -> Float[Tensor, ""]:
    """‖P_Φ G‖ / ‖G‖, in [0, 1]: the best cosine with G that any ΔΘ can reach.

    P_Φ projects on the columns of Φ: ‖P_Φ G‖² = tr(Cᵀ S⁻¹ C), S = ΦᵀΦ and C = ΦᵀG, on the space
    where S is not zero up to rounding.

    Args:
        gram: S, over all active rows.
        cross: C, over all rows.
        G_norm: ‖G‖ over all rows.
    """
    if _is_regular(gram):
        solved = torch.linalg.solve_triangular(torch.linalg.cholesky(gram), cross, upper=False)
        length: Tensor = torch.linalg.vector_norm(solved)
        return length / G_norm  # tr(Cᵀ S⁻¹ C) = ‖L⁻¹C‖², S = LLᵀ
    values, vectors, kept = _spectrum(gram)
    squares = (vectors.mT @ cross).square() / torch.where(kept, values, 1)[..., None]
    attained: Tensor = (squares * kept[..., None]).sum().sqrt()
    return attained / G_norm


def attainable_cosine_of_rows(
    phi: Float[Tensor, "rows groups n_feat"], G: Float[Tensor, "rows groups n_out"]
) -> Float[Tensor, ""]:
    """`attainable_cosine` from Φ and G themselves, cheaper when rows < n_feat.

    Eigenvectors of ΦΦᵀ (rows × rows) with a nonzero eigenvalue span the columns of Φ.
    """
    has_rows, phi, blocks = len(G) > 0, phi.transpose(0, 1), G.transpose(0, 1)
    between = phi @ phi.mT
    whole: Tensor = torch.linalg.vector_norm(blocks)
    if not has_rows or _is_regular(between):
        return whole / whole  # independent rows: every move of the outputs can be reached
    _, vectors, kept = _spectrum(between)
    attained: Tensor = torch.linalg.vector_norm((vectors.mT @ blocks) * kept[..., None])
    return attained / whole


def _is_regular(gram: Float[Tensor, "groups n n"]) -> bool:
    """Whether all eigenvalues are far above those that `_spectrum` treats as zero.

    They are if S − 10·n·ε·‖S‖_∞ has a Cholesky factor, since λ_max ≤ ‖S‖_∞. This test costs a small
    part of an eigendecomposition, which is needed only where there is no factor.
    """
    n = gram.shape[-1]
    largest = gram.abs().sum(-1).amax(-1)
    shift = 10 * n * torch.finfo(gram.dtype).eps * largest
    lowered = gram - shift[..., None, None] * torch.eye(n, dtype=gram.dtype, device=gram.device)
    return not bool(torch.linalg.cholesky_ex(lowered).info.any())


def _spectrum(gram: Float[Tensor, "groups n n"]) -> tuple[Tensor, Tensor, Tensor]:
    """Return eigenvalues, eigenvectors, and which eigenvalues are not zero: above n·ε·λ_max.

    The eigenvalues of a matrix that is not finite are NaN, and none counts as zero.
    """
    finite = gram.isfinite().all()
    values, vectors = torch.linalg.eigh(torch.where(finite, gram, 0))
    values = torch.where(finite, values, torch.nan)
    zero = values <= gram.shape[-1] * torch.finfo(gram.dtype).eps * values[..., -1:]
    return values, vectors, ~zero
