"""Data behind the thresholds of the audit's rules: healthy runs' readings, and faults' costs.

Small nets of four kinds (MLPs with ReLU and tanh, a CNN, a transformer) learn scikit-learn's digits
for 60 steps of 64, under SGD with momentum and AdamW. The learning rate of each is the best of a
grid on healthy inputs (one constant mean and standard deviation taken out).

First table: the readings of all healthy runs. A limit beyond their 99 % raises no false alarm.
Other tables: a dose of a fault, and the mean loss of the last 15 steps over that of the healthy
twin, at the twin's learning rate and at the best of all learning rates: the loss that no learning
rate recovers is due to the fault. Median over nets (range).

    python tests/benchmarks/thresholds.py [--seeds 2] [--only healthy "input std"] [--threads 1]
        [--write FILE]
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, median

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from write_up import heading, parser, table, write

from adiv_monitor.audit.experiments.observe import observe
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.audit.training.train import train
from adiv_monitor.diagnosis import course, readings
from adiv_monitor.diagnosis.faults import initialisation, optimizer
from adiv_monitor.diagnosis.record import Record

STEPS, BATCH = 60, 64
Batch = tuple[Tensor, Tensor]


class Transformer(nn.Module):
    """Two pre-norm blocks over the eight rows of the image."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.places = nn.Parameter(0.02 * torch.randn(8, width))
        block = partial(nn.TransformerEncoderLayer, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList(block(width, 4, 4 * width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.view(-1, 8, 8)) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def mlp(activation: type[nn.Module]) -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(64, 128), activation(), nn.Linear(128, 128), activation()),
        nn.Linear(128, 10),
    )


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        nn.Linear(512, 10),
    )


def normed_cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16)),
        *(nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10)),
    )


NETS: dict[str, Callable[[], nn.Module]] = {
    "ReLU MLP": lambda: mlp(nn.ReLU),
    "tanh MLP": lambda: mlp(nn.Tanh),
    "CNN": cnn,
    "CNN with BatchNorm": normed_cnn,
    "transformer": Transformer,
}
RATES = {
    "SGD": [10 ** (e / 2) for e in range(-5, 1)],
    "AdamW": [10 ** (e / 2) for e in range(-7, -1)],
}

TRIED = (0.001, 0.01, 0.1, 0.3, 3, 10)  # times the twin's learning rate


@dataclass(frozen=True)
class Case:
    """A net in training, with everything that a fault can change."""

    net: str
    optimizer: str
    rate: float
    seed: int = 0
    inputs: Callable[[Tensor], Tensor] = lambda x: x
    model: Callable[[nn.Module], None] = lambda model: None
    settings: tuple[tuple[str, float], ...] = ()
    second_layer: float = 1.0  # times the learning rate
    clip_norm: float | None = None

    def setup(self) -> Setup:
        torch.manual_seed(self.seed)
        model = NETS[self.net]()
        self.model(model)
        x, y = digits()
        chosen = [torch.randint(len(x), (BATCH,)) for _ in range(STEPS)]
        x = self.inputs(x)
        batches = tuple((x[rows], y[rows]) for rows in chosen)
        return Setup(model, self.stepper, loss, batches, STEPS, self.clip_norm, self.seed)

    def stepper(self, model: nn.Module) -> Optimizer:
        second = list(_maps(model)[1].parameters())
        ids = {id(p) for p in second}
        groups: list[dict[str, object]] = [
            {"params": [p for p in model.parameters() if id(p) not in ids]},
            {"params": second, "lr": self.rate * self.second_layer},
        ]
        settings = dict(self.settings)
        if self.optimizer == "SGD":
            return torch.optim.SGD(groups, lr=self.rate, **{"momentum": 0.9, **settings})
        return torch.optim.AdamW(groups, lr=self.rate, **settings)


def _maps(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)]


def digits() -> tuple[Tensor, Tensor]:
    data, target = load_digits(return_X_y=True)
    x = torch.tensor(data, dtype=torch.float32)
    return (x - x.mean()) / x.std(), torch.tensor(target)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def ends_at(case: Case) -> float:
    """Return the mean loss of the last quarter."""
    fork: Fork = case.setup().fork()
    losses = train(fork).losses
    if len(losses) < STEPS or not math.isfinite(losses[-1]):
        return math.inf
    return fmean(losses[-STEPS // 4 :])


def at_best_rate(case: Case, rates: Iterable[float]) -> tuple[float, float]:
    """Return (loss, learning rate) at the best of these learning rates."""
    return min((ends_at(replace(case, rate=rate)), rate) for rate in rates)


def healthy(seeds: int) -> list[Case]:
    cases = [Case(net, name, math.nan) for net in NETS for name in RATES]
    tuned = [replace(case, rate=at_best_rate(case, RATES[case.optimizer])[1]) for case in cases]
    return [replace(case, seed=seed) for case in tuned for seed in range(seeds)]


def read(record: Record) -> Iterator[tuple[str, float]]:
    """Yield the readings that the rules use."""
    at_first = {p: t.value for p, t in readings.at_first(record, "update_ratio")[0].items()}
    middle = median(at_first.values())
    yield "uneven-rates: largest update_ratio over the median's", max(at_first.values()) / middle
    yield "uneven-rates: smallest update_ratio over the median's", min(at_first.values()) / middle
    moves = readings.by_layer(record, "update_ratio")
    yield "rate-too-high: largest update_ratio", max(t.value for t in moves.values())
    yield "rate-too-low: largest update_ratio", max(t.value for t in moves.values())
    uphill = [r.descent < 0 for r in record.reports[1:]]
    yield "optimizer-turns: steps uphill, share", fmean(uphill)
    cosines = readings.by_layer(record, "parameter_cosine")
    yield "optimizer-turns: smallest parameter_cosine", min(t.value for t in cosines.values())
    for ratio in initialisation.gradient_ratios(record).values():
        yield "vanishing, exploding: gradient, first layer over last", ratio
    assert record.chance is not None
    yield "bad-initialisation: first loss over chance", record.losses[0] / record.chance
    gains = [w.gain for w in record.weights.values()]
    yield "bad-initialisation: smallest gain", min(gains)
    yield "bad-initialisation: largest gain", max(gains)
    yield "decay-fights: decay's pull (decay 0.01)", optimizer.first_pull(record, 0.01)
    yield (
        "parameters' norm, last over first",
        record.parameter_norms[-1] / record.parameter_norms[0],
    )
    cosines = readings.by_layer(record, "gradient_cosine")
    yield "interference: smallest gradient_cosine", min(t.value for t in cosines.values())
    ceilings = readings.by_layer(record, "attainable_cosine")
    yield (
        "interference: ceiling over gradient_cosine",
        max(ceilings[p].value / max(cosines[p].value, 1e-9) for p in ceilings),
    )
    for units in record.units.values():
        yield f"dead-units: dead share, {units.function}", units.dead / units.units
        yield f"saturated-units: saturated share, {units.function}", units.saturated
    yield "loss: fall over the first loss", 1 - course.end(record) / record.losses[0]


Dose = tuple[str, Callable[[Case], Case]]


def scaled(x: Tensor, by: float) -> Tensor:
    return by * x


def offset(x: Tensor, by: float) -> Tensor:
    return x + by


def unequal(x: Tensor, sigma: float) -> Tensor:
    """Scale the samples by log-normal factors, keeping the mean square."""
    generator = torch.Generator().manual_seed(0)
    lengths = (sigma * torch.randn(len(x), 1, generator=generator)).exp()
    return x * lengths / lengths.square().mean().sqrt()


def one_large(x: Tensor, by: float) -> Tensor:
    """Make one feature random, with `by` times the usual standard deviation."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(len(x), generator=generator)
    return torch.cat([(by * noise)[:, None], x[:, 1:]], dim=1)


def gained(model: nn.Module, by: float) -> None:
    """Multiply all weights of linear and convolutional layers by a factor."""
    with torch.no_grad():
        for module in _maps(model):
            module.weight.mul_(by)


def killed(model: nn.Module, share: float) -> None:
    """Deactivate a share of the first layer's units permanently."""
    first = _maps(model)[0]
    with torch.no_grad():
        first.bias[: round(share * len(first.bias))] = -100.0


def of_inputs(change: Callable[[Tensor, float], Tensor], by: float) -> Callable[[Case], Case]:
    return lambda case: replace(case, inputs=partial(change, by=by))


def _settings(**settings: float) -> Callable[[Case], Case]:
    return lambda case: replace(case, settings=tuple(settings.items()))


FAULTS: dict[str, list[Dose]] = {
    "input std": [
        (f"{by:g}", of_inputs(scaled, by)) for by in (0.01, 0.1, 0.3, 3, 10, 30, 100)
    ],
    "input mean over std": [(f"{by:g}", of_inputs(offset, by)) for by in (1, 2, 3, 5, 10)],
    "lengths log-normal, σ": [
        (f"{s:g}", lambda case, s=s: replace(case, inputs=lambda x: unequal(x, s)))
        for s in (0.5, 0.75, 1, 1.5)
    ],
    "one feature's std": [(f"{by:g}", of_inputs(one_large, by)) for by in (10, 30, 100)],
    "gain of all layers, times": [
        (f"{by:g}", lambda case, by=by: replace(case, model=partial(gained, by=by)))
        for by in (0.1, 0.3, 3, 10)
    ],
    "dead share of the first layer": [
        (f"{s:g}", lambda case, s=s: replace(case, model=partial(killed, share=s)))
        for s in (0.25, 0.5, 0.75, 0.9, 1.0)
    ],
    "momentum, β₁": [
        (
            f"{m:g}",
            lambda case, m=m: replace(
                case,
                settings=(
                    (("momentum", m),) if case.optimizer == "SGD" else (("betas", (m, 0.999)),)
                ),
            ),
        )
        for m in (0.95, 0.98, 0.99, 0.995)
    ],
    "weight decay": [(f"{d:g}", _settings(weight_decay=d)) for d in (0.03, 0.1, 0.3, 1, 3, 10, 30)],
    "rate of the second layer, times": [
        (f"{by:g}", lambda case, by=by: replace(case, second_layer=by))
        for by in (0.001, 0.01, 0.1, 0.3, 3, 10, 30)
    ],
    "clip norm": [
        (f"{c:g}", lambda case, c=c: replace(case, clip_norm=c)) for c in (1, 0.3, 0.1, 0.03, 0.01)
    ],
}  # fmt: skip


def healthy_table(cases: list[Case]) -> list[tuple[str, ...]]:
    found = defaultdict(list)
    for case in cases:
        record = observe(case.setup(), every_n_steps=STEPS // 10)
        for name, value in read(record):
            found[name].append(value)
    rows = []
    for name, values in sorted(found.items()):
        levels = torch.tensor(values).quantile(torch.tensor([0.0, 0.05, 0.5, 0.95, 1.0]))
        rows.append((name, str(len(values)), *(f"{v:.3g}" for v in levels.tolist())))
    return rows


def dose_table(cases: list[Case], doses: list[Dose]) -> list[tuple[str, ...]]:
    twins = {case: ends_at(case) for case in cases}
    rows = []
    for name, change in doses:
        for kind in RATES:
            mine = [case for case in cases if case.optimizer == kind]
            same = [ends_at(change(case)) / twins[case] for case in mine]
            tuned = []
            for case, at_own in zip(mine, same, strict=True):
                rates = [case.rate * by for by in TRIED]
                best, _ = at_best_rate(change(case), rates)
                tuned.append(min(at_own, best / twins[case]))
            rows.append((name, kind, summary(same), summary(tuned)))
    return rows


def rate_table(cases: list[Case]) -> list[tuple[str, ...]]:
    """Return shares of the fall, as the rules use them, at multiples of the best learning rate."""
    rows = []
    for by in (0.001, 0.01, 0.1, 0.3, 1, 3, 10, 30, 100):
        shares = [shares_of_fall(replace(case, rate=by * case.rate)) for case in cases]
        lower, higher = zip(*shares, strict=True)
        rows.append((f"{by:g}", summary(list(lower)), summary(list(higher))))
    return rows


def shares_of_fall(case: Case) -> tuple[float, float]:
    """Return the loss's fall over the best fall at × 0.1 and 0.3, and over that at × 3 and 10."""
    losses = {by: ends_at(replace(case, rate=by * case.rate)) for by in (0.1, 0.3, 1, 3, 10)}
    falls = {by: math.log(10) - loss for by, loss in losses.items()}
    lower, higher = max(falls[0.1], falls[0.3]), max(falls[3], falls[10])
    return tuple(falls[1] / best if best > 0 else 1.0 for best in (lower, higher))


def summary(ratios: list[float]) -> str:
    return f"{median(ratios):.3g} ({min(ratios):.3g} to {max(ratios):.3g})"


def main(arguments: list[str] | None = None) -> None:
    """Run the requested tables, and print or write them."""
    options = parser(__doc__ or "")
    options.add_argument("--seeds", type=int, default=3, help="of the healthy runs")
    options.add_argument("--only", nargs="*", default=["healthy", "rate", *FAULTS])
    chosen = options.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    cases = healthy(chosen.seeds)
    lines = heading("What sets the audit's thresholds", __file__, chosen)
    first = [case for case in cases if case.seed == 0]
    rates = [
        (case.net, case.optimizer, f"{case.rate:.2g}", f"{ends_at(case):.3g}") for case in first
    ]
    lines += ["## Healthy", "", *table(("net", "optimizer", "best rate", "loss at the end"), rates)]
    if "healthy" in chosen.only:
        header = ("reading", "n", "least", "5 %", "median", "95 %", "most")
        lines += table(header, healthy_table(cases))
    if "rate" in chosen.only:
        header = ("rate, times", "share of the fall at a lower rate", "at a higher rate")
        lines += ["## Rate", "", *table(header, rate_table(first))]
        write(lines, chosen.write)
    for fault, doses in FAULTS.items():
        if fault in chosen.only:
            header = (fault, "optimizer", "loss × at the twin's rate", "at its best rate")
            lines += [f"## {fault}", "", *table(header, dose_table(first, doses))]
            write(lines, chosen.write)
    print(write(lines, chosen.write))


if __name__ == "__main__":
    main()
