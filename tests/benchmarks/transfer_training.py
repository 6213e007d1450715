"""Trainings of `transfer.py`: models, data, and many models of the same shape at once."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from adiv_monitor.alignment import Alignment, AlignmentReading, Probe
from adiv_monitor.max_lr import optimizer_groups, parametrize_model

BASE = 32
STEPS = {"mlp": 150, "gpt": 250}
BATCH = {"mlp": 64, "gpt": 8}
CONTEXT, HEAD = 32, 16
SEEDS = range(3)
NAMES = {"mup": "mup", "solver": "sp", "measured": "sp", "absolute": "mup"}
# Tenfold exponents of the rates that are best for "solver" at the base width.
BEST = {("mlp", "adam"): -12.5, ("mlp", "sgd"): -7.5, ("gpt", "adam"): -20, ("gpt", "sgd"): -5}


class Setting(NamedTuple):
    """A curve of loss over rate."""

    model: str
    optimizer: str
    arm: str
    width: int


class Block(nn.Module):
    """A block of attention and an MLP, each behind a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, positions, width) to the same shape."""
        heads = self.attend(self.first(x)).unflatten(-1, (3, -1, HEAD))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        later = torch.ones(x.shape[1], x.shape[1]).triu(1) * -1e9
        attended = (q @ k.mT / HEAD**0.5 + later).softmax(-1) @ v
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class GPT(nn.Module):
    """A GPT of two blocks."""

    def __init__(self, width: int, readout: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(128, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.norm = nn.LayerNorm(width)
        self.head = readout(width, 128)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, positions) to logits (batch · positions, 128)."""
        places = torch.arange(tokens.shape[1])
        x = self.blocks(self.token(tokens) + self.position(places))
        return self.head(self.norm(x)).flatten(0, 1)


def build(model: str, width: int, readout: Callable[..., nn.Module] = nn.Linear) -> nn.Module:
    """Return the model with torch's initialisation."""
    if model == "gpt":
        return GPT(width, readout)
    return nn.Sequential(
        *(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()),
        readout(width, 10),
    )


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Return standardised digits (1797, 64) in a fixed order, and their labels."""
    found = load_digits()
    x = torch.tensor(found.data, dtype=torch.float32)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return ((x - x.mean()) / x.std())[order], torch.tensor(found.target)[order]


@cache
def characters() -> Tensor:
    """Return the characters of the manual as numbers below 128."""
    text = "\n".join(topics[name] for name in sorted(topics))
    return torch.tensor([min(ord(character), 127) for character in text])


def held_out(model: str) -> tuple[Tensor, Tensor]:
    """Return inputs and targets that no batch contains."""
    if model == "mlp":
        x, y = digits()
        return x[-400:], y[-400:]
    pieces = characters()[-128 * (CONTEXT + 1) :].view(128, -1)
    return pieces[:, :-1].contiguous(), pieces[:, 1:].flatten()


def judged(model: str) -> tuple[Tensor, Tensor]:
    """Return the data that rates are judged on: all images of the batches, or held-out text."""
    x, y = digits()
    return (x[:-400], y[:-400]) if model == "mlp" else held_out(model)


def batches(model: str, seeds: Sequence[int] = SEEDS) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets of each step by seed; they do not depend on the model."""
    randoms = [torch.Generator().manual_seed(1000 + seed) for seed in seeds]
    for _ in range(STEPS[model]):
        if model == "mlp":
            x, y = digits()
            rows = [torch.randint(len(x) - 400, (BATCH[model],), generator=g) for g in randoms]
            yield x[torch.stack(rows)], y[torch.stack(rows)]
        else:
            last = len(characters()) - 129 * (CONTEXT + 1)
            starts = [torch.randint(last, (BATCH[model], 1), generator=g) for g in randoms]
            pieces = characters()[torch.stack(starts) + torch.arange(CONTEXT + 1)]
            yield pieces[..., :-1].contiguous(), pieces[..., 1:].flatten(1)


def prepared(setting: Setting) -> tuple[nn.Module, list[dict[str, Any]]]:
    """Return an arm's model, and its parameter groups with rates for η = 1."""
    kind, name, arm, width = setting
    arm, _, factors = arm.partition(":")
    if arm == "package":
        import mup

        model = build(kind, width, mup.MuReadout)
        sizes = [build(kind, n, mup.MuReadout) for n in (BASE, 2 * BASE)]
        mup.set_base_shapes(model, sizes[0], delta=sizes[1])
        readout = model.head if kind == "gpt" else model[-1]
        readout.width_mult = lambda: width / BASE  # it asks its weight, which is one of many here
        optimizer = mup.MuSGD if name == "sgd" else mup.MuAdam
        return model, optimizer(model.parameters(), lr=1.0).param_groups
    model = build(kind, width)
    if arm == "torch":
        return model, [{"params": list(model.parameters()), "lr": 1.0}]
    probe = Probe(held_out(kind)[0][:4])
    base = None if arm == "absolute" else Alignment(build(kind, BASE), probe).layers
    layers = parametrize_model(model, probe, NAMES[arm], base=base)
    chosen = (factor.split("=") for factor in filter(None, factors.split(",")))
    kinds = {of: 10 ** (int(tenfold) / 10) for of, tenfold in chosen}
    return model, optimizer_groups(
        *(model, layers, NAMES[arm], name),
        lr=1.0,
        base=base,
        kinds=kinds,
        alignments=measured(kind, name) if arm == "measured" else None,
    )


@cache
def measured(kind: str, name: str) -> dict[str, AlignmentReading]:
    """Return the alignments at the end of one training at the base width, at its best rate."""
    torch.manual_seed(0)
    model, groups = prepared(Setting(kind, name, "solver", BASE))
    for group in groups:
        group["lr"] *= 10 ** (BEST[kind, name] / 10)
    momentum = {"momentum": 0.9} if name == "sgd" else {}
    optimizer = (torch.optim.SGD if name == "sgd" else torch.optim.Adam)(groups, **momentum)
    steps = STEPS[kind]
    schedule = LambdaLR(optimizer, lambda t: share_of_rate(t, steps) if t < steps else 0.0)
    alignment = Alignment(model, Probe(held_out(kind)[0]))
    for x, y in batches(kind, [0]):
        optimizer.zero_grad()
        F.cross_entropy(model(x[0]), y[0]).backward()
        optimizer.step()
        schedule.step()
    return alignment.read()


class Together:
    """Models of several rates and seeds, trained at once by torch's Adam, or SGD with momentum.

    Args:
        setting: what they are.
        runs: (tenfold exponent, seed) of each.
    """

    def __init__(self, setting: Setting, runs: Sequence[tuple[float, int]]) -> None:
        models = []
        for _, seed in runs:
            torch.manual_seed(seed)
            models.append(prepared(setting))
        self.optimizer = setting.optimizer
        self.model, groups = models[0]
        factors = {id(p): group["lr"] for group in groups for p in group["params"]}
        rates = torch.tensor([10 ** (tenfold / 10) for tenfold, _ in runs])
        self.seeds = sorted({seed for _, seed in runs})
        self.places = torch.tensor([self.seeds.index(seed) for _, seed in runs])
        self.names = [name for name, _ in self.model.named_parameters()]
        self.rates = [
            factors[id(p)] * rates.view(-1, *[1] * p.dim()) for p in self.model.parameters()
        ]
        same = zip(*(model.parameters() for model, _ in models), strict=True)
        self.weights = [torch.stack([p.detach() for p in own]).requires_grad_() for own in same]
        self.first, self.second = ([torch.zeros_like(w) for w in self.weights] for _ in range(2))
        self.taken = 0

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of every model (models,); x and y are by seed."""

        def loss(weights: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
            named = dict(zip(self.names, weights, strict=True))
            return F.cross_entropy(functional_call(self.model, named, x), y)

        return vmap(loss)(self.weights, x[self.places], y[self.places])

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], share: float) -> None:
        """Take a step with every model, at this share of its rate."""
        self.taken += 1
        if self.optimizer == "sgd":
            torch._foreach_mul_(self.first, 0.9)
            torch._foreach_add_(self.first, gradients)
            moves = self.first
        else:
            torch._foreach_lerp_(self.first, gradients, 0.1)
            torch._foreach_mul_(self.second, 0.999)
            torch._foreach_addcmul_(self.second, gradients, gradients, 0.001)
            roots = torch._foreach_sqrt(self.second)
            torch._foreach_div_(roots, math.sqrt(1 - 0.999**self.taken))
            torch._foreach_add_(roots, 1e-8)
            moves = torch._foreach_div(self.first, roots)
            torch._foreach_div_(moves, 1 - 0.9**self.taken)
        moves = torch._foreach_mul(moves, self.rates)
        torch._foreach_add_(self.weights, moves, alpha=-share)


def share_of_rate(step: int, steps: int) -> float:
    """The rate rises over a tenth of the steps, and falls linearly to nothing."""
    rise = steps // 10
    return min((step + 1) / rise, (steps - step) / (steps - rise))


def train(setting: Setting, runs: Sequence[tuple[float, int]]) -> tuple[list[float], list[float]]:
    """Return final losses on `judged` and on held-out data; ∞ if they are not finite."""
    models = Together(setting, runs)
    for t, (x, y) in enumerate(batches(setting.model, models.seeds)):
        gradients = torch.autograd.grad(models.losses(x, y).sum(), models.weights)
        models.step(gradients, share_of_rate(t, STEPS[setting.model]))
    found = []
    for data in (judged(setting.model), held_out(setting.model)):
        with torch.no_grad():
            losses = models.losses(*(z.expand(len(models.seeds), *z.shape) for z in data))
        found.append([loss if math.isfinite(loss) else math.inf for loss in losses.tolist()])
    return found[0], found[1]
