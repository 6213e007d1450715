"""Measures on request: the user's own, from rows and weights around the step, and spectral ones."""

from dataclasses import replace

import pytest
import torch
from setups import mlp, one_step, same, trained
from torch import Tensor, nn
from torch.nn import functional

from adiv_monitor import StepReport
from adiv_monitor.maths.sums import NO_SUMS, About, StepSums, blank
from adiv_monitor.step.own_measures import OwnRows, sigma, stable_rank, values_of


def wasted(rows: OwnRows) -> Tensor:
    """Return ‖ΔW φ‖ / ‖W φ‖ of all rows."""
    return (rows.features @ rows.update.mT).norm() / (rows.features @ rows.weight.mT).norm()


def backward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    functional.cross_entropy(model(batch[0]), batch[1]).backward()


def test_it_gets_the_rows_and_the_weights_before_the_step() -> None:
    model, batch = mlp()
    (before, bias), seen = (p.detach().clone() for p in model[0].parameters()), list[OwnRows]()

    def look(rows: OwnRows) -> float:
        seen.append(rows)
        return len(rows.output) + 0.1  # which float32 can't hold

    report = one_step(
        model, lambda m: backward(m, batch), own_measures={"wasted": wasted, "rows": look}
    )
    first, update = seen[0], model[0].weight.detach() - before
    torch.testing.assert_close(first.weight, before)
    torch.testing.assert_close(first.update, update)
    torch.testing.assert_close(first.features, batch[0])
    torch.testing.assert_close(first.output, functional.linear(batch[0], before, bias))
    torch.testing.assert_close(first.gradient.mT @ first.features * -0.1, update)
    own = report.layers["0"].own
    expected = (batch[0] @ update.mT).norm() / (batch[0] @ before.mT).norm()
    assert own == {"wasted": pytest.approx(expected.item()), "rows": pytest.approx(6.1, rel=1e-12)}
    assert StepReport.from_dict(report.to_dict()).layers["0"].own == own
    assert report.to_rows()[0]["wasted"] == own["wasted"]


def test_rows_of_a_convolution_are_patches() -> None:
    torch.manual_seed(0)
    model, x = nn.Conv2d(2, 3, 2).double(), torch.randn(2, 2, 3, 3, dtype=torch.float64)
    found: list[OwnRows] = []
    own = {"of": lambda rows: found.append(rows) or 1}
    trained(model, lambda m: m(x).square().sum(), max_rows=None, own_measures=own)
    [rows] = found
    torch.testing.assert_close(rows.gradient.mT @ rows.features, model.weight.grad.flatten(1))


def test_what_raises_is_nan_and_said_and_the_run_stays_as_it_was() -> None:
    (model, batch), (twin, _) = mlp(), mlp()
    expected = one_step(twin, lambda m: backward(m, batch))

    def destroys(rows: OwnRows) -> float:
        for tensor in rows:
            tensor.zero_()
        raise KeyError("none")

    report = one_step(model, lambda m: backward(m, batch), own_measures={"it": destroys})
    same(report, expected)
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert all(str(x.own["it"]) == "nan" for x in report.layers.values())
    (note,) = report.notes
    assert note == "The measure 'it' is NaN in '0', '2', '4': KeyError: 'none'."


def test_several_ranks_have_the_mean_over_their_rows() -> None:
    lines = blank("own", 4)  # x and y of the first layer by two ranks, x of the second by one
    lines["layer"], lines["number"], lines["rows"] = [0, 0, 0, 1], [0, 1, 0, 0], [10, 10, 20, 5]
    lines["value"] = [1.0, 7.0, 4.0, 2.0]
    sums: StepSums = replace(NO_SUMS, about=(About("linear", own=("x", "y")),) * 3, own=lines)
    assert [values_of(sums, i) for i in range(3)] == [{"x": 3.0, "y": 7.0}, {"x": 2.0}, {}]


def low_rank(rank: int) -> Tensor:
    return torch.randn(200, rank, dtype=torch.float64) @ torch.randn(rank, 90, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["rank 1", "rank 3", "random", "wide", "float32", "large"])
def test_sigma_is_the_largest_singular_value(kind: str) -> None:
    torch.manual_seed(1)
    M = {
        "rank 1": low_rank(1),
        "rank 3": low_rank(3),
        "random": torch.randn(400, 400, dtype=torch.float64),
        "wide": torch.randn(3, 500, dtype=torch.float64),
        "float32": torch.randn(300, 200),
        "large": 1e10 * torch.randn(300, 200),
    }[kind]
    values = torch.linalg.svdvals(M.double())
    found = sigma(M).item()
    assert found == pytest.approx(values[0].item(), rel=0.02)
    assert found <= values[0] * (1 + 1e-6)
    if "rank" in kind:
        assert found == pytest.approx(values[0].item(), rel=1e-6)
    rank = (values.square().sum() / values[0] ** 2).item()
    assert stable_rank(M).item() == pytest.approx(rank, rel=0.04)


def test_a_layer_has_those_of_its_weight_and_update() -> None:
    model, batch = mlp()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    def backward(model: nn.Module) -> None:
        functional.cross_entropy(model(batch[0]), batch[1]).backward()

    state = torch.get_rng_state()
    report = one_step(model, backward, spectral=True)
    assert torch.equal(state, torch.get_rng_state())
    for path, reading in report.layers.items():
        W = before[f"{path}.weight"]
        for name, M in (("weight", W), ("update", model.get_submodule(path).weight - W)):
            values = torch.linalg.svdvals(M)
            expected = values[0].item(), (values.square().sum() / values[0] ** 2).item()
            found = reading.own[f"{name}_sigma"], reading.own[f"{name}_stable_rank"]
            assert found == pytest.approx(expected, rel=0.02)


def test_a_weight_that_stays_has_an_update_without_direction() -> None:
    assert sigma(torch.zeros(3, 4)).isnan()
