"""Zero-gradient rows change no measure, and a sample of rows agrees with all rows.

On a perceptron, a convolutional network, a vision transformer and a causal language model with
padded sequences.
"""

import math
from collections.abc import Callable

import pytest
import torch
from setups import same
from torch import Tensor, nn
from torch.nn import functional

from adiv_monitor import Monitor, StepReport


class Block(nn.Module):
    """Attention and a perceptron over tokens."""

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.before, self.between = nn.LayerNorm(8), nn.RMSNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8, bias=False)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        qkv = self.qkv(self.before(tokens)).chunk(3, -1)
        attended = functional.scaled_dot_product_attention(*qkv, is_causal=self.causal)
        tokens = tokens + self.out(attended)
        return tokens + self.down(functional.gelu(self.up(self.between(tokens))))


class Mean(nn.Module):
    """A block over the positions of (batch, channels, height, width), and a mean over them."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, patches: Tensor) -> Tensor:
        return self.block(patches.flatten(2).mT).mean(1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": lambda: nn.Sequential(
        nn.Linear(10, 12), nn.ReLU(), nn.LayerNorm(12), nn.Linear(12, 5)
    ),
    "convolutions": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=4, padding_mode="reflect"),
        nn.Conv2d(8, 6, 3, stride=2),
        nn.Flatten(2),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(6, 5),
    ),
    "vision": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 2, 2), Mean(Block(causal=False)), nn.Linear(8, 5)
    ),
    "language": lambda: nn.Sequential(
        nn.Embedding(20, 8, padding_idx=0), Block(causal=True), nn.Linear(8, 20, bias=False)
    ),
}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
}


def batch_of(kind: str, size: int, padding: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(5)
    if kind == "language":
        tokens = torch.randint(1, 20, (size, 8))
        tokens[size // 2 :, 5:] = 0
        tokens = functional.pad(tokens, (0, padding))
        following = functional.pad(tokens[:, 1:], (0, 1))
        return tokens, following.masked_fill(following == 0, -100)
    shape = (10,) if kind == "perceptron" else (3, 8, 8)
    x = torch.rand(size, *shape, dtype=torch.float64)
    labels = torch.randint(5, (size,))
    more = torch.rand(padding, *shape, dtype=torch.float64)
    return torch.cat([x, more]), functional.pad(labels, (0, padding), value=-100)


def report_of(
    kind: str,
    optimizer: str,
    batch: tuple[Tensor, Tensor],
    warm: tuple[Tensor, Tensor],
    **options: object,
) -> StepReport:
    """Return the report of the third step."""
    torch.manual_seed(3)
    model = MODELS[kind]().double()
    steps = OPTIMIZERS[optimizer](model)
    for _ in range(2):
        train(model, steps, warm)
    with Monitor(model, steps, on_error="raise", **options) as monitor:
        train(model, steps, batch)
    assert monitor.latest is not None
    return monitor.latest


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    optimizer.zero_grad()
    scores = model(batch[0]).flatten(0, -2)
    functional.cross_entropy(scores, batch[1].flatten()).backward()
    optimizer.step()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", MODELS)
def test_idle_rows_change_nothing(kind: str, optimizer: str) -> None:
    """Invariant 8 holds with all rows, which are few enough that all scales are kept."""
    batch, padded = batch_of(kind, 3, 0), batch_of(kind, 3, 1)
    assert len(padded[1].flatten()) > len(batch[1].flatten())
    plain = report_of(kind, optimizer, batch, batch, max_rows=None, attainable=True)
    found = report_of(kind, optimizer, padded, batch, max_rows=None, attainable=True)
    assert all(reading.attainable_cosine is not None for reading in found.layers.values())
    same(found, plain, but=("idle_share",))
    assert not found.notes
    for path, reading in found.layers.items():
        assert reading.rows_total > plain.layers[path].rows_total
        assert reading.idle_share > plain.layers[path].idle_share


@pytest.mark.slow(one_in=4)
@pytest.mark.parametrize("kind", MODELS)
def test_a_sample_is_as_far_off_as_it_says(kind: str) -> None:
    """Invariant 9 holds with zero-gradient rows, over all draws, layers and sampled measures."""
    padded = batch_of(kind, 60 if kind != "perceptron" else 600, 10)
    truth = report_of(kind, "adamw", padded, padded, max_rows=None)
    names = (
        *("update_cosine", "gradient_cosine", "effective_lr", "descent", "common_share"),
        *("harmed_fraction", "bias_share", "update_ratio", "row_cosine_mean"),
    )
    off = []
    for seed in range(30):
        found = report_of(kind, "adamw", padded, padded, max_rows=128, seed=seed)
        for path, reading in found.layers.items():
            for name in names:
                value, expected = getattr(reading, name), getattr(truth.layers[path], name)
                error = reading.standard_error.get(name, 0.0)
                if error == 0:
                    assert value == pytest.approx(expected, rel=1e-9), f"{name} of '{path}'"
                else:
                    off.append((value - expected) / error)
    beyond = torch.tensor(off).abs()
    assert (beyond > 3).double().mean() < 0.015
    assert (beyond > 6).double().mean() < 0.002


@pytest.mark.parametrize("rows", [2, 20], ids=["fewer than features", "more than features"])
def test_without_active_rows_there_is_no_ceiling(rows: int) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, attainable=True, on_error="raise") as monitor:
        (0 * model(torch.randn(rows, 4))).sum().backward()
        optimizer.step()
    assert monitor.latest is not None
    for reading in monitor.latest.layers.values():
        assert reading.idle_share == 1
        assert math.isnan(reading.attainable_cosine)


def test_few_active_rows_are_not_taken_for_certain() -> None:
    """With 4 of 2,048 rows active, most samples contain none or one of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 4)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.randn(2_048, 12, dtype=torch.float64)

    def reading_of(max_rows: int | None, seed: int = 0) -> StepReport:
        with Monitor(model, optimizer, max_rows=max_rows, seed=seed, on_error="raise") as monitor:
            optimizer.zero_grad()
            model(x)[:4].square().sum().backward()
            optimizer.step()
        assert monitor.latest is not None
        return monitor.latest

    truth = reading_of(None).layers["0"].measures()
    seen = set()
    for seed in range(40):
        report = reading_of(512, seed)
        reading = report.layers["0"]
        active = reading.rows_seen - reading.rows_without_gradient
        seen.add(min(active, 2))
        assert any("zero gradient, but" in note for note in report.notes) is (active == 0)
        for name in ("gradient_cosine", "interference_ratio", "common_share"):
            value, error = reading.measures()[name], reading.standard_error.get(name, 0.0)
            assert math.isnan(value) is (active == 0), name
            if active == 1:
                assert not math.isfinite(error), name
        for name in ("effective_lr", "diagonal_cosine", "idle_share", "scale_mean"):
            assert reading.measures()[name] == pytest.approx(truth[name], rel=1e-9), name
    assert seen == {0, 1, 2}
