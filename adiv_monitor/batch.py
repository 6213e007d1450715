"""Layers that are alike, measured together: many small operations cost more than a large one."""

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from adiv_monitor import measures
from adiv_monitor.dots import Dots


def measure(dots: Dots) -> dict[str, Tensor]:
    """Every measure that these dot products determine, by name; of the layers stacked in them.

    And what a reader of the measures needs besides: `gradient_square`, `update_square`,
    `rows_without_gradient`, and the entries that quantiles are to be taken of.
    """
    G_G = dots["G_G"]
    found = {
        "gradient_cosine": measures.gradient_cosine(dots["e_G"], dots["e_e"], G_G),
        "rows_without_gradient": measures.rows_without_gradient(G_G),
        "gradient_square": G_G.sum(-1),
    }
    if "own_own" in dots:
        own_own = dots["own_own"]
        found |= {
            "diagonal_cosine": measures.diagonal_cosine(dots["own_G"], own_own, G_G),
            "interference_ratio": measures.interference_ratio(dots["rest_rest"], own_own),
        }
        if "scale" in dots:
            found |= measures.of_scale(dots["scale"][..., None])
        else:  # of gains they were taken with the dot products
            found |= {name: values for name, values in dots.items() if name.startswith("scale_")}
    if "d_G" in dots:
        d_G, d_d, u_u = dots["d_G"], dots["d_d"], dots["u_u"]
        row_cosines = measures.row_cosine(d_G, d_d, G_G)
        found |= {
            "update_cosine": measures.update_cosine(d_G, d_d, G_G),
            "effective_lr": measures.effective_lr(d_G, G_G),
            "row_cosine_mean": row_cosines.nanmean(-1),
            "row_cosine_entries": measures.thinned(row_cosines[..., None]),
            "harmed_fraction": measures.harmed_fraction(d_G, G_G),
            "bias_share": measures.bias_share(dots["A_A"], dots["B_B"]),
            "update_ratio": measures.update_ratio(d_d, dots["z_z"]),
            "update_square": u_u,
            "parameter_cosine": measures.parameter_cosine(
                dots["u_gamma"], u_u, dots["gamma_gamma"]
            ),
        }
    if "a_a" in dots:
        a_a, u_u, gamma_gamma = dots["a_a"], dots["u_u"], dots["gamma_gamma"]
        found |= {
            "projection_cosine": measures.projection_cosine(dots["a_u"], a_a, u_u),
            "applied_cosine": measures.applied_cosine(dots["a_gamma"], a_a, gamma_gamma),
        }
    return found


def alike(layers: Mapping[str, Mapping[str, Tensor]]) -> list[tuple[list[str], dict[str, Tensor]]]:
    """Layers with the same names, shapes, types and devices, stacked in a first dimension."""
    kinds: dict[object, list[str]] = defaultdict(list)
    for path, tensors in layers.items():
        kind = tuple((name, t.shape, t.dtype, t.device) for name, t in tensors.items())
        kinds[kind].append(path)
    return [
        (paths, {name: torch.stack([layers[p][name] for p in paths]) for name in layers[paths[0]]})
        for paths in kinds.values()
    ]
