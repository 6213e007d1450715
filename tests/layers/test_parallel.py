"""DistributedDataParallel: two ranks with half the batch each give one rank's gradients."""

import os
import subprocess
import sys

import pytest
import torch

# The model and the batch are source text, because every rank is a separate process.
SETTING = """
import torch
from adiv_layers import *
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    PatchNormConv2d(2, 3, 3), nn.ReLU(), GradientOnlyConv2d(3, 2, 1), nn.Flatten(),
    AffineLikeLinear(32, 16), nn.ReLU(), NormLikeLinear(16, 3),
    GradientOnlyLinear(3, 3), GradientOnlyLinear(3, 2, form="disproportional"),
).double()
x = torch.randn(6, 2, 6, 6, dtype=torch.float64)
"""
RANK = """
import os, sys
import torch.distributed as dist

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/meet", rank=rank, world_size=2)
parallel = nn.parallel.DistributedDataParallel(model)
parallel(x[3 * rank : 3 * rank + 3]).square().mean().backward()
if rank == 0:
    torch.save([p.grad for p in model.parameters()], f"{sys.argv[1]}/gradients")
dist.destroy_process_group()
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_two_ranks_are_one(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SETTING + RANK, str(tmp_path)],
            env={**environment, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=100)
            assert rank.returncode == 0, errors
    finally:
        for rank in ranks:
            rank.kill()
    scope = {}
    exec(SETTING, scope)
    scope["model"](scope["x"]).square().mean().backward()
    gradients = torch.load(tmp_path / "gradients")
    for actual, parameter in zip(gradients, scope["model"].parameters(), strict=True):
        torch.testing.assert_close(actual, parameter.grad, rtol=1e-10, atol=1e-10)
