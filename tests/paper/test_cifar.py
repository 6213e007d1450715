"""Images are the same bytes from wherever they come; nothing stands in for missing data."""

import tarfile
from pathlib import Path

import cifar
import numpy as np
import pytest
import torch

Image = pytest.importorskip("PIL.Image")

CLASSES = ("airplane", "bird")
SHADES = {"train": (10, 200, 90), "test": (30, 60)}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "adiv-monitor"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Images of one colour, shades in red only."""
    for part, shades in SHADES.items():
        for name in CLASSES:
            (tmp_path / "found" / part / name).mkdir(parents=True)
            for i, shade in enumerate(shades):
                image = np.zeros((32, 32, 3), np.uint8)
                image[..., 0] = shade
                file = tmp_path / "found" / part / name / f"{i:04}.png"
                Image.fromarray(image).save(file)
    return tmp_path / "found"


def check(data: cifar.Data) -> None:
    assert data.train.shape == (6, 3072) and data.test.shape == (4, 3072)
    assert data.train_labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.test_labels.tolist() == [0, 0, 1, 1]
    for part, shades in SHADES.items():
        images = getattr(data, part)
        assert images.dtype == torch.uint8
        assert images[:, :1024].unique(dim=1).flatten().tolist() == [*shades, *shades]
        assert not images[:, 1024:].any()


def test_folders_are_decoded_once(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(cifar.load(str(folder)))
    (kept,) = cache.glob("*.npz")
    monkeypatch.setattr(cifar, "_pixels_of", None)  # nothing is decoded any more
    check(cifar.load(str(folder)))
    check(cifar.load(str(kept)))
    assert cifar.load(str(kept)).source == "CIFAR-10 from found"


def test_archives_hold_the_same(folder: Path) -> None:
    with tarfile.open(folder.parent / "cifar10-images.tar.xz", "w:xz") as tar:
        tar.add(folder, "cifar10")
    check(cifar.load(str(folder.parent)))
    check(cifar.load(str(folder.parent / "cifar10-images.tar.xz")))


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
