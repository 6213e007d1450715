"""Look-ups: φ(x) = one-hot(token), scale 1."""

import torch
from torch import Tensor, nn

from adiv_monitor.features.features import OneHotFeatures
from adiv_monitor.features.registry import register_features
from adiv_monitor.features.rows import Rows, exact_type
from adiv_monitor.features.whole import Whole


def _refuse(module: nn.Embedding) -> str | None:
    if module.scale_grad_by_freq:
        return "scale_grad_by_freq=True rescales the gradient row by row: set it to False"
    if module.sparse:
        return "sparse=True gives sparse gradients: set it to False to measure this layer"
    return None


def _trained(module: nn.Embedding, token: Tensor) -> Tensor:
    padding = module.padding_idx
    trained = torch.ones_like(token) if padding is None else token != padding
    return trained.to(exact_type(module.weight))


def whole_input(module: nn.Embedding, input: Tensor) -> Whole:
    """Scales of all rows, and how often every token comes."""
    token = input.reshape(-1)
    trained = _trained(module, token)
    counts = trained.new_zeros(module.num_embeddings).index_add_(0, token, trained)
    return Whole(trained, 0.0, counts, None if module.padding_idx is None else trained)


@register_features(nn.Embedding, kind="embedding", refuse=_refuse, whole=whole_input)
def embedding(module: nn.Embedding, rows: Rows, input: Tensor) -> OneHotFeatures:
    """Z = W[token]: one row per token; the padding token is not trained."""
    token = input.reshape(-1)
    token = token.clone() if rows.chosen is None else token[rows.flat]
    return OneHotFeatures(token.long(), _trained(module, token), module.num_embeddings)
