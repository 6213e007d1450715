"""Figs 2 to 5: which networks they need, and the command as small as it can be."""

import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("scipy")
pytest.importorskip("matplotlib")

import widths
from cifar import synthetic
from widths_report import accuracies, text


@pytest.mark.slow
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("set_flush_denormal", "set_num_threads"):  # they would outlive this test
        monkeypatch.setattr(torch, name, lambda setting: None)
    monkeypatch.setattr("cifar.synthetic", lambda: synthetic(train=256, test=50))
    where = ["--data", "synthetic", "--out", str(tmp_path), "--methods", "standard", "affine-like"]
    monkeypatch.setattr(sys, "argv", ["widths.py", "--quick", *where])
    widths.main()
    runs = json.loads((tmp_path / "widths.json").read_text())
    # Methods × (widths × depths × activations of Figs 2, 3, 5, and widths × activations of Fig 4).
    assert len(runs) == 2 * (2 * 2 * 3 + 3 * 2)
    for figure in widths.FIGURES:
        assert (tmp_path / f"fig{figure}.png").stat().st_size > 10_000
    page = (tmp_path / "widths.md").read_text()
    assert "SYNTHETIC" in page and "| map | 1 × 16 | 1 × 64 | 3 × 16 | 3 × 64 |" in page
    assert page == text(runs, 2)
    assert "| map | 2 × 1 | 2 × 8 | 2 × 64 |" in page
    assert page.count("## Fig 4") == 2 and page.count("## Fig") == 5
    standard = accuracies(run for run in runs if run["activation"] == "tanh")["standard"]
    assert set(standard) == {(1, 16), (1, 64), (3, 16), (3, 64), (2, 1), (2, 8), (2, 64)}
