"""Batches of any structure: copied, moved, counted; statistics of inputs equal those of numpy."""

import dataclasses
from collections import UserDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from audited import batches, cross_entropy, seen, sgd
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from adiv_monitor.audit.experiments.data import input_statistics
from adiv_monitor.audit.training.batches import copied, first, on_device, taken, tensors
from adiv_monitor.audit.training.setup import Setup
from adiv_monitor.diagnosis.record import InputStatistics

X = torch.ones(3, 2)
Pair = namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass(frozen=True)
class Sample:
    x: Tensor
    name: str = "a"


class Encoding(UserDict):
    """A mapping that is no dict, as tokenisers return."""


@pytest.mark.parametrize(
    "batch",
    [
        X,
        [X, 1],
        (X, "a"),
        {"x": X, "deep": [(X,)]},
        Pair(X, None),
        Sample(X),
        Encoding(x=X),
        pack_sequence([torch.ones(3), torch.ones(2)]),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_structures(batch: Any) -> None:
    moved = on_device(batch, torch.device("meta"))
    assert type(moved) is type(batch)
    found = list(tensors(moved))
    assert found and all(x.device.type == "meta" for x in found if x.dtype == torch.float32)
    assert all(x.device.type == "cpu" for x in tensors(batch))
    copy = copied(batch)
    for new, old in zip(tensors(copy), tensors(batch), strict=True):
        assert torch.equal(new, old) and new.data_ptr() != old.data_ptr()


def test_a_buffer_that_is_used_again_is_not_taken_twice() -> None:
    def loader() -> Any:
        buffer = torch.zeros(2)
        for number in range(5):
            yield buffer.fill_(number)

    found = taken(loader(), 3, torch.device("cpu"))
    assert [x.tolist() for x in found] == [[0, 0], [1, 1], [2, 2]]


def test_the_first_samples_share_what_is_sparse_as_a_graph() -> None:
    x, sparse = torch.rand(3, 3), torch.eye(3).to_sparse()
    small, same = first((x, sparse), 2)
    assert torch.equal(small, x[:2]) and same is sparse


def found(
    model: nn.Module, data: list[tuple[Tensor, Tensor]], loss: object = cross_entropy
) -> dict[str, InputStatistics]:
    of = Setup(model, sgd(), loss, tuple(data), len(data))  # type: ignore[arg-type]
    return input_statistics(of.fork()) or {}


@pytest.mark.parametrize("shape", [(6,), (5, 4), (2, 4, 4), (3, 2, 2, 2)])
def test_statistics_are_those_of_all_batches_together(shape: tuple[int, ...]) -> None:
    scale = torch.linspace(0, 30, shape[0] if len(shape) > 2 else shape[-1])
    scale = scale.reshape(-1, *[1] * (len(shape) - 1)) if len(shape) > 2 else scale
    data = [(x * scale + 100, y) for x, y in batches(3, features=shape)]
    model = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), 3))
    x = np.concatenate([batch[0].double().numpy() for batch in data])
    places = np.moveaxis(x, 1, -1) if x.ndim >= 4 else x
    features = places.reshape(-1, places.shape[-1])
    stds, lengths = features.std(0), (x.reshape(len(x), -1) ** 2).sum(1)
    expected = InputStatistics(
        mean=x.mean(),
        std=x.std(),
        minimum=x.min(),
        maximum=x.max(),
        feature_mean_spread=features.mean(0).std(),
        feature_std_ratio=stds.max() / np.sort(stds[stds > 0])[(np.sum(stds > 0) - 1) // 2],
        length_cv=lengths.std() / lengths.mean(),
        features=features.shape[1],
    )
    assert vars(found(model, data)["input"]) == pytest.approx(vars(expected), rel=1e-9)


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(1, 3)

    def forward(self, x: Tensor, *more: Tensor, **labels: Tensor) -> Tensor:
        return self.map(x.mean(1, keepdim=True))


def test_inputs_are_named_and_labels_and_tokens_are_none() -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        given = dict.fromkeys(("labels", "annots", "gt_boxes", "truth"), y.float())
        return nn.functional.cross_entropy(model(x, [x, x - 1], x.long(), **given), y)

    assert found(Mean(), batches(), loss).keys() == {"x", "1.0", "1.1"}


def test_a_model_that_is_not_called_itself_is_told_of() -> None:
    record = seen(nn.Sequential(nn.Linear(6, 3)), loss=lambda m, batch: cross_entropy(m[0], batch))
    assert record.inputs == {}
    assert any("did not call the model" in note for note in record.notes)
