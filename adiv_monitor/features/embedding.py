"""Look-ups: φ(x) = one-hot(token), scale 1."""

import torch
from torch import Tensor, nn

from adiv_monitor.features.features import OneHotFeatures
from adiv_monitor.features.registry import register_features
from adiv_monitor.features.rows import Rows


def _refuse(module: nn.Embedding) -> str | None:
    if module.scale_grad_by_freq:
        return "scale_grad_by_freq=True rescales the gradient row by row: set it to False"
    if module.sparse:
        return "sparse=True gives sparse gradients: set it to False to measure this layer"
    return None


@register_features(nn.Embedding, kind="embedding", refuse=_refuse)
def embedding(module: nn.Embedding, rows: Rows, input: Tensor) -> OneHotFeatures:
    """Z = W[token]: one row per token; the padding token is not trained."""
    token = input.reshape(-1)
    token = token.clone() if rows.index is None else token[rows.index]
    dtype = torch.promote_types(module.weight.dtype, torch.float32)
    padding = module.padding_idx
    trained = torch.ones_like(token) if padding is None else token != padding
    return OneHotFeatures(token.long(), trained.to(dtype), module.num_embeddings)
