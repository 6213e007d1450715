"""Every row of a step is sampled with the same probability, however its calls divide it."""

from collections.abc import Callable

import pytest
import torch
from setups import trained
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from adiv_monitor import Monitor
from adiv_monitor.features.features import DenseFeatures
from adiv_monitor.step import vectors


def twenty_calls(model: nn.Module, x: Tensor) -> None:
    sum(model(part).square().sum() for part in x.split(2)).backward()


def micro_batches(model: nn.Module, x: Tensor) -> None:
    for part in (x[:25], x[25:26], x[26:]):
        model(part).square().sum().backward()


def checkpointed(model: nn.Module, x: Tensor) -> None:
    for reentrant, part in ((False, x[:30]), (True, x[30:])):
        part = part.clone().requires_grad_()
        checkpoint(model, part, use_reentrant=reentrant).square().sum().backward()


@pytest.mark.slow(one_in=4, first=1)
@pytest.mark.parametrize("backward", [twenty_calls, micro_batches, checkpointed])
def test_rows_of_a_step_are_even(
    backward: Callable[[nn.Module, Tensor], None], whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 10 of 40 rows sampled, each is in a quarter of the draws."""
    model = nn.Linear(2, 2).double()
    x = torch.arange(40, dtype=torch.float64)[:, None] + torch.tensor([1.0, 0.5]).double()
    seen: list[Tensor] = []
    original = vectors.Family

    def spy(layers: list[vectors.LayerInProgress]) -> vectors.Family:
        features = layers[0].features
        assert isinstance(features, DenseFeatures) and features.phi is not None
        seen.append(features.phi[:, 0, 0] - 1)
        return original(layers)

    monkeypatch.setattr(vectors, "Family", spy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    repeats = 60 if whole else 30
    with Monitor(model, optimizer, every_n_steps=1, max_rows=10, on_error="raise") as monitor:
        for _ in range(repeats):
            optimizer.zero_grad()
            backward(model, x)
            optimizer.step()
    reading = monitor.latest.layers[""]
    assert (reading.rows_seen, reading.rows_total) == (10, 40)
    counts = torch.stack([torch.bincount(rows.long(), minlength=40) for rows in seen]).sum(0)
    assert counts.sum() == 10 * repeats
    # χ² with 39 degrees of freedom: at most five standard deviations above the mean.
    assert (counts - repeats / 4).square().sum() / (repeats * 3 / 16) < 40 + 5 * 78**0.5


def test_quantiles_of_active_rows_rest_on_those_alone(whole: bool) -> None:
    """64 of 1,024 rows are active: 256 sampled rows contain about 16 of them."""
    torch.manual_seed(0)
    layer, x = nn.Linear(3, 3).double(), torch.randn(1024, 3, dtype=torch.float64)
    aims = torch.where(torch.arange(1024)[:, None] < 64, torch.randn(1024, 3).double(), 0.0)

    def p50(max_rows: int | None, seed: int = 0) -> tuple[float, float]:
        optimizer = torch.optim.SGD(layer.parameters(), lr=1e-9)
        loss = lambda layer: (layer(x) * aims).sum()  # noqa: E731
        (report,) = trained(layer, loss, optimizer=optimizer, max_rows=max_rows, seed=seed)
        reading = report.layers[""]
        return reading.row_cosine_p50, reading.standard_error.get("row_cosine_p50", 0.0)

    truth, none = p50(None)
    assert none == 0
    off = torch.tensor(
        [(p - truth) / e for p, e in (p50(256, seed) for seed in range(40 if whole else 16))]
    )
    assert 0.6 < off.square().mean().sqrt() < 1.6
