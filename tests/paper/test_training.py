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


@pytest.mark.slow(one_in=3, first=2)
@pytest.mark.parametrize(("last", "torn"), [(1, False), (2, True), (3, True)])
def test_results_do_not_depend_on_a_kill(
    last: int, torn: bool, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(SETTING, data, tmp_path / "whole", EPOCHS)

    def kill(epoch: int, seconds: float) -> None:
        if epoch == last:
            raise Killed

    with pytest.raises(Killed):
        train(SETTING, data, tmp_path / "apart/killed", EPOCHS, tell=kill)
    if torn:  # in the middle of a line, and of a checkpoint
        with (tmp_path / "apart/killed" / "results.jsonl").open("a") as file:
            file.write('{"epoch": 4, "test_acc')
        (tmp_path / "apart/killed" / "checkpoint.new").write_bytes(b"PK")
    shown = runs(tmp_path / "apart")  # of the killed one, what it has written whole
    assert {len(run["epoch"]) for run in shown} == {last}
    train(SETTING, data, tmp_path / "apart/killed", EPOCHS)
    assert without_times(tmp_path / "apart/killed") == without_times(tmp_path / "whole")
    states = [
        torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)["ensemble"]
        for name in ("whole", "apart/killed")
    ]
    for whole, killed in zip(*(state["tensors"] for state in states), strict=True):
        assert torch.equal(whole, killed)
    assert states[0]["steps"] == states[1]["steps"] == EPOCHS * 5


def test_other_networks_or_images_do_not_go_on(data: Data, tmp_path: Path) -> None:
    train(SETTING, data, tmp_path, 1)
    with pytest.raises(ValueError, match="other networks"):
        train(SETTING._replace(networks=NETWORKS[:2]), data, tmp_path, 2)
    with pytest.raises(ValueError, match="other images"):
        train(SETTING, data._replace(train=255 - data.train), tmp_path, 2)
