"""Every rule reproduces its layer's output from features and parameters, for any rows."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from rules import found, layouts
from torch import Tensor, nn

from adiv_monitor import Monitor
from adiv_monitor.capture.sampling import draw
from adiv_monitor.features import DenseFeatures, Rows, register_features
from adiv_monitor.features.uses import Use

MODES = ("zeros", "reflect", "replicate", "circular")
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear-tokens": (lambda: nn.Linear(4, 3), (2, 5, 4)),
    "linear-one-row": (lambda: nn.Linear(4, 3, bias=False), (4,)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2), (2, 4, 9)),
    "conv2d-unbatched": (lambda: nn.Conv2d(4, 6, (1, 3), padding=(0, 2)), (4, 5, 6)),
    "conv2d-valid": (lambda: nn.Conv2d(4, 6, 3, padding="valid"), (2, 4, 5, 6)),
    "conv3d": (lambda: nn.Conv3d(2, 4, (2, 3, 1), stride=(1, 2, 1), padding=1), (2, 2, 4, 5, 3)),
    "depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4), (2, 4, 5, 5)),
    "layer-norm": (lambda: nn.LayerNorm((3, 4)), (2, 5, 3, 4)),
    "layer-norm-no-bias": (lambda: nn.LayerNorm(4, bias=False), (2, 5, 4)),
    "rms-norm": (lambda: nn.RMSNorm(4, eps=1e-3), (2, 5, 4)),
    "rms-norm-default-eps": (lambda: nn.RMSNorm(4), (2, 5, 4)),
    "group-norm": (lambda: nn.GroupNorm(2, 6), (3, 6, 4, 5)),
    "group-norm-flat": (lambda: nn.GroupNorm(2, 6), (3, 6)),
    "batch-norm-flat": (lambda: nn.BatchNorm1d(4), (5, 4)),
    "batch-norm-1d": (lambda: nn.BatchNorm1d(4), (5, 4, 3)),
    "batch-norm-3d": (lambda: nn.BatchNorm3d(4), (5, 4, 2, 3, 2)),
    "batch-norm-eval": (lambda: nn.BatchNorm2d(4).eval(), (5, 4, 3, 2)),
    "batch-norm-no-statistics": (
        lambda: nn.BatchNorm2d(4, track_running_stats=False).eval(),
        (5, 4, 3, 2),
    ),
    **{
        f"conv{dims}d-{padding}-{mode}": (
            lambda dims=dims, padding=padding, mode=mode: getattr(nn, f"Conv{dims}d")(
                2, 4, 4, padding=padding, padding_mode=mode, dilation=2
            ),
            (3, 2, *(8, 9, 7)[:dims]),
        )
        for dims in (1, 2, 3)
        for padding in ("same", 3)
        for mode in MODES
    },
}


def use_of(module: nn.Module, x: Tensor) -> tuple[Use, Tensor]:
    """Return the use that the rules find in a module, and its output."""
    [(use, z)] = found(lambda: module(x), module.parameters())
    return use, z.detach()


def predicted(use: Use, rows: Rows) -> Tensor:
    features = use.features(rows)
    z = features.by_weight(use.shaped(use.weight.detach()))
    return z if use.bias is None else z + features.by_bias(use.bias.detach())


def in_layouts(x: Tensor) -> list[Tensor]:
    """Return the same values in several memory layouts."""
    others = [x.contiguous(memory_format=torch.channels_last)] if x.dim() == 4 else []
    return [laid_out for [laid_out] in layouts([x])] + others


@pytest.mark.parametrize("name", LAYERS)
def test_output_is_linear_in_the_parameters_with_these_features(name: str) -> None:
    build, shape = LAYERS[name]
    module = build().double()
    for parameter in module.parameters():
        parameter.data.normal_()
    if getattr(module, "running_mean", None) is not None:
        module.running_mean.normal_()
        module.running_var.uniform_(0.5, 2)
    generator = np.random.default_rng(0)
    for x in in_layouts(torch.randn(shape, dtype=torch.float64)):
        use, output = use_of(module, x)
        z = use.layout(output)
        for count in (z[..., 0].numel(), 3, 1):
            chosen = draw((z[..., 0].numel(),), count, generator).chosen
            rows = Rows(tuple(z.shape[:-1]), chosen)
            torch.testing.assert_close(predicted(use, rows), rows.take(z), rtol=0, atol=1e-12)


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
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with Monitor(module, optimizer, on_error="raise") as monitor:
        module(torch.tensor([[0, 2, 3], [3, 2, 2]])).square().sum().backward()
        optimizer.step()
    assert not monitor.latest.layers
    assert reason in monitor.latest.unsupported["weight"]


def test_many_calls_share_the_rows_evenly() -> None:
    """A layer called 40 times is sampled over all its calls, with at most max_rows rows."""
    module = nn.Linear(3, 3).double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for seed in range(5):
        with Monitor(module, optimizer, max_rows=64, seed=seed, on_error="raise") as monitor:
            sum(module(torch.randn(8, 3, dtype=torch.float64)).sum() for _ in range(40)).backward()
            optimizer.step()
        reading = monitor.latest.layers[""]
        assert reading.rows_total == 320
        assert reading.rows_seen == 64


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

    model = Transposed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(1, 4, dtype=torch.float64)
    with Monitor(model, optimizer, on_error="raise") as monitor:
        model(x, gain=3.0).square().sum().backward()
        optimizer.step()
    reading = monitor.latest.layers[""]
    assert reading.kind == "transposed"
    assert reading.effective_lr == pytest.approx(0.1 * 9 * float(x.square().sum() + 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_under_autocast(dtype: torch.dtype) -> None:
    """Readings of an autocast run are those of the full-precision run, up to rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4)
    )
    x, y = torch.randn(16, 3, 8, 8), torch.randint(4, (16,))
    found = []
    for enabled in (True, False):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with Monitor(model, optimizer, on_error="raise") as monitor:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype, enabled=enabled):
                loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        found.append(monitor.latest.layers)
    half, full = found
    assert half.keys() == full.keys() == {"0", "1", "4"}
    for path, reading in half.items():
        for name in ("gradient_cosine", "diagonal_cosine", "scale_mean", "scale_cv"):
            expected = getattr(full[path], name)
            assert getattr(reading, name) == pytest.approx(expected, rel=0.05, abs=0.02), name
