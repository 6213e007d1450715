"""DistributedDataParallel: two ranks with half the batch each give one rank's gradients."""

import pytest
import torch
import torch.distributed as dist
from adiv_layers import (
    AffineLikeLinear,
    GradientOnlyConv2d,
    GradientOnlyLinear,
    NormLikeLinear,
    PatchNormConv2d,
)
from processes import meet, run_in
from torch import nn


def made():
    torch.manual_seed(0)
    model = nn.Sequential(
        *(PatchNormConv2d(2, 3, 3), nn.ReLU(), GradientOnlyConv2d(3, 2, 1), nn.Flatten()),
        *(AffineLikeLinear(32, 16), nn.ReLU(), NormLikeLinear(16, 3)),
        *(GradientOnlyLinear(3, 3), GradientOnlyLinear(3, 2, form="disproportional")),
    ).double()
    return model, torch.randn(6, 2, 6, 6, dtype=torch.float64)


def half(rank, folder):
    meet(rank, 2, folder)
    model, x = made()
    parallel = nn.parallel.DistributedDataParallel(model)
    parallel(x[3 * rank : 3 * rank + 3]).square().mean().backward()
    torch.save([p.grad for p in model.parameters()], f"{folder}/{rank}.pt")


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs the gloo backend")
def test_two_ranks_are_one(tmp_path):
    run_in(2, half, str(tmp_path))
    model, x = made()
    model(x).square().mean().backward()
    for rank in range(2):
        gradients = torch.load(tmp_path / f"{rank}.pt")
        for actual, parameter in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(actual, parameter.grad, rtol=1e-10, atol=1e-10)
