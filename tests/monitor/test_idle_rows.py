"""Zero-gradient rows change no measure, and a sample of rows agrees with all rows.

On a perceptron, a convolutional network, a vision transformer and a causal language model with
padded sequences.
"""

import math

import pytest
import torch
from setups import trained
from torch import nn

from adiv_monitor import StepReport


@pytest.mark.parametrize("rows", [2, 20], ids=["fewer than features", "more than features"])
def test_without_active_rows_there_is_no_ceiling(rows: int) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    loss = lambda model: (0 * model(torch.randn(rows, 4))).sum()  # noqa: E731
    for reading in trained(model, loss, attainable=True)[0].layers.values():
        assert reading.idle_share == 1
        assert math.isnan(reading.attainable_cosine)


def test_few_active_rows_are_not_taken_for_certain() -> None:
    """With 4 of 2,048 rows active, most samples contain none or one of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 4)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.randn(2_048, 12, dtype=torch.float64)

    def reading_of(max_rows: int | None, seed: int = 0) -> StepReport:
        loss = lambda model: model(x)[:4].square().sum()  # noqa: E731
        return trained(model, loss, optimizer=optimizer, max_rows=max_rows, seed=seed)[0]

    truth = reading_of(None).layers["0"].measures()
    seen = set()
    for seed in range(40):
        report = reading_of(512, seed)
        reading = report.layers["0"]
        active = reading.rows_seen - reading.rows_without_gradient
        seen.add(min(active, 2))
        assert any("zero gradient, but" in note for note in report.notes) is (active == 0)
        for name in ("gradient_cosine", "interference_ratio", "common_share"):
            value, error = reading.measures()[name], reading.standard_error.get(name, 0.0)
            assert math.isnan(value) is (active == 0), name
            if active == 1:
                assert not math.isfinite(error), name
        for name in ("effective_lr", "diagonal_cosine", "idle_share", "scale_mean"):
            assert reading.measures()[name] == pytest.approx(truth[name], rel=1e-9), name
    assert seen == {0, 1, 2}
