"""Which probabilities a fused attention dropped: its random mask, seen from outside.

No kernel shows its mask. But with the same state of the random numbers it draws the same one, and
with one-hot values its output is the dropped probabilities themselves, P̃ I = P̃: as many columns
at a time as the values are wide, so that the same kernel is chosen.
"""

from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn import functional

from adiv_monitor.features.scores import by_head
from adiv_monitor.rerun.randomness import Randomness


@torch.no_grad()
def kept(
    random: Randomness, samples: Tensor, query: Tensor, key: Tensor, value: Tensor, **others: Any
) -> Bool[Tensor, "samples heads queries keys"]:
    """The probabilities that one call of attention did not zero, of some of its samples.

    Random numbers go on afterwards as if nothing had been drawn.

    Args:
        random: where the random numbers stood before that call.
        samples: which of the samples, (chosen,) int64.
        query: as in the call, and so are all others.
        key: see query.
        value: its numbers don't matter.
        others: the other arguments of `F.scaled_dot_product_attention`, by name.
    """
    keys, width = value.shape[-2:]
    blocks = []
    for start in range(0, keys, width):
        one_hot = value.new_zeros(keys, width)
        one_hot[start : start + width].fill_diagonal_(1)
        with random.again():
            dropped = functional.scaled_dot_product_attention(
                query, key, one_hot.expand_as(value), **others
            )
        blocks.append(by_head(dropped)[..., : keys - start].index_select(0, samples) != 0)
    return torch.cat(blocks, -1)
