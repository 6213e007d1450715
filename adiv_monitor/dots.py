"""Which dot products a step is looked at through, and which measure takes which of them.

A layer's matrices are given up as soon as their dot products are taken. Layers whose products have
the same shapes are then measured together, since many small operations cost more than one.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from adiv_monitor import measures
from adiv_monitor.measures import row_dots, row_squares

# By name: one tensor, the same for every layer of a kind. `a_b` is a·b, of rows where the measures
# need rows, else of the whole; other names say what they are.
Dots = dict[str, Tensor]

_MAX_ENTRIES = 2_048


def of_gradient(
    scale: Float[Tensor, "rows groups"] | None,
    G: Float[Tensor, "rows groups n_out"],
    e: Float[Tensor, "rows n_total"],
) -> Dots:
    """What a plain gradient step would do: e against G, and against its own part D G."""
    G_G = row_squares(G)
    found = {"G_G": _over_groups(G_G), "e_G": dot(e, G), "e_e": dot(e, e)}
    if scale is not None:
        own = scale * G_G  # its sum is ⟨D G, G⟩
        rest = torch.addcmul(e.reshape(G.shape), scale[..., None], G, value=-1)
        found |= {"scale": scale, "own_G": own.sum(), "own_own": dot(scale, own)}
        found["rest_rest"] = dot(rest, rest)
    return found


def of_update(
    by_weight: Float[Tensor, "rows n_total"] | None,
    by_bias: Float[Tensor, "rows n_total"] | None,
    G: Float[Tensor, "rows n_total"],
) -> Dots:
    """What the optimizer's step did: Δz = Φ_W ΔΘ_Wᵀ + φ_b ⊗ ΔΘ_b against G."""
    parts = [part for part in (by_weight, by_bias) if part is not None]
    moved = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    zero = G.new_zeros(())
    return {
        "d_G": -row_dots(moved, G),
        "d_d": row_squares(moved),
        "A_A": zero if by_weight is None else dot(by_weight, by_weight),
        "B_B": zero if by_bias is None else dot(by_bias, by_bias),
    }


def of_parts(a: Sequence[Tensor], b: Sequence[Tensor]) -> Float[Tensor, ""]:
    """⟨a, b⟩ of two vectors in parts, one per parameter of the layer."""
    dots = [dot(p, q) for p, q in zip(a, b, strict=True)]
    return dots[0] if len(dots) == 1 else torch.stack(dots).sum()


def dot(a: Tensor, b: Tensor) -> Float[Tensor, ""]:
    """⟨vec a, vec b⟩ of two tensors with the same number of entries."""
    return torch.dot(a.reshape(-1), b.reshape(-1))


def _over_groups(dots: Float[Tensor, "rows groups"]) -> Float[Tensor, " rows"]:
    return dots[:, 0] if dots.shape[1] == 1 else dots.sum(dim=1)


def measure(dots: Dots) -> dict[str, Tensor]:
    """Every measure that these dot products determine, under its name."""
    G_G = dots["G_G"]
    found = {
        "gradient_cosine": measures.gradient_cosine(dots["e_G"], dots["e_e"], G_G),
        "rows_without_gradient": measures.rows_without_gradient(G_G),
        "gradient_square": G_G.sum(-1),
    }
    if "scale" in dots:
        scale, own_own = dots["scale"], dots["own_own"]
        found |= {
            "diagonal_cosine": measures.diagonal_cosine(dots["own_G"], own_own, G_G),
            "interference_ratio": measures.interference_ratio(dots["rest_rest"], own_own),
            "scale_mean": measures.scale_mean(scale),
            "scale_cv": measures.scale_cv(scale),
            "scale_max": measures.scale_max(scale),
            "scale_entries": thinned(scale),
        }
    if "d_G" in dots:
        d_G, d_d, u_u = dots["d_G"], dots["d_d"], dots["u_u"]
        row_cosines = measures.row_cosine(d_G, d_d, G_G)
        found |= {
            "update_cosine": measures.update_cosine(d_G, d_d, G_G),
            "effective_lr": measures.effective_lr(d_G, G_G),
            "row_cosine_mean": row_cosines.nanmean(-1),
            "row_cosine_entries": thinned(row_cosines[..., None]),
            "harmed_fraction": measures.harmed_fraction(d_G, G_G),
            "bias_share": measures.bias_share(dots["A_A"], dots["B_B"]),
            "update_ratio": measures.update_ratio(d_d, dots["z_z"]),
            "update_square": u_u,
            "parameter_cosine": measures.parameter_cosine(
                dots["u_gamma"], u_u, dots["gamma_gamma"]
            ),
        }
        if "a_a" in dots:
            a_a = dots["a_a"]
            found |= {
                "projection_cosine": measures.projection_cosine(dots["a_u"], a_a, u_u),
                "applied_cosine": measures.applied_cosine(
                    dots["a_gamma"], a_a, dots["gamma_gamma"]
                ),
            }
    return found


def thinned(values: Float[Tensor, "*layers rows groups"]) -> Float[Tensor, "*layers entries"]:
    """At most 2,048 entries: of every so many rows, all groups (of a single row, if they are more).

    Quantiles are taken of these, so this is what goes to the host.
    """
    step = -(-values.shape[-2] * values.shape[-1] // _MAX_ENTRIES)
    return values[..., :: max(step, 1), :].flatten(-2)


def alike(layers: Mapping[str, Dots]) -> list[tuple[list[str], Dots]]:
    """Layers with the same names, shapes, types and devices, stacked in a first dimension."""
    kinds: dict[object, list[str]] = defaultdict(list)
    for path, dots in layers.items():
        kind = tuple((name, t.shape, t.dtype, t.device) for name, t in dots.items())
        kinds[kind].append(path)
    return [
        (
            paths,
            {
                name: torch.stack([layers[path][name] for path in paths])
                for name in layers[paths[0]]
            },
        )
        for paths in kinds.values()
    ]
