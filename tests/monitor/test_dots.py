"""Dot products of rows."""

import pytest
import torch

from adiv_monitor.maths import dots
from adiv_monitor.maths.sums import Vector, column_of, pairs_of


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
