"""Layers with which a plain gradient step moves activations straight downhill."""

from adiv_layers.attention import CorrectedMultiheadAttention
from adiv_layers.convert import ConversionReport, convert
from adiv_layers.convolutions import (
    GradientOnlyConv2d,
    PatchNormConv1d,
    PatchNormConv2d,
    PatchNormConv3d,
)
from adiv_layers.modules import AffineLikeLinear, GradientOnlyLinear, L2Norm, NormLikeLinear

__all__ = [  # noqa: RUF022 (grouped by family)
    # structural: the map itself is corrected
    "AffineLikeLinear",
    "CorrectedMultiheadAttention",
    "NormLikeLinear",
    "PatchNormConv1d",
    "PatchNormConv2d",
    "PatchNormConv3d",
    # gradient-only: the map is unchanged, its parameters receive corrected gradients
    "GradientOnlyConv2d",
    "GradientOnlyLinear",
    # normalisers without parameters
    "L2Norm",
    # replacement of the layers of any model
    "ConversionReport",
    "convert",
]
