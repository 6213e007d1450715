"""The ward's beds: what is planted is there, and nothing else is."""

import torch
from audit.ward.cases import CASES, HEALTHY
from audit.ward.course import course
from audit.ward.run import BATCHES


def test_there_are_enough_of_each() -> None:
    assert len(CASES) >= 24 and len(HEALTHY) >= 12
    kinds = {case.kind for case in CASES.values()}
    assert {"MLP", "CNN", "transformer"} <= kinds
    assert len({case.expected[0] for case in CASES.values()}) >= 17


def test_equal_seeds_make_equal_runs() -> None:
    for bed in (HEALTHY["gpt-adamw"], CASES["mlp-sgd: exposure ×/÷ e^1.5"]):
        one, same, other = (bed.build(seed) for seed in (0, 0, 1))
        assert len(one.batches) == BATCHES
        for batch, twin in zip(one.batches, same.batches, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(batch, twin, strict=True))
        weights, equal = one.model.state_dict(), same.model.state_dict()
        assert all(torch.equal(weights[name], equal[name]) for name in weights)
        assert not torch.equal(one.batches[0][0], other.batches[0][0])


def test_an_illness_costs_what_it_is_planted_for() -> None:
    case = CASES["regression-sgd: one feature × 100"]
    assert course(case, 0)["loss"] > 2 * course(case.twin, 0)["loss"]
