"""Open questions: what is tuned and resumed, and what a transformer sees."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("scipy")
pytest.importorskip("matplotlib")

import text
import transformer
import tuned
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
