"""The dot products of one layer's step, from which every measure follows.

A layer's matrices, Φ and G and what is made of them, are given up as soon as these are taken.

Float32 sums of many alike entries drift in `torch.dot`, which adds them up one after the other on a
CPU (by a percent over thirty million): here they are added pairwise.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from adiv_monitor import measures
from adiv_monitor.measures import row_dots, row_squares

# By name: `a_b` is a_r·b_r of every row, or ⟨a, b⟩ of the layer's parameters; other names say what
# they are.
Dots = dict[str, Tensor]

_WIDTH, _CHUNK = 2**10, 2**18


def of_gradient(
    scale: Float[Tensor, "rows groups"] | None,
    G: Float[Tensor, "rows groups n_out"],
    e: Float[Tensor, "rows n_total"],
) -> Dots:
    """What a plain gradient step would do: e against G, and against its own part D G.

    Raises:
        ValueError: the scale is not one real number per row and group.
    """
    G_G = row_squares(G)
    found = {
        "G_G": _over_groups(G_G),
        "e_G": row_dots(e, G.flatten(1)),
        "e_e": row_squares(e),
    }
    if scale is None:
        return found
    if scale.shape != G_G.shape or not scale.is_floating_point():
        raise ValueError(
            f"the features' scale() gave {scale.dtype} of shape {tuple(scale.shape)}, expected "
            f"real numbers of shape (rows, groups) = {tuple(G_G.shape)}: ‖φ‖² of every row"
        )
    scale = scale.to(G.dtype)
    own = scale * G_G
    rest = torch.addcmul(e.reshape(G.shape), scale[..., None], G, value=-1)
    found |= {
        "own_G": _over_groups(own),
        "own_own": _over_groups(scale * own),
        "rest_rest": row_squares(rest.flatten(1)),
    }
    # The scales of a gain are a matrix as large as its features: not kept.
    return found | ({"scale": scale[:, 0]} if scale.shape[1] == 1 else measures.of_scale(scale))


def of_update(
    by_weight: Float[Tensor, "rows n_total"] | None,
    by_bias: Float[Tensor, "rows n_total"] | None,
    G: Float[Tensor, "rows n_total"],
) -> Dots:
    """What the optimizer's step did: Δz = Φ_W ΔΘ_Wᵀ + φ_b ⊗ ΔΘ_b against G."""
    moved = added(by_weight, by_bias)
    d_d = row_squares(moved)
    # A part that is alone need not be squared again.
    A_A, B_B = (
        torch.zeros_like(d_d) if part is None else d_d if part is moved else row_squares(part)
        for part in (by_weight, by_bias)
    )
    return {"d_G": -row_dots(moved, G), "d_d": d_d, "A_A": A_A, "B_B": B_B}


def added(
    by_weight: Float[Tensor, "rows n_total"] | None, by_bias: Float[Tensor, "rows n_total"] | None
) -> Float[Tensor, "rows n_total"]:
    """The two together; one of them is there, since a layer trains a weight or a bias."""
    if by_weight is None or by_bias is None:
        lone = by_bias if by_weight is None else by_weight
        assert lone is not None
        return lone
    return by_weight + by_bias


def of_parts(a: Sequence[Tensor], b: Sequence[Tensor]) -> Float[Tensor, ""]:
    """⟨a, b⟩ of two vectors in parts, one per parameter of the layer."""
    dots = [_square(p) if p is q else _dot(p, q) for p, q in zip(a, b, strict=True)]
    return dots[0] if len(dots) == 1 else torch.stack(dots).sum()


def _square(a: Float[Tensor, " _"]) -> Float[Tensor, ""]:
    # As rows, which are short enough for their norms to be precise: faster than `_dot`.
    height = len(a) // _WIDTH
    rows, rest = a[: height * _WIDTH].view(height, _WIDTH), a[height * _WIDTH :]
    return row_squares(rest) + row_squares(rows).sum() if height else row_squares(a)


def _dot(a: Float[Tensor, " _"], b: Float[Tensor, " _"]) -> Float[Tensor, ""]:
    if len(a) <= _CHUNK:
        return (a * b).sum()
    if a.is_cuda:  # there torch.dot adds up in parallel, and many small operations are slow
        return torch.dot(a, b)
    products = a.new_empty(_CHUNK)
    pairs = zip(torch.split(a, _CHUNK), torch.split(b, _CHUNK), strict=True)
    return torch.stack([torch.mul(p, q, out=products[: len(p)]).sum() for p, q in pairs]).sum()


def _over_groups(dots: Float[Tensor, "rows groups"]) -> Float[Tensor, " rows"]:
    return dots[:, 0] if dots.shape[1] == 1 else dots.sum(dim=1)
