"""Logits of attentions in the probe's pass: their values, their scale, what widths do to them."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

pytest.importorskip("scipy")

from logits import read_logits
from width import Experiment, described, measure_widths
from width_slopes import layer_widths

from adiv_monitor.alignment import Probe

X = torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    """Two heads; `how` the logits are made."""

    def __init__(self, width: int, how: str) -> None:
        super().__init__()
        self.how = how
        self.embed = nn.Linear(12, width)
        self.attend = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.attend(self.embed(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = heads
        if self.how == "fused":
            made = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            later = torch.ones(5, 5).triu(1) * -1e9
            made = ((q @ k.transpose(-2, -1)) / q.shape[-1] + later).softmax(-1) @ v
        return self.head(made.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("how", "power"), [("fused", 0.5), ("by hand", 1.0)])
def test_logits_are_products_times_their_scale(how: str, power: float) -> None:
    model = Attention(32, how)
    (found,) = read_logits(model, Probe(X)).values()
    q, k, _ = model.attend(model.embed(X)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    assert found.head_size == 16
    assert found.scale == pytest.approx(16**-power)
    torch.testing.assert_close(found.values, (q @ k.mT).detach() * 16**-power)


def test_the_coordinate_check_has_a_row_of_logits() -> None:
    """With heads that grow, 1/√d lets the change of logits grow where 1/d does not."""

    def build(how: str, width: int, seed: int) -> Experiment:
        torch.manual_seed(seed)
        model = Attention(width, how)

        def step() -> None:
            """All weights of queries and keys move along one direction, as Adam's do, by 1/n."""
            with torch.no_grad():
                model.attend.weight[: 2 * width] += model.attend.weight.new_ones(width) / width

        return Experiment(model, step, Probe(X))

    rows = {}
    for how in ("fused", "by hand"):
        runs = measure_widths(lambda *given, how=how: build(how, *given), (32, 128), steps=3)
        layers = layer_widths(runs)
        (rows[how],) = [layer for layer in layers if layer.path == "logits"]
        assert rows[how].note in described(layers)
    assert rows["fused"].note == "q·k/√d, d 16 to 64"
    assert rows["by hand"].note == "q·k/d, d 16 to 64"
    slopes = [rows[how].move.value for how in ("fused", "by hand")]
    assert slopes[0] - slopes[1] == pytest.approx(0.5, abs=1e-3)  # √d, the same runs otherwise
