"""Layers under which a gradient step moves activations straight downhill."""

from adiv_layers.convolutions import PatchNormConv1d, PatchNormConv2d, PatchNormConv3d
from adiv_layers.modules import AffineLikeLinear, L2Norm, NormLikeLinear

__all__ = [  # noqa: RUF022 (grouped by family)
    # structural: the map itself is corrected
    "AffineLikeLinear",
    "NormLikeLinear",
    "PatchNormConv1d",
    "PatchNormConv2d",
    "PatchNormConv3d",
    # normalisers without parameters
    "L2Norm",
]
