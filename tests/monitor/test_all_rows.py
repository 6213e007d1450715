"""Sums over all rows: of layers that are alike together, each gets its own."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from adiv_monitor import Monitor
from adiv_monitor.maths import totals
from adiv_monitor.maths.records import leaves
from adiv_monitor.maths.sums import ScaleTotals, Totals
from adiv_monitor.maths.totals import MOST_ENTRIES, AllRows

ROWS = 50


def layer(seed: int, rows: int = ROWS, *, bias: float | None = 1.0) -> AllRows:
    """Some rows are idle; None: every row has a bias of its own."""
    random = torch.Generator().manual_seed(seed)

    def positive() -> Tensor:
        return torch.rand(rows, generator=random, dtype=torch.float64) + 0.1

    weight, square = positive(), positive()
    square[torch.rand(rows, generator=random) < 0.3] = 0
    return AllRows(weight, positive() if bias is None else bias, square)


def by_hand(rows: AllRows) -> Totals[float]:
    """As `Totals` says."""
    active = rows.square != 0
    scale, square = (rows.weight_square + rows.bias_square)[active], rows.square[active]
    return Totals(
        active=active.sum().item(),
        G_G=square.sum().item(),
        own_G=(scale * square).sum().item(),
        own_own=(scale**2 * square).sum().item(),
        scales=ScaleTotals(
            sum=scale.sum().item(),
            deviation=(scale - scale.mean()).square().sum().sqrt().item(),
            largest=scale.max().item(),
            entries=math.nan,
        ),
        weight_squares=rows.weight_square.sum().item(),
    )


@pytest.mark.parametrize("bias", [0.0, 2.5, None])
def test_every_layer_gets_its_own(bias: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = {str(seed): layer(seed, bias=bias) for seed in range(4)}
    layers["another"] = layer(9, 7, bias=bias)
    stacked: list[int] = []
    real = totals._of_stacked

    def counted(weight_square: Tensor, *rest: Tensor | float) -> Totals[Tensor]:
        stacked.append(len(weight_square))
        return real(weight_square, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(totals, "_of_stacked", counted)
    found = totals.sums(layers, np.random.default_rng(0))
    assert sorted(stacked) == [1, 4]  # where that fails, they are looked at one by one
    for path, rows in layers.items():
        expected = by_hand(rows)
        for (name, value), (other, told) in zip(leaves(expected), leaves(found[path]), strict=True):
            assert name == other
            if name != "scales.entries":
                assert told.shape == (1,)
                assert told.item() == pytest.approx(value, rel=1e-12), name
        scale = rows.weight_square + rows.bias_square
        entries = torch.where(rows.square != 0, scale, torch.nan)
        torch.testing.assert_close(found[path].scales.entries, entries, equal_nan=True)


def test_of_very_many_scales_some_are_told() -> None:
    """Other ones at every step, none of them twice."""
    rows = layer(0, 3 * MOST_ENTRIES)
    generator = np.random.default_rng(0)
    first, second = (
        totals.sums({"": rows}, generator)[""].scales.entries.nan_to_num(-1) for _ in range(2)
    )
    scale = torch.where(rows.square != 0, rows.weight_square + 1, -1)
    for entries in (first, second):
        active = entries[entries > 0]
        assert len(entries) == MOST_ENTRIES
        assert len(active.unique()) == len(active)
        assert torch.isin(active, scale).all()
        assert 0.25 < (entries < 0).double().mean() < 0.35
    assert not torch.equal(first, second)


def test_a_layer_whose_sums_fail_is_lost_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    real = totals._of_stacked

    def breaks(weight_square: Tensor, *rest: Tensor | float) -> Totals[Tensor]:
        if (weight_square == 0).any():  # a row of zeros, which only the first layer has
            raise RuntimeError("no sums")
        return real(weight_square, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(totals, "_of_stacked", breaks)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(3, 4)
    x[1] = 0
    with (
        Monitor(model, optimizer, max_rows=None) as monitor,
        pytest.warns(UserWarning, match="no sums"),
    ):
        model(x).square().sum().backward()
        optimizer.step()
    assert monitor.latest is not None
    assert monitor.latest.layers.keys() == {"1"}
    assert "no sums" in monitor.latest.unsupported["0"]
