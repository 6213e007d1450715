"""Features φ of functions and registered modules: how these are linear in their parameters."""

from adiv_monitor.features import corrected
from adiv_monitor.features.features import DenseFeatures, Features, OneHotFeatures
from adiv_monitor.features.functions import (
    attention,
    bags,
    conv,
    einsum,
    elementwise,
    embedding,
    experts,
    gains,
    linear,
    offsets,
    products,
    tokens,
)
from adiv_monitor.features.registry import channels_second, find_rule, register_features
from adiv_monitor.features.rows import Rows

__all__ = [
    "DenseFeatures",
    "Features",
    "OneHotFeatures",
    "Rows",
    "channels_second",
    "find_rule",
    "register_features",
]

del (
    attention,
    bags,
    conv,
    corrected,
    einsum,
    elementwise,
    embedding,
    experts,
    gains,
    linear,
    offsets,
    products,
    tokens,
)  # imported for the rules they register
