"""torch's own attention uses its weights without calling layers: nothing to hook into."""

from torch import nn

from adiv_monitor.features.features import Features
from adiv_monitor.features.registry import register_features


def _refuse(module: nn.MultiheadAttention) -> str:
    return (
        "nn.MultiheadAttention uses its weights without calling layers: "
        'adiv_layers.convert(model, "standard", attention=True) opens it into layers that compute '
        "the same"
    )


@register_features(nn.MultiheadAttention, refuse=_refuse)
def multihead_attention(*_: object) -> Features:
    """Never called: every such module is refused."""
    raise AssertionError("refused modules have no rows")
