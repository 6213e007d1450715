"""Open questions: what is tuned and resumed, what is claimed of runs, and every command, small."""

import argparse
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("scipy")
pytest.importorskip("matplotlib")

import depth
import optimizers
import patches
import text
import transformer
import tuned
from cifar import synthetic
from tuned_report import best_rate

KNOWN = {"data": "none", "steps": 7}


def run(arm: str, rate: float, seed: int, score: float | None) -> dict[str, Any]:
    readings = {"step": [0, 1], "scale_cv": [[1.0, None], [3.0, 5.0]]}
    return {
        "arm": arm,
        "learning_rate": rate,
        "seed": seed,
        **KNOWN,
        **readings,
        "score": score,
        "result": None if score is None else score + seed,
    }


def test_every_arm_is_tuned_and_its_best_trained_with_more_seeds(tmp_path: Path) -> None:
    trained: list[tuple[str, float, int]] = []

    def train(trial: tuned.Trial) -> dict[str, Any]:
        trained.append(tuple(trial))
        peak = {"a": 0.1, "b": 10.0}[trial.arm]
        lost = trial.learning_rate > peak
        return run(*trial, None if lost else trial.learning_rate)

    file = tmp_path / "deep" / "q.json"
    grids = {"a": range(-4, 0), "b": range(-1, 1)}
    tuning = tuned.Tuning(file, grids, KNOWN, train)
    tuning.run(seeds=2)
    # b's best lies on the edge until a half decade beyond 10 diverges.
    assert [t[:2] for t in trained if t[2] == 0] == [
        *(("a", rate) for rate in (0.01, 0.03, 0.1, 0.3)),
        *(("b", rate) for rate in (0.3, 1.0, 3.0, 10.0, 30.0)),
    ]
    assert [t for t in trained if t[2]] == [("a", 0.1, 1), ("b", 10.0, 1)]
    kept = json.loads(file.read_text())
    assert kept == tuning.runs and best_rate(kept, "b") == 10.0

    # Killed after five runs, the rest follows, and only the rest.
    file.write_text(json.dumps(kept[:5]))
    trained.clear()
    again = tuned.Tuning(file, grids, KNOWN, train)
    again.run(seeds=2)
    assert again.runs == kept and len(trained) == len(kept) - 5
    parser = argparse.ArgumentParser()
    again.check(parser, resume=True)
    with pytest.raises(SystemExit):
        again.check(parser, resume=False)
    with pytest.raises(SystemExit):
        tuned.Tuning(file, grids, {**KNOWN, "data": "other"}, train).check(parser, resume=True)


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
@pytest.mark.parametrize("question", [optimizers, depth, transformer, patches])
def test_the_commands(
    question: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("set_flush_denormal", "set_num_threads"):  # they would outlive this test
        monkeypatch.setattr(torch, name, lambda setting: None)
    monkeypatch.setattr("cifar.synthetic", lambda: synthetic(train=80, test=20))
    monkeypatch.setattr(depth, "DEPTHS", (2, 3))
    monkeypatch.setattr(depth, "DEEP", 3)
    monkeypatch.setattr(depth, "GRIDS", {f"{k} {d}": range(1) for k in depth.KINDS for d in (2, 3)})
    if question is optimizers and not hasattr(torch.optim, "Muon"):
        pytest.skip("Muon needs torch 2.9")
    name = question.__name__
    where = ["--quick", "--out", str(tmp_path)]
    where += ["--steps", "2"] if question is transformer else ["--data", "synthetic"]

    def command(*more: str) -> list[dict[str, Any]]:
        monkeypatch.setattr(sys, "argv", [name, *where, *more])
        question.main()
        found: list[dict[str, Any]] = json.loads((tmp_path / f"{name}.json").read_text())
        return found

    found = command()
    assert [r["arm"] for r in found] == list(question.GRIDS)
    assert all(r["score"] is None or math.isfinite(r["score"]) for r in found)
    written = (tmp_path / f"{name}.md").read_text()
    assert written.startswith(f"# {question.QUESTION.title}")
    assert all(f"| {claim.stated} |" in written for claim in question.QUESTION.claims)
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    assert command("--resume") == found
    with pytest.raises(SystemExit):
        command()
