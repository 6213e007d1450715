"""The attention scale of some scores: the diagonal of M, for any computation before the scores.

M = J Jᵀ with J = ∂Y/∂Θ, so its diagonal is D_ts = ‖∂Y_ts/∂Θ‖². With h_r = ∂Y_ts/∂z_r, for the rows
z_r = Θφ_r of all uses of parameters before Y_ts,

    D_ts = Σ_r ‖φ_r‖² ‖h_r‖²

This is ‖k_s‖²(‖x_t‖²+1) + ‖q_t‖²(‖x_s‖²+1) where the projections' outputs are the queries and keys
(spec, section 5), also with an orthogonal map such as a rotary position in between. QK-norm,
scaling and low-rank updates change h. Scores of different queries and different keys have no row in
common, so one backward pass computes the h of many scores.
"""

from collections.abc import Callable, Iterator, Sequence
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
    chosen = [generator.permutation(size)[:draws] for _ in range(samples * heads)]
    diagonals = np.stack(chosen).reshape(samples, heads, 1, -1)
    s = (np.arange(queries)[:, None] + diagonals) % size
    return np.where(s < keys, s, -1)


def scales(
    query: Float[Tensor, "samples heads queries width"],
    key: Float[Tensor, "samples heads keys width"],
    uses: Sequence[ScaledUse],
    keys: Index,
) -> Float[Tensor, "samples heads queries draws"]:
    """Return D_ts of the scores with these keys, 0 where there is none.

    It is wrong if D is not the sum over the rows of the uses: queries and keys share a weight,
    tokens are mixed before the scores, or a use is not known.

    Args:
        query: q with its graph.
        key: k with its graph.
        uses: the uses of parameters before the scores.
        keys: see `some_keys`.
    """
    of_queries, of_keys = _Side(query, uses), _Side(key, uses)
    every = to_device(keys, query.device)
    found = torch.zeros(keys.shape, dtype=to_compute_dtype(query).dtype, device=query.device)
    for head, draw in np.ndindex(keys.shape[1], keys.shape[3]):
        k, q = key[:, head].detach(), query[:, head].detach()
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

    The token of a row is read off its gradients, digit by digit of the token's number: those of all
    tokens whose number has this binary digit.
    """

    def __init__(self, reached: Tensor, uses: Sequence[ScaledUse]) -> None:
        self._reached, self._uses = reached, uses if reached.requires_grad else ()
        self._tokens = [torch.zeros(len(x.scale), dtype=torch.int64) for x in self._uses]
        self._tokens = [x.to(reached.device) for x in self._tokens]
        samples, _, length, _ = reached.shape
        numbers = torch.arange(samples * length, device=reached.device).view(samples, 1, length, 1)
        along = torch.linspace(1, 9, reached[0].numel()).to(reached).view_as(reached[0]).cos()
        self._digits = (samples * length - 1).bit_length()
        for digit in range(self._digits):
            for tokens, squares in self._rows(along * (numbers >> digit & 1)):
                tokens += (squares != 0).long() << digit

    def squares(self, head: int, other: Tensor) -> Float[Tensor, "samples length"]:
        """Return Σ_r ‖φ_r‖² ‖h_r‖² of every token's rows, for its score with the other side."""
        along = torch.zeros_like(self._reached)
        along[:, head] = other
        total = to_compute_dtype(other.new_zeros(2**self._digits))
        for tokens, squares in self._rows(along):
            total.index_add_(0, tokens, squares)
        return total[: other.shape[0] * other.shape[1]].view(other.shape[:2])

    def _rows(self, along: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the tokens of the rows of each use, and ‖φ_r‖² ‖h_r‖²."""
        edges = [use.edge for use in self._uses]
        given: dict[str, bool] = {"retain_graph": True, "allow_unused": True}
        found = torch.autograd.grad(self._reached, edges, along, **given) if edges else ()
        for use, tokens, h in zip(self._uses, self._tokens, found, strict=True):
            if h is not None:
                blocks = to_compute_dtype(use.layout(h)).reshape(*use.scale.shape, -1)
                yield tokens, (blocks.square().sum(-1) * use.scale).sum(-1)
