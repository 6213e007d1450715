"""`attainable_cosine`: the best cosine that any step of a layer could reach, from all its rows."""

import torch
from jaxtyping import Float
from torch import Tensor

from adiv_monitor.features.features import BlockFeatures, DenseFeatures, Features, OneHotFeatures

KNOWN = DenseFeatures | OneHotFeatures | BlockFeatures


def attainable_cosine(features: Features, G: Float[Tensor, "rows n_total"]) -> Float[Tensor, ""]:
    """‖P_Φ G‖ / ‖G‖, in [0, 1]: the best cosine with G that any ΔΘ can reach.

    P_Φ projects on the columns of Φ, over all active rows.

    Args:
        features: Φ of all rows, of one of the types in `KNOWN`.
        G: ∂L/∂z of all rows; 0 for tokens that are not trained.
    """
    active = G.any(1).nonzero()[:, 0]
    features, G = features.pick(active), G.index_select(0, active).double()
    if isinstance(features, OneHotFeatures):  # rows of the same token move alike
        ones, table = G.new_ones(len(G)), G.new_zeros(features.vocabulary, G.shape[1])
        count = table[:, 0].index_add(0, features.token, ones).clamp(min=1)
        together = table.index_add(0, features.token, G)
        parts = [together / count.sqrt()[:, None]]
    elif isinstance(features, BlockFeatures):  # each block has its own features
        rows = [(features.block == block).nonzero()[:, 0] for block in range(features.count)]
        parts = [_projected(features.phi[at, None], G[at, None]) for at in rows if len(at)]
    else:
        assert isinstance(features, DenseFeatures)
        phi = features.columns()
        of_groups = G.view(*phi.shape[:2], G.shape[1] // phi.shape[1])
        parts = [_projected(phi, of_groups)] if len(G) else []
    lengths = torch.stack([G.new_zeros(()), *map(torch.linalg.vector_norm, parts)])
    share: Tensor = torch.linalg.vector_norm(lengths) / torch.linalg.vector_norm(G)
    return share.clamp(max=1)  # whatever the rounding


def _projected(
    phi: Float[Tensor, "rows groups n_feat"], G: Float[Tensor, "rows groups n_out"]
) -> Float[Tensor, "groups n n_out"]:
    """Return a tensor as long as P_Φ G, where P_Φ projects on the columns of Φ; in float64.

    ‖P_Φ G‖² = tr(Cᵀ S⁻¹ C) with S = ΦᵀΦ and C = ΦᵀG, on the space where S is not zero up to
    rounding. Where there are fewer rows than features, the eigenvectors of ΦΦᵀ with a nonzero
    eigenvalue span the columns of Φ.
    """
    phi, G = (x.double().transpose(0, 1) for x in (phi, G))
    has_few = phi.shape[1] <= phi.shape[2]
    gram, cross = (phi @ phi.mT, G) if has_few else (phi.mT @ phi, phi.mT @ G)
    if _is_regular(gram):
        if has_few:  # independent rows: every move of the outputs can be reached
            return G
        factor = torch.linalg.cholesky(gram)  # tr(Cᵀ S⁻¹ C) = ‖L⁻¹C‖², S = LLᵀ
        solved: Tensor = torch.linalg.solve_triangular(factor, cross, upper=False)
        return solved
    values, vectors, kept = _spectrum(gram)
    scale = kept if has_few else kept / values.where(kept, 1).sqrt()
    return vectors.mT @ cross * scale[..., None]


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
