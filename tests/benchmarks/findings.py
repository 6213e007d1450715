"""A healthy and a faulty run for the page of each finding, and the limits as the code has them.

The healthy run is an MLP on scikit-learn's digits, standardised by one mean and one deviation, with
SGD, momentum and its best rate (`thresholds.py`); the faulty one is the same with one thing wrong.
Writes between the marks of `docs/findings/*.md`.

    python tests/benchmarks/findings.py [--only input-scale …] [--threads 1] [--write docs/findings]
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from thresholds import Case, gained, killed, loss, offset, scaled, unequal
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW
from write_up import parser, table

from adiv_monitor.audit.audit import audit
from adiv_monitor.audit.experiments import answers, exchange, loss_inputs, modules, places
from adiv_monitor.audit.experiments import data as experiments_data
from adiv_monitor.audit.report import AuditReport
from adiv_monitor.audit.training.setup import Setup
from adiv_monitor.diagnosis import finding as of_trials
from adiv_monitor.diagnosis import readings
from adiv_monitor.diagnosis.faults import (
    data,
    initialisation,
    inputs,
    optimizer,
    parameters,
    rates,
    samples,
    states,
    targets,
    units,
)
from adiv_monitor.diagnosis.faults import loss as loss_rules
from adiv_monitor.diagnosis.finding import Finding
from adiv_monitor.diagnosis.record import Record

HEALTHY = Case("ReLU MLP", "SGD", 0.1)


class Cut(nn.Module):
    """A net whose gradient is cut behind the first layers."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.front, self.back = layers[:2], layers[2:]

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.front(x).detach())


class Times(nn.Module):
    """Multiplies by a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


class Keeps(nn.Module):
    """Adds a tenth of what its layers returned for the batch before, or nothing."""

    def __init__(self, layers: nn.Sequential, keeps: bool = True) -> None:
        super().__init__()
        self.layers, self.keeps, self.last = layers, keeps, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        made = self.layers(x) + 0.1 * self.last
        self.last = made.detach() if self.keeps else self.last
        return made


def two_views(of: tuple[int, int]) -> Setup:
    """Outputs of two noisy views of an image shall be alike, and of other images not."""
    noise = torch.Generator().manual_seed(0)
    views = [tuple(x + 0.3 * torch.randn(x.shape, generator=noise) for _ in range(2))
             for x, _ in HEALTHY.setup().batches]  # fmt: skip

    def contrast(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        one, other = (functional.normalize(model(batch[i]), dim=1) for i in of)
        return functional.cross_entropy(5 * one @ other.T, torch.arange(len(one)))

    return replace(HEALTHY.setup(), batches=tuple(views), loss=contrast,
                   optimizer=partial(momentum, rate=0.003))  # fmt: skip


def labels_apart(batches: tuple[Any, ...]) -> tuple[Any, ...]:
    """The labels of other samples."""
    labels = torch.cat([y for _, y in batches])
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    others = labels[order].split([len(y) for _, y in batches])
    return tuple((x, y) for (x, _), y in zip(batches, others, strict=True))


class Clipped(nn.Module):
    """A net whose weights are put back into a small box before each forward pass."""

    def __init__(self, layers: nn.Sequential, box: float = 0.01) -> None:
        super().__init__()
        self.layers, self.box = layers, box

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for parameter in self.layers.parameters():
                parameter.clamp_(-self.box, self.box)
        return self.layers(x)


def deep(activation: type[nn.Module], depth: int) -> nn.Sequential:
    hidden = [m for _ in range(depth) for m in (nn.Linear(64, 64), activation())]
    return nn.Sequential(*hidden, nn.Linear(64, 10))


def shuffled(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A loss that compares with other samples' targets."""
    x, y = batch
    return loss(model, (x, y[torch.randperm(len(y))]))


def lacking(model: nn.Sequential) -> SGD:
    return SGD(model[:4].parameters(), lr=0.1, momentum=0.9)


def faulty(**changes: Any) -> Callable[[], Setup]:
    return lambda: replace(HEALTHY, **changes).setup()


def with_model(change: Callable[[nn.Sequential], nn.Module], **changes: Any) -> Callable[[], Setup]:
    def made() -> Setup:
        setup = HEALTHY.setup()
        return replace(setup, model=change(setup.model), optimizer=momentum, **changes)

    return made


def momentum(model: nn.Module, rate: float = 0.1) -> SGD:
    return SGD([p for p in model.parameters() if p.requires_grad], lr=rate, momentum=0.9)


def regression(by: float) -> Setup:
    """The digit, less its mean and over its standard deviation, times a factor."""

    def squared(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return (model(x)[:, 0] - by * (y - 4.5) / 2.9).square().mean()

    return replace(HEALTHY.setup(), loss=squared, optimizer=partial(momentum, rate=0.03))


def of_shape(shaped: Callable[[Tensor], Tensor]) -> Setup:
    """A regression of the digit, less its mean and over its standard deviation."""

    def squared(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return (shaped(model(x)) - (y - 4.5) / 2.9).square().mean()

    setup = HEALTHY.setup()
    layers = [*setup.model.children()][:-1]
    model = nn.Sequential(*layers, nn.Linear(setup.model[-1].in_features, 1))
    return replace(setup, model=model, loss=squared, optimizer=partial(momentum, rate=0.03))


def dice(shares: Tensor, y: Tensor) -> Tensor:
    """Return 1 minus the dice coefficient of all classes together."""
    target = functional.one_hot(y, 10)
    return 1 - 2 * (shares * target).sum() / (shares.sum() + target.sum())


def odd(last: nn.Module) -> Setup:
    """Whether the digit is odd."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return functional.binary_cross_entropy(model(x), (y % 2)[:, None].float())

    setup = HEALTHY.setup()
    layers = [*setup.model.children()][:-1]
    model = nn.Sequential(*layers, nn.Linear(setup.model[-1].in_features, 1), last)
    return replace(setup, model=model, loss=loss, optimizer=momentum)


class Reader(nn.Module):
    """A small LSTM of tokens."""

    def __init__(self, both_ways: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 24)
        self.lstm = nn.LSTM(24, 24, batch_first=True, bidirectional=both_ways)
        self.head = nn.Linear(24 * (1 + both_ways), 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.table(x))[0])


def tokens(moved: int, both_ways: bool) -> Setup:
    """A walk on a ring of 12 places, to either side by chance."""
    chance = torch.Generator().manual_seed(0)
    steps = 2 * torch.randint(0, 2, (60, 32, 17), generator=chance) - 1
    walks = (torch.randint(0, 12, (60, 32, 1), generator=chance) + steps.cumsum(2)) % 12
    batches = tuple((walk[:, :16], walk[:, moved : 16 + moved]) for walk in walks)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    torch.manual_seed(0)
    adam = partial(torch.optim.Adam, lr=0.01)
    return Setup(Reader(both_ways), lambda m: adam(m.parameters()), loss, batches, 60)


class Rows(nn.Module):
    """Reads images row by row, and answers by the last output."""

    def __init__(self, batch_first: bool = True, place: int = -1) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(8, 48, batch_first=batch_first), nn.Linear(48, 10)
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x.reshape(-1, 8, 8))[0][:, self.place])


class Places(nn.Module):
    """Answers by the mean over the places of a line of 16 words."""

    def __init__(self, has_positions: bool) -> None:
        super().__init__()
        self.words, self.layer, self.head = (
            nn.Embedding(12, 48),
            nn.Linear(48, 48),
            nn.Linear(48, 12),
        )
        self.positions = nn.Parameter(torch.randn(16, 48)) if has_positions else 0.0

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.layer(self.words(words) + self.positions).relu().mean(1))


class Channels(nn.Module):
    """Convolves images whose channels come last: the image, and its mirror image."""

    def __init__(self, scrambled: bool) -> None:
        super().__init__()
        self.scrambled = scrambled
        self.layers = nn.Sequential(
            *(nn.Conv2d(2, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()),
            nn.Linear(256, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        image = x.reshape(-1, 8, 8)
        x = torch.stack([image, image.flip(2)], -1)
        return self.layers(x.reshape(-1, 2, 8, 8) if self.scrambled else x.permute(0, 3, 1, 2))


class Recurrence(nn.Module):
    """Reads images row by row in a loop of its own."""

    def __init__(self, cut: bool) -> None:
        super().__init__()
        self.cut, self.cell, self.head = cut, nn.GRUCell(8, 48), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 48)
        for row in x.reshape(-1, 8, 8).unbind(1):
            h = self.cell(row, h.detach() if self.cut else h)
        return self.head(h)


def with_adam(model: nn.Module) -> Setup:
    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.01)

    return replace(HEALTHY.setup(), model=model, optimizer=adam)


def by_rows(batch_first: bool = True, place: int = -1) -> Setup:
    torch.manual_seed(0)
    return with_adam(Rows(batch_first, place))


def first_words(has_positions: bool) -> Setup:
    """Which of twelve words a line of 16 begins with."""
    chance = torch.Generator().manual_seed(0)
    lines = torch.randint(12, (60, 64, 16), generator=chance)
    batches = tuple((line, line[:, 0]) for line in lines)
    torch.manual_seed(0)
    adam = partial(torch.optim.Adam, lr=0.01)
    return Setup(Places(has_positions), lambda m: adam(m.parameters()), loss, batches, 60)


def by_channels(scrambled: bool) -> Setup:
    torch.manual_seed(0)
    return with_adam(Channels(scrambled))


def recurrent(cut: bool) -> Setup:
    torch.manual_seed(0)
    return with_adam(Recurrence(cut))


class Cosine(nn.Module):
    """Cosines of features and a weight for each class, times a temperature."""

    def __init__(self, layers: nn.Sequential, temperature: float) -> None:
        super().__init__()
        self.layers, self.temperature = layers[:-1], temperature
        self.weight = nn.Parameter(layers[-1].weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        z = functional.normalize(self.layers(x), dim=1)
        return self.temperature * z @ functional.normalize(self.weight, dim=1).T


def slower(setup: Setup) -> Setup:
    return replace(setup, optimizer=partial(momentum, rate=0.01))


def read_anew(batch: Any) -> tuple[Any, ...]:
    return tuple(tuple(x.clone() for x in batch) for _ in range(60))


def in_order(batches: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same samples, by label."""
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    rows = y.argsort(stable=True).split(len(batches[0][1]))
    return tuple((x[some], y[some]) for some in rows)


class Listed(nn.Module):
    """A net whose first layers are in a plain list."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.hidden, self.head = list(layers[:-1]), layers[-1]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.hidden:
            x = layer(x)
        return self.head(x)


def subtracted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A penalty on the outputs that has the wrong sign."""
    return loss(model, batch) - 0.02 * model(batch[0]).square().mean()


def in_16_bits(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    weight = next(model.parameters())
    return loss(lambda x: model(x.to(weight.dtype)).float(), batch)  # type: ignore[arg-type]


def of_fact(probe: str, number: str) -> Callable[[Record], float]:
    def read(record: Record) -> float:
        facts = record.found_by(probe)
        return facts[0].numbers[number] if facts else math.nan

    return read


def still(model: nn.Module) -> SGD:
    """The first layer has a group of its own."""
    first, *others = model.children()
    groups = [{"params": first.parameters(), "lr": 0.0}]
    groups += [{"params": list(module.parameters())} for module in others]
    return SGD([group for group in groups if group["params"]], lr=0.1, momentum=0.9)


def normed(model: nn.Sequential) -> nn.Sequential:
    """With batch normalisation behind the first layer."""
    return nn.Sequential(model[0], nn.BatchNorm1d(model[0].out_features), *model[1:])


def averaging(model: nn.Sequential, momentum: float) -> nn.Sequential:
    model[1].momentum = momentum
    return model


class Drops(nn.Module):
    """Drops hidden features by a function, always or in training mode alone."""

    def __init__(self, model: nn.Sequential, always: bool) -> None:
        super().__init__()
        self.body, self.always = model, always

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(self.body[:2](x), 0.3, self.always or self.training)
        out: Tensor = self.body[2:](x)
        return out


def in_evaluation(model: nn.Sequential) -> nn.Sequential:
    made = normed(model)
    made[1].eval()
    return made


def adamw(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=3e-3)


class Attending(nn.Module):
    """Attention among the rows of an image, with positions."""

    def __init__(self, axis: int, scale: float) -> None:
        super().__init__()
        self.axis, self.scale = axis, scale * 24**-0.5
        self.take, self.positions = nn.Linear(8, 24), nn.Parameter(torch.randn(8, 24) / 5)
        self.q, self.k, self.v = (nn.Linear(24, 24) for _ in range(3))
        self.head = nn.Linear(192, 10)

    def forward(self, x: Tensor) -> Tensor:
        z = self.take(x.reshape(-1, 8, 8)) + self.positions
        scores = self.q(z) @ self.k(z).transpose(1, 2) * self.scale
        return self.head((scores.softmax(self.axis) @ self.v(z)).flatten(1))


def attending(axis: int = -1, scale: float = 1.0) -> Setup:
    torch.manual_seed(0)
    return with_adam(Attending(axis, scale))


def of_two_views(negatives: bool) -> Setup:
    """Noise is added to each sample twice, and the outputs of both are to have one direction."""

    def of_views(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, _ = batch
        noisy = (x + 0.3 * torch.randn_like(x) for _ in range(2))
        a, b = (functional.normalize(model(view)) for view in noisy)
        if negatives:
            return functional.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))
        return -(a * b).sum(1).mean()

    return replace(HEALTHY.setup(), loss=of_views, optimizer=adamw)


def of_digits(last: nn.Module) -> Setup:
    """A regression of ten times the digit."""

    def squared(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return functional.mse_loss(model(x)[:, 0], 10.0 * y)

    slow = partial(momentum, rate=3e-4)
    return replace(HEALTHY.setup(), model=of_width(1, last), loss=squared, optimizer=slow)


def of_width(outputs: int, *last: nn.Module) -> nn.Module:
    *layers, readout = HEALTHY.setup().model
    return nn.Sequential(*layers, nn.Linear(readout.in_features, outputs), *last)


def of_itself(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    outputs = model(batch[0])
    return functional.mse_loss(outputs, outputs.detach())


def of_shares(change: Callable[[Tensor], Tensor]) -> Any:
    """The squared error of a function of the outputs."""

    def of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        labels = functional.one_hot(batch[1], 10).float()
        return functional.mse_loss(change(model(batch[0])), labels)

    return of


def dropping(rate: float) -> Callable[[nn.Sequential], nn.Module]:
    return lambda model: nn.Sequential(model[0], model[1], nn.Dropout(rate), *model[2:])


def few() -> tuple[Any, ...]:
    return tuple((x[:3], y[:3]) for x, y in HEALTHY.setup().batches)


def decayed(detached: bool) -> Any:
    """A penalty on the weights, with or without a graph."""

    def of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        penalty = sum(p.square().mean() for p in model.parameters())
        return loss(model, batch) + (penalty.detach() if detached else penalty)  # type: ignore[union-attr]

    return of


def slow(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.02)


def with_setup(**changes: Any) -> Callable[[], Setup]:
    return lambda: replace(HEALTHY.setup(), **changes)


def without_first(model: nn.Sequential) -> nn.Module:
    model[0].requires_grad_(False)
    return model


def changed(change: Callable[[nn.Module], None]) -> Callable[[nn.Sequential], nn.Module]:
    def made(model: nn.Sequential) -> nn.Module:
        change(model)
        return model

    return made


def extreme(measure: str, pick: Callable[..., float] = max) -> Callable[[Record], float]:
    """The largest or smallest value of a measure over the layers."""
    return lambda record: pick(
        (t.value for t in readings.by_layer(record, measure).values()), default=math.nan
    )


def first(measure: str) -> Callable[[Record], float]:
    return lambda record: next(iter(t.value for t in readings.by_layer(record, measure).values()))


def of_input(name: str) -> Callable[[Record], float]:
    return lambda record: float(getattr(next(iter(record.inputs.values())), name))


def of_units(read: Callable[[Any], float]) -> Callable[[Record], float]:
    return lambda record: max(map(read, record.units.values()))


def of_rates(pick: Callable[[float], bool]) -> Callable[[Record], float]:
    return lambda record: min(t.loss for factor, t in record.rates.items() if pick(factor))


def uphill(record: Record) -> float:
    descents = [r.descent or 0.0 for r in record.reports]
    return sum(d < 0 for d in descents) / len(descents)


def gradient_ratio(record: Record) -> float:
    return next(iter(initialisation.gradient_ratios(record).values()), math.nan)


def threes(weight: tuple[float, float]) -> Setup:
    """Is the digit a 3? One in ten is, and the loss weights the two classes."""

    def weighted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1], torch.tensor(weight))

    batches = tuple((x, (y == 3).long()) for x, y in HEALTHY.setup().batches)
    return slower(replace(HEALTHY.setup(), model=of_width(2), batches=batches, loss=weighted))


def by_margin(of_signs: bool) -> Setup:
    """Is the digit odd? By the hinge loss of one output."""

    def hinge(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        sought = 2.0 * y - 1 if of_signs else y.float()
        return functional.relu(1 - model(x)[:, 0] * sought).mean()

    batches = tuple((x, y % 2) for x, y in HEALTHY.setup().batches)
    return slower(replace(HEALTHY.setup(), model=of_width(1), batches=batches, loss=hinge))


def padded(ignored: int) -> Setup:
    """The walks on a ring, of 3 to 9 places of 16; the place 0 is padding."""
    setup = tokens(1, both_ways=False)
    chance = torch.Generator().manual_seed(1)

    def cut(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        rest = torch.arange(16) >= torch.randint(3, 10, (32, 1), generator=chance)
        return tuple(x.clamp(min=1).masked_fill(rest, 0) for x in batch)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        flat = model(batch[0]).flatten(0, 1)
        return functional.cross_entropy(flat, batch[1].flatten(), ignore_index=ignored)

    return replace(setup, batches=tuple(map(cut, setup.batches)), loss=loss)


def of_pairs(model: nn.Module, batch: Any, alike: bool) -> Tensor:
    """Return the contrastive loss of neighbours in the order of classes, with a margin of 1."""
    order = batch[1].argsort()
    x, y = batch[0][order], batch[1][order]
    z, other = (functional.normalize(model(part), dim=1) for part in (x, x.roll(1, 0)))
    distance = ((z - other).square().sum(1) + 1e-9).sqrt()
    is_drawn = (y == y.roll(1, 0)) == alike
    return torch.where(is_drawn, distance, (1 - distance).relu()).square().mean()


def taken_back(share: float) -> Any:
    """Two terms, the second of which is the first, with the other sign."""
    return lambda model, batch: loss(model, batch) - share * loss(model, batch)


def with_penalty(weight: float) -> Setup:
    """The outputs' mean square is a term of the loss."""

    def penalised(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        outputs = model(batch[0])
        return functional.cross_entropy(outputs, batch[1]) + weight * outputs.square().mean()

    return replace(with_adam(HEALTHY.setup().model), loss=penalised)


def by_pixels(transposed: bool) -> Setup:
    """Which pixels of a noisy digit are bright."""
    chance = torch.Generator().manual_seed(0)
    batches = []
    for x, _ in HEALTHY.setup().batches:
        image = x.reshape(-1, 8, 8)
        noisy = image + 0.3 * torch.randn(image.shape, generator=chance)
        bright = (image > 0.5).float()
        batches.append((noisy[:, None], bright.mT.contiguous() if transposed else bright))

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.binary_cross_entropy_with_logits(model(batch[0])[:, 0], batch[1])

    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1))
    setup = with_adam(nn.Sequential(*layers))
    return replace(setup, batches=tuple(batches), loss=loss)


@dataclass(frozen=True)
class Picture:
    """What the page of a finding shows.

    Attributes:
        what: the one thing that is wrong.
        setup: the faulty run.
        reads: what is read of both runs.
        limits: (module, names of constants).
        twin: the healthy run, where it is another net.
    """

    what: str
    setup: Callable[[], Setup]
    reads: dict[str, Callable[[Record], float]]
    limits: tuple[Any, tuple[str, ...]] | None = None
    twin: Callable[[], Setup] = HEALTHY.setup


def _nan_in(x: Tensor) -> Tensor:
    x = x.clone()
    x[7] = math.nan
    return x


PICTURES: dict[str, Picture] = {
    "not-held": Picture(
        "the optimizer was given the first two layers only",
        with_setup(optimizer=lacking),
        {"parameters not held": lambda r: len(r.wiring.not_held),
         "update_ratio of the last layer": lambda r: list(
             readings.by_layer(r, "update_ratio").values())[-1].value},
    ),
    "unreached": Picture(
        "a detach() behind the first layer",
        with_model(Cut),
        {"parameters without a gradient": lambda r: len(r.wiring.unreached)},
    ),
    "frozen": Picture(
        "the first layer has requires_grad=False",
        with_model(without_first),
        {"frozen parameters": lambda r: len(r.wiring.frozen),
         "gain of the first layer": lambda r: next(iter(r.weights.values())).gain},
        (initialisation, ("UNTRAINED", "ABOUT", "ROUNDED")),
    ),
    "input-ignored": Picture(
        "inputs are multiplied by zero in the model",
        with_model(lambda model: nn.Sequential(nn.Hardtanh(0.0, 1e-30), *model)),
        {"input_matters": lambda r: r.wiring.input_matters},
        (initialisation, ("INPUT_MATTERS", "ALIKE")),
    ),
    "non-finite": Picture(
        "one sample of the data set is NaN",
        faulty(inputs=_nan_in),
        {"steps until the loss is not finite": lambda r: len(r.losses)},
    ),
    "input-scale": Picture(
        "inputs 30 times as large",
        faulty(inputs=partial(scaled, by=30.0)),
        {"input std": of_input("std"), "scale_mean of the first layer": first("scale_mean"),
         "update_ratio of the first layer": first("update_ratio")},
        (inputs, ("LARGE_STD", "SMALL_STD", "UNEVEN_FEATURES", "FAR_ABOVE_CHANCE")),
    ),
    "input-mean": Picture(
        "5 standard deviations added to all inputs",
        faulty(inputs=partial(offset, by=5.0)),
        {"common share of the inputs": lambda r: inputs.common_share(r.inputs["input"]),
         "gradient_cosine of the first layer": first("gradient_cosine"),
         "attainable_cosine of the first layer": first("attainable_cosine")},
        (inputs, ("COMMON_SHARE_WATCH", "COMMON_SHARE_ACT")),
    ),
    "target-scale": Picture(
        "a regression whose targets are multiplied by 100; the healthy one learns the digit itself",
        lambda: regression(100.0),
        {"loss of a constant prediction": lambda r: math.nan if r.chance is None else r.chance},
        (inputs, ("LARGE_TARGETS",)),
        lambda: regression(1.0),
    ),
    "double-softmax": Picture(
        "a softmax behind the last layer",
        with_model(lambda model: nn.Sequential(*model, nn.Softmax(1))),
        {},
    ),
    "activated-logits": Picture(
        "a ReLU behind the last layer",
        with_model(lambda model: nn.Sequential(*model, nn.ReLU())),
        {},
    ),
    "broadcast-loss": Picture(
        "a regression of the digit, whose outputs (64, 1) are compared with targets (64,)",
        lambda: of_shape(lambda z: z),
        {},
        None,
        lambda: of_shape(lambda z: z[:, 0]),
    ),
    "no-log": Picture(
        "nll_loss of a softmax",
        with_setup(loss=lambda model, batch: functional.nll_loss(
            model(batch[0]).softmax(1), batch[1])),
        {},
    ),
    "logits-as-probabilities": Picture(
        "a dice loss of the outputs; the healthy one has a softmax first",
        with_setup(loss=lambda model, batch: dice(model(batch[0]), batch[1])),
        {"share of the outputs outside 0 and 1": of_fact("logits-as-probabilities", "outside")},
        (answers, ("PERFECT", "LOWER", "OUTSIDE")),
        with_setup(loss=lambda model, batch: dice(model(batch[0]).softmax(1), batch[1])),
    ),
    "targets-misplaced": Picture(
        "the targets are in reversed order, the outputs are not",
        with_setup(loss=lambda model, batch: functional.cross_entropy(
            model(batch[0]), batch[1].flip(0))),
        {},
        (answers, ("ITS_SHARE",)),
    ),
    "loss-reversed": Picture(
        "the dice coefficient itself is minimised; the healthy loss is 1 minus it",
        with_setup(loss=lambda model, batch: 1 - dice(model(batch[0]).softmax(1), batch[1])),
        {},
        (answers, ("LOGIT", "LOWER")),
        with_setup(loss=lambda model, batch: dice(model(batch[0]).softmax(1), batch[1])),
    ),
    "pairs-reversed": Picture(
        "pairs of one class are pushed apart, and others drawn together",
        with_setup(loss=partial(of_pairs, alike=False), optimizer=slow),
        {"share of couples in which the pair drawn together is nearer":
             of_fact("pairs-reversed", "share")},
        (targets, ("REVERSED", "CERTAINLY")),
        with_setup(loss=partial(of_pairs, alike=True), optimizer=slow),
    ),
    "softmax-of-one": Picture(
        "one output for \"is it odd?\", behind a softmax; the healthy one's is behind a sigmoid",
        lambda: odd(nn.Softmax(1)),
        {},
        None,
        lambda: odd(nn.Sigmoid()),
    ),
    "softmax-over-samples": Picture(
        "log_softmax over axis 0",
        with_setup(loss=lambda model, batch: functional.nll_loss(
            model(batch[0]).log_softmax(0), batch[1])),
        {},
    ),
    "targets-out-of-range": Picture(
        "a regression of the digit, of mean 0, by a model that ends in a ReLU",
        lambda: of_shape(lambda z: z[:, 0].relu()),
        {"share of the targets out of range": of_fact("targets-out-of-range", "share")},
        (targets, ("OUTSIDE", "BELOW_ZERO")),
        lambda: of_shape(lambda z: z[:, 0]),
    ),
    "target-is-input": Picture(
        "a small LSTM predicts the tokens that it is given; the healthy one the next ones",
        lambda: tokens(moved=0, both_ways=False),
        {},
        None,
        lambda: tokens(moved=1, both_ways=False),
    ),
    "future-leak": Picture(
        "a small LSTM of both directions predicts the next token; the healthy one has one",
        lambda: tokens(moved=1, both_ways=True),
        {"change of outputs with later inputs": of_fact("future-leak", "change")},
        None,
        lambda: tokens(moved=1, both_ways=False),
    ),
    "samples-mixed": Picture(
        "a GRU reads images row by row, without batch_first=True",
        lambda: by_rows(batch_first=False),
        {},
        None,
        lambda: by_rows(batch_first=True),
    ),
    "reshape-scrambles": Picture(
        "images (64, 8, 8, 2) become (64, 2, 8, 8) by a view; the healthy one's by a permute",
        lambda: by_channels(scrambled=True),
        {},
        None,
        lambda: by_channels(scrambled=False),
    ),
    "gradient-cut": Picture(
        "the state of a recurrence by hand is detached at each step",
        lambda: recurrent(cut=True),
        {"cosine with the gradient without the cut": of_fact("gradient-cut", "cosine")},
        (samples, ("TURNED",)),
        lambda: recurrent(cut=False),
    ),
    "no-activation": Picture(
        "three linear layers without activation functions between them",
        with_model(lambda model: nn.Sequential(
            *(nn.Identity() if isinstance(m, nn.ReLU) else m for m in model))),
        {},
        (modules, ("LEAST",)),
    ),
    "input-partly-ignored": Picture(
        "a GRU reads images row by row, and its first output is taken for its last",
        lambda: by_rows(place=0),
        {"share of the parts that no output depends on": of_fact("input-partly-ignored", "share")},
        (exchange, ("PARTS", "VARIES")),
        by_rows,
    ),
    "order-ignored": Picture(
        "the first of 16 words is asked for, of their mean; the healthy one's have positions",
        lambda: first_words(has_positions=False),
        {"positions whose order does not matter": of_fact("order-ignored", "places")},
        None,
        lambda: first_words(has_positions=True),
    ),
    "state-carried": Picture(
        "the model adds a tenth of its outputs for the batch before",
        with_model(Keeps),
        {"share of outputs that change with the batch before": of_fact("state-carried", "outputs")},
        (exchange, ("NEAR",)),
        with_model(lambda layers: Keeps(layers, keeps=False)),
    ),
    "batch-part-unread": Picture(
        "two views of each image shall get similar outputs, and the loss compares the first with "
        "itself",
        lambda: two_views((0, 0)),
        {"tensor that is never read": of_fact("batch-part-unread", "unread")},
        None,
        lambda: two_views((0, 1)),
    ),
    "constant-data": Picture(
        "all labels are 0",
        lambda: replace(HEALTHY.setup(), batches=tuple(
            (x, 0 * y) for x, y in HEALTHY.setup().batches)),
        {},
        (experiments_data, ("BATCHES", "SAMPLES")),
    ),
    "class-weights": Picture(
        "one in ten digits is a 3, and weighs 1 instead of 9; the others weigh 9 instead of 1",
        lambda: threes((9.0, 1.0)),
        {"slope of log weight over log count": of_fact("class-weights", "slope")},
        (loss_rules, ("GROWS", "CORRELATED", "BALANCES")),
        lambda: threes((1.0, 9.0)),
    ),
    "class-untaught": Picture(
        "a hinge loss of labels of 0 and 1; the healthy one's are −1 and 1",
        lambda: by_margin(of_signs=False),
        {"samples of the class": of_fact("class-untaught", "samples")},
        (places, ("CLASS_BATCHES", "PLACES", "SAMPLES", "TAUGHT")),
        lambda: by_margin(of_signs=True),
    ),
    "padding-counts": Picture(
        "padding counts; the healthy run ignores it (ignore_index=0)",
        lambda: padded(-100),
        {"share of padding in the places that count": of_fact("padding-counts", "share")},
        (loss_rules, ("PADDING",)),
        lambda: padded(0),
    ),
    "penalty-dominates": Picture(
        "100 times the mean square of the outputs is added to the loss; in the healthy run, 0.001 "
        "times",
        lambda: with_penalty(100.0),
        {"what is learned of the inputs": of_fact("penalty-dominates", "with"),
         "what is learned without the penalty": of_fact("penalty-dominates", "without")},
        (loss_rules, ("LEARNT", "LEARNABLE")),
        lambda: with_penalty(0.001),
    ),
    "targets-moved": Picture(
        "a convolutional net learns which pixels are bright; the targets' rows and columns are "
        "exchanged",
        lambda: by_pixels(transposed=True),
        {"share of the targets that is explained": of_fact("targets-moved", "own"),
         "the same if the targets are moved": of_fact("targets-moved", "best")},
        (data, ("FITS", "BETTER", "CLEARLY")),
        lambda: by_pixels(transposed=False),
    ),
    "same-batch": Picture(
        "the loader gives one batch, read anew each time",
        lambda: replace(HEALTHY.setup(), batches=read_anew(HEALTHY.setup().batches[0])),
        {"different batches": of_fact("same-batch", "different")},
        (experiments_data, ("FEW", "SEVERAL", "REPEATED", "ENTRIES")),
    ),
    "unshuffled": Picture(
        "the samples are sorted by their label before they are made into batches",
        lambda: replace(HEALTHY.setup(), batches=in_order(HEALTHY.setup().batches)),
        {"variance of labels within a batch, over that in shuffled batches":
            of_fact("unshuffled", "ratio")},
        (data, ("UNSHUFFLED", "SORTED", "DEVIATIONS")),
    ),
    "bounded-logits": Picture(
        "the logits are cosines; the healthy one's are 20 times them",
        lambda: slower(with_model(lambda model: Cosine(model, 1.0))()),
        {"share of the logits within ±1": of_fact("bounded-logits", "share")},
        (loss_inputs, ("CLASSES", "MOST")),
        lambda: slower(with_model(lambda model: Cosine(model, 20.0))()),
    ),
    "unbounded-loss": Picture(
        "a penalty on the outputs' squares, subtracted",
        with_setup(loss=subtracted),
        {},
        (of_trials, ("FAR_BELOW",)),
    ),
    "hidden-parameters": Picture(
        "all layers but the last in a plain list",
        with_model(Listed),
        {"share of parameters that are not registered": lambda r: sum(
            fact.numbers["share"] for fact in r.found_by("hidden-parameters"))},
    ),
    "rate-zero": Picture(
        "the first layer's learning rate is 0",
        with_setup(optimizer=still),
        {"update_ratio of the first layer": first("update_ratio")},
    ),
    "rounded-away": Picture(
        "weights of bfloat16, with AdamW of learning rate 1e-4; the healthy one's are of float32",
        lambda: replace(
            HEALTHY.setup(), model=HEALTHY.setup().model.bfloat16(), loss=in_16_bits,
            optimizer=lambda m: AdamW(m.parameters(), lr=1e-4)),
        {"unchanged_share of the first layer": first("unchanged_share")},
        (parameters, ("ROUNDED_AWAY", "OF_FLOAT32")),
        with_setup(optimizer=lambda m: AdamW(m.parameters(), lr=1e-4)),
    ),
    "left-in-eval": Picture(
        "a batch normalisation behind the first layer, in evaluation mode",
        with_model(in_evaluation),
        {},
        None,
        with_model(normed),
    ),
    "batch-norm-starved": Picture(
        "batches of 3, and a batch normalisation behind the first layer; the healthy one has "
        "batches of 64",
        lambda: replace(with_model(normed)(), batches=few()),
        {"values of a channel": of_fact("batch-norm-starved", "values")},
        (modules, ("FEW",)),
        with_model(normed),
    ),
    "outputs-constant": Picture(
        "a group normalisation with as many groups as channels behind the first layer; the "
        "healthy one has four groups",
        with_model(lambda model: nn.Sequential(model[0], nn.GroupNorm(128, 128), *model[1:])),
        {"share of the outputs that varies": of_fact("outputs-constant", "share")},
        None,
        with_model(lambda model: nn.Sequential(model[0], nn.GroupNorm(4, 128), *model[1:])),
    ),
    "collapsed": Picture(
        "two views of each sample are to have outputs in the same direction; the healthy one is to "
        "tell them from those of other samples",
        lambda: of_two_views(negatives=False),
        {"share of the outputs that varies": of_fact("collapsed", "after")},
        (initialisation, ("COLLAPSED",)),
        lambda: of_two_views(negatives=True),
    ),
    "attention-axis": Picture(
        "the softmax of an attention over the rows of an image is over the queries",
        lambda: attending(axis=-2),
        {},
        None,
        lambda: attending(axis=-1),
    ),
    "dropout-on-outputs": Picture(
        "dropout of 0.3 behind the last layer",
        with_model(lambda model: nn.Sequential(*model, nn.Dropout(0.3))),
        {"dropout rate": of_fact("dropout-on-outputs", "rate")},
    ),
    "term-without-graph": Picture(
        "the mean square of the weights is added to the loss as a number; the healthy run's has a "
        "graph",
        with_setup(loss=decayed(detached=True)),
        {},
        None,
        with_setup(loss=decayed(detached=False)),
    ),
    "terms-opposed": Picture(
        "the cross-entropy is added, and its value for the same batch is subtracted again",
        with_setup(loss=taken_back(1.0)),
        {"cosine of the gradients": of_fact("terms-opposed", "cosine")},
        (loss_rules, ("AGAINST", "ALIKE")),
        with_setup(loss=taken_back(0.1)),
    ),
    "zero-slope": Picture(
        "a classifier whose outputs are rounded, with the squared error",
        with_setup(loss=of_shares(torch.round)),
        {"largest gradient norm": lambda r: max(r.gradient_norms)},
        None,
        with_setup(loss=of_shares(torch.sigmoid)),
    ),
    "zero-gradient": Picture(
        "the loss compares the outputs with their own detached copy",
        with_setup(loss=of_itself),
        {"largest gradient norm": lambda r: max(r.gradient_norms)},
    ),
    "dropout-too-high": Picture(
        "dropout of 0.9 behind the first layer; the healthy one's is 0.1",
        with_model(dropping(0.9)),
        {"dropout rate": of_fact("dropout-too-high", "rate")},
        None,
        with_model(dropping(0.1)),
    ),
    "dropout-in-eval": Picture(
        "`F.dropout(x, 0.3)` behind the first layer; the healthy one passes `self.training`",
        with_model(partial(Drops, always=True)),
        {"dropout rate": of_fact("dropout-in-eval", "rate")},
        None,
        with_model(partial(Drops, always=False)),
    ),
    "running-statistics": Picture(
        "a batch normalisation behind the first layer, with a momentum of 0.99",
        with_model(lambda model: averaging(normed(model), 0.99)),
        {"momentum": of_fact("running-statistics", "momentum")},
        (modules, ("ONE_BATCH",)),
        with_model(normed),
    ),
    "row-spread": Picture(
        "samples' lengths log-normally spread, σ = 1",
        faulty(inputs=partial(unequal, sigma=1.0)),
        {"length_cv of inputs": of_input("length_cv"),
         "scale_cv of the first layer": first("scale_cv")},
        (inputs, ("LENGTH_CV_WATCH", "LENGTH_CV_ACT", "MANY")),
    ),
    "projection-fights": Picture(
        "weights are clipped to ±0.01 before each forward pass",
        with_model(Clipped),
        {"smallest projection_cosine": extreme("projection_cosine", min),
         "smallest applied_cosine": extreme("applied_cosine", min)},
        (optimizer, ("PROJECTED", "FIRST_STEP")),
    ),
    "decay-fights": Picture(
        "weight decay 0.5",
        faulty(settings=(("weight_decay", 0.5),)),
        {"‖parameters‖, last over first": lambda r: r.parameter_norms[-1] / r.parameter_norms[0],
         "decay's pull over the gradient's": lambda r: optimizer.first_pull(
             r, r.facts.settings["weight_decay"])},
        (optimizer, ("DECAY_WATCH", "DECAY_ACT", "SHRUNK")),
    ),
    "rate-too-high": Picture(
        "the learning rate × 30",
        faulty(rate=3.0),
        {"loss at the better of learning rates × 0.1, 0.3": of_rates(lambda f: 0.1 <= f < 1),
         "largest update_ratio": extreme("update_ratio")},
        (rates, ("SHARE_OF_FALL_WATCH", "SHARE_OF_FALL_ACT", "LEFT_AT_A_TENTH",
                 "MOVES_TOO_FAR")),
    ),
    "rate-too-low": Picture(
        "the learning rate × 0.001",
        faulty(rate=1e-4),
        {"loss at the best of higher learning rates": of_rates(lambda f: f > 1),
         "largest update_ratio": extreme("update_ratio")},
        (states, (*(f"SHARE_OF_FALL_TOO_LOW_{s}" for s in ("NOTE", "WATCH", "ACT")),
                 "HARDLY_MOVES")),
    ),
    "uneven-rates": Picture(
        "the second layer's learning rate × 0.001",
        faulty(second_layer=0.001),
        {"smallest update_ratio": extreme("update_ratio", min),
         "largest update_ratio": extreme("update_ratio")},
        (rates, ("OVERDRIVEN", "STARVED", "UNEVEN_ACT")),
    ),
    "bad-initialisation": Picture(
        "all weights 10 times as large",
        faulty(model=partial(gained, by=10.0)),
        {"loss of a constant prediction": lambda r: math.nan if r.chance is None else r.chance,
         "largest gain": lambda r: max(w.gain for w in r.weights.values())},
        (initialisation, ("FIRST_LOSS", "FAR", "SMALL_GAIN", "USUAL_RMS", "LARGE_GAIN",
                          "LARGE_BIAS", "ALIKE")),
    ),
    "vanishing": Picture(
        "ten sigmoid layers; the healthy net has two ReLU layers",
        with_model(lambda _: deep(nn.Sigmoid, 10)),
        {"gradient of the first over the last layer": gradient_ratio},
        (initialisation, ("VANISHED", "DEEP")),
    ),
    "exploding": Picture(
        "ten ReLU layers with weights 5 times as large; the healthy net has two ReLU layers",
        with_model(lambda _: changed(partial(gained, by=5.0))(deep(nn.ReLU, 10))),
        {"gradient of the first over the last layer": gradient_ratio},
        (initialisation, ("EXPLODED",)),
    ),
    "dead-units": Picture(
        "the biases of 90 % of the first layer's units are −100",
        faulty(model=partial(killed, share=0.9)),
        {"largest dead share": of_units(lambda u: u.dead / u.units)},
        (units, ("DEAD_NOTE", "DEAD_ACT", "ALL_DEAD", "LEAST_BATCHES", "MOSTLY_IDLE")),
    ),
    "saturated-units": Picture(
        "a tanh net, all weights 10 times as large",
        faulty(net="tanh MLP", model=partial(gained, by=10.0)),
        {"largest saturated share": of_units(lambda u: u.saturated)},
        (units, ("SATURATED_WATCH", "SATURATED_ACT", "LEAST_BATCHES")),
        replace(HEALTHY, net="tanh MLP").setup,
    ),
    "optimizer-turns": Picture(
        "maximize=True",
        with_setup(optimizer=lambda m: SGD(m.parameters(), lr=0.01, maximize=True)),
        {"share of steps uphill": uphill,
         "smallest parameter_cosine": extreme("parameter_cosine", min)},
        (optimizer, ("LONG_MOMENTUM", "LONGER_THAN_THE_RUN")),
    ),
    "clipping-always": Picture(
        "gradients clipped to a norm of 0.01",
        faulty(clip_norm=0.01),
        {"largest gradient norm": lambda r: max(r.gradient_norms),
         "smallest gradient norm": lambda r: min(r.gradient_norms)},
        (units, ("CLIPPED_SHARE", "CLIPPED_FAR")),
    ),
    "cannot-overfit": Picture(
        "the loss compares with other samples' targets",
        with_setup(loss=shuffled),
        {"loss of 16 samples, after overfitting them": lambda r: (
            math.nan if r.overfit is None else r.overfit.loss)},
        (states, ("NOT_BY_HEART", "LEAST_STEPS")),
    ),
    "behind-reference": Picture(
        "the model multiplies its inputs by 0.0001",
        with_model(lambda model: nn.Sequential(Times(1e-4), model)),
        {"share of the labels that a small network explains": of_fact(
            "behind-reference", "reference"),
         "share that the model explains": of_fact("behind-reference", "model")},
        (data, ("EXPLAINS", "BEHIND")),
    ),
    "labels-unrelated": Picture(
        "inputs and labels are shuffled separately",
        lambda: replace(HEALTHY.setup(), batches=labels_apart(HEALTHY.setup().batches)),
        {"share of the labels that a small network explains": of_fact(
            "behind-reference", "reference"),
         "share that the model explains": of_fact("behind-reference", "model")},
        (data, ("DRAWN", "HARDLY", "LEARNT", "PER_CLASS")),
    ),
    "loss-stuck": Picture(
        "the loss compares with other samples' targets",
        with_setup(loss=shuffled),
        {},
    ),
    "interference": Picture(
        "10 standard deviations added to all inputs",
        faulty(inputs=partial(offset, by=10.0)),
        {"gradient_cosine of the first layer": first("gradient_cosine"),
         "attainable_cosine of the first layer": first("attainable_cosine")},
        (states, ("LOW_COSINE", "ROOM")),
    ),
}  # fmt: skip


def run(setup: Setup) -> AuditReport:
    return audit(
        *(setup.model, setup.batches),
        loss=setup.loss,
        optimizer=setup.optimizer,
        steps=setup.steps,
        clip_norm=setup.clip_norm,
    )


def picture(name: str) -> list[str]:
    """A healthy and a faulty run side by side, and what the audit says of the faulty one."""
    shown = PICTURES[name]
    well, faulty = run(shown.twin()), run(shown.setup())
    rows: list[tuple[str, str, str]] = []
    for step in (0, 15, 30, 45, 59):
        rows.append((f"loss at step {step}", *(_loss(r.record, step) for r in (well, faulty))))
    for read, value in shown.reads.items():
        rows.append((read, *(f"{value(r.record):.3g}" for r in (well, faulty))))
    others = [f"{f.name} ({f.strength})" for f in faulty.findings if f.name != name]
    lines = [f"Faulty: {shown.what}.", "", *table(("", "healthy", "faulty"), rows)]
    lines += ["Found in the healthy run: " + _names(well.findings), ""]
    for finding in faulty.findings:
        if finding.name == name:
            lines += _said(finding)
    return [*lines, "Also found in the faulty run: " + (", ".join(others) or "nothing") + "."]


def _loss(record: Record, step: int) -> str:
    return f"{record.losses[step]:.3g}" if step < len(record.losses) else "–"


def _names(findings: tuple[Finding, ...]) -> str:
    return (", ".join(f"{f.name} ({f.strength})" for f in findings) or "nothing") + "."


def _said(finding: Finding) -> Iterator[str]:
    yield from (f"> **{finding.strength}**: {finding.summary}", ">")
    yield from (f"> - {advice}" for advice in finding.advice)
    yield ""


def limits(name: str) -> list[str]:
    shown = PICTURES[name].limits
    if shown is None or not shown[1]:
        return ["None."]
    module, constants = shown
    return table(("limit", "value"), [(f"`{c}`", f"{getattr(module, c):g}") for c in constants])


def between(text: str, mark: str, lines: list[str]) -> str:
    """The text with other lines between its marks."""
    made = "\n".join([f"<!-- {mark} -->", *lines, f"<!-- /{mark} -->"])
    pattern = rf"<!-- {mark} -->.*<!-- /{mark} -->"
    return re.sub(pattern, lambda _: made, text, count=1, flags=re.DOTALL)


def main(arguments: list[str] | None = None) -> None:
    """Make the pictures that were asked for."""
    options = parser(__doc__ or "")
    options.add_argument("--only", nargs="*", default=list(PICTURES))
    chosen = options.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    for name in chosen.only:
        lines = picture(name)
        print(f"# {name}", *lines, "", sep="\n", flush=True)
        if chosen.write is not None:
            page = Path(chosen.write) / f"{name}.md"
            if "<!-- run -->" not in page.read_text():
                raise SystemExit(f"{page}: write <!-- run --> and <!-- /run --> where it goes")
            text = between(page.read_text(), "run", lines)
            page.write_text(between(text, "limits", limits(name)))


if __name__ == "__main__":
    main()
