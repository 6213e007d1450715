"""Monitored networks train as in an ensemble; what is read, and a rank correlation."""

import math
import random
from typing import Any

import pytest
import torch

pytest.importorskip("scipy")
pytest.importorskip("matplotlib")

import readings
from cifar import Data, synthetic
from ensemble import Network
from readings_report import MEASURES, correlation
from scipy import stats
from training import Course, Setting


@pytest.fixture(scope="module")
def data() -> Data:
    return synthetic(train=96, test=40)


def test_what_is_read_is_what_the_definitions_say(data: Data) -> None:
    """Of plain SGD on one layer's own numbers, in float64, by really taking the step."""
    network = Network("affine-like", "tanh", 0, 0.5)
    setting = Setting(96, 32, 2, "centred", (network,), "sgd")
    course = Course(setting, data, dtype=torch.float64)
    torch.set_default_dtype(torch.float64)
    try:
        run = readings.train(network, setting, course, 1)
        alone = readings.model(network, course.ensemble.sizes, course.typical)
    finally:
        torch.set_default_dtype(torch.float32)
    assert run["step"] == [0] and run["epoch"] == [1]
    layers = [layer for layer in alone if isinstance(layer, torch.nn.Linear)]
    inputs: dict[int, Any] = {}
    outputs: dict[int, Any] = {}

    def keep(i: int) -> Any:
        def hook(layer: Any, given: Any, z: Any) -> None:
            inputs[i], outputs[i] = given[0].detach(), z
            z.retain_grad()

        return hook

    for i, layer in enumerate(layers):
        layer.register_forward_hook(keep(i))
    rows = course.order(0, 1)
    x, y = course.pixels(course.train[0][rows]), course.train[1][rows]
    torch.nn.functional.cross_entropy(alone(x), y).backward()
    seen = dict(inputs), {i: (z.detach(), z.grad) for i, z in outputs.items()}
    torch.optim.SGD(alone.parameters(), lr=0.5).step()
    for i, layer in enumerate(layers):
        z, g = seen[1][i]
        move = (layer.forward(seen[0][i]) - z).detach()
        downhill = -(move * g).sum() / (move.norm() * g.norm())
        assert run["update_cosine"][i][0] == pytest.approx(downhill.item(), rel=1e-4)
        # Plain SGD's step is the gradient's.
        assert run["gradient_cosine"][i][0] == pytest.approx(downhill.item(), rel=1e-4)
        harmed = ((move * g).sum(-1) > 0).double().mean().item()
        assert run["harmed_fraction"][i][0] == pytest.approx(harmed, abs=1e-4)
        # All rows of an affine-like map move by the same factor.
        assert run["scale_cv"][i][0] == pytest.approx(0, abs=1e-6)


def test_monitored_networks_train_as_those_of_an_ensemble(data: Data) -> None:
    chosen = tuple(Network(m, "leaky", 1, 1e-3) for m in ("batchnorm", "constant-scale"))
    setting = Setting(16, 8, 1, "unit", chosen)
    course = Course(setting, data)
    alone = [readings.train(network, setting, course, 3) for network in chosen]
    expected = [course.epoch(number) for number in (1, 2, 3)]
    for i, run in enumerate(alone):
        place = course.ensemble.networks.index(chosen[i])
        for name in ("train_accuracy", "test_accuracy"):
            theirs = [found[name][place] for found in expected]
            assert run[name] == pytest.approx(theirs, abs=5)  # rounding: two images of 40
        assert all(len(run[measure]) == 2 for measure in MEASURES)  # layers
        assert all(len(run[m][0]) == len(run["step"]) == 18 for m in MEASURES)


def test_a_rank_correlation() -> None:
    drawn = random.Random(0)
    x = [drawn.random() for _ in range(40)]
    y = [math.exp(value + drawn.random()) for value in x]
    found = correlation(x, y)
    assert found.value == pytest.approx(stats.spearmanr(x, y).statistic)
    assert found.low < found.value < found.high
    r = found.value
    reach = 1.959964 * math.sqrt((1 + r * r / 2) / 37)
    assert math.atanh(found.high) == pytest.approx(math.atanh(r) + reach, rel=1e-5)
    assert math.atanh(found.low) == pytest.approx(math.atanh(r) - reach, rel=1e-5)
    assert correlation(x, [-value for value in x]).value == -1
    assert correlation([1, 2, 3], [1, 3, 2]).value != correlation([1, 2, 3], [1, 3, 2]).value  # NaN
    assert correlation([*x, math.nan], [*y, 1.0]) == found
