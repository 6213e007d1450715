"""Sums over all rows, computed for similar layers together, are correct for each layer."""

import pytest
import torch
from torch import Tensor, nn

from adiv_monitor import Monitor
from adiv_monitor.features.functions.conv import Geometry, patch_squares, patches
from adiv_monitor.features.rows import Rows, Whole
from adiv_monitor.maths import totals
from adiv_monitor.maths.totals import AllRows
from adiv_monitor.report import MEASURES, LayerReading

ROWS = 50


def layer(seed: int, rows: int = ROWS, *, bias: float | None = 1.0) -> AllRows:
    """Return a layer with zero-gradient rows; with None, every row has its own bias."""
    random = torch.Generator().manual_seed(seed)

    def positive() -> Tensor:
        return torch.rand(rows, generator=random, dtype=torch.float64) + 0.1

    weight, gradient = positive(), positive()
    gradient[torch.rand(rows, generator=random) < 0.3] = 0
    return gradient, Whole(weight, positive() if bias is None else bias)


def scale_of(rows: AllRows) -> Tensor:
    assert rows[1] is not None
    return rows[1].norm ** 2 + rows[1].bias_square


def by_hand(rows: AllRows) -> dict[str, float]:
    """Compute the sums as `StepSums` defines them."""
    square = rows[0] ** 2
    found = {
        "active": (square != 0).sum().item(),
        "G_G": square.sum().item(),
        "concentration": ((square**2).sum() / square.sum() ** 2).item(),
    }
    if rows[1] is None:
        return found
    scale, square = scale_of(rows)[square != 0], square[square != 0]
    return {
        **found,
        "own_G": (scale * square).sum().item(),
        "own_own": (scale**2 * square).sum().item(),
        "scale_sum": scale.sum().item(),
        "scale_off": (scale - scale.mean()).square().sum().sqrt().item(),
        "scale_max": scale.max().item(),
    }


@pytest.mark.parametrize("bias", [0.0, 2.5, None])
def test_every_layer_gets_its_own(bias: float | None) -> None:
    layers = {str(seed): layer(seed, bias=bias) for seed in range(3)}
    layers["without scales"] = layer(8, 11)[0], None
    layers["another"] = layer(9, 7, bias=bias)
    calls = {path: [rows] for path, rows in layers.items()}
    several = list(totals.sums(calls))
    assert [of.paths for of in several] == [["0", "1", "2", "another"], ["without scales"]]
    for found in several:
        for i, path in enumerate(found.paths):
            rows, numbers = layers[path], {name: of[i].item() for name, of in found.columns.items()}
            assert numbers == pytest.approx(by_hand(rows))
            assert found.knows_scales == (rows[1] is not None)


GEOMETRIES = {
    "dilated": Geometry((3, 2), (2, 1), ((1, 1), (1, 1)), (1, 2), 1, 6),
    "uneven padding": Geometry((2, 2), (1, 1), ((0, 1), (0, 1)), (1, 1), 1, 6),
    "transposed": Geometry((3, 3), (1, 1), ((2, 2), (1, 2)), (1, 1), 1, 6, spacing=(2, 2)),
    "one dimension": Geometry((3,), (2,), ((1, 1),), (1,), 1, 6),
    "cropped": Geometry((2, 2), (1, 1), ((-1, 1), (0, -1)), (1, 1), 1, 6),
    "three dimensions": Geometry((3, 2, 1), (1, 1, 1), ((1, 1), (0, 0), (0, 0)), (1, 1, 1), 1, 6),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_scales_are_the_squares_of_patches(name: str, dtype: torch.dtype) -> None:
    geometry = GEOMETRIES[name]
    x = torch.randn(5, 6, *(5, 4, 3)[: len(geometry.kernel)], dtype=dtype)
    found = patch_squares(geometry, x)
    every = patches(geometry, x, Rows(tuple(found.shape)))  # (rows, 1, entries)
    torch.testing.assert_close(found.flatten(), every.square().sum((1, 2)), rtol=1e-5, atol=1e-5)
    strided = x.to(memory_format=torch.channels_last) if x.dim() == 4 else x.mT.contiguous().mT
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
