"""The attention scale of some scores: the diagonal of M, for whatever lies before the scores.

M = J Jᵀ with J = ∂Y/∂Θ, so its diagonal is D_ts = ‖∂Y_ts/∂Θ‖². With h_r = ∂Y_ts/∂z_r, for the rows
z_r = Θφ_r of all uses of parameters on the way to Y_ts,

    D_ts = Σ_r ‖φ_r‖² ‖h_r‖²

which is ‖k_s‖²(‖x_t‖²+1) + ‖q_t‖²(‖x_s‖²+1) where the projections' outputs are the queries and
keys (spec, section 5), and where an orthogonal map such as a rotary position comes between.
QK-norm, scaling and low-rank updates change h. Scores of different queries and different keys have
no row in common, so one backward pass gives the h of many of them.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from adiv_monitor.capture.score_replay import Parameters, Reached, Use
from adiv_monitor.features.rows import Index


def some_keys(
    heads: int, queries: int, keys: int, draws: int, generator: np.random.Generator
) -> Index:
    """For every head and query some keys, −1 for none; all scores are equally likely.

    Shape (heads, queries, draws). In one draw no key comes twice.
    """
    chosen = np.full((heads, queries, draws), -1, dtype=np.int64)
    along = np.arange(min(queries, keys))
    for head in range(heads):
        for draw in range(draws):
            t, s = generator.integers(queries), generator.integers(keys)
            chosen[head, (along + t) % queries, draw] = (along + s) % keys
    return chosen


def scales(
    call: Reached, leaves: Parameters, keys: Int[Tensor, "heads queries draws"]
) -> Float[Tensor, "samples heads queries draws"]:
    """D_ts of the scores with these keys; 0 where there is none.

    Args:
        call: the queries and keys with their graph.
        leaves: its leaves, the parameters.
        keys: see `some_keys`.

    Raises:
        ValueError: D is not the sum over the rows of the uses, by one score of which the whole
            gradient was taken: tokens are mixed before the scores, queries and keys have a weight
            in common, or a use is not known.
    """
    of_queries = _Side(call.query, call.uses)
    of_keys = _Side(call.key, call.uses)
    found = call.query.new_zeros(len(call.query), *keys.shape)
    for head, by_draw in enumerate(keys):
        for draw, chosen in enumerate(by_draw.T):
            t = (chosen >= 0).nonzero()[:, 0]
            s = chosen[t]
            by_query = of_queries.squares(head, t, call.key[:, head, s])
            by_key = of_keys.squares(head, s, call.query[:, head, t])
            found[:, head, t, draw] = by_query[:, t] + by_key[:, s]
    _check(call, leaves, keys, found)
    return found


class _Side:
    """The queries, or the keys, with the uses that lie before them."""

    def __init__(self, reached: Tensor, uses: Sequence[Use]) -> None:
        self._reached = reached
        # Of several backward passes, the first shows which uses are on the way.
        probe = torch.zeros_like(reached)
        probe[0, :, -1] = torch.arange(1, probe[0, 0, 0].numel() + 1).to(probe).cos()
        gradients = self._gradients([use.z for use in uses], probe)
        self._uses = [u for u, h in zip(uses, gradients, strict=True) if h is not None]
        self._order = [
            _order(use, h, reached.shape[0], reached.shape[2])
            for use, h in zip(uses, gradients, strict=True)
            if h is not None
        ]

    def squares(
        self, head: int, at: Int[Tensor, " some"], other: Float[Tensor, "samples some width"]
    ) -> Float[Tensor, "samples length"]:
        """Σ_r ‖φ_r‖² ‖h_r‖² over the rows of every token, of its score with the other side."""
        samples, _, length, _ = self._reached.shape
        along = torch.zeros_like(self._reached)
        along[:, head, at] = other.detach()
        total = self._reached.new_zeros(samples, length)
        gradients = self._gradients([use.z for use in self._uses], along)
        for use, h, (order, place) in zip(self._uses, gradients, self._order, strict=True):
            if h is not None:
                rows = _squares(use, h).detach().reshape(order)
                total += rows.movedim(place, (0, 1)).flatten(2).sum(2)
        return total

    def _gradients(self, inputs: list[Tensor], along: Tensor) -> Sequence[Tensor | None]:
        if not inputs or not self._reached.requires_grad:
            return [None] * len(inputs)
        return torch.autograd.grad(
            self._reached, inputs, along, retain_graph=True, allow_unused=True
        )


def _squares(use: Use, h: Tensor) -> Float[Tensor, " rows"]:
    rows, groups = use.scale.shape
    return (h.reshape(rows, groups, -1).square().sum(-1) * use.scale).sum(-1)


def _order(
    use: Use, h: Tensor, samples: int, length: int
) -> tuple[tuple[int, ...], tuple[int, int]]:
    """How the use's rows are laid out, and where samples and tokens are in that.

    Told from the gradient of the first sample's last token, which reaches that token's rows alone.
    """
    rows = len(use.scale)
    more = rows // (samples * length)
    layouts = [
        ((samples, length, more), (0, 1)),
        ((length, samples, more), (1, 0)),
        ((samples, more, length), (0, 2)),
    ]
    touched = _squares(use, h) != 0
    for order, place in layouts:
        if rows == samples * length * more:
            by_token = touched.reshape(order).movedim(place, (0, 1)).any(2)
            if by_token[0, -1] and int(by_token.sum()) == 1:
                return order, place
    raise ValueError(
        f"attention scale: got a use of parameters with output {tuple(use.z.shape)} of which "
        f"{int(touched.sum())} rows reach one of {samples} × {length} tokens, expected only that "
        "token's rows: something mixes tokens between the projections and the scores"
    )


def _check(
    call: Reached, leaves: Parameters, keys: Int[Tensor, "heads queries draws"], found: Tensor
) -> None:
    """One score's gradient with respect to all parameters says what D really is there."""
    head, t, draw = (int(i) for i in (keys >= 0).nonzero()[-1])
    score = call.query[0, head, t] @ call.key[0, head, keys[head, t, draw]]
    gradients = torch.autograd.grad(
        score, list(leaves.values()), retain_graph=True, allow_unused=True
    )
    whole = sum(g.square().sum() for g in gradients if g is not None)
    told = found[0, head, t, draw]
    # Products of float32 may be taken with fewer digits (TensorFloat-32), half precision has few.
    tolerance = min(50 * torch.finfo(score.dtype).eps ** 0.5, 0.05)
    if not torch.isclose(told, torch.as_tensor(whole).to(told), rtol=tolerance, atol=0):
        raise ValueError(
            f"attention scale: got {float(told):.4g} from the rows of {len(call.uses)} uses, "
            f"expected {float(whole):.4g}, the square of the whole gradient of that score: queries "
            "and keys have a weight in common, or one of its uses is not known"
        )
