"""torch's own attention reads the same as an equal model of separately called layers."""

import copy

import pytest
import torch
from adiv_layers import convert
from setups import EXACT, one_step
from torch import Tensor, nn

X = torch.linspace(-1, 1, 3 * 5 * 8, dtype=torch.float64).reshape(3, 5, 8).sin()
Y = torch.linspace(-2, 1, 3 * 4 * 8, dtype=torch.float64).reshape(3, 4, 8).cos()

KINDS = {
    "packed": {},
    "no bias": {"bias": False},
    "widths of their own": {"kdim": 6, "vdim": 5},
    "one more key": {"add_bias_kv": True},
}
NAMES = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out_proj": "out_proj"}


class Net(nn.Module):
    def __init__(self, kind: str, *, cross: bool, weights: bool) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **KINDS[kind])
        self.cross, self.weights = cross or "kdim" in KINDS[kind], weights

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        other = self.before(Y).tanh() if self.cross else x
        keys = other[..., : self.attention.kdim]
        values = other[..., : self.attention.vdim]
        attended, _ = self.attention(x, keys, values, need_weights=self.weights)
        return attended


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("weights", [False, True], ids=["fused", "with weights"])
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize("kind", KINDS)
def test_opened_into_layers_it_reads_the_same(kind: str, cross: bool, weights: bool) -> None:
    torch.manual_seed(1)
    model = Net(kind, cross=cross, weights=weights).double()
    opened = copy.deepcopy(model)
    convert(opened, "standard", attention=True)
    reports = [
        one_step(m, lambda m: m(X).square().sum().backward(), max_rows=None)
        for m in (model, opened)
    ]
    for report in reports:
        assert report.coverage == 1.0
        assert not report.unsupported
    for part, name in NAMES.items():
        found = reports[0].layers[f"attention.{part}"]
        expected = reports[1].layers[f"attention.{name}"]
        assert (found.kind, found.rows_total) == (expected.kind, expected.rows_total)
        assert found.measures() == pytest.approx(expected.measures(), **EXACT)
