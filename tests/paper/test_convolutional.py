"""The maps over patches of the convolutional networks, written out."""

import pytest
import torch
from torch import nn

pytest.importorskip("scipy")
pytest.importorskip("matplotlib")

from convolutional import PATCH_MAPS, model


@pytest.mark.parametrize("map_", PATCH_MAPS)
def test_patch_maps_divide_every_patch(map_: str) -> None:
    """Of the first two convolutions, written out over unfolded patches, in float64."""
    alone = model("strided", map_, "leaky", 0).double()
    x = torch.rand(2, 3072, dtype=torch.float64)
    expected = x.view(2, 3, 32, 32)
    convolutions = [layer for layer in alone if isinstance(layer, nn.Conv2d)]
    for layer in convolutions[:2]:
        patches = nn.functional.unfold(expected, 3, padding=1, stride=2)  # (2, features, places)
        squares = patches.square().sum(1, keepdim=True)
        z = layer.weight.flatten(1) @ patches
        if map_ == "patch-affine-like":
            z = (z + layer.bias.view(-1, 1)) / (squares + 1).sqrt()
        else:
            z = z / squares.sqrt() + layer.bias.view(-1, 1)
        side = expected.shape[-1] // 2
        expected = nn.functional.leaky_relu(z.view(2, -1, side, side))
    torch.testing.assert_close(alone[:5](x), expected)
