"""The fault benchmark's runs are what they say, and the audit judges a handful of them right.

All of them, with several seeds: `python tests/audit/fault_benchmark/benchmark.py`.
"""

import pytest
import torch
from audit.fault_benchmark.cases import CASES, HEALTHY
from audit.fault_benchmark.course import at_the_end, losses_of
from audit.fault_benchmark.judge import diagnosed, judge
from audit.fault_benchmark.page import page
from audit.fault_benchmark.reports import reported
from audit.fault_benchmark.run import STEPS, error_of

from adiv_monitor.diagnosis.diagnose import NOTHING

FAULTY = (
    "regression-sgd: one feature × 100",
    "blobs-sgd: inputs × 100",
    "regression-sgd: rate × 30",
    "mlp-sgd: rate × 0.001",
    "deep-tanh-sgd: gain 0.1",
    "mlp-sgd: biases -10",
    "regression-sgd: optimizer holds the head only",
    "mlp-adam: log(0)",
)
WELL = ("regression-sgd", "mlp-adam")
STUCK = (
    "mlp-sgd: inputs × 160",
    "mlp-sgd: inputs × 0.01",
    "mlp-sgd: rate × 100",
    "mlp-sgd: rate × 0.001",
    "mlp-sgd: biases -10",
    "mlp-sgd: uphill",
    "mlp-sgd: weight decay 1",
    "mlp-adam: log(0)",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTY)
def test_a_fault_costs_and_is_named_first(name: str) -> None:
    case = CASES[name]
    faulty, well = (losses_of(x.build(0).setup(STEPS, 0).fork()) for x in (case, case.twin))
    assert at_the_end(faulty, STEPS) > 1.5 * at_the_end(well, STEPS)
    name, strength = diagnosed(case, 0)["findings"][0]
    assert name in case.expected and strength == "act"


@pytest.mark.slow(one_in=6)
@pytest.mark.parametrize("name", [*WELL, "mlp-momentum", "deep-tanh-sgd", "cnn-adam", "gpt-adamw"])
def test_reports_of_a_healthy_run_raise_no_alarm(name: str) -> None:
    row = reported(HEALTHY[name], 0)
    assert row["fell"] and row["finite"]
    for verdict in (row["known"], row["unknown"]):
        assert not verdict["headline"].startswith("To fix")
        assert "act" not in [strength for _, strength in verdict["findings"]]


@pytest.mark.slow(one_in=8)
@pytest.mark.parametrize("name", STUCK)
def test_reports_of_a_run_whose_loss_does_not_fall_never_say_nothing(name: str) -> None:
    row = reported(CASES[name], 0)
    assert not (row["fell"] and row["finite"])
    assert row["known"]["findings"] and row["known"]["headline"] != NOTHING
    if not row["finite"]:
        (_, strength), *_ = row["known"]["findings"]  # a cause of it may stand above it
        assert strength == "act" and "non-finite" in dict(row["known"]["findings"])


@pytest.mark.slow
def test_advice_is_judged_on_another_seed_beside_chance() -> None:
    row = judge(CASES["blobs-sgd: inputs × 100"], 0)
    assert row["advice"]["pays"] and row["advice"]["loss"] < row["without"]
    assert {"random", "rate"} <= row.keys()


def test_the_page_counts_what_was_named_and_what_paid() -> None:
    faulty = {"name": "blobs-sgd: inputs × 100", "seed": 0, "words": False}
    paid, failed = ({"change": "x", "pays": pays} for pays in (True, False))
    right = {**faulty, "findings": [["input-scale", "act"]], "advice": paid, "random": failed}
    wrong = {**faulty, "findings": [["dead-units", "act"]], "advice": failed, "random": failed}
    well = {"name": "mlp-sgd", "seed": 0, "words": False, "findings": [["frozen", "act"]]}
    lines = page([right, right, right, wrong, well]).splitlines()
    assert "| planted fault named first | 75 % ± 22 (3 of 4) |" in lines
    assert "| first advice pays, of all faulty runs | 75 % ± 22 (3 of 4) |" in lines
    assert "| one random change pays, of all faulty runs | 0 % ± 0 (0 of 4) |" in lines
    assert "| healthy runs with an alarm (a finding to act on) | 100 % ± 0 (1 of 1) |" in lines
    missed = f"| {faulty['name']} | 0 | input-scale | dead-units (act) | x |"
    assert [line for line in lines if line.startswith(f"| {faulty['name']}")] == [missed]


def test_errors_are_those_of_answers_whatever_the_loss_is() -> None:
    numbers = torch.tensor([[0.0], [2.0], [4.0]])
    wrong = error_of(torch.tensor([0.0, 2.0, 4.0]), numbers)
    assert wrong == 0.0, "shapes that differ are no error"
    assert error_of(torch.tensor([[2.0], [2.0], [2.0]]), numbers) == 1.0
    answers = torch.tensor([0.0, 1.0, 1.0])
    assert error_of(torch.tensor([-9.0, 1.0, 3.0]), answers) == 0.0
    assert error_of(torch.tensor([1.0, 1.0, 1.0]), answers) == 0.5
    words = torch.tensor([[1, 0], [1, 1]])
    assert error_of(torch.tensor([[[0.0, 1.0], [1.0, 0.0]]] * 2), words) == 0.5, "the last place"
    assert error_of(torch.full((3, 1), torch.inf), numbers) == torch.inf
    rare = torch.tensor([0, 0, 0, 1])
    assert error_of(torch.eye(2)[torch.zeros(4).long()], rare) == 0.5, "averaged over classes"
    assert error_of(torch.tensor([[-1.0], [-2.0], [3.0], [4.0]]), rare) == pytest.approx(1 / 6)
    filled = torch.tensor([[1, 0], [1, 0]])
    assert error_of(torch.eye(2)[torch.tensor([[1, 1], [0, 1]])], filled, padding=0) == 0.5
