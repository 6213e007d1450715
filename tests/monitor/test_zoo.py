"""Every model of the zoo is measured completely, and trains as without a monitor.

Each is trained twice from one seed, with and without monitors, for three steps, of which the middle
one is not measured.
"""

import math
from collections.abc import Container, Iterator

import pytest
import torch
from torch import Tensor
from zoo import ZOO, Trained, Training
from zoo.marks import filtered
from zoo.runs import Run, run

from adiv_monitor.report import REALISED_MEASURES

pytestmark = pytest.mark.slow(one_in=23)
ONLY_IN_TRAINING = {"wav2vec2.masked_spec_embed"}  # layers that the probe does not run
NOT_ON_A_PROBE = {"rnn_tanh", "rnn_relu", "lstm", "gru"}  # kinds without these measures


class FirstOrder:
    """−⟨∂L/∂Θ, ΔΘ⟩ of every step of an optimizer, in float64.

    Args:
        trained: the trained parameters by name.
        unseen: names of the excluded parameters.
    """

    def __init__(self, trained: Trained, unseen: Container[str]) -> None:
        named = trained.model.named_parameters()
        self.descents: list[float] = []
        self._parameters = [p for name, p in named if p.requires_grad and name not in unseen]
        self._before: list[Tensor] = []
        trained.optimizer.register_step_pre_hook(self._begin)
        trained.optimizer.register_step_post_hook(self._end)

    def _begin(self, *_: object) -> None:
        self._before = [p.detach().clone() for p in self._parameters]

    def _end(self, *_: object) -> None:
        """Record the step's end, by which AdamW has not changed the gradients."""
        descents = (
            ((before - p.detach()).double() * p.grad).sum().item()
            for before, p in zip(self._before, self._parameters, strict=True)
        )
        self.descents.append(math.fsum(descents))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: several would wait for each other in models this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=map(filtered, ZOO))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def monitored(name: str) -> Run:
    return run(ZOO[name], monitored=True, realised=True)


@pytest.fixture(scope="module")
def plain(name: str) -> tuple[Run, list[FirstOrder]]:
    """Return the run without monitors, and the truth of its steps."""
    found: list[FirstOrder] = []

    def look(training: Training) -> None:
        found.extend(FirstOrder(each, ZOO[name].unseen) for each in training.trained)

    return run(ZOO[name], monitored=False, prepare=look), found


def test_all_parameters_are_measured_but_those_that_are_listed(name: str, monitored: Run) -> None:
    unseen = ZOO[name].unseen
    for trained, reports in zip(monitored.training.trained, monitored.reports, strict=True):
        assert [report.step for report in reports] == [0, 2]
        sizes = sizes_of(trained)
        for report in reports:
            assert report.unmeasured == {n: size for n, size in sizes.items() if n in unseen}
            share = 1 - sum(report.unmeasured.values()) / sum(sizes.values())
            assert report.coverage == pytest.approx(share)
            assert share >= 0.99 or sizes.keys() == unseen.keys()
            assert bool(report.unsupported) == bool(unseen), report.unsupported


def sizes_of(trained: Trained) -> dict[str, int]:
    """Return the number of elements of each trained parameter by name."""
    return {n: p.numel() for n, p in trained.model.named_parameters() if p.requires_grad}


def test_the_run_is_the_unmonitored_one(monitored: Run, plain: tuple[Run, object]) -> None:
    monitored.assert_same(plain[0])


def test_what_really_happened_is_known_of_every_layer(monitored: Run) -> None:
    """Without the loss, the direction alone is not known."""
    known = set(REALISED_MEASURES) - {"realised_cosine"}
    for report in (report for reports in monitored.reports for report in reports):
        assert not [note for note in report.notes if "is not known" in note]
        for path, reading in report.layers.items():
            has_none = path in ONLY_IN_TRAINING or reading.kind in NOT_ON_A_PROBE
            expected = set() if has_none else known
            assert known & reading.measures().keys() == expected, path


def test_the_layers_descents_add_up_to_that_of_the_step(
    monitored: Run, plain: tuple[Run, list[FirstOrder]]
) -> None:
    """No use of a parameter is missed or counted twice: the parts sum to −⟨∂L/∂Θ, ΔΘ⟩.

    Descents estimated from rows agree within five of their errors.
    """
    for reports, truth in zip(monitored.reports, plain[1], strict=True):
        for report in reports:
            readings = report.layers.values()
            parts = [reading.descent for reading in readings]
            errors = (reading.standard_error.get("descent", 0.0) for reading in readings)
            allowed = 5 * math.hypot(*errors) + 1e-4 * sum(map(abs, parts))
            assert math.fsum(parts) == pytest.approx(truth.descents[report.step], abs=allowed)
