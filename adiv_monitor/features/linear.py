"""Affine maps: φ(x) = [x, 1], scale ‖x‖² + 1 (paper, eqn 11)."""

from torch import Tensor, nn

from adiv_monitor.features.features import DenseFeatures
from adiv_monitor.features.registry import register_features
from adiv_monitor.features.rows import Rows, exact_type
from adiv_monitor.features.whole import Whole, squares


def whole_input(module: nn.Linear, input: Tensor) -> Whole:
    """Scales and mean feature of all rows."""
    x = input.reshape(-1, input.shape[-1])
    return Whole(squares(x), float(module.bias is not None), x.sum(0, dtype=exact_type(x)))


@register_features(nn.Linear, kind="linear", whole=whole_input)
def linear(module: nn.Linear, rows: Rows, input: Tensor) -> DenseFeatures:
    """Z = W x + b: one row per sample or token."""
    return DenseFeatures(rows.take(input)[:, None], None if module.bias is None else 1.0)
