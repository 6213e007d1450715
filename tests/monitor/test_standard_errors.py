"""Measures from sampled rows know their errors: against many draws from rows that are all known."""

import numpy as np
import pytest

from adiv_monitor.maths import measures
from adiv_monitor.maths.estimates import Estimate, PerLayer, Sample, Sum

ROWS, SEEN, DRAWS = 400, 120, 3000


def draws(active: np.ndarray) -> tuple[np.ndarray, Sample]:
    """Which rows were looked at: every draw stands in the place of a layer."""
    random = np.random.default_rng(1)
    index = np.stack([random.choice(len(active), SEEN, replace=False) for _ in range(DRAWS)])
    return index, Sample(np.full(DRAWS, float(len(active))), active[index])


def agrees(found: Estimate, exact: float) -> None:
    """On average the value is right and its error the spread of the values; few lie further off."""
    value, error = found
    spread = value.std()
    assert abs(value.mean() - exact) < 4 * spread / np.sqrt(DRAWS) + 0.1 * spread
    assert np.sqrt((error**2).mean()) == pytest.approx(spread, rel=0.08)
    assert (np.abs(value - exact) > 3 * error).mean() < 0.02


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("idle", [0.0, 0.4])
def test_the_spread_of_scales(groups: int, idle: float) -> None:
    random = np.random.default_rng(0)
    scales = 2 + 5 * random.random((ROWS, 1)) + 3 * random.random((ROWS, groups))
    active = random.random(ROWS) >= idle
    index, sample = draws(active)
    pivot = np.full(DRAWS, 4.0)
    from_pivot = scales - 4.0
    sums, squares = from_pivot.sum(1)[index], (from_pivot**2).sum(1)[index]
    found = measures.scale_cv_of_rows(sums, squares, np.full(DRAWS, groups), pivot, sample)
    agrees(found, scales[active].std() / scales[active].mean())


@pytest.mark.parametrize("idle", [0.0, 0.4])
def test_how_much_the_rows_have_in_common(idle: float) -> None:
    random = np.random.default_rng(0)
    features = random.normal(size=(ROWS, 6)) * random.gamma(3.0, 1.0, (ROWS, 1)) + 1.5
    active = random.random(ROWS) >= idle
    index, sample = draws(active)
    seen = features[index] * sample.active[..., None]
    products = (seen * seen.sum(1, keepdims=True)).sum(-1)
    count = np.full(DRAWS, float(active.sum()))
    # What idle rows hold does not count.
    squares = np.where(sample.active, (seen**2).sum(-1), 7.0)
    products = np.where(sample.active, products, 7.0)
    found = measures.common_share_of_rows(products, squares, count, sample)
    whole = features[active]
    agrees(found, float((whole.mean(0) ** 2).sum() / (whole**2).sum(1).mean()))


def test_the_share_of_idle_rows() -> None:
    active = np.random.default_rng(0).random(ROWS) >= 0.3
    _, sample = draws(active)
    found = measures.idle_share(sample, np.full(DRAWS, np.nan))
    agrees(found, 1 - active.mean())
    known = measures.idle_share(sample, np.full(DRAWS, float(active.sum())))
    assert (known.value == 1 - active.mean()).all()
    assert (known.error == 0).all()


def test_the_share_of_harmed_rows() -> None:
    random = np.random.default_rng(0)
    active, d_G = random.random(ROWS) >= 0.3, random.normal(size=ROWS) + 0.5
    index, sample = draws(active)
    moved, still = (of_certain(np.full(DRAWS, square)) for square in (1.0, 0.0))
    found = measures.harmed_fraction(d_G[index], sample, moved)
    agrees(found, (d_G[active] < 0).mean())
    assert np.isnan(measures.harmed_fraction(d_G[index], sample, still).value).all()


def of_certain(total: PerLayer) -> Sum:
    return Sum(total, np.zeros((DRAWS, SEEN)))


# --- exactly ---------------------------------------------------------------------------------


def of_all(rows: int, active: np.ndarray) -> Sample:
    return Sample(np.full(len(active), float(rows)), active)


def test_all_rows_leave_nothing_to_chance() -> None:
    random = np.random.default_rng(0)
    features, active = random.normal(size=(2, 50, 3)) + 1, random.random((2, 50)) < 0.7
    sample, count = of_all(50, active), active.sum(1).astype(float)
    squares = (features**2).sum(-1)
    whole = np.where(active[..., None], features, 0).sum(1)
    products = (features * whole[:, None]).sum(-1)
    found = measures.common_share_of_rows(products, squares, count, sample)
    total = np.where(active, squares, 0).sum(1)
    share = measures.common_share((whole**2).sum(1), count, total)
    np.testing.assert_allclose(found.value, share, rtol=1e-12)
    pivot, one = np.array([2.0, -3.0]), np.ones(2)
    from_pivot = squares - pivot[:, None]
    cv = measures.scale_cv_of_rows(from_pivot, from_pivot**2, one, pivot, sample)
    of_layers = [s[a].std() / s[a].mean() for s, a in zip(squares, active, strict=True)]
    np.testing.assert_allclose(cv.value, of_layers, rtol=1e-12)
    largest = measures.scale_max_of_rows(squares, sample)
    assert largest.value.tolist() == np.where(active, squares, 0).max(1).tolist()
    for exact in (found, cv, largest):
        assert exact.error.tolist() == [0, 0]


def test_the_largest_scale_is_as_far_off_as_the_second_largest() -> None:
    active = np.array([[True, True, True, True], [False, True, True, False], [True] + [False] * 3])
    largest = np.array([[3.0, 9.0, 4.0, 7.0], [50.0, 2.0, 8.0, 60.0], [5.0, 9.0, 9.0, 9.0]])
    found = measures.scale_max_of_rows(largest, of_all(100, active))
    assert found.value.tolist() == [9, 8, 5]
    assert found.error.tolist() == [2, 6, 0]
    none = measures.scale_max_of_rows(np.ones((2, 0)), of_all(100, np.ones((2, 0), dtype=bool)))
    assert none.value.dtype == none.error.dtype == np.float64
    assert np.isnan(none.value).all()
    assert none.error.tolist() == [0, 0]


def test_scales_that_are_all_the_same_do_not_spread() -> None:
    zero, sample = np.zeros((1, 5)), of_all(100, np.ones((1, 5), dtype=bool))
    assert measures.scale_cv_of_rows(zero, zero, np.ones(1), np.ones(1), sample) == (0, 0)


def test_one_row_has_nothing_in_common_with_others() -> None:
    """Of one active row of many, the pairs are not known: it speaks for its own square alone."""
    active = np.array([[True, False, False]])
    rows, sample = np.array([[4.0, 0.0, 0.0]]), of_all(100, active)
    found = measures.common_share_of_rows(rows, rows, np.array([20.0]), sample)
    assert found.value == pytest.approx(1 / 20)


def test_what_is_lost_to_rounding_is_divided_by_without_a_word() -> None:
    """Squares of features of 1e-23 are zero in float32, the norm of their sum is not."""
    one, zero = np.ones(1), np.zeros(1)
    assert measures.common_share(one, one, zero) == np.inf
    assert measures.scale_cv(one, zero, one) == np.inf
    assert np.isnan(measures.common_share(zero, zero, zero))
    assert np.isnan(measures.scale_cv(zero, zero, zero))
