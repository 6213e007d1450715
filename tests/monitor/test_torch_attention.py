"""torch's own attention reads the same as an equal model of separately called layers."""

import copy
from contextlib import nullcontext

import pytest
import torch
from adiv_layers import convert
from setups import EXACT, one_step
from torch import Tensor, nn

from adiv_monitor import Monitor

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


@pytest.mark.parametrize(
    "way",
    [
        "float32",
        "channels_last",
        "autocast",
        "device context",
        pytest.param("compiled", marks=pytest.mark.slow),
    ],
)
def test_the_run_is_the_same_to_the_last_bit(way: str) -> None:
    class Picture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU())
            self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
            self.token = nn.Parameter(torch.randn(1, 1, 8))

        def forward(self, x: Tensor) -> Tensor:
            tokens = self.stem(x).flatten(2).mT
            tokens = torch.cat([self.token.expand(len(x), -1, -1), tokens], 1)
            return self.block(tokens)[:, 0]

    def train(monitored: bool) -> list[Tensor]:
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = Picture()
        x = torch.randn(4, 3, 9, 9)
        if way == "channels_last":
            model = model.to(memory_format=torch.channels_last)
            x = x.to(memory_format=torch.channels_last)
        call = torch.compile(model, backend="eager") if way == "compiled" else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        monitor = Monitor(model, optimizer, every_n_steps=2, on_error="raise")
        if monitored:
            monitor.attach()
        else:
            monitor.close()
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            with (
                torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"),
                torch.device("cpu") if way == "device context" else nullcontext(),
            ):
                loss = call(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        monitor.close()
        if monitored:
            assert all(report.coverage == 1.0 for report in monitor.reports)
        return [*losses, *model.state_dict().values(), torch.get_rng_state()]

    for a, b in zip(train(False), train(True), strict=True):
        assert torch.equal(a, b)
