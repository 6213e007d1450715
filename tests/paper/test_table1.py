"""Lines through accuracies, claims of pairs, and what table1.py does not train again."""

import math

import pytest

pytest.importorskip("scipy")
pytest.importorskip("matplotlib")

import fair_report
from slopes import Arm, holm


def test_a_line_and_its_errors() -> None:
    """A bend that all seeds share is no error of the slope."""
    bent = {0: 51.0, 1: 47.5, 2: 50.0}  # 1, −2, 1 around 50 − x/2
    accuracies = {x: {seed: a + seed * (1 + x) for seed in (0, 1)} for x, a in bent.items()}
    accuracies[1][2] = 90.0  # a seed without the other batch sizes
    line = Arm("standard", "tanh", 1e-3, accuracies).line()
    assert line is not None and line.seeds == 2
    # Of the seeds: 50 − x/2 and 51 + x/2.
    assert (line.intercept, line.slope) == pytest.approx((50.5, 0))
    assert (line.intercept_error, line.slope_error) == pytest.approx((0.5, 0.5))
    line = line._replace(slope=-0.5)
    # Student's t with one degree of freedom is Cauchy's.
    assert line.chance(-1) == pytest.approx(0.25)
    assert line.chance(1) == pytest.approx(0.75)


def test_p_values_are_corrected_for_their_number() -> None:
    # Of 0.01, 0.04, 0.03: 3 · 0.01; 2 · 0.03; and 0.04 is not less than the one before it.
    corrected = holm([0.01, math.nan, 0.04, 0.03])
    assert corrected[0] == pytest.approx(0.03) and math.isnan(corrected[1])
    assert corrected[2:] == pytest.approx([0.06, 0.06])


def test_a_claim_is_judged_by_the_mean_over_batch_sizes_of_every_seed() -> None:
    """One p-value a claim, not one a batch size; Holm corrects for the number of claims."""
    standard = fair_report.Arm("standard", "tanh", 128)
    found = {
        standard: {0: 50.0, 1: 50.0},
        standard._replace(batch_size=8): {0: 40.0, 1: 42.0, 2: 44.0},
        standard._replace(method="affine-like"): {0: 52.0, 1: 53.0},
        standard._replace(method="affine-like", batch_size=8): {0: 41.0, 1: 43.0, 2: 40.0},
    }
    claim = fair_report.Claim("affine-like", "standard", "theory")
    assert fair_report.together(found, claim, "tanh") == [1.5, 2.0]
    assert fair_report.together(found, claim, "leaky") == []
    assert fair_report.chance([1.5, 2.0]) == pytest.approx(1 - 2 * math.atan(7) / math.pi)
    assert math.isnan(fair_report.chance([]))
