"""The random dropout mask of a fused attention call, determined from outside.

No kernel reveals its mask. With the same state of the random numbers, however, it draws the same
mask, and with one-hot values its output is the dropped probabilities themselves, P̃ I = P̃. As many
columns as the values have are computed at a time, so that the same kernel is chosen.
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
    """Return which probabilities one attention call did not zero, for some of its samples.

    The state of the random numbers is restored afterwards.

    Args:
        random: the state of the random numbers before that call.
        samples: the chosen samples, (chosen,) int64.
        query: the query of the call, unchanged.
        key: the key of the call, unchanged.
        value: the value of the call; its numbers don't matter.
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
