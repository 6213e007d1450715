"""The measures as functions: zero vectors, sums, quantiles."""

import math

import numpy as np
import pytest

from adiv_monitor.maths import measures
from adiv_monitor.maths.estimates import (
    Sample,
    Sum,
    mean_of_active,
    over_rows,
    product,
    quantiles,
    share_error,
)


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
    """Mean, spread and 3 errors of 4,000 draws of 60 out of 400 rows agree with all rows."""
    sampled, factors = FORMS[form]
    rows, seen, draws = 400, 60, 4000
    whole = population(rows)
    random = np.random.default_rng(1)
    index = np.stack([random.choice(rows, seen, replace=False) for _ in range(draws)])
    sample = Sample(np.full(draws, float(rows)), np.ones((draws, seen), dtype=bool))

    def of(name: str) -> Sum:
        return over_rows(whole[name][index], sample)

    one = Sum(np.ones(draws), np.zeros((draws, seen)))
    value, error = product(of("n") if sampled else one, [(of(f), p) for f, p in factors], sample)
    exact = whole["n"].sum() if sampled else 1.0
    for name, power in factors:
        exact *= whole[name].sum() ** power
    spread = value.std()
    assert abs(value.mean() - exact) < 4 * spread / math.sqrt(draws) + 0.03 * spread
    assert error.mean() == pytest.approx(spread, rel=0.1)
    assert (np.abs(value - exact) > 3 * error).mean() < 0.02


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
    everything = Sample(np.array([20.0]), np.ones((1, 20), dtype=bool))
    assert share_error(np.array([0]), np.array([20]), everything)[0] == 0


def of_certain(*values: float) -> list[Sum]:
    return [Sum(np.array([value]), np.zeros((1, 2))) for value in values]


def test_the_cosine_of_equal_vectors_is_one() -> None:
    squares = np.geomspace(1e-180, 1e180, 999)
    assert set(measures.projection_cosine(squares, squares, squares)) == {1.0}
    assert set(measures.projection_cosine(-squares, squares, squares)) == {-1.0}


def test_a_vector_of_zeros_has_no_direction() -> None:
    sample = Sample(np.array([2.0]), np.ones((1, 2), dtype=bool))
    zero, one = of_certain(0.0, 1.0)
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
