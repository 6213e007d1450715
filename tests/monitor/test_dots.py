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
        {i: torch.randn(n, 3, dtype=dtype).t() for i, n in enumerate((1, 0, 70, 400))}
        for _ in range(2)
    )
    one, other = flat.Flat(a), flat.Flat(b)
    for buffer, of in ((one, a), (other, b)):
        buffer.apply(torch._foreach_copy_, of)
    of_all = ((one.squares(), a, a), (one.dots(other), a, b))
    for found, first, second in of_all:
        expected = [(first[i].double() * second[i].double()).sum() for i in one.keys]
        torch.testing.assert_close(found[0].double(), torch.stack(expected), rtol=1e-5, atol=1e-4)
    expected = torch.stack([a[i].double().sum() for i in one.keys])
    torch.testing.assert_close(one.sums()[0].double(), expected, rtol=1e-5, atol=1e-4)
