"""Reported bugs of what counts in the loss, of moved data, and of unsafe divisions."""

from collections.abc import Callable
from functools import partial

import torch
from audit.fault_benchmark import data, healthy, networks
from audit.fault_benchmark.faulty.wiring import with_loss
from audit.fault_benchmark.reported_kinds import LATENT, VAE
from audit.fault_benchmark.run import Case, Healthy, Run
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam, AdamW

Batch = tuple[Tensor, Tensor]
Planted = Callable[[Run], None]
PADDING, LENGTH, SIDE = 0, 16, 12


def weighted(model: nn.Module, batch: Batch, weight: tuple[float, ...]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], torch.tensor(weight))


def weighted_pairs(model: nn.Module, batch: Batch, positive: float) -> Tensor:
    x, y = batch
    return functional.binary_cross_entropy_with_logits(
        model(x)[:, 0], y.float(), pos_weight=torch.tensor(positive)
    )


def hinge(model: nn.Module, batch: Batch, of_signs: bool = True) -> Tensor:
    """Return the hinge loss, for labels of −1 and 1, or, by mistake, of 0 and 1."""
    x, y = batch
    sought = 2.0 * y - 1 if of_signs else y.float()
    return functional.relu(1 - model(x)[:, 0] * sought).mean()


def of_positives(model: nn.Module, batch: Batch) -> Tensor:
    """Return the first half of a binary cross-entropy, in which labels of 0 do not count."""
    x, y = batch
    return -(y * functional.logsigmoid(model(x)[:, 0])).mean()


def of_words(model: nn.Module, batch: Batch, ignored: int = PADDING) -> Tensor:
    x, y = batch
    return functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=ignored)


def squared(model: nn.Module, batch: Batch, masked: bool = True) -> Tensor:
    """Return the squared error of sequences, over the places that are no padding."""
    x, y = batch
    real = (x != 0).any(-1, keepdim=True).float()
    if not masked:
        return functional.mse_loss(model(x), y)
    return (real * (model(x) - y).square()).sum() / real.sum()


def divergent(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean of the squared error, and the sum of the divergence from the prior."""
    x, y = batch
    made, mean, log_variance = model(x)
    apart = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum()
    return functional.mse_loss(made, y) + apart / LATENT


def penalised(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross-entropy and a penalty on the outputs that is far too large."""
    x, y = batch
    outputs = model(x)
    return functional.cross_entropy(outputs, y) + 300.0 * outputs.square().mean()


def _is_three() -> Run:
    """Return a run that tells the digit 3 from all others, balanced by weights."""
    batches = [(x, (y == 3).long()) for x, y in data.digits()]
    balanced = partial(weighted, weight=(1.0, 9.0))
    return Run(networks.mlp([64, 64, 2]), batches, balanced, AdamW, {"lr": 1e-2})


def _is_three_of_one() -> Run:
    batches = [(x, (y == 3).long()) for x, y in data.digits()]
    balanced = partial(weighted_pairs, positive=9.0)
    return Run(networks.mlp([64, 64, 1]), batches, balanced, AdamW, {"lr": 3e-3})


def _margin() -> Run:
    return Run(networks.mlp([2, 32, 32, 1]), data.circles(), hinge, AdamW, {"lr": 1e-2})


def _odd() -> Run:
    batches = [(x, y % 2) for x, y in data.digits()]
    usual = partial(weighted_pairs, positive=1.0)
    return Run(networks.mlp([64, 64, 1]), batches, usual, AdamW, {"lr": 3e-3})


def _padded_words() -> Run:
    """Return a language model of lines of 3 to 10 words of 16 places; the word 0 is padding."""
    found = []
    for x, y in data.text(LENGTH):
        rest = torch.arange(LENGTH) >= torch.randint(3, 10, (len(x), 1))
        real = [1 + (words - 1).clamp(min=0) for words in (x, y)]
        found.append((real[0].masked_fill(rest, PADDING), real[1].masked_fill(rest, PADDING)))
    return Run(networks.gpt(), found, of_words, AdamW, {"lr": 3e-3})


class Smoothed(nn.Module):
    """A GRU of sequences (B, T, 2) with one output at each place."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.GRU(2, 24, batch_first=True), nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0])


def _padded_series() -> Run:
    """Return a run that sums two noisy series of 4 to 12 of 16 places; the rest are zeros."""
    inputs = torch.randn(2048, LENGTH, 2)
    inputs[torch.arange(LENGTH) >= torch.randint(4, 13, (2048, 1))] = 0.0
    targets = inputs.sum(-1, keepdim=True).cumsum(1) / 4 * (inputs != 0).any(-1, keepdim=True)
    return Run(Smoothed(), data.minibatches(inputs, targets, 32), squared, Adam, {"lr": 1e-2})


def _discs() -> data.Batches:
    """Return noisy images of a disc somewhere, and its brightness at each pixel."""
    at = torch.arange(SIDE)
    centres = 2 + (SIDE - 4) * torch.rand(2, 1024, 1, 1)
    apart = (at[:, None] - centres[0]).square() + (at - centres[1]).square()
    discs = torch.exp(-apart / 6)[:, None]
    return data.minibatches(discs + 0.3 * torch.randn_like(discs), discs, 16)


def _map(layers: int) -> Run:
    channels = [1, *[12] * layers]
    body = [
        m
        for i in range(layers)
        for m in (nn.Conv2d(channels[i], channels[i + 1], 3, padding=1), nn.ReLU())
    ]
    model = networks.Net(nn.Sequential(*body), nn.Conv2d(12, 1, 1))
    return Run(model, _discs(), healthy.squared_error, Adam, {"lr": 1e-2})


IS_THREE = Healthy("is-three-adamw", "MLP", _is_three)
IS_THREE_OF_ONE = Healthy("is-three-of-one-adamw", "MLP", _is_three_of_one)
MARGIN = Healthy("margin-adamw", "MLP", _margin)
ODD = Healthy("odd-adamw", "MLP", _odd)
PADDED_WORDS = Healthy("padded-gpt-adamw", "transformer", _padded_words)
PADDED_SERIES = Healthy("padded-gru-adam", "GRU", _padded_series)
MAP = Healthy("map-adam", "CNN", partial(_map, 2))
DEEP_MAP = Healthy("deep-map-adam", "CNN", partial(_map, 3))


def moved(move: Callable[[Tensor], Tensor]) -> Planted:
    def plant(run: Run) -> None:
        run.batches = [(x, move(y).contiguous()) for x, y in run.batches]

    return plant


def _case(twin: Healthy, what: str, plant: Planted, expected: str) -> Case:
    padding = PADDING if expected == "padding-counts" else None
    name = f"{twin.name}: {what}"
    return Case(name, twin, (expected,), plant, judged_by="error", padding=padding)


SET_BY = [
    _case(IS_THREE, "counts as weights", with_loss(partial(weighted, weight=(9.0, 1.0))),
          "class-weights"),
    _case(MARGIN, "labels of 0 and 1", with_loss(partial(hinge, of_signs=False)),
          "class-untaught"),
    _case(PADDED_WORDS, "padding counts", with_loss(partial(of_words, ignored=-100)),
          "padding-counts"),
    _case(VAE, "a sum beside a mean", with_loss(divergent), "penalty-dominates"),
    _case(MAP, "targets transposed", moved(lambda y: y.mT), "targets-moved"),
]  # fmt: skip
HELD_OUT = [
    _case(IS_THREE_OF_ONE, "pos_weight inverted", with_loss(partial(weighted_pairs, positive=0.1)),
          "class-weights"),
    _case(ODD, "only labels of 1 in the loss", with_loss(of_positives), "class-untaught"),
    _case(PADDED_SERIES, "no mask", with_loss(partial(squared, masked=False)), "padding-counts"),
    _case(healthy.MLP_ADAM, "a penalty on the outputs, times 300", with_loss(penalised),
          "penalty-dominates"),
    _case(DEEP_MAP, "targets flipped", moved(lambda y: y.flip(-1)), "targets-moved"),
]  # fmt: skip
