"""Statistics of a model's inputs equal those of numpy over all inputs at once."""

import numpy as np
import pytest
import torch
from audited import batches, cross_entropy, seen
from torch import Tensor, nn

from adiv_monitor.diagnosis.record import InputStatistics


def expected(x: np.ndarray, features: np.ndarray) -> InputStatistics:
    """`features`: (entries, features)."""
    stds = features.std(0)
    lengths = (x.reshape(len(x), -1) ** 2).sum(1)
    return InputStatistics(
        mean=x.mean(),
        std=x.std(),
        minimum=x.min(),
        maximum=x.max(),
        feature_mean_spread=features.mean(0).std(),
        feature_std_ratio=stds.max() / np.sort(stds[stds > 0])[(np.sum(stds > 0) - 1) // 2],
        length_cv=lengths.std() / lengths.mean(),
        features=features.shape[1],
    )


def same(found: InputStatistics, wanted: InputStatistics) -> None:
    assert vars(found) == pytest.approx(vars(wanted), rel=1e-9)


class Flat(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.map = nn.Linear(features, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.map(x.flatten(1))


@pytest.mark.parametrize("shape", [(6,), (5, 4), (2, 4, 4), (3, 2, 2, 2)])
def test_features_of(shape: tuple[int, ...]) -> None:
    scale = torch.linspace(0, 30, shape[0] if len(shape) > 2 else shape[-1])
    scale = scale.reshape(-1, *[1] * (len(shape) - 1)) if len(shape) > 2 else scale
    data = [(x * scale + 100, y) for x, y in batches(3, features=shape)]
    found = seen(Flat(int(np.prod(shape))), data).inputs
    x = np.concatenate([batch[0].double().numpy() for batch in data])
    places = np.moveaxis(x, 1, -1) if x.ndim >= 4 else x
    assert found.keys() == {"x"}
    same(found["x"], expected(x, places.reshape(-1, places.shape[-1])))


def test_batches_of_other_widths_are_one_feature() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = nn.Linear(1, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.map(x.mean(1, keepdim=True))

    data = [(x[:, : 6 - i], y) for i, (x, y) in enumerate(batches(3))]
    found = seen(Mean(), data, steps=3).inputs["x"]
    x = np.concatenate([batch[0].double().flatten().numpy() for batch in data])
    assert (found.mean, found.std) == pytest.approx((x.mean(), x.std()))
    assert found.features == 1


def test_names_of_arguments() -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = nn.Linear(6, 3)

        def forward(self, x: Tensor, *more: Tensor, parts: list[Tensor], labels: Tensor) -> Tensor:
            return self.map(x + more[0] + parts[0] + parts[1])

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        parts = model(x, x + 1, parts=[x, x - 1], labels=y.float())
        return nn.functional.cross_entropy(parts, y)

    assert seen(Several(), loss=loss).inputs.keys() == {"x", "1", "parts.0", "parts.1"}


def test_tokens_have_none() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 3))
    data = [(torch.randint(0, 9, (10, 3)), y) for _, y in batches()]
    assert seen(model, data).inputs == {}


def test_what_is_not_finite_shows() -> None:
    data = batches()
    data[1][0][0, 0] = torch.nan
    found = seen(nn.Linear(6, 3), data).inputs["input"]
    assert np.isnan([found.mean, found.std, found.minimum, found.maximum]).all()


def test_only_what_training_calls_counts() -> None:
    """Not what the audit runs again; and a model that is not called itself is told of."""
    found = seen(nn.Linear(6, 3), steps=1, every_n_steps=1).inputs["input"]
    assert found.mean == pytest.approx(batches()[0][0].double().mean().item())

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = nn.Linear(6, 3)

    record = seen(Inner(), loss=lambda model, batch: cross_entropy(model.map, batch))
    assert record.inputs == {}
    assert any("did not call the model" in note for note in record.notes)
