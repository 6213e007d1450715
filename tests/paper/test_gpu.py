"""On a GPU, ensembles train in CUDA graphs as without them, and as on a CPU."""

from itertools import product, starmap

import pytest
import torch
from cifar import synthetic
from ensemble import Network
from methods import METHODS
from training import Course, Setting

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
NETWORKS = tuple(starmap(Network, product(METHODS, ["tanh", "leaky"], [0, 1], [1e-3])))


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_graphs_train_as_a_cpu(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over an epoch of 123 steps, of which the last has fewer images.

    Rounding grows by a factor of 10⁹ in layer normalisation of four numbers, so it is left out of
    the comparison with a CPU.
    """
    data, setting = synthetic(train=982, test=40), Setting(8, 4, 2, "unit", NETWORKS, optimizer)
    courses = [Course(setting, data, device, torch.float64) for device in ("cpu", "cuda", "cuda")]
    monkeypatch.setattr(courses[1], "step", courses[1].take)  # no graph
    for course in courses:
        course.epoch(1)
    assert courses[1]._graph is None and courses[2]._graph is not None
    assert {course.ensemble.step_number for course in courses} == {123}
    eager, captured = (course.ensemble.state()["tensors"] for course in courses[1:])
    for mine, theirs in zip(captured, eager, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
    for place, network in enumerate(courses[0].ensemble.networks):
        if network.method != "layernorm":
            both = (course.ensemble.parameters(place) for course in courses[::2])
            for mine, theirs in zip(*both, strict=True):
                torch.testing.assert_close(theirs.cpu(), mine, rtol=1e-6, atol=1e-8)
