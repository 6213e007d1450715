"""Features φ of functions and registered modules: how these are linear in their parameters."""

from adiv_monitor.features import corrected, functions
from adiv_monitor.features.features import DenseFeatures, Features, OneHotFeatures
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

del corrected, functions  # imported for the rules they register
