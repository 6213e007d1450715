"""Images are the same bytes from wherever they come; nothing stands in for missing data."""

from pathlib import Path

import cifar
import pytest
import torch


def test_missing_data_are_no_reason_to_make_some_up(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="--download"):
        cifar.load(str(tmp_path))


def test_pixels() -> None:
    train = cifar.synthetic(train=300, test=1).train
    unit = cifar.pixels("unit", train, torch.float64)(train)
    torch.testing.assert_close(unit, train.double() / 255)
    centred = cifar.pixels("centred", train, torch.float64)(train)
    torch.testing.assert_close(centred, unit - unit.mean(0))
    channels = cifar.pixels("standardised", train, torch.float64)(train).view(300, 3, -1)
    zeros = torch.zeros(3, dtype=torch.float64)
    torch.testing.assert_close(channels.mean((0, 2)), zeros)
    torch.testing.assert_close(channels.var((0, 2), correction=0), zeros + 1)
    with pytest.raises(ValueError, match="pixels='raw'"):
        cifar.pixels("raw", train)
