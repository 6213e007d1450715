"""Affine maps: φ(x) = [x, 1], scale ‖x‖² + 1 (paper, eqn 11)."""

from torch import Tensor, nn

from adiv_monitor.features.features import DenseFeatures
from adiv_monitor.features.registry import register_features
from adiv_monitor.features.rows import Rows


@register_features(nn.Linear, kind="linear")
def linear(module: nn.Linear, rows: Rows, input: Tensor) -> DenseFeatures:
    """Z = W x + b: one row per sample or token."""
    x = rows.take(input)
    return DenseFeatures(x[:, None], None if module.bias is None else x.new_ones(len(x), 1))
