"""Operations of features agree with Φ written out column by column."""

from itertools import product

import pytest
import torch
from torch import Tensor

from adiv_monitor.capture.check import of_gradient
from adiv_monitor.features import DenseFeatures
from adiv_monitor.features.rows import contracted

ROWS, OUT = 7, 2
BIASES = ("none", "one", "half", "of rows", "of groups")


def made(groups: int, n_feat: int, bias: str, *, across: bool) -> DenseFeatures:
    """Return features stored group by group, or feature by feature."""
    phi = torch.randn(ROWS, groups, n_feat, dtype=torch.float64)
    if across:
        phi = phi.mT.contiguous().mT
    number = {"none": None, "one": 1.0, "half": 0.5}
    if bias in number:
        return DenseFeatures(phi, number[bias])
    width = groups if bias == "of groups" else 1
    return DenseFeatures(phi, torch.rand(ROWS, width, dtype=torch.float64) + 0.5)


CASES = [
    made(groups, n_feat, bias, across=across)
    for groups, n_feat, bias, across in product((1, 3), (1, 4), BIASES, (False, True))
]


def written_out(features: DenseFeatures) -> tuple[Tensor, Tensor | None]:
    """Return φ_W and φ_b of every row and group."""
    phi, bias = features.phi, features.bias
    if bias is None:
        return phi, None
    return phi, torch.zeros_like(phi[..., 0]) + bias


@pytest.mark.parametrize("features", CASES)
def test_features_are_what_they_are_written_out(features: DenseFeatures) -> None:
    phi, bias = written_out(features)
    groups, n_feat = phi.shape[1:]
    weight = torch.randn(groups * OUT, n_feat, dtype=torch.float64)
    blocks = weight.reshape(groups, OUT, n_feat)
    moved = torch.stack([(phi[:, g] @ blocks[g].T) for g in range(groups)], dim=1)
    torch.testing.assert_close(features.by_weight(weight), moved.flatten(1))
    depthwise = weight[::OUT]
    alone = torch.stack([phi[:, g] @ depthwise[g] for g in range(groups)], dim=1)
    torch.testing.assert_close(features.by_weight(depthwise), alone)
    one = torch.randn(groups * OUT, dtype=torch.float64)
    if bias is None:
        assert features.by_bias(one) is None
    else:
        offset = bias[:, :, None] * one.reshape(groups, OUT)
        torch.testing.assert_close(features.by_bias(one), offset.flatten(1))
    square = phi.square().sum(2) + (0 if bias is None else bias.square())
    torch.testing.assert_close(features.scale(), square)
    active = torch.rand(ROWS, dtype=torch.float64).round()
    together = (active[:, None, None] * phi).sum(0)
    norms = phi.square().sum((1, 2)).sqrt()
    torch.testing.assert_close(features.common(active), ((phi * together).sum((1, 2)), norms))


@pytest.mark.parametrize("features", CASES)
def test_rows_of_features_apart_and_together(features: DenseFeatures) -> None:
    torch.testing.assert_close(features.scale(), features.joined([]).scale())
    parts = [features.pick(torch.tensor(rows)) for rows in ([0, 1], [2], [3, 4, 5, 6])]
    torch.testing.assert_close(parts[0].joined(parts[1:]).columns(), features.columns())
    for part, rows in zip(parts, (slice(0, 2), slice(2, 3), slice(3, 7)), strict=True):
        torch.testing.assert_close(part.scale(), features.scale()[rows])


@pytest.mark.parametrize("features", [case for case in CASES if case.groups == 1])
def test_products_with_vectors_are_those_of_the_gradient(features: DenseFeatures) -> None:
    """γv = Σ_r g_r (φ_r·v) with γ = GᵀΦ from autograd."""
    assert features.phi is not None
    weight = torch.randn(OUT, features.width, dtype=torch.float64, requires_grad=True)
    moved, G = features.by_weight(weight), torch.randn(ROWS, OUT, dtype=torch.float64)
    (gamma,) = torch.autograd.grad((moved * G).sum(), weight)
    v = torch.randn(features.width, 3, dtype=torch.float64)
    found, _ = of_gradient(features, gamma, None, v)
    assert found is not None
    torch.testing.assert_close(contracted(features.phi[:, 0] @ v, G).flatten(), found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_do_not_depend_on_the_order_in_memory(dtype: torch.dtype) -> None:
    G = torch.randn(2, 4, 5, 6).to(dtype)
    products = torch.randn(2, 4, 5, 2)
    expected = torch.einsum("rn,rm->nm", G.float().reshape(-1, 6), products.reshape(-1, 2))
    for gradient in (G, G.movedim(-1, 1).contiguous().movedim(1, -1)):
        torch.testing.assert_close(contracted(products, gradient), expected)
