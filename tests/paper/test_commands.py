"""Every command, as small as it can be: what it leaves, what it resumes, what it refuses."""

import importlib
import json
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("scipy")
pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

import alignments
import clouds
import convolutional
import depth
import fair
import normalisers
import optimizers
import patches
import resnet
import sweep
import text
import transformer
import widths
from cifar import synthetic


class Command(NamedTuple):
    """A script's options, how many runs it leaves, of how many synthetic images, and pictures."""

    options: tuple[str, ...]
    runs: int
    images: tuple[int, int] = (80, 20)
    pictures: tuple[str, ...] = ()


TWO = ("--methods", "affine-like", "standard", "--activations", "tanh")
DATA = ("--data", "synthetic")
FIGURES = tuple(f"fig{figure}" for figure in widths.FIGURES)
COMMANDS = {  # by the name of its files, of which the script's is the first part
    "table1": Command((*DATA, *TWO, "--epochs", "1"), 2 * 3 * 2),  # methods, batch sizes, seeds
    "fair": Command((*DATA, *TWO), 2 * 2, (640, 100)),  # methods, seeds
    "readings": Command((*DATA, *TWO), 2 * 2, (256, 50)),  # methods, batch sizes
    "convolutional-pooled": Command(DATA, len(convolutional.GRIDS)),
    "convolutional-strided": Command((*DATA, "--network", "strided"), len(convolutional.GRIDS)),
    # Methods × (widths × depths × activations of Figs 2, 3, 5, widths × activations of Fig 4).
    "widths": Command((*DATA, *TWO[:3]), 2 * (2 * 2 * 3 + 3 * 2), (256, 50), FIGURES),
    "optimizers": Command(DATA, len(optimizers.GRIDS)),
    "depth": Command(DATA, 2 * len(depth.KINDS)),
    "normalisers": Command(DATA, len(normalisers.GRIDS)),
    "transformer": Command(("--steps", "2"), len(transformer.GRIDS)),
    "patches": Command(DATA, len(patches.GRIDS)),
    "alignments": Command(
        (*DATA, "--steps", "2", "--widths", "16", "32"), len(alignments.grids((16, 32)))
    ),
    "constants": Command((*DATA, "--steps", "2", "--width", "32"), 4 * len(alignments.CONSTANTS)),
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("set_flush_denormal", "set_num_threads"):  # they would outlive this test
        monkeypatch.setattr(torch, name, lambda setting: None)
    monkeypatch.setattr(fair, "WIDENED", 1)
    monkeypatch.setattr(depth, "DEPTHS", (2, 3))
    monkeypatch.setattr(depth, "DEEP", 3)
    monkeypatch.setattr(depth, "GRIDS", {f"{k} {d}": range(1) for k in depth.KINDS for d in (2, 3)})


@pytest.mark.slow(one_in=9, first=1)
@pytest.mark.parametrize("name", COMMANDS)
def test_runs_a_page_and_a_picture(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "optimizers" and not hasattr(torch.optim, "Muon"):
        pytest.skip("Muon needs torch 2.9")
    script, out = importlib.import_module(name.split("-")[0]), tmp_path / "new" / "folder"
    of = COMMANDS[name]
    train, test = of.images
    monkeypatch.setattr("cifar.synthetic", lambda: synthetic(train=train, test=test))

    def command(*more: str) -> list[dict[str, Any]]:
        argv = [f"{name}.py", "--quick", *of.options, "--out", str(out), *more]
        monkeypatch.setattr(sys, "argv", argv)
        script.main()
        found: list[dict[str, Any]] = json.loads((out / f"{name}.json").read_text())
        return found

    if name == "constants":  # which goes on from these
        options = COMMANDS["alignments"].options
        monkeypatch.setattr(sys, "argv", ["", "--quick", *options, "--out", str(out)])
        alignments.main()
    found = command()
    assert len(found) == of.runs
    for run in found:
        accuracies = run.get("test_accuracy", [run.get("score")])
        assert all(each is None or math.isfinite(each) for each in accuracies)
    page = (out / f"{name}.md").read_text()
    assert "SYNTHETIC" in page or name == "transformer"
    for picture in of.pictures or (name,) * (name != "constants"):
        assert (out / f"{picture}.png").stat().st_size > 10_000
    if name != "widths":
        monkeypatch.setattr(torch.autograd, "grad", None)  # nothing is trained again
        monkeypatch.setattr(torch.Tensor, "backward", None)
        assert command("--resume") == found
        with pytest.raises(SystemExit):
            command()


@pytest.mark.slow
def test_the_picture_of_a_plane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["clouds.py", "--out", str(tmp_path)])
    clouds.main()
    assert (tmp_path / "fig1.png").stat().st_size > 10_000


@pytest.mark.parametrize("arm", transformer.GRIDS)
def test_a_transformer_sees_no_later_characters(arm: str) -> None:
    alone = transformer.model(arm, 0)
    pieces = torch.randint(text.VOCABULARY, (2, transformer.LENGTH))
    before = alone(pieces)
    pieces[:, 30:] = (pieces[:, 30:] + 1) % text.VOCABULARY
    after = alone(pieces)
    torch.testing.assert_close(after[:, :30], before[:, :30])
    assert not torch.allclose(after[:, 30:], before[:, 30:])


@pytest.mark.slow
@pytest.mark.parametrize("case", sweep.CASES)
def test_a_case_goes_on(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cifar.synthetic", lambda: synthetic(train=60, test=10))
    monkeypatch.setattr(resnet, "ROWS", 8)

    def command(*more: str) -> list[dict[str, Any]]:
        argv = ["sweep.py", case, "--quick", "--out", str(tmp_path), *more]
        monkeypatch.setattr(sys, "argv", argv)
        sweep.main()
        written = (tmp_path / f"{case}.jsonl").read_text()
        return [json.loads(line) for line in written.splitlines()]

    found = command()
    assert [run["arm"] for run in found[:2]] == ["baseline"] * 2
    page = (tmp_path / f"{case}.md").read_text()
    assert "**Stated before the run.**" in page and "## The audit" in page
    pictures = {file: file.read_bytes() for file in tmp_path.glob("*.png")}
    assert len(pictures) in (2, 3) and all(len(drawn) > 10_000 for drawn in pictures.values())
    monkeypatch.setattr(sweep, "train", None)  # nothing is trained again
    assert command("--resume") == found
    assert (tmp_path / f"{case}.md").read_text() == page
    with pytest.raises(SystemExit):
        command()
    with pytest.raises(SystemExit):
        command("--resume", "--steps", "1")
