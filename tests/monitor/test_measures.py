"""The measures as functions: any number of layers at once, zero vectors, quantiles."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from adiv_monitor import dots, measures
from adiv_monitor.batch import alike, measure
from adiv_monitor.features import DenseFeatures
from adiv_monitor.outcome import fetch


def dots_of_a_layer(rows: int, groups: int = 1) -> dots.Dots:
    """Products of a step whose every matrix is random."""
    phi = torch.randn(rows, groups, 5, dtype=torch.float64)
    G = torch.randn(rows, groups, 3, dtype=torch.float64)
    e, by_weight, by_bias, z = torch.randn(4, rows, groups * 3, dtype=torch.float64)
    u, gamma = torch.randn(2, 7, dtype=torch.float64)
    return {
        **dots.of_gradient(DenseFeatures(phi).scale(), G, e),
        **dots.of_update(by_weight, by_bias, G.flatten(1)),
        "z_z": measures.row_squares(z),
        "u_u": dots.of_parts([u], [u]),
        "u_gamma": dots.of_parts([u], [gamma]),
        "gamma_gamma": dots.of_parts([gamma], [gamma]),
    }


@pytest.mark.parametrize("groups", [1, 4])
def test_layers_measured_together_are_as_measured_alone(groups: int) -> None:
    layers = {f"layer {i}": dots_of_a_layer(6, groups) for i in range(3)}
    layers["another shape"] = dots_of_a_layer(5, groups)
    alone = {}
    for path, products in layers.items():
        alone[path] = measure(products)
    together = alike(layers)
    assert sorted(len(paths) for paths, _ in together) == [1, 3]
    for paths, stacked in together:
        for name, values in measure(stacked).items():
            for path, value in zip(paths, values, strict=True):
                torch.testing.assert_close(value, alone[path][name], rtol=1e-12, atol=0)


def test_sums_of_many_alike_entries_do_not_drift() -> None:
    """A constant float32 vector, and a matrix of wide constant rows: all measures as in float64."""
    for count in (100, 300_000, 5_000_000):
        a = torch.full((count,), 0.1)
        assert dots.of_parts([a], [a]).item() == pytest.approx(count * a[0].item() ** 2, rel=1e-6)
    G = torch.full((200, 1, 30_000), 1e-3)
    scale, e = torch.full((200, 1), 3.0), 7 * G.flatten(1)
    found = dots.of_gradient(scale, G, e) | dots.of_update(e, 2 * e, G.flatten(1))
    assert measures.gradient_cosine(found["e_G"], found["e_e"], found["G_G"]) == pytest.approx(1)
    assert measures.update_cosine(found["d_G"], found["d_d"], found["G_G"]) == pytest.approx(-1)
    ratio = measures.interference_ratio(found["rest_rest"], found["own_own"])
    assert ratio.item() == pytest.approx(4 / 3, rel=1e-6)
    assert measures.bias_share(found["A_A"], found["B_B"]).item() == pytest.approx(2 / 3, rel=1e-6)


def test_no_matrix_outlives_its_dot_products() -> None:
    """The scales of a gain are as large as its features; only numbers per row are kept of them."""
    G = torch.randn(100, 64, 1)
    found = dots.of_gradient(torch.rand(100, 64), G, torch.randn(100, 64))
    assert max(t.numel() for t in found.values()) <= 2048
    bases = (t if t._base is None else t._base for t in found.values())
    assert max(base.numel() for base in bases) <= 2048


def test_what_is_fetched_belongs_to_its_layer() -> None:
    tensors = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([True, False])}
    other = {"a": torch.tensor([3.0], dtype=torch.float64)}
    fetched = fetch([(["x", "y"], tensors), (["z"], other)])
    assert fetched == {"x": {"a": [1], "b": [1]}, "y": {"a": [2], "b": [0]}, "z": {"a": [3]}}


def test_a_vector_of_zeros_has_no_direction() -> None:
    zero, one = torch.zeros(()), torch.ones(())
    assert measures.cosine(zero, zero, one).isnan()
    assert measures.cosine(torch.tensor(1e-30), torch.tensor(1e-30), torch.tensor(1e-30)) == 1
    rows = torch.tensor([0.0, 1.0])
    assert measures.row_cosine(rows, rows, rows).tolist() == [
        pytest.approx(math.nan, nan_ok=True),
        1,
    ]
    assert measures.rows_without_gradient(rows) == 1
    assert measures.harmed_fraction(-rows, rows) == 1
    assert measures.harmed_fraction(0 * rows, 0 * rows).isnan()
    assert measures.scale_max(torch.zeros(2, 0, 1)).isnan().all()


@pytest.mark.parametrize("count", [1, 2, 37])
def test_quantiles(count: int) -> None:
    levels = (0, 0.05, 0.5, 1)
    values = np.random.default_rng(0).normal(size=(3, count))
    expected = np.quantile(values, levels, axis=-1).T
    np.testing.assert_allclose(measures.quantiles(values, levels), expected, rtol=1e-13)
    np.testing.assert_allclose(measures.quantiles_of_numbers(values, levels), expected, rtol=1e-13)


def test_quantiles_of_numbers_leave_out_what_is_none() -> None:
    values = np.array([[3, math.nan, 1, 2], [math.nan] * 4, [math.inf, math.inf, 1, math.nan]])
    found = measures.quantiles_of_numbers(values, (0, 0.5))
    np.testing.assert_array_equal(found, [[1, 2], [math.nan] * 2, [1, math.inf]])
    np.testing.assert_array_equal(measures.quantiles(values, (1,))[0], math.nan)
    assert np.isnan(measures.quantiles_of_numbers(np.empty((2, 0)), (0, 1))).all()


@pytest.mark.parametrize(("rows", "groups", "kept"), [(8, 3, 24), (5000, 1, 1667), (1000, 7, 1750)])
def test_many_entries_are_thinned_row_by_row(rows: int, groups: int, kept: int) -> None:
    values = torch.arange(rows * groups).view(1, rows, groups)
    entries: Tensor = measures.thinned(values)
    assert entries.shape == (1, kept)
    assert entries[0, :groups].tolist() == list(range(groups))
