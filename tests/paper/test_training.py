"""Training goes on after a kill as if nothing had been."""

import json
from itertools import product, starmap
from pathlib import Path

import pytest
import torch
import training
from cifar import Data, synthetic
from ensemble import Network
from methods import METHODS
from training import Setting, runs, train

NETWORKS = tuple(starmap(Network, product(METHODS, ["tanh", "leaky"], [0, 1], [1e-3])))
SETTING = Setting(16, 4, 2, "unit", NETWORKS)
EPOCHS = 4


@pytest.fixture(scope="module")
def data() -> Data:
    return synthetic(train=72, test=40)


@pytest.fixture(autouse=True)
def checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "CHECKPOINT_EVERY", 2)


def without_times(folder: Path) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


class Killed(Exception):
    pass


@pytest.mark.parametrize("last", [1, 2, 3])
@pytest.mark.parametrize("torn", [False, True])
def test_results_do_not_depend_on_a_kill(
    last: int, torn: bool, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(SETTING, data, tmp_path / "whole", EPOCHS)

    def kill(epoch: int, seconds: float) -> None:
        if epoch == last:
            raise Killed

    with pytest.raises(Killed):
        train(SETTING, data, tmp_path / "killed", EPOCHS, tell=kill)
    if torn:  # in the middle of a line, and of a checkpoint
        with (tmp_path / "killed" / "results.jsonl").open("a") as file:
            file.write('{"epoch": 4, "test_acc')
        (tmp_path / "killed" / "checkpoint.new").write_bytes(b"PK")
    train(SETTING, data, tmp_path / "killed", EPOCHS)
    assert without_times(tmp_path / "killed") == without_times(tmp_path / "whole")
    states = [
        torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)["ensemble"]
        for name in ("whole", "killed")
    ]
    for whole, killed in zip(*(state["tensors"] for state in states), strict=True):
        assert torch.equal(whole, killed)
    assert states[0]["steps"] == states[1]["steps"] == EPOCHS * 5


def test_more_epochs_continue_fewer(data: Data, tmp_path: Path) -> None:
    train(SETTING, data, tmp_path / "whole", EPOCHS)
    train(SETTING, data, tmp_path / "longer", 3)
    train(SETTING, data, tmp_path / "longer", EPOCHS)
    assert without_times(tmp_path / "longer") == without_times(tmp_path / "whole")


def test_other_networks_or_images_do_not_go_on(data: Data, tmp_path: Path) -> None:
    train(SETTING, data, tmp_path, 1)
    with pytest.raises(ValueError, match="other networks"):
        train(SETTING._replace(networks=NETWORKS[:2]), data, tmp_path, 2)
    with pytest.raises(ValueError, match="other images"):
        train(SETTING, data._replace(train=255 - data.train), tmp_path, 2)


def test_networks_of_a_seed_do_not_depend_on_the_others(data: Data, tmp_path: Path) -> None:
    alone = SETTING._replace(networks=(Network("affine-like", "leaky", 1, 1e-3),))
    train(alone, data, tmp_path / "alone" / "a", 2)
    train(SETTING, data, tmp_path / "all" / "a", 2)
    (one,) = runs(tmp_path / "alone")
    keys = ("method", "activation", "seed")
    (same,) = (r for r in runs(tmp_path / "all") if all(r[k] == one[k] for k in keys))
    assert one["epoch"] == [1, 2] and "SYNTHETIC" in one["data"]
    # Sums are taken in another order in a larger product, so not bit by bit.
    assert one["test_accuracy"] == pytest.approx(same["test_accuracy"], abs=5)
