"""The measures as functions: any number of layers at once, zero vectors, sums, quantiles."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from setups import leaves
from torch import Tensor

from adiv_monitor.features.rows import squares
from adiv_monitor.maths import measures
from adiv_monitor.maths.attention_sums import AttentionSums, ScaleSums
from adiv_monitor.maths.estimates import (
    Sample,
    Sum,
    mean_of_active,
    over_rows,
    product,
    quantiles,
    share_error,
)
from adiv_monitor.maths.readings import Judged, measure
from adiv_monitor.maths.sums import (
    REALISED,
    About,
    Array,
    Blocks,
    Common,
    Dots,
    Evidence,
    FamilySums,
    LayerSums,
    Moved,
    Pairs,
    Sampled,
    ScaleTotals,
    StackedSums,
    Totals,
    Vector,
    pairs_of,
)
from adiv_monitor.step.parameter_steps import PieceNumbers
from adiv_monitor.step.transfer import Flags, StepSums, fetch


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


def test_few_rows_overrate_a_ratio_unless_their_bias_is_taken_off() -> None:
    """√ of a heavy-tailed mean is too small on average; the correction removes most of the bias."""
    whole = population(400)["a"] ** 2
    random = np.random.default_rng(1)
    rows = np.stack([random.choice(whole, 30, replace=False) for _ in range(4000)])
    sample = Sample(np.full(4000, 400.0), np.ones(rows.shape, dtype=bool))
    one = Sum(np.ones(4000), np.zeros(rows.shape))
    root = math.sqrt(whole.sum())
    plain = np.sqrt(rows.mean(1) * 400).mean() / root - 1
    fixed = product(one, [(over_rows(rows, sample), 0.5)], sample).value.mean() / root - 1
    assert plain < -0.05
    assert abs(fixed) < 0.75 * abs(plain)


def test_all_rows_leave_nothing_to_chance() -> None:
    whole = population(50)
    sample = Sample(np.array([50.0]), np.ones((1, 50), dtype=bool))
    a, b = (over_rows(whole[name][None], sample) for name in "ab")
    value, error = product(a, [(b, -1)], sample)
    assert value[0] == pytest.approx(whole["a"].sum() / whole["b"].sum(), rel=1e-14)
    assert error[0] == 0


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


def test_exact_sums_are_taken_where_they_are_known() -> None:
    sample = Sample(np.array([10.0, 10.0]), np.ones((2, 4), dtype=bool))
    found = over_rows(np.arange(8.0).reshape(2, 4), sample, np.array([math.nan, 7.0]))
    assert found.total.tolist() == [15, 7]
    assert (found.spread[0] != 0).any()
    assert (found.spread[1] == 0).all()


def test_a_share_of_none_among_few_is_not_certain() -> None:
    sample = Sample(np.array([1000.0]), np.ones((1, 20), dtype=bool))
    error = share_error(np.array([0]), np.array([20]), sample)[0]
    assert 0.03 < error < 0.06
    everything = Sample(np.array([20.0]), np.ones((1, 20), dtype=bool))
    assert share_error(np.array([0]), np.array([20]), everything)[0] == 0


def of_certain(*values: float) -> list[Sum]:
    return [Sum(np.array([value]), np.zeros((1, 2))) for value in values]


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


def test_sums_of_many_alike_entries_do_not_drift() -> None:
    """Float32 sums over a constant matrix or output, also of wide rows, agree with float64."""
    value = torch.tensor(0.1).item()
    for shape in [(100,), (2000, 2500), (512, 512, 3, 3)]:
        constant = torch.full(shape, 0.1)
        assert squares(constant).sum().item() == pytest.approx(
            constant.numel() * value**2, rel=1e-5
        )


def test_pairs_are_those_of_the_vectors_that_are_there() -> None:
    own, e, G, d, bias, z, rest, *_ = Vector
    assert pairs_of((own, e, G, d, bias, z, rest)) == (
        *((v, v) for v in (own, e, G, d, bias, z, rest)),
        *((own, e), (e, G), (G, d), (d, bias), (own, G)),
    )
    assert pairs_of((e, G, z)) == ((e, e), (G, G), (z, z), (e, G))
    assert pairs_of(()) == ()


def products_of(random: np.random.Generator, rows: int, pairs: Pairs) -> Array:
    """Return dot products of random vectors, 30 % of whose rows have no gradient."""
    vectors = {vector: random.normal(size=(rows, 6)) for vector in Vector}
    vectors[Vector.G][random.random(rows) < 0.3] = 0
    return np.stack([(vectors[a] * vectors[b]).sum(1) for a, b in pairs], axis=1)


def random_layer(
    random: np.random.Generator, rows: int, groups: int = 1, known: str = "nothing"
) -> Judged:
    """Return a step with random matrices, and `known` statistics of all its rows."""
    own = () if groups == 1 else (Vector.OWN,)
    names = (*own, Vector.E, Vector.G, Vector.D, Vector.Z, Vector.REST)

    def positive(size: int = 1, least: float = 0.0) -> np.ndarray:
        return random.exponential(size=size) + least

    totals: Totals[Array] | None = None
    active = np.array([2.0 * rows])
    if known == "gradients":
        concentration = random.uniform(1 / rows, 1, size=1)
        totals = Totals(active, positive(least=20), concentration)
    elif known == "sums":
        G_G, own_G, own_own, total, deviation, largest = (positive(least=20) for _ in range(6))
        scales = ScaleTotals(total, deviation, largest, positive(rows))
        totals = Totals(active, G_G, np.array([0.1]), own_G, own_own, scales)
    blocks = Blocks(
        groups,
        pivot=np.ones((1, 1)),
        sums=positive(rows),
        norms=positive(rows, 1),
        largest=positive(rows, 2),
        entries=positive(rows * groups),
    )
    layer = LayerSums(
        About("linear"),
        Sampled(rows, 3 * rows),
        names,
        products_of(random, rows, pairs_of(names)),
        Evidence(1e-16, factor=float(positive()[0])),
        Dots(*positive(3).tolist()),
        scale=positive(rows, 1) if groups == 1 else None,
        blocks=None if groups == 1 else blocks,
        totals=totals,
        common=Common(positive(rows), positive(rows)),
        realised=Moved(4 * rows, products_of(random, rows, REALISED)),
    )
    own_gamma, own_w = positive(2).tolist()
    return Judged(layer, known != "nothing", own_gamma=own_gamma, own_w=own_w)


# Changes with certain results if all rows are seen, measured beside layers with sampled rows.
WHOLE: dict[str, Callable[[LayerSums[Array]], Array]] = {
    "nothing moves": lambda layer: layer.products * _without(layer, Vector.D),
    "no active row": lambda layer: layer.products * _without(layer, Vector.G),
    "squares overflow": lambda layer: layer.products * 1e200,
}


def _without(layer: LayerSums[Array], vector: Vector) -> Array:
    """Return a mask of products: 0 for those with this vector, else 1."""
    return np.array([float(vector not in pair) for pair in pairs_of(layer.vectors)])


def seen_whole(judged: Judged, change: Callable[[LayerSums[Array]], Array]) -> Judged:
    layer = judged.layer
    rows = Sampled(layer.sampled.seen, layer.sampled.seen)
    return replace(judged, layer=replace(layer, sampled=rows, products=change(layer)))


@pytest.mark.parametrize("known", ["nothing", "gradients", "sums"])
@pytest.mark.parametrize("groups", [1, 4])
@np.errstate(over="ignore", invalid="ignore")
def test_layers_measured_together_are_as_measured_alone(groups: int, known: str) -> None:
    random = np.random.default_rng(0)
    layers = {f"layer {i}": random_layer(random, 6, groups, known) for i in range(3)}
    for rows in (1, 2, 5, 128, 300):
        layers[f"{rows} rows"] = random_layer(random, rows, groups, known)
    for name, change in WHOLE.items():
        layers[name] = seen_whole(random_layer(random, 6, groups, known), change)
    together = measure(layers)
    assert list(together) == list(layers)
    for path, numbers in layers.items():
        alone = measure({path: numbers})[path]
        assert together[path].values == pytest.approx(alone.values, rel=1e-12, nan_ok=True)
        assert together[path].errors == pytest.approx(alone.errors, rel=1e-12, nan_ok=True)
        assert together[path].quantiles.keys() == alone.quantiles.keys()
        for name, found in alone.quantiles.items():
            assert together[path].quantiles[name] == pytest.approx(found, rel=1e-12, nan_ok=True)
        assert together[path].idle_seen == alone.idle_seen
        assert (together[path].suspected, together[path].holds_more) == (
            *(alone.suspected, alone.holds_more),
        )


def test_what_is_fetched_belongs_to_where_it_was() -> None:
    def of(total: int, **others: Any) -> LayerSums[Tensor]:
        evidence: Evidence[Tensor] = Evidence(1e-7, of_bias=(torch.tensor([8.0]),))
        nothing = torch.empty(0)
        return LayerSums(About("x"), Sampled(1, total), (), nothing, evidence, **others)

    e, G, z = Vector.E, Vector.G, Vector.Z
    layers = {"x": of(1), "y": of(2, realised=Moved(1, torch.tensor([9.0])))}
    blocks = Blocks(2, *(torch.tensor([[of]]) for of in (1.0, 2.0, 3.0, 4.0, 5.0)))
    common = torch.tensor([[5.0], [6.0]]), torch.tensor([[7.0], [8.0]]), None
    parts = (
        FamilySums(2, (e, G, z), torch.tensor([[10.0], [20.0]]), None, common),
        FamilySums(1, (G, z), None, blocks, None),
    )
    numbers = torch.arange(4 * 3.0).view(4, 3, 1)
    rows = (StackedSums(("y", None, "x"), (e, G, z), numbers, parts),)
    products: PieceNumbers[Tensor] = PieceNumbers((7, 8), w_w=(torch.tensor([3.0, 4.0]),))
    attending = {
        "z": tuple(
            AttentionSums(
                torch.tensor(0.0), ScaleSums(torch.ones(1, 2), (), ()), torch.tensor([[5.0, g]])
            )
            for g in (6.0, 7.0)
        )
    }
    flags = Flags(skipped=torch.tensor(0.0))
    of_three = (torch.tensor([3.0, 4.0, 5.0]), torch.tensor([0.3, 0.4, 0.5]), torch.zeros(3))
    scales = ScaleTotals(*(torch.tensor([of]) for of in (1.0, 2.0, 3.0)), torch.ones(1, 9))
    own = torch.tensor([11.0])
    totals = {("y", "lost", "x"): Totals(*of_three, own, own, scales)}
    found = fetch(StepSums(layers, rows, totals, flags, products, attending))
    x, y = found.layers["x"], found.layers["y"]
    assert x.totals is not None and y.totals is not None
    assert (x.totals.active.tolist(), y.totals.active.tolist()) == ([5], [3])
    assert (x.totals.G_G.tolist(), y.totals.G_G.tolist()) == ([0.5], [pytest.approx(0.3)])
    assert x.totals.scales is None and y.totals.scales is not None
    assert y.totals.scales.entries.tolist() == [1, 1]
    assert (x.vectors, x.products.tolist()) == ((G, z), [[5, 8]])
    assert (y.vectors, y.products.tolist()) == ((e, G, z), [[0, 3, 6, 9]])
    assert x.scale is None and x.common is None
    assert y.scale is not None and y.scale.tolist() == [10]
    assert y.common is not None and (y.common.products.tolist(), y.common.sum) == ([5], None)
    assert x.blocks is not None and x.blocks.largest.tolist() == [4]
    assert y.realised is not None and y.realised.products.tolist() == [9]
    assert [of.tolist() for of in x.evidence.of_bias] == [[8]]
    assert all(array.dtype == np.float64 for _, array in leaves(found))
    assert found.flags.skipped == 0 and found.flags.moved is None
    assert [sums.G_G.tolist() for sums in found.attention["z"]] == [[[5, 6]], [[5, 7]]]
    assert [part.tolist() for part in found.products.w_w] == [[3, 4]]


@pytest.mark.parametrize("count", [1, 2, 37])
def test_quantiles(count: int) -> None:
    levels = (0, 0.05, 0.5, 1)
    values = np.random.default_rng(0).normal(size=(3, count))
    expected = np.quantile(values, levels, axis=-1).T
    found, errors = quantiles(values, levels)
    np.testing.assert_allclose(found, expected, rtol=1e-13)
    assert (errors == 0).all()


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


def test_one_entry_of_several_knows_no_error() -> None:
    values = np.array([[2.0, np.nan], [2.0, 2.0]])
    found, errors = quantiles(values, (0.5,), np.array([0.5, 0.5]))
    assert found.tolist() == [[2.0], [2.0]]
    assert np.isnan(errors[0, 0])
    assert errors[1, 0] == 0
    assert quantiles(values[:1], (0.5,), 0.0)[1].tolist() == [[0.0]]
