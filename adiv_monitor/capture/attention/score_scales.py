"""The attention scale of some scores: the diagonal of M, for any computation before the scores.

M = J Jᵀ with J = ∂Y/∂Θ, so its diagonal is D_ts = ‖∂Y_ts/∂Θ‖². With h_r = ∂Y_ts/∂z_r, for the rows
z_r = Θφ_r of all uses of parameters before Y_ts,

    D_ts = Σ_r ‖φ_r‖² ‖h_r‖²

This is ‖k_s‖²(‖x_t‖²+1) + ‖q_t‖²(‖x_s‖²+1) where the projections' outputs are the queries and keys
(spec, section 5), also with an orthogonal map such as a rotary position in between. QK-norm,
scaling and low-rank updates change h. Scores of different queries and different keys have no row in
common, so one backward pass computes the h of many scores.

This module never waits for the device: whether D is correct is one of the returned numbers.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from adiv_monitor.capture.attention.score_moves import Reached, ScaledUse
from adiv_monitor.features.rows import Index, to_device
from adiv_monitor.rerun.derivatives import Parameters


def some_keys(
    samples: int,
    heads: int,
    queries: int,
    keys: int,
    draws: int,
    generator: np.random.Generator,
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
    call: Reached, leaves: Parameters, keys: Index
) -> tuple[Float[Tensor, "samples heads queries draws"], Float[Tensor, ""]]:
    """Return D_ts of the scores with these keys, 0 where there is none, and the error of one.

    The error is relative, from the full gradient of one score. It is not small where D is not the
    sum over the rows of the uses: queries and keys share a weight, or a use is not known. Where
    tokens are mixed before the scores, everything is NaN.

    Args:
        call: the queries and keys with their graph.
        leaves: the leaves of the graph, which are the parameters.
        keys: see `some_keys`.
    """
    of_queries = _Side(call.query, call.uses)
    of_keys = _Side(call.key, call.uses)
    every = to_device(keys, call.query.device)
    found = torch.zeros_like(every, dtype=call.query.dtype)
    for head in range(keys.shape[1]):
        for draw in range(keys.shape[3]):
            s = every[:, head, :, draw]
            seen, s = s >= 0, s.clamp(min=0)
            key = _at(call.key[:, head].detach(), s) * seen[..., None]
            query = call.query[:, head].detach() * seen[..., None]
            by_key = torch.zeros_like(call.key[:, head]).detach()
            by_key.scatter_add_(1, s[..., None].expand_as(query), query)
            scale = of_queries.squares(head, key) + of_keys.squares(head, by_key).gather(1, s)
            found[:, head, :, draw] = torch.where(seen, scale, 0)
    return found, _error(call, leaves, keys, found)


def _at(
    tensor: Float[Tensor, "samples length width"], places: Int[Tensor, "samples some"]
) -> Float[Tensor, "samples some width"]:
    return tensor.gather(1, places[..., None].expand(-1, -1, tensor.shape[2]))


class _Side:
    """The queries or the keys, with the uses that they depend on."""

    def __init__(self, reached: Tensor, uses: Sequence[ScaledUse]) -> None:
        self._reached = reached
        # The first of several backward passes determines which uses they depend on.
        probe = torch.zeros_like(reached)
        probe[0, :, -1] = torch.arange(1, probe[0, 0, 0].numel() + 1).to(probe).cos()
        gradients = self._gradients([use.z for use in uses], probe)
        self._uses = [
            _Ordered(use, h, reached.shape[0], reached.shape[2])
            for use, h in zip(uses, gradients, strict=True)
            if h is not None
        ]

    def squares(
        self, head: int, other: Float[Tensor, "samples length width"]
    ) -> Float[Tensor, "samples length"]:
        """Return Σ_r ‖φ_r‖² ‖h_r‖² of every token's rows, for its score with the other side."""
        samples, _, length, _ = self._reached.shape
        along = torch.zeros_like(self._reached)
        along[:, head] = other
        total = self._reached.new_zeros(samples, length)
        gradients = self._gradients([ordered.use.z for ordered in self._uses], along)
        for ordered, h in zip(self._uses, gradients, strict=True):
            if h is not None:
                total = total + ordered.by_token(h)
        return total

    def _gradients(self, inputs: list[Tensor], along: Tensor) -> Sequence[Tensor | None]:
        if not inputs or not self._reached.requires_grad:
            return [None] * len(inputs)
        return torch.autograd.grad(
            self._reached, inputs, along, retain_graph=True, allow_unused=True
        )


class _Ordered:
    """A use and the order of its rows.

    The order follows from the gradient of the first sample's last token, which reaches only the
    rows of that token.
    """

    def __init__(self, use: ScaledUse, probe: Tensor, samples: int, length: int) -> None:
        self.use = use
        more, rest = divmod(len(use.scale), samples * length)
        if rest or not more:
            raise ValueError(
                f"attention scale: got a use of parameters with {len(use.scale)} rows, expected "
                f"some for each of {samples} × {length} tokens"
            )
        self._layouts = [
            ((samples, length, more), (0, 1)),
            ((length, samples, more), (1, 0)),
            ((samples, more, length), (0, 2)),
        ]
        self._fits = []
        touched = self._squares(probe) != 0
        for order, place in self._layouts:
            by_token = touched.reshape(order).movedim(place, (0, 1)).any(2)
            self._fits.append(by_token[0, -1] & (by_token.sum() == 1))

    def by_token(self, h: Tensor) -> Float[Tensor, "samples length"]:
        """Return Σ ‖φ_r‖² ‖h_r‖² over the rows of every token; NaN where no layout fits."""
        rows, found = self._squares(h), h.new_full((), torch.nan)
        for (order, place), fits in reversed([*zip(self._layouts, self._fits, strict=True)]):
            ordered = rows.reshape(order).movedim(place, (0, 1)).sum(2)
            found = torch.where(fits, ordered, found)
        return found

    def _squares(self, h: Tensor) -> Float[Tensor, " rows"]:
        rows, groups = self.use.scale.shape
        blocks = self.use.layout(h.detach()).reshape(rows, groups, -1)
        return (blocks.square().sum(-1) * self.use.scale).sum(-1)


def _error(call: Reached, leaves: Parameters, keys: Index, found: Tensor) -> Float[Tensor, ""]:
    """Return |D − ‖∂Y_ts/∂Θ‖²| / ‖∂Y_ts/∂Θ‖² of one score, from its gradient of all parameters."""
    n, head, t, draw = np.argwhere(keys >= 0)[-1]
    score = call.query[n, head, t] @ call.key[n, head, keys[n, head, t, draw]]
    gradients = torch.autograd.grad(
        score, list(leaves.values()), retain_graph=True, allow_unused=True
    )
    whole = sum((g.square().sum() for g in gradients if g is not None), torch.zeros_like(score))
    return ((found[n, head, t, draw] - whole).abs() / whole).detach()
