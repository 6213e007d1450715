"""Batches of any structure: copied, moved, counted."""

import dataclasses
from collections import UserDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from adiv_monitor.audit.training.batches import copied, on_device, taken, tensors

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
