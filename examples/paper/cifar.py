"""CIFAR-10 as arrays of bytes, from wherever the user has it, decoded once.

`--data` names one of: an .npz that this module wrote; a folder with torchvision's copy
(`cifar-10-batches-py`; `--download` fetches it); images in folders, `train/<class>/*` and
`test/<class>/*`, unpacked or in a tar; or the word `synthetic`, which is no CIFAR-10 at all and
exists so that the code can be tried without data.
"""

import hashlib
import io
import os
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]
Read = Callable[[], Iterator[tuple[str, Bytes]]]
PIXELS = ("unit", "centred", "standardised")
IMAGES = {".jpg", ".jpeg", ".png"}


class Data(NamedTuple):
    """Images as rows of bytes (channel, height, width flattened) with labels.

    Attributes:
        train: (rows, features), uint8.
        train_labels: (rows,), int64.
        test: (rows, features), uint8.
        test_labels: (rows,), int64.
        source: what the data are, for the output.
    """

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    source: str

    def to(self, device: str) -> "Data":
        """The same on a device."""
        train, test = self.train.to(device), self.test.to(device)
        labels, test_labels = self.train_labels.to(device), self.test_labels.to(device)
        return Data(train, labels, test, test_labels, self.source)


class Pixels(NamedTuple):
    """What turns bytes into inputs: (byte − shift) · factor, both (features,)."""

    shift: Tensor
    factor: Tensor

    def to(self, device: str) -> "Pixels":
        """The same on a device."""
        return Pixels(self.shift.to(device), self.factor.to(device))

    def __call__(self, images: Tensor) -> Tensor:
        """Inputs (rows, features) of bytes (rows, features)."""
        return (images.to(self.shift.dtype) - self.shift) * self.factor


def pixels(name: str, train: Tensor, dtype: torch.dtype = torch.float32) -> Pixels:
    """The inputs that networks see, by name.

    Args:
        name: "unit": bytes / 255; "centred": that less the training mean of every pixel;
            "standardised": that less the mean of its channel, over the channel's deviation.
        train: training images, (rows, features) bytes; three channels, one after the other.
        dtype: of the inputs.

    Raises:
        ValueError: unknown name.
    """
    if name not in PIXELS:
        raise ValueError(f"pixels={name!r}; must be one of {PIXELS}.")
    features = train.shape[1]
    shift = torch.zeros(features, dtype=torch.float64)
    factor = torch.full((features,), 1 / 255, dtype=torch.float64)
    if name != "unit":
        # Sums of bytes and of their squares are exact in integers.
        shift = train.sum(0, dtype=torch.int64).double() / len(train)
    if name == "standardised":
        squares = torch.zeros(features, dtype=torch.int64)
        for block in torch.split(train, 5000):
            squares += block.int().square().sum(0)
        mean = shift.view(3, -1).mean(1)
        variance = squares.double().view(3, -1).mean(1) / len(train) - mean.square()
        shift = mean.repeat_interleave(features // 3)
        factor = variance.rsqrt().repeat_interleave(features // 3)
    return Pixels(shift.to(dtype), factor.to(dtype))


def load(place: str, *, download: bool = False) -> Data:
    """Read CIFAR-10, decoding images only the first time.

    Args:
        place: see the top of this file.
        download: fetch torchvision's copy into the folder first.

    Raises:
        FileNotFoundError: there is no CIFAR-10 at that place.
    """
    if place == "synthetic":
        return synthetic()
    path = Path(place)
    if download:
        from torchvision.datasets import CIFAR10  # type: ignore[import-untyped]

        CIFAR10(str(path), train=True, download=True)
    if path.suffix == ".npz":
        return _from_npz(path)
    found, read = _source(path)
    stamp = f"{found.resolve()} {found.stat().st_size} {found.stat().st_mtime_ns}"
    name = hashlib.sha256(stamp.encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    kept = cache / "adiv-monitor" / f"cifar10-{name}.npz"
    if not kept.exists():
        print(f"decoding {found} once, into {kept}", flush=True)
        _decode(read, kept, f"CIFAR-10 from {found.name}")
    return _from_npz(kept)


def synthetic(train: int = 2000, test: int = 500) -> Data:
    """Random images of ten classes, with lengths spread about as CIFAR-10's: not CIFAR-10."""
    random = np.random.default_rng(0)
    labels = random.integers(10, size=train + test)
    patterns = random.normal(size=(10, 3, 8, 8)).repeat(4, 2).repeat(4, 3)
    noise = random.normal(size=(train + test, 3, 8, 8)).repeat(4, 2).repeat(4, 3)
    light = random.normal(120, 30, size=(train + test, 1, 1, 1))
    images = (light + 15 * patterns[labels] + 45 * noise).clip(0, 255).astype(np.uint8)
    rows = torch.from_numpy(images.reshape(train + test, -1))
    classes = torch.from_numpy(labels)
    source = "SYNTHETIC images, not CIFAR-10: only to try the code"
    return Data(rows[:train], classes[:train], rows[train:], classes[train:], source)


def held_out(data: Data, count: int) -> Data:
    """The training images alone, some of which, always the same, are there to test on."""
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(1))
    rest, chosen = order[count:], order[:count]
    return Data(
        *(data.train[rest], data.train_labels[rest]),
        *(data.train[chosen], data.train_labels[chosen]),
        f"{data.source}; tested on {count} training images held out",
    )


def _from_npz(path: Path) -> Data:
    with np.load(path) as kept:
        names = ("train", "train_labels", "test", "test_labels")
        arrays = [torch.from_numpy(kept[name]) for name in names]
        source = str(kept["source"])
    train, train_labels, test, test_labels = arrays
    return Data(train, train_labels.long(), test, test_labels.long(), source)


def _source(path: Path) -> tuple[Path, Read]:
    """Where exactly the data lie below a path, and what reads them."""
    if (path / "cifar-10-batches-py").is_dir():
        return path / "cifar-10-batches-py", partial(_from_torchvision, path)
    if path.is_file() and ".tar" in path.name:
        return path, partial(_from_tar, path)
    for folder in (path, path / "cifar10"):
        if (folder / "train").is_dir() and (folder / "test").is_dir():
            return folder, partial(_from_folders, folder)
    archives = sorted(path.glob("cifar10*.tar*")) if path.is_dir() else []
    if len(archives) == 1:
        return archives[0], partial(_from_tar, archives[0])
    raise FileNotFoundError(
        f"{path}: no CIFAR-10 there. Give --data a folder for torchvision's copy with --download, "
        "a folder with train/<class>/ and test/<class>/ of images, a tar of such, or an .npz. "
        "--data synthetic tries the code without data."
    )


def _from_torchvision(path: Path) -> Iterator[tuple[str, Bytes]]:
    from torchvision.datasets import CIFAR10

    for part in ("train", "test"):
        found = CIFAR10(str(path), train=part == "train")
        for image, label in zip(found.data, found.targets, strict=True):
            yield f"{part}/{found.classes[label]}/", image


def _from_folders(folder: Path) -> Iterator[tuple[str, Bytes]]:
    for file in sorted(folder.glob("t*/*/*")):
        if file.suffix.lower() in IMAGES:
            yield file.relative_to(folder).as_posix(), _pixels_of(file.read_bytes())


def _from_tar(archive: Path) -> Iterator[tuple[str, Bytes]]:
    with tarfile.open(archive) as tar:
        for member in tar:
            file = tar.extractfile(member)
            if file is not None and Path(member.name).suffix.lower() in IMAGES:
                yield "/".join(Path(member.name).parts[-3:]), _pixels_of(file.read())


def _pixels_of(file: bytes) -> Bytes:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(file)).convert("RGB"), dtype=np.uint8)


def _decode(read: Read, to: Path, source: str) -> None:
    """Write all images as rows in the order of their names, classes numbered by the alphabet."""
    rows: dict[str, list[tuple[str, int, Bytes]]] = {"train": [], "test": []}
    for number, (name, image) in enumerate(read()):
        part, label, _ = name.split("/")
        rows[part].append((label, number, image.transpose(2, 0, 1).reshape(-1)))
    classes = sorted({label for label, _, _ in rows["train"]})
    arrays: dict[str, NDArray[Any]] = {"source": np.array(source)}
    for part, images in rows.items():
        arrays[part] = np.stack([image for _, _, image in images])
        arrays[f"{part}_labels"] = np.array([classes.index(label) for label, _, _ in images])
    to.parent.mkdir(parents=True, exist_ok=True)
    unfinished = to.with_name(f"{os.getpid()}-{to.name}")  # a name that np.savez leaves as it is
    np.savez(unfinished, **arrays)  # type: ignore[arg-type]  # the stubs know no such names
    unfinished.replace(to)
