"""Measures as functions of known rows: zero vectors, and errors against many draws of some."""

import math

import numpy as np
import pytest

from adiv_monitor.maths import measures
from adiv_monitor.maths.estimates import (
    Ends,
    Estimate,
    PerLayer,
    Sample,
    Sizes,
    Sum,
    by_size,
    mean_of_active,
    over_rows,
    product,
    quantiles,
    share_error,
)

ROWS, SEEN, DRAWS = 400, 120, 3000


def draws(active: np.ndarray) -> tuple[np.ndarray, Sample]:
    """Return random samples of rows, each in the place of a layer."""
    random = np.random.default_rng(1)
    index = np.stack([random.choice(len(active), SEEN, replace=False) for _ in range(DRAWS)])
    return index, Sample(np.full(DRAWS, float(len(active))), active[index])


def agrees(found: Estimate, exact: float) -> None:
    """Assert that values are right on average, their spread is the error, and few lie outside."""
    value, error = found
    spread = value.std()
    assert abs(value.mean() - exact) < 4 * spread / np.sqrt(DRAWS) + 0.05 * spread
    assert np.sqrt((error**2).mean()) == pytest.approx(spread, rel=0.08)
    assert (np.abs(value - exact) > 3 * error).mean() < 0.02


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("unit", [1.0, 0.01])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("idle", [0.0, 0.4])
def test_the_spread_of_scales(groups: int, idle: float, unit: float) -> None:
    random = np.random.default_rng(0)
    scales = 2 + 5 * random.random((ROWS, 1)) + 3 * random.random((ROWS, groups))
    scales *= unit
    active = random.random(ROWS) >= idle
    index, sample = draws(active)
    pivot = np.full(DRAWS, 4.0 * unit)
    from_pivot = scales - 4.0 * unit
    sums, squares = from_pivot.sum(1)[index], (from_pivot**2).sum(1)[index]
    found = measures.scale_cv_of_rows(sums, squares, np.full(DRAWS, groups), pivot, sample)
    agrees(found, scales[active].std() / scales[active].mean())


@pytest.mark.parametrize("mean", [0.7, 1.5])
@pytest.mark.parametrize("idle", [0.0, 0.4])
def test_how_much_the_rows_have_in_common(idle: float, mean: float) -> None:
    random = np.random.default_rng(0)
    features = random.normal(size=(ROWS, 6)) * random.gamma(3.0, 1.0, (ROWS, 1)) + mean
    active = random.random(ROWS) >= idle
    index, sample = draws(active)
    seen = features[index] * sample.active[..., None]
    products = (seen * seen.sum(1, keepdims=True)).sum(-1)
    count = np.full(DRAWS, float(active.sum()))
    # Values of zero-gradient rows do not count.
    squares = np.where(sample.active, (seen**2).sum(-1), 7.0)
    products = np.where(sample.active, products, 7.0)
    found = measures.common_share(products, squares, count, sample)
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


def of_certain(total: PerLayer) -> Sum:
    return Sum(total, np.zeros((DRAWS, SEEN)))


def population(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Return heavy-tailed rows: a numerator of either sign, and two correlated positive sums."""
    random = np.random.default_rng(seed)
    size = np.exp(random.normal(scale=0.7, size=rows))
    return {
        "n": random.normal(size=rows) + 0.3 * size,
        "a": size * random.exponential(size=rows),
        "b": size,
    }


FORMS = {
    "a mean": (True, ()),
    "cosine, exact numerator": (False, (("a", -0.5),)),
    "cosine of rows": (True, (("a", -0.5), ("b", -0.5))),
    "ratio of norms": (False, (("a", 0.5), ("b", -0.5))),
    "rate of rows": (True, (("b", -1.0),)),
}


@pytest.mark.parametrize("form", FORMS)
def test_products_of_sums_are_unbiased_and_know_their_error(form: str) -> None:
    sampled, factors = FORMS[form]
    whole = population(ROWS)
    index, sample = draws(np.ones(ROWS, dtype=bool))
    sums = {name: over_rows(rows[index], sample) for name, rows in whole.items()}
    exact = whole["n"].sum() if sampled else 1.0
    for name, power in factors:
        exact *= whole[name].sum() ** power
    numerator = sums["n"] if sampled else of_certain(np.ones(DRAWS))
    agrees(product(numerator, [(sums[name], power) for name, power in factors], sample), exact)


def test_one_row_does_not_tell_what_it_has_in_common_with_others() -> None:
    """With one active sampled row of many, pairs are unknown: only its own square counts."""
    active = np.array([[True, False, False]])
    rows, sample = np.array([[4.0, 0.0, 0.0]]), Sample(np.array([100.0]), active)
    found = measures.common_share(rows, rows, np.array([20.0]), sample)
    assert found.value == pytest.approx(1 / 20) and np.isnan(found.error)
    assert measures.common_share(rows, rows, np.array([1.0]), sample) == (1, 0)
    idle = Sample(sample.total, active & False)
    assert np.isnan(measures.common_share(rows, rows, np.array([0.0]), idle).value)
    assert np.isnan(measures.idle_share(Sample(np.zeros(1), active[:, :0]), np.zeros(1)).value)


def test_errors_from_few_active_rows_cover_the_error() -> None:
    """Every twentieth row has a gradient, as with class tokens: a sample holds about six."""
    random = np.random.default_rng(0)
    active = np.arange(ROWS) % 20 == 0
    index, sample = draws(active)
    size, cosines = np.exp(random.normal(size=(2, ROWS))) * active
    cosines = np.tanh(cosines) - 0.4
    features = random.normal(size=(ROWS, 6)) + 1
    seen = features[index] * sample.active[..., None]
    products = (seen * seen.sum(1, keepdims=True)).sum(-1)
    squares, one = (seen**2).sum(-1), np.ones(DRAWS)
    count, scales = of_certain(20 * one), (features[active] ** 2).sum(1)
    d_d, d_G = (over_rows(of[index], sample) for of in (size**2, size * cosines))
    sums, squared, pivot = squares - 7, (squares - 7) ** 2, 7 * one
    measured = [
        measures.row_cosine_mean(
            np.where(sample.active, cosines[index], np.nan), sample, np.zeros(DRAWS)
        ),
        measures.update_cosine(d_G, d_d, count, sample),
        measures.common_share(products, squares, count.total, sample),
        measures.scale_cv_of_rows(sums, squared, one, pivot, sample),
    ]
    exact = [
        cosines[active].mean(),
        (size * cosines).sum() / np.sqrt(20 * (size**2).sum()),
        (features[active].mean(0) ** 2).sum() / scales.mean(),
        scales.std() / scales.mean(),
    ]
    n = sample.active.sum(1)
    for (value, error), true in zip(measured, exact, strict=True):
        assert np.isnan(error[n < 3]).all()
        for few in (n >= 3) & (n < 5), (n >= 5) & (n < 8):
            off = np.abs(value - true)[few] / error[few]
            assert few.sum() > 500
            assert (off > 3).mean() < 0.05
            assert (off > 20).mean() < 0.005


# --- sums estimated with known ones --------------------------------------------------------------


def heavy(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return heavy-tailed row sizes, and values that grow with them, each row at its own rate."""
    random = np.random.default_rng(0)
    sizes = np.exp(1.5 * random.normal(size=rows))
    return sizes, sizes * random.gamma(10.0, 1.0, rows)


def sizes_of(rows: np.ndarray, index: np.ndarray) -> Sizes:
    sums = (rows.sum(), (rows**2).sum())
    return Sizes(rows[index], *(np.full(len(index), of_all_rows) for of_all_rows in sums))


def test_few_rows_that_hold_most_are_reckoned_with() -> None:
    """A sample without the large rows cannot see them, but the known sizes show it."""
    sizes, values = heavy(ROWS)
    index, sample = draws(np.ones(ROWS, dtype=bool))
    plain = over_rows(values[index], sample)
    told = by_size(plain, values[index], sizes_of(sizes, index), sample)
    by_sample, by_sizes = product(plain, [], sample), product(told, [], sample)

    def beyond_three(found: Estimate) -> float:
        return float((np.abs(found.value - values.sum()) > 3 * found.error).mean())

    assert beyond_three(by_sample) > 0.04
    assert beyond_three(by_sizes) < 0.01
    assert by_sizes.value.std() < 0.4 * by_sample.value.std()
    assert by_sizes.error.mean() < 1.5 * by_sizes.value.std()
    assert abs(by_sizes.value.mean() - values.sum()) < 0.1 * by_sizes.value.std()


# --- samples without spread ----------------------------------------------------------------------


@pytest.mark.slow(one_in=5)
@pytest.mark.parametrize("negative", [0.005, 0.02, 0.05, 0.2, 0.47, 0.5])
@pytest.mark.parametrize("seen", [40, 128])
def test_cosines_of_one_output_know_that_rows_may_be_others(seen: int, negative: float) -> None:
    """All cosines are ±1: a sample may contain one sign only, and its median jumps between them."""
    random = np.random.default_rng(0)
    rows, levels = 4000, (0.05, 0.5, 0.95)
    cosines = np.ones(rows)
    cosines[: round(negative * rows)] = -1
    cosines *= 1 - 1e-7 * random.random(rows)  # rounding errors
    index = np.stack([random.choice(rows, seen, replace=False) for _ in range(DRAWS)])
    found, rounding = cosines[index], np.full(DRAWS, 1e-3)
    sample = Sample(np.full(DRAWS, float(rows)), np.ones((DRAWS, seen), dtype=bool))
    mean = measures.row_cosine_mean(found, sample, rounding)
    assert (mean.error > 0.01).all()
    assert (np.abs(mean.value - cosines.mean()) > 3 * mean.error).mean() < 0.02
    value, error = quantiles(found, levels, sample.variance_share, Ends(-1.0, 1.0), rounding)
    truth = np.quantile(cosines, levels)
    assert ((np.abs(value - truth) > 3 * error + 1e-6).mean(0) < 0.02).all()
    # No sign is asserted that may be wrong.
    assert ((np.abs(value) > 2 * error) & (value * truth < 0)).mean(0).max() < 0.02


@pytest.mark.slow(one_in=5)
@pytest.mark.parametrize("seen", [4, 10, 20, 50, 64, 128])
def test_quantiles_of_few_rows_know_that_the_tail_lies_beyond_them(seen: int) -> None:
    """Of ten rows, none may be among the lowest 5 %: the outermost two do not bound that."""
    random = np.random.default_rng(1)
    cosines, levels = np.tanh(random.normal(0.3, 0.5, 4000)), (0.05, 0.5, 0.95)
    index = np.stack([random.choice(4000, seen, replace=False) for _ in range(DRAWS)])
    share = Sample(np.full(DRAWS, 4000.0), np.ones((DRAWS, seen), dtype=bool)).variance_share
    value, error = quantiles(cosines[index], levels, share, Ends(-1.0, 1.0))
    outside = np.abs(value - np.quantile(cosines, levels)) > 3 * error
    assert (outside.mean(0) < (0.08 if seen == 4 else 0.02)).all()


# --- values at the limits ------------------------------------------------------------------------


def test_one_row_of_several_knows_no_error() -> None:
    sample = Sample(np.array([9.0]), np.ones((1, 1), dtype=bool))
    value, error = product(over_rows(np.ones((1, 1)), sample), [], sample)
    assert value[0] == 9
    assert math.isnan(error[0])
    value, error = mean_of_active(np.full((1, 1), 3.0), sample.active, sample)
    assert value[0] == 3
    assert math.isnan(error[0])
    exact = over_rows(np.ones((1, 1)), sample, np.array([5.0]))
    assert product(exact, [], sample) == (5, 0)


def test_a_share_of_none_among_few_is_not_certain() -> None:
    sample = Sample(np.array([1000.0]), np.ones((1, 20), dtype=bool))
    error = share_error(np.array([0]), np.array([20]), sample)[0]
    assert 0.03 < error < 0.06
    alike = measures.row_cosine_mean(np.full((1, 20), 0.5), sample, np.zeros(1))
    assert alike == (0.5, 2 * error), "the others may have the other sign"
    everything = Sample(np.array([20.0]), np.ones((1, 20), dtype=bool))
    assert share_error(np.array([0]), np.array([20]), everything)[0] == 0


def test_the_cosine_of_equal_vectors_is_one() -> None:
    squares = np.geomspace(1e-180, 1e180, 999)
    assert set(measures.projection_cosine(squares, squares, squares)) == {1.0}
    assert set(measures.projection_cosine(-squares, squares, squares)) == {-1.0}


def test_a_vector_of_zeros_has_no_direction() -> None:
    sample = Sample(np.array([2.0]), np.ones((1, 2), dtype=bool))
    zero, one = (Sum(np.array([value]), np.zeros((1, 2))) for value in (0.0, 1.0))
    assert np.isnan(measures.update_cosine(zero, zero, one, sample).value)
    assert np.isnan(measures.update_cosine(zero, one, zero, sample).value)
    assert np.isnan(measures.harmed_fraction(np.zeros((1, 2)), sample, zero).value)
    assert np.isnan(measures.bias_share(zero, zero, sample).value)
    assert measures.effective_lr(zero, one, sample).value == 0
    assert measures.update_ratio(zero, one, sample).value == 0
    assert measures.bias_share(one, zero, sample).value == 0
    assert measures.bias_share(zero, one, sample).value == 1
    rows = np.array([[0.0, 1.0]])
    np.testing.assert_array_equal(measures.row_cosines(rows, rows, rows), [[math.nan, 1]])
    tiny = np.array([1e-180])
    assert measures.parameter_cosine(-tiny, tiny, tiny) == 1
    idle = Sample(np.array([2.0]), np.zeros((1, 2), dtype=bool))
    assert measures.idle_share(idle, np.array([math.nan])).value == 1
    assert np.isnan(measures.scale_max_of_rows(np.ones((1, 2)), idle).value)


# --- quantiles -----------------------------------------------------------------------------------


def test_quantiles_of_numbers_leave_out_what_is_none() -> None:
    values = np.array([[3, math.nan, 1, 2], [math.nan] * 4, [math.inf, math.inf, 1, math.nan]])
    found, _ = quantiles(values, (0, 0.5))
    np.testing.assert_array_equal(found, [[1, 2], [math.nan] * 2, [1, math.inf]])
    assert np.isnan(quantiles(np.empty((2, 0)), (0, 1))[0]).all()
    [[_], [error]] = quantiles(np.array([[*range(50), *range(1000, 1050)]]), (0.5,), 0.01)
    assert error > 475, "half of the gap around the median"


def test_quantiles_know_their_error() -> None:
    """Errors of the quantiles of 100 out of 5,000 normal numbers agree with their spread."""
    random = np.random.default_rng(0)
    whole = random.normal(size=5000)
    rows = np.stack([random.choice(whole, 100, replace=False) for _ in range(2000)])
    sample = Sample(np.full(2000, 5000.0), np.ones(rows.shape, dtype=bool))
    found, errors = quantiles(rows, (0.05, 0.5, 0.95), sample.variance_share)
    spread = found.std(axis=0)
    # Near the ends the errors exceed the spread, as few entries determine them.
    assert (errors.mean(axis=0) > 0.9 * spread).all()
    assert (errors.mean(axis=0) < 1.35 * spread).all()
    beyond = np.abs(found - np.quantile(whole, (0.05, 0.5, 0.95))) / errors
    assert ((beyond > 2).mean(axis=0) < 0.08).all()
    assert ((beyond > 3).mean(axis=0) < 0.02).all()
