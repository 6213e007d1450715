"""The demo as its users run it, on the digits and on tiny files in the formats of the others."""

import hashlib
import pickle
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("pytorch_lightning")
pytest.importorskip("sklearn")
import torchvision
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs go to runs/ of the current folder."""
    monkeypatch.chdir(tmp_path)


def demo(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["demo.py", "--max-epochs", "1", *arguments])
    runpy.run_path(str(DEMO), run_name="__main__")


def accuracies(text: str) -> tuple[float, float]:
    """Of the mended run, and of the one before."""
    ((mended, raw),) = re.findall(r"test accuracy ([\d.]+)% instead of ([\d.]+)%", text)
    return float(mended), float(raw)


def test_digits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    demo(monkeypatch)
    text = capsys.readouterr().out
    unwrapped = " ".join(text.split())
    assert "act: The entries of input 'input' have a standard deviation of 6" in unwrapped
    assert "→ standardise the inputs" in unwrapped, "what part three tries is what is advised"
    mended, raw = accuracies(text)
    assert mended > raw
    rows = re.findall(r"^(\w+, \w+) +(\d.*)$", text, flags=re.MULTILINE)
    cells = {name: row.replace("*", "").split() for name, row in rows}
    assert len(cells) == 12, "three layers of four runs"
    for name, (*_, scale, cv) in cells.items():
        if name.endswith("corrected"):
            assert float(scale) == 1
            assert float(cv) < 1e-6
    assert float(cells["input, raw"][-2]) > 50 * float(cells["input, mended"][-2]) > 0
    assert len(re.findall(r"^(?:standard|corrected): [\d.]+% ± ", text, flags=re.MULTILINE)) == 2
    ((folder,),) = [re.findall(r"tensorboard --logdir (\S+)", text)]
    kept = {path.name for path in Path(folder).iterdir()}
    assert kept == {"audit", "mended", "mended.html", "raw", "raw.html"}
    assert Path(folder, "audit", "report.html").exists()
    assert "trainer = Trainer(callbacks=[DivergenceCallback()])" in text
    assert "adiv-audit my_project.train:build --data my_project.train:batches" in text
    tags = EventAccumulator(str(Path(folder) / "raw")).Reload().Tags()
    assert {"loss", "adiv.update_ratio/net.input"} <= set(tags["scalars"])
    assert "adiv/overview" in tags["images"]


def colours(classes: int, per_class: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Noisy images, one mean brightness per class."""
    chance = np.random.default_rng(0)
    labels = np.repeat(np.arange(classes), per_class)
    noise = chance.integers(0, 50, (len(labels), side, side, 3))
    return (noise + labels[:, None, None, None] * 200 // classes).astype(np.uint8), labels


def test_cifar10(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """CIFAR-10's own files, two images per class; torchvision checks their md5 sums as ever."""
    folder = tmp_path / "data" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    images, labels = colours(10, per_class=2, side=32)
    batch = {
        "data": images.transpose(0, 3, 1, 2).reshape(len(images), 3072),
        "labels": labels.tolist(),
    }
    sums = {}
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"):
        content = pickle.dumps({"label_names": list("abcdefghij")} if "meta" in name else batch)
        (folder / name).write_bytes(content)
        sums[name] = hashlib.md5(content).hexdigest()
    dataset = torchvision.datasets.CIFAR10
    train = [[name, md5] for name, md5 in sums.items() if name.startswith("data")]
    monkeypatch.setattr(dataset, "train_list", train)
    monkeypatch.setattr(dataset, "test_list", [["test_batch", sums["test_batch"]]])
    monkeypatch.setattr(dataset, "meta", {**dataset.meta, "md5": sums["batches.meta"]})
    demo(monkeypatch, "--dataset", "cifar10", "--root", "data")
    accuracies(capsys.readouterr().out)


def pictures(root: Path, *classes: str) -> None:
    images, labels = colours(len(classes), per_class=4, side=40)
    for index, (image, label) in enumerate(zip(images, labels, strict=True)):
        folder = root / classes[label]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[: 40 - index]).save(folder / f"{index}.jpg")


def test_image_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for part in ("train", "test"):
        pictures(tmp_path / "pictures" / part, "cat", "dog", "emu")
    demo(monkeypatch, "--dataset", "imagefolder", "--root", "pictures", "--seed", "3")
    accuracies(capsys.readouterr().out)


def test_folders_must_hold_the_same_classes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pictures(tmp_path / "pictures" / "train", "cat", "dog")
    pictures(tmp_path / "pictures" / "test", "cat", "emu")
    with pytest.raises(SystemExit, match=r"'cat', 'dog'.*'cat', 'emu'"):
        demo(monkeypatch, "--dataset", "imagefolder", "--root", "pictures")


def test_a_dataset_of_files_needs_their_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        demo(monkeypatch, "--dataset", "cifar10")
    assert "--dataset cifar10 needs --root" in capsys.readouterr().err
