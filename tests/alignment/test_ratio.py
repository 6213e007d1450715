"""The log-alignment ratio: exact values, its bound, and its meaning as an effective rank."""

import math

import pytest
import torch

from adiv_monitor.alignment import effective_rank, kappa, log_alignment

N = 64


def test_an_orthogonal_weight_of_any_size_knows_nothing_of_its_inputs() -> None:
    weight = 1e-9 * torch.linalg.qr(torch.randn(N, N, dtype=torch.float64))[0]
    assert log_alignment(weight, torch.randn(5, N).double()) == pytest.approx(0.5, abs=1e-9)


def test_nothing_that_comes_through_has_no_ratio() -> None:
    weight, z = torch.zeros(4, N), torch.zeros(2, N)
    weight[:, 0], z[:, 1] = 1, 1
    assert log_alignment(weight, z) is None
    assert log_alignment(weight, torch.zeros(2, N)) is None
    assert log_alignment(torch.zeros(4, N), z) is None
    assert kappa(None, N) is None
    assert effective_rank(None, N) is None


def drawn(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight and inputs of random sizes, with columns of very different lengths."""
    torch.manual_seed(seed)
    n, out, rows = (int(torch.randint(2, 40, ())) for _ in range(3))
    weight = torch.randn(out, n, dtype=torch.float64) * torch.rand(n) ** 4
    return weight, torch.randn(rows, n, dtype=torch.float64) * torch.rand(n) ** 4


@pytest.mark.parametrize("seed", range(20))
def test_it_is_never_above_one_and_says_an_effective_rank(seed: int) -> None:
    weight, z = drawn(seed)
    n = z.shape[1]
    found = log_alignment(weight, z)
    assert found <= 1 + 1e-12
    _, s, Vh = torch.linalg.svd(weight, full_matrices=False)
    p = s**2 / (s**2).sum()
    q = (z @ Vh.t()).square().mean(0) / z.square().sum(1).mean()
    assert found == pytest.approx(1 + 0.5 * math.log((p * q).sum(), n), abs=1e-9)
    rank = effective_rank(found, n)
    assert rank == pytest.approx(1 / float((p * q).sum()), rel=1e-9)
    assert kappa(found, n) == pytest.approx(1 / math.sqrt(rank), rel=1e-9)
