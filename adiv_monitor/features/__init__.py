"""Features φ of functions and registered modules: how these are linear in their parameters."""

from adiv_monitor.features import corrected, functions
from adiv_monitor.features.features import DenseFeatures, Features, OneHotFeatures
from adiv_monitor.features.registry import register_features
from adiv_monitor.features.rows import Rows

__all__ = [
    "DenseFeatures",
    "Features",
    "OneHotFeatures",
    "Rows",
    "register_features",
]

del corrected, functions  # imported for the rules they register
