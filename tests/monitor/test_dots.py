"""Dot products of rows."""

import pytest
import torch

from adiv_monitor.maths import dots
from adiv_monitor.maths.sums import Vector, column_of, pairs_of
from adiv_monitor.step import flat


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_few_and_many_entries_are_rounded_alike(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer's readings must not depend on whether its vectors are multiplied together."""
    named = tuple(Vector)
    vectors = {vector: torch.randn(40, 301, dtype=dtype) for vector in named}
    vectors[Vector.BIAS] = vectors[Vector.D]  # a layer that trains its bias alone
    found = []
    for most in (0, vectors[Vector.G].numel()):
        monkeypatch.setattr(dots, "STACKED", most)
        found.append(dots.of_rows(vectors, pairs_of(named)))
    one, other = found
    assert torch.equal(one, other)
    for a, b in pairs_of(named):
        expected = (vectors[a].double() * vectors[b].double()).sum(1)
        column = one[:, column_of(pairs_of(named), a, b)].double()
        torch.testing.assert_close(column, expected, rtol=0, atol=1e-3)
    d, bias = Vector.D, Vector.BIAS
    assert torch.equal(
        one[:, column_of(pairs_of(named), d, d)], one[:, column_of(pairs_of(named), bias, bias)]
    )


@pytest.mark.parametrize("device", ["cpu", "any other"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_tensors_in_one_buffer_have_their_own_sums(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every length, one longer than what is multiplied at once; none of what lies between."""
    monkeypatch.setattr(flat, "_CHUNK", 128)
    if device != "cpu":  # where torch has no sums of segments
        monkeypatch.delattr(torch, "segment_reduce")
        monkeypatch.setattr(flat, "_WITH_SEGMENTS", ())
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
