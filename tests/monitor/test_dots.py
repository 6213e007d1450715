"""Tensors end to end in one buffer."""

import pytest
import torch

from adiv_monitor.maths import totals
from adiv_monitor.step import flat


@pytest.mark.parametrize("device", ["cpu", "any other"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_tensors_in_one_buffer_have_their_own_sums(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every length, one longer than what is multiplied at once; none of what lies between."""
    monkeypatch.setattr(flat, "_CHUNK", 128)
    if device != "cpu":  # where torch has no sums of segments
        monkeypatch.delattr(torch, "segment_reduce")
        monkeypatch.setattr(totals, "_WITH_SEGMENTS", ())
    a, b = (
        {i: torch.randn(n, 3, dtype=dtype).t() for i, n in enumerate((1, 400, 0, 70))}
        for _ in range(2)
    )
    b[1] = torch.randn(3, 400, dtype=dtype)  # of another order in memory
    one, other = flat.Flat(a), flat.Flat(a)
    one.apply(torch._foreach_copy_, a)
    other.apply(torch._foreach_copy_, b)
    for found, first, second in ((one.dots(one), a, a), (one.dots(other), a, b)):
        expected = [(first[i].double() * second[i].double()).sum() for i in one.keys]
        torch.testing.assert_close(
            torch.cat(found).double(), torch.stack(expected), rtol=1e-5, atol=1e-4
        )
    expected = torch.stack([a[i].double().sum() for i in one.keys])
    torch.testing.assert_close(one.sums()[0].double(), expected, rtol=1e-5, atol=1e-4)
