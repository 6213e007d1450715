"""The attention scale of some scores: the diagonal of M, for any computation before the scores.

M = J Jᵀ with J = ∂Y/∂Θ, so its diagonal is D_ts = ‖∂Y_ts/∂Θ‖². With h_r = ∂Y_ts/∂z_r, for the rows
z_r = Θφ_r of all uses of parameters before Y_ts,

    D_ts = Σ_r ‖φ_r‖² ‖h_r‖²

This is ‖k_s‖²(‖x_t‖²+1) + ‖q_t‖²(‖x_s‖²+1) where the projections' outputs are the queries and keys
(spec, section 5), also with an orthogonal map such as a rotary position in between. QK-norm,
scaling and low-rank updates change h. Scores of different queries and different keys have no row in
common, so one backward pass computes the h of many scores.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.graph import GradientEdge

from adiv_monitor.features.rows import Index, to_compute_dtype, to_device


class ScaledUse(NamedTuple):
    """One use of trained parameters, in a run with a graph.

    Attributes:
        edge: of its output z.
        scale: ‖φ_r‖² of its rows, for the trained parameters.
        layout: (tensor shaped like z) → rows in front, channels in the last dimension, group by
            group.
    """

    edge: GradientEdge
    scale: Float[Tensor, "rows groups"]
    layout: Callable[[Tensor], Tensor]


def some_keys(
    samples: int, heads: int, queries: int, keys: int, draws: int, generator: np.random.Generator
) -> Index:
    """Sample keys for every sample, head and query: (samples, heads, queries, draws), −1 for none.

    All scores are equally likely, and no score is drawn twice. Within one draw no key occurs twice,
    because a draw is one of the max(queries, keys) cyclic diagonals of the scores. That many draws
    cover all scores.
    """
    size = max(queries, keys)
    most = min(draws, size)
    chosen = [generator.permutation(size)[:most] for _ in range(samples * heads)]
    diagonals = np.stack(chosen).reshape(samples, heads, 1, most)
    s = (np.arange(queries)[:, None] + diagonals) % size
    return np.where(s < keys, s, -1)


def scales(
    query: Float[Tensor, "samples heads queries width"],
    key: Float[Tensor, "samples heads keys width"],
    uses: Sequence[ScaledUse],
    keys: Index,
) -> Float[Tensor, "samples heads queries draws"]:
    """Return D_ts of the scores with these keys, 0 where there is none.

    It is wrong if D is not the sum over the rows of the uses: queries and keys share a weight, or a
    use is not known. Where tokens are mixed before the scores, everything is NaN.

    Args:
        query: q with its graph.
        key: k with its graph.
        uses: the uses of parameters before the scores.
        keys: see `some_keys`.
    """
    of_queries, of_keys = _Side(query, uses), _Side(key, uses)
    every = to_device(keys, query.device)
    found = torch.zeros(keys.shape, dtype=to_compute_dtype(query).dtype, device=query.device)
    for head in range(keys.shape[1]):
        k, q = key[:, head].detach(), query[:, head].detach()
        for draw in range(keys.shape[3]):
            s = every[:, head, :, draw, None]
            seen, s = s >= 0, s.clamp(min=0)
            by_query = k.gather(1, s.expand(-1, -1, k.shape[2])) * seen
            by_key = torch.zeros_like(k).scatter_add_(1, s.expand_as(q), q * seen)
            scale = of_queries.squares(head, by_query)
            scale = scale + of_keys.squares(head, by_key).gather(1, s[..., 0])
            found[:, head, :, draw] = torch.where(seen[..., 0], scale, 0)
    return found


class _Side:
    """The queries or the keys, with the uses that they depend on.

    The order of a use's rows follows from the gradient of the first sample's last token, which
    reaches only the rows of that token.
    """

    def __init__(self, reached: Tensor, uses: Sequence[ScaledUse]) -> None:
        self._reached = reached
        probe = torch.zeros_like(reached)
        probe[0, :, -1] = torch.arange(1, probe[0, 0, 0].numel() + 1).to(probe).cos()
        gradients = self._gradients(uses, probe)
        pairs = zip(uses, gradients, strict=True)
        self._uses = [(use, self._fits(use, h)) for use, h in pairs if h is not None]

    def squares(self, head: int, other: Tensor) -> Float[Tensor, "samples length"]:
        """Return Σ_r ‖φ_r‖² ‖h_r‖² of every token's rows, for its score with the other side."""
        along = torch.zeros_like(self._reached)
        along[:, head] = other
        total = to_compute_dtype(self._reached.new_zeros(self._reached.shape[0], other.shape[1]))
        gradients = self._gradients([use for use, _ in self._uses], along)
        for (use, fits), h in zip(self._uses, gradients, strict=True):
            if h is not None:
                ordered = [rows.sum(2) for rows in self._ordered(use, h)]
                by_token = torch.where(ordered[0].any(), torch.nan, ordered[0])
                for rows, fit in zip(ordered, fits, strict=True):
                    by_token = torch.where(fit, rows, by_token)
                total = total + by_token
        return total

    def _gradients(self, uses: Sequence[ScaledUse], along: Tensor) -> Sequence[Tensor | None]:
        if not uses or not self._reached.requires_grad:
            return [None] * len(uses)
        return torch.autograd.grad(
            self._reached, [use.edge for use in uses], along, retain_graph=True, allow_unused=True
        )

    def _fits(self, use: ScaledUse, probe: Tensor) -> list[Tensor]:
        touched = [(rows != 0).any(2) for rows in self._ordered(use, probe)]
        return [tokens[0, -1] & (tokens.sum() == 1) for tokens in touched]

    def _ordered(self, use: ScaledUse, h: Tensor) -> list[Float[Tensor, "samples length more"]]:
        """Return ‖φ_r‖² ‖h_r‖² by sample and token, for every order that the rows may have."""
        samples, _, length, _ = self._reached.shape
        rows, groups = use.scale.shape
        more, rest = divmod(rows, samples * length)
        if rest or not more:
            raise ValueError(
                f"attention scale: got a use of parameters with {rows} rows, expected some for "
                f"each of {samples} × {length} tokens"
            )
        blocks = to_compute_dtype(use.layout(h)).reshape(rows, groups, -1)
        squares = (blocks.square().sum(-1) * use.scale).sum(-1)
        return [
            squares.reshape(samples, length, more),
            squares.reshape(length, samples, more).transpose(0, 1),
            squares.reshape(samples, more, length).transpose(1, 2),
        ]
