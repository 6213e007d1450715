"""The convolutional networks: what each map computes, and the command as small as it can be."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("scipy")
pytest.importorskip("matplotlib")

import convolutional
from cifar import synthetic
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


@pytest.mark.slow
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("set_flush_denormal", "set_num_threads"):  # they would outlive this test
        monkeypatch.setattr(torch, name, lambda setting: None)
    monkeypatch.setattr("cifar.synthetic", lambda: synthetic(train=64, test=20))
    where = ["--data", "synthetic", "--out", str(tmp_path)]

    def command(*more: str) -> list[dict[str, Any]]:
        monkeypatch.setattr(sys, "argv", ["convolutional.py", "--quick", *where, *more])
        convolutional.main()
        runs: list[dict[str, Any]] = json.loads((tmp_path / "convolutional.json").read_text())
        return runs

    found = command("--maps", "none", "patch-norm-like")
    assert len(found) == 2 * 2  # networks, maps
    assert "SYNTHETIC" in (tmp_path / "convolutional.md").read_text()
    assert (tmp_path / "convolutional.png").stat().st_size > 10_000
    more = command("--maps", "none", "patch-norm-like-half", "--resume")
    assert more[:4] == found and len(more) == 6
    with pytest.raises(SystemExit):
        command()
