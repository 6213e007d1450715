"""Precision of the features of modules, what cannot be measured, and rules of the user's own."""

import pytest
import torch
from rules import found
from setups import one_step, trained
from torch import Tensor, nn

from adiv_monitor import LayerReading
from adiv_monitor.features import DenseFeatures, Rows, register_features
from adiv_monitor.features.uses import Use


def use_of(module: nn.Module, x: Tensor) -> tuple[Use, Tensor]:
    """Return the use that the rules find in a module, and its output."""
    [(use, z)] = found(lambda: module(x), module.parameters())
    return use, z.detach()


def predicted(use: Use, rows: Rows) -> Tensor:
    features = use.features(rows)
    z = features.by_weight(use.shaped(use.weight.detach()))
    return z if use.bias is None else z + features.by_bias(use.bias.detach())


@pytest.mark.parametrize("module", [nn.BatchNorm2d(4), nn.GroupNorm(2, 4)])
def test_normalisers_of_inputs_far_from_zero(module: nn.Module) -> None:
    """x̂ in float32 is off by the rounding of the mean, as in the module itself."""
    x = 1000 + 0.1 * torch.randn(8, 4, 5, 5)
    rows = Rows((8, 5, 5))
    exact, _ = use_of(module.double(), x.double())
    expected = predicted(exact, rows)
    rounded, _ = use_of(module.float(), x)
    torch.testing.assert_close(predicted(rounded, rows).double(), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float32], ids=str)
def test_batch_norm_in_half_precision_is_as_precise_as_its_input(kept: torch.dtype) -> None:
    module = nn.BatchNorm2d(4).to(kept)  # the dtype in which it saves its statistics for backward
    x, rows = torch.randn(8, 4, 5, 5).bfloat16(), Rows((8, 5, 5))
    rounded, _ = use_of(module, x)
    exact, _ = use_of(module.double(), x.double())
    expected = predicted(exact, rows)
    torch.testing.assert_close(predicted(rounded, rows).double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.Embedding(4, 3, scale_grad_by_freq=True), "scale_grad_by_freq=True rescales"),
        (nn.Embedding(4, 3, sparse=True), "sparse=True gives sparse gradients"),
        (nn.EmbeddingBag(4, 3, sparse=True), "sparse=True gives sparse gradients"),
        (nn.EmbeddingBag(4, 3, mode="max"), "mode='max' takes every feature"),
    ],
)
def test_what_cannot_be_measured_has_a_reason(module: nn.Module, reason: str) -> None:
    tokens = torch.tensor([[0, 2, 3], [3, 2, 2]])
    (report,) = trained(module, lambda module: module(tokens).square().sum())
    assert not report.layers
    assert reason in report.unsupported["weight"]


def test_users_teach_their_own_layer() -> None:
    """A user's rule measures HuggingFace's Conv1D, which stores its weight transposed."""

    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
            self.shift = nn.Parameter(torch.randn(3, dtype=torch.float64))

        def forward(self, x: Tensor, *, gain: float) -> Tensor:
            return gain * (x @ self.kernel + self.shift)

    @register_features(Transposed, kind="transposed", weight="kernel", bias="shift")
    def transposed(module: Transposed, rows: Rows, x: Tensor, *, gain: float) -> DenseFeatures:
        phi = gain * rows.take(x)
        return DenseFeatures(phi[:, None], phi.new_full((len(phi), 1), gain), transposed=True)

    x = torch.randn(1, 4, dtype=torch.float64)
    (report,) = trained(Transposed(), lambda model: model(x, gain=3.0).square().sum())
    reading = report.layers[""]
    assert reading.kind == "transposed"
    assert reading.effective_lr == pytest.approx(0.1 * 9 * float(x.square().sum() + 1))


def test_scales_of_all_rows_keep_their_precision_where_backward_runs_under_autocast() -> None:
    def read(*, within: bool) -> dict[str, float]:
        torch.manual_seed(0)
        module = nn.Conv2d(6, 12, 3, padding=1, groups=6)

        def backward(module: nn.Module) -> None:
            loss = (module(torch.randn(7, 6, 5, 4) + 3) * torch.randn(7, 12, 5, 4)).sum()
            with torch.autocast("cpu", torch.bfloat16, enabled=within):
                loss.backward()

        return one_step(module, backward, max_rows=4).layers[""].measures()

    outside = read(within=False)
    assert "update_cosine" in outside and read(within=True) == outside


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_under_autocast(dtype: torch.dtype) -> None:
    """Readings of an autocast run are those of the full-precision run, up to rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4)
    )
    x, y = torch.randn(16, 3, 8, 8), torch.randint(4, (16,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def layers(*, enabled: bool) -> dict[str, LayerReading]:
        def loss(model: nn.Module) -> Tensor:
            with torch.autocast("cpu", dtype=dtype, enabled=enabled):
                return nn.functional.cross_entropy(model(x), y)

        return trained(model, loss, optimizer=optimizer)[0].layers

    half, full = layers(enabled=True), layers(enabled=False)
    assert half.keys() == full.keys() == {"0", "1", "4"}
    for path, reading in half.items():
        for name in ("gradient_cosine", "diagonal_cosine", "scale_mean", "scale_cv"):
            expected = getattr(full[path], name)
            assert getattr(reading, name) == pytest.approx(expected, rel=0.05, abs=0.02), name
