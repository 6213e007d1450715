"""Cases: what is trained, resumed and taken of the audit's advice, and every command, small."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

import gpt
import resnet
import sweep
from case import Case, Part
from case_report import best_rate, difference, verdict
from cifar import synthetic


def small(trained: list[float]) -> Case:
    """A line through two points, whose steps are noted."""

    def part(seed: int) -> Part:
        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            while True:
                yield torch.tensor([[1.0], [2.0]]), torch.tensor([[2.0], [4.0]]) + seed

        def error(model: nn.Module) -> float:
            batch = next(batches())
            return float((model(batch[0]) - batch[1]).square().mean())

        return Part(batches, lambda model: -error(model), error)

    def optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
        trained.append(lr)
        return torch.optim.SGD(model.parameters(), lr)

    return Case(
        *("Small", "A line.", "two points", "Nothing.", "error", False, (0.01, 0.1, 100.0), 30),
        model=lambda: nn.Linear(1, 1),
        optimizer=optimizer,
        scheduler=lambda optimizer, steps: torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 10),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        part=part,
    )


def test_a_run_is_a_plain_loop(tmp_path: Path) -> None:
    case = small([])
    run = sweep.train(case, sweep.nothing, 0.1, 1)
    torch.manual_seed(1)
    alone = nn.Linear(1, 1)
    sgd = torch.optim.SGD(alone.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(sgd, 0.5, 10)
    x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [5.0]])
    losses = []
    for _ in range(30):
        sgd.zero_grad()
        loss = (alone(x) - y).square().mean()
        losses.append(loss.item())
        loss.backward()
        sgd.step()
        scheduler.step()
    assert run["result"] == float((alone(x) - y).square().mean().detach()) == -run["score"]
    assert run["losses"] == pytest.approx(losses, rel=1e-3)
    watched = sweep.train(case, sweep.nothing, 0.1, 1, tmp_path / "seen.png")
    assert watched == run and (tmp_path / "seen.png").stat().st_size > 1000
    lost = sweep.train(case, sweep.nothing, 1e30, 1)
    assert lost["score"] is lost["result"] is None


def test_runs_are_swept_once(tmp_path: Path) -> None:
    trained: list[float] = []
    case, file = small(trained), tmp_path / "small.jsonl"
    plain = sweep.Sweep(case, 2, file, "cpu")
    runs = plain.all_runs("baseline", sweep.nothing)
    assert trained == [0.01, 0.01, 0.1, 0.1, 100.0, 100.0]
    assert [run["result"] is None for run in runs] == [False] * 4 + [True] * 2
    assert best_rate(runs, "baseline") == 0.1  # 100 has no score
    written = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*written[:3], written[3][:20]]))  # killed while it wrote
    trained.clear()
    assert plain.all_runs("baseline", sweep.nothing) == runs
    assert trained == [0.1, 100.0, 100.0] and file.read_text() == "".join(written)
    better = [{**run, "arm": "advised", "result": 0.5 + run["seed"]} for run in runs[:4]]
    best = {run["seed"]: run["result"] for run in runs if run["learning_rate"] == 0.1}
    assert difference([*runs, *better]) == [0.5 - best[0], 1.5 - best[1]]


def test_runs_of_another_kind_are_not_taken(tmp_path: Path) -> None:
    """Other data, another device, other advice: their results would be compared with ours."""
    case, file = small([]), tmp_path / "small.jsonl"
    ours = sweep.Sweep(case, 1, file, "cpu")
    ours.all_runs("baseline", sweep.nothing)
    runs = ours.all_runs("advised", sweep.nothing, advice="clip at 1")
    assert ours.all_runs("advised", sweep.nothing, advice="clip at 1") == runs
    with pytest.raises(sweep.OtherRuns, match="advice: 'clip at 1', expected 'standardise'"):
        ours.all_runs("advised", sweep.nothing, advice="standardise")
    with pytest.raises(sweep.OtherRuns, match="device: 'cpu', expected 'cuda'"):
        sweep.Sweep(case, 1, file, "cuda").all_runs("baseline", sweep.nothing)
    with pytest.raises(sweep.OtherRuns, match="steps: 30, expected 31"):
        sweep.Sweep(case._replace(steps=31), 1, file, "cpu").all_runs("baseline", sweep.nothing)


def test_a_verdict_needs_two_standard_errors() -> None:
    assert verdict([1.0, 3.0, 2.0], higher=True) == "2.000 ± 0.577, p = 0.074: better"
    assert verdict([1.0, 3.0, 2.0], higher=False).endswith(": worse")
    assert verdict([1.0, 3.0, -1.0], higher=True).endswith(
        ": no difference beyond two standard errors"
    )
    assert verdict([-9.0], higher=False) == "−9.000, of one seed, which says nothing about chance"


def test_a_residual_network_of_twenty_layers() -> None:
    layers = [m for m in resnet.model().modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    assert len(layers) == 20
    assert sum(p.numel() for p in resnet.model().parameters()) == 269_722  # He et al.: 0.27 M


def test_a_gpt_of_seven_million_parameters_looks_back_only() -> None:
    with torch.device("meta"):
        assert 5e6 < sum(p.numel() for p in gpt.GPT().parameters()) < 10e6
    alone = gpt.GPT(24, 1)
    pieces = torch.randint(96, (2, gpt.LENGTH))
    before = alone(pieces)
    pieces[:, 50:] = (pieces[:, 50:] + 1) % 96
    torch.testing.assert_close(alone(pieces)[:, :50], before[:, :50])


@pytest.mark.slow
@pytest.mark.parametrize("case", sweep.CASES)
def test_the_commands(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda setting: None)
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
