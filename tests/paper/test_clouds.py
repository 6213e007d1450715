"""Fig 1: where each map leaves the points of a plane."""

import math
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")

import clouds


def test_where_points_lie() -> None:
    x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    lengths = {method: clouds.treated(method, x).norm(dim=1) for method in clouds.MAPS}
    torch.testing.assert_close(lengths["norm-like"], torch.ones(50).double())
    root = torch.full((50,), math.sqrt(2)).double()
    torch.testing.assert_close(lengths["rmsnorm"], root, rtol=1e-4, atol=0)
    squares = x.square().sum(1)
    torch.testing.assert_close(lengths["affine-like"], (squares / (squares + 1)).sqrt())
    normalised = clouds.treated("layernorm", x)  # two clusters: only a sign is left
    torch.testing.assert_close(normalised[:, 0], -normalised[:, 1])
    batch = clouds.treated("batchnorm", x)
    torch.testing.assert_close(batch.mean(0), torch.zeros(2).double())


def test_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["clouds.py", "--out", str(tmp_path)])
    clouds.main()
    assert (tmp_path / "fig1.png").stat().st_size > 10_000
