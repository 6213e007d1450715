"""Sums over all rows, computed for similar layers together, are correct for each layer."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from adiv_monitor import Monitor
from adiv_monitor.features import whole
from adiv_monitor.features.functions.conv import Geometry, patch_squares, patches
from adiv_monitor.features.rows import Rows
from adiv_monitor.maths import totals
from adiv_monitor.maths.records import leaves
from adiv_monitor.maths.sums import Array, ScaleTotals, Totals
from adiv_monitor.maths.totals import MOST_ENTRIES, AllRows
from adiv_monitor.report import MEASURES, LayerReading
from adiv_monitor.step.parameter_steps import PieceNumbers
from adiv_monitor.step.rank_contribution import sums_by_piece

ROWS = 50


def layer(seed: int, rows: int = ROWS, *, bias: float | None = 1.0) -> AllRows:
    """Return a layer with zero-gradient rows; with None, every row has its own bias."""
    random = torch.Generator().manual_seed(seed)

    def positive() -> Tensor:
        return torch.rand(rows, generator=random, dtype=torch.float64) + 0.1

    weight, square = positive(), positive()
    square[torch.rand(rows, generator=random) < 0.3] = 0
    return AllRows(weight, positive() if bias is None else bias, square)


def by_hand(rows: AllRows) -> Totals[float]:
    """Compute the sums as `Totals` defines them."""
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
    found = totals.by_layer(totals.sums(layers, np.random.default_rng(0)))
    assert sorted(stacked) == [1, 4]  # after a failure, layers are summed one by one
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


def test_some_of_very_many_scales_are_kept() -> None:
    """Of very many scales a random sample is kept, another at every step, without repetitions."""
    rows = layer(0, 3 * MOST_ENTRIES)
    generator = np.random.default_rng(0)
    first, second = (
        totals.by_layer(totals.sums({"": rows}, generator))[""].scales.entries.nan_to_num(-1)
        for _ in range(2)
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
        if (weight_square == 0).any():  # a zero row, which only the first layer has
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


class Affine(nn.Module):
    """A gain of one number per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(6, 1, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x


PARTED = {
    "batch norm": lambda: nn.BatchNorm2d(6),
    "batch norm in evaluation": lambda: nn.BatchNorm2d(6).eval(),
    "batch norm without statistics": lambda: nn.BatchNorm2d(6, track_running_stats=False),
    "group norm": lambda: nn.GroupNorm(2, 6),
    "layer norm": lambda: nn.LayerNorm([5, 4]),
    "layer norm of samples": lambda: nn.LayerNorm([6, 5, 4]),
    "rms norm": lambda: nn.RMSNorm(4),
    "gain": Affine,
    "depthwise": lambda: nn.Conv2d(6, 12, (3, 2), (2, 1), padding=1, dilation=(1, 2), groups=6),
    "grouped": lambda: nn.Conv2d(6, 4, 3, groups=2, padding_mode="circular", padding=1),
}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", PARTED)
def test_all_rows_are_the_same_in_parts_and_at_once(
    name: str, channels_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read() -> LayerReading:
        torch.manual_seed(0)
        module = PARTED[name]().double()
        x = torch.randn(7, 6, 5, 4, dtype=torch.float64) * 3 + 100
        if channels_last:
            x = x.to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with Monitor(module, optimizer, max_rows=4) as monitor:
            z = module(x.requires_grad_())
            (z * torch.randn(z.shape, dtype=torch.float64)).sum().backward()
            optimizer.step()
        assert monitor.latest is not None
        (found,) = monitor.latest.layers.values()
        return found

    at_once = read()
    parts: list[int] = []
    real = torch.split

    def split(tensor: Tensor, size: int, dim: int = 0) -> tuple[Tensor, ...]:
        found = real(tensor, size, dim)
        parts.append(len(found))
        return found

    monkeypatch.setattr(whole, "CHUNK", 40)
    monkeypatch.setattr(torch, "split", split)
    in_parts = read()
    assert max(parts) == 7
    read_of = {measure: getattr(at_once, measure) for measure in MEASURES}
    known = {measure: value for measure, value in read_of.items() if value is not None}
    assert {"update_cosine", "diagonal_cosine", "scale_mean"} <= known.keys()
    for measure, expected in known.items():
        value = getattr(in_parts, measure)
        assert value == pytest.approx(expected, rel=1e-9, abs=1e-12, nan_ok=True), measure


GROUPED = {
    "depthwise": Geometry((3, 2), (2, 1), ((1, 1), (1, 1)), (1, 2), 6, 1),
    "uneven padding": Geometry((2, 2), (1, 1), ((0, 1), (0, 1)), (1, 1), 2, 3),
    "circular": Geometry((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 3, 2, mode="circular"),
    "transposed": Geometry((3, 3), (1, 1), ((2, 2), (1, 2)), (1, 1), 6, 1, spacing=(2, 2)),
    "one dimension": Geometry((3,), (2,), ((1, 1),), (1,), 3, 2),
    "reflected": Geometry((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 3, 2, mode="reflect"),
    "cropped": Geometry((2, 2), (1, 1), ((-1, 1), (0, -1)), (1, 1), 6, 1),
    "three dimensions": Geometry((3, 2, 1), (1, 1, 1), ((1, 1), (0, 0), (0, 0)), (1, 1, 1), 2, 3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", GROUPED)
def test_scales_are_the_squares_of_patches(name: str, dtype: torch.dtype) -> None:
    geometry = GROUPED[name]
    x = torch.randn(5, 6, *(5, 4, 3)[: geometry.dims], dtype=dtype)
    found = patch_squares(geometry, x)
    every = patches(geometry, Rows(tuple(found.shape[:-1])), x)  # (rows, groups, entries)
    torch.testing.assert_close(found.flatten(0, -2), every.square().sum(-1), rtol=1e-5, atol=1e-5)
    strided = (
        x.to(memory_format=torch.channels_last) if geometry.dims == 2 else x.mT.contiguous().mT
    )
    torch.testing.assert_close(patch_squares(geometry, strided), found, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(patch_squares(geometry, x[0]), found[:1], rtol=1e-5, atol=1e-5)
    assert patch_squares(geometry, x[:0]).shape == (0, *found.shape[1:])


def test_scales_of_all_rows_keep_their_precision_where_backward_runs_under_autocast() -> None:
    def read(*, within: bool) -> LayerReading:
        torch.manual_seed(0)
        module = nn.Conv2d(6, 12, 3, padding=1, groups=6)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with Monitor(module, optimizer, max_rows=4) as monitor:
            loss = (module(torch.randn(7, 6, 5, 4) + 3) * torch.randn(7, 12, 5, 4)).sum()
            with torch.autocast("cpu", torch.bfloat16, enabled=within):
                loss.backward()
            optimizer.step()
        assert monitor.latest is not None
        (found,) = monitor.latest.layers.values()
        return found

    outside, within = read(within=False), read(within=True)
    assert outside.update_cosine is not None
    for measure in MEASURES:
        assert getattr(within, measure) == getattr(outside, measure), measure


def test_products_of_small_pieces_are_summed_each_by_itself() -> None:
    """Concatenated pieces, on two devices, some empty, and large pieces have their own sums."""
    first, second = np.arange(6.0), np.array([7.0, 8.0])
    places = {
        10: (-1, slice(0, 0)),
        11: (-1, slice(0, 4)),
        12: (-1, slice(4, 4)),
        13: (-1, slice(4, 6)),
        14: (-1, slice(6, 6)),
        20: (-2, slice(0, 2)),
    }
    products: PieceNumbers[Array] = PieceNumbers()
    products.w_w.update({-1: first, -2: second, 30: np.array([1.0, 2.0])})
    found = sums_by_piece(products, places)
    assert found.w_w == {10: 0, 11: 6, 12: 0, 13: 9, 14: 0, 20: 15, 30: 3}
    assert found.gamma_gamma == {}
