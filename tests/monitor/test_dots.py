"""Tensors end to end in one buffer."""

import pytest
import torch
from torch import Tensor

from adiv_monitor.maths import totals
from adiv_monitor.step import flat


@pytest.mark.parametrize("device", ["cpu", "any other"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("most", [128, 384, 2**18])
def test_tensors_in_one_buffer_have_their_own_sums(
    device: str, dtype: torch.dtype, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every length, whole and in chunks; none of what lies between."""
    monkeypatch.setattr(flat, "CACHED", most)
    if device != "cpu":  # where torch has no sums of segments
        monkeypatch.delattr(torch, "segment_reduce")
        monkeypatch.setattr(totals, "_WITH_SEGMENTS", ())
    a, b = (
        {i: torch.randn(n, 3, dtype=dtype).t() for i, n in enumerate((0, 1, 400, 0, 70))}
        for _ in range(2)
    )
    b[2] = torch.randn(3, 400, dtype=dtype)  # of another order in memory
    b[4] = torch.randn(3, 140, dtype=dtype)[:, ::2]

    def terms(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        found = (x.double() * y.double()).sum(1)
        return found, x.add_(y).double().sum(1)

    for other in (b, flat.Flat(a).copy(b)):
        one = flat.Flat(a).copy(a)
        found = one.sums(("dot", "sum"), terms, other)
        dots = [(a[i].double() * b[i].double()).sum() for i in one.keys]
        sums = [(a[i] + b[i]).double().sum() for i in one.keys]
        for name, expected in (("dot", dots), ("sum", sums)):
            torch.testing.assert_close(torch.cat(found[name]), torch.stack(expected))
        for i in one.keys:
            assert torch.equal(one.views[i], a[i] + b[i])
