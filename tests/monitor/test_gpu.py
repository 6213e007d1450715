"""On a GPU, a measured step with fused kernels reads the same as one with plain PyTorch."""

import warnings

import pytest
import torch
from fused_runs import alike, trained

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def _exact() -> object:
    """Make convolutions exact and deterministic."""
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield


@pytest.mark.parametrize("max_rows", [8, None])
def test_a_measured_step(max_rows: int | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a kernel that does not start warns
        reports, net = trained(True, device="cuda", max_rows=max_rows)
    expected, other = trained(False, device="cuda", max_rows=max_rows)
    unmonitored = trained(False, device="cuda", monitored=False)[1]
    for a, b, c in zip(*(m.parameters() for m in (net, other, unmonitored)), strict=True):
        assert torch.equal(a, b) and torch.equal(b, c)
    assert len(reports) == len(expected) == 2
    for mine, theirs in zip(reports, expected, strict=True):
        assert mine.layers.keys() == theirs.layers.keys()
        for path, reading in mine.layers.items():
            for name, value in vars(reading).items():
                assert alike(value, vars(theirs.layers[path])[name]), (path, name)
