"""The pictures of docs/readings.md: what measures read in healthy and in faulty runs.

A network of three layers learns scikit-learn's digits, standardised by one mean and one deviation,
by SGD with momentum 0.9 in batches of 64; one thing at a time is changed. Seconds each, on a CPU.

    python docs/figures/readings.py [NAME …] [--steps 60] [--out docs/images]

NAME: rates, layers, optimizers, inputs, scales, realised, rows; all of them if none is given.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from adiv_layers import convert
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from adiv_monitor import Monitor, StepReport
from adiv_monitor.diagnosis.health import HEALTH

BATCH, RATE = 64, 0.1
BLUE, GREY, RED, GREEN = "#0072b2", "#555555", "#c1440e", "#1b8a5a"
Batches = list[tuple[Tensor, Tensor]]


def digits(steps: int, change: Callable[[Tensor], Tensor] = lambda x: x) -> Batches:
    """As many batches of digits as there are steps."""
    data, target = load_digits(return_X_y=True)
    x, y = torch.tensor(data, dtype=torch.float32), torch.tensor(target)
    x = change((x - x.mean()) / x.std())
    generator = torch.Generator().manual_seed(0)
    chosen = [torch.randint(len(x), (BATCH,), generator=generator) for _ in range(steps)]
    return [(x[rows], y[rows]) for rows in chosen]


def network(hidden: int = 2) -> nn.Sequential:
    """64 inputs, hidden layers of 128 ReLU units, ten classes."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(64, 128), nn.ReLU()]
    for _ in range(hidden - 1):
        layers += [nn.Linear(128, 128), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(128, 10))


def trained(
    model: nn.Module, optimizer: Optimizer, batches: Batches, **options: Any
) -> tuple[list[float], list[StepReport]]:
    """The loss of every step, and every report."""
    loss_function = nn.CrossEntropyLoss()
    losses = []
    options = {"every_n_steps": 1, "max_rows": None, "keep": len(batches), **options}
    if options.get("realised"):
        options["realised"] = loss_function
    with Monitor(model, optimizer, **options) as monitor:
        for x, y in batches:
            optimizer.zero_grad()
            loss = loss_function(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, list(monitor.reports)


def momentum(model: nn.Module, rate: float = RATE) -> SGD:
    return SGD(model.parameters(), lr=rate, momentum=0.9)


def course(reports: Sequence[StepReport], measure: str) -> Iterator[tuple[str, list[float]]]:
    """Layer → its values, step by step."""
    for layer in reports[0].layers:
        yield layer, [getattr(report.layers[layer], measure) for report in reports]


# The pictures: steps → figure


def rates(steps: int) -> Figure:
    """Loss and `update_ratio` at a learning rate that is too low, right, and too high."""
    figure, (left, right) = panels()
    for colour, factor in ((BLUE, 0.001), (GREY, 1), (RED, 30)):
        model = network()
        losses, reports = trained(model, momentum(model, factor * RATE), digits(steps))
        left.plot(losses, color=colour, label=f"learning rate {factor * RATE:g}")
        for _, values in course(reports, "update_ratio"):
            right.plot(values, color=colour, linewidth=1)
    healthy(right, "update_ratio")
    left.set(yscale="log", title="loss", xlabel="step")
    right.set(yscale="log", title="update_ratio of the three layers", xlabel="step")
    left.legend(frameon=False)
    return figure


def layers(steps: int) -> Figure:
    """`update_ratio` and `effective_lr`, where one layer has its own learning rate."""
    figure, axes = panels()
    for colour, factor, said in ((GREY, 1, "one learning rate"), (BLUE, 0.001, "layer 4: × 0.001")):
        model = network(hidden=5)
        slow = list(model[4].parameters())
        rest = [p for p in model.parameters() if all(p is not other for other in slow)]
        groups = [{"params": rest}, {"params": slow, "lr": RATE * factor}]
        _, reports = trained(model, SGD(groups, lr=RATE, momentum=0.9), digits(steps))
        for axis, measure in zip(axes, ("update_ratio", "effective_lr"), strict=True):
            medians = {layer: median(values) for layer, values in course(reports, measure)}
            axis.plot(*zip(*medians.items(), strict=True), "o-", color=colour, label=said)
            axis.set(yscale="log", title=measure, xlabel="layer")
    healthy(axes[0], "update_ratio")
    axes[1].legend(frameon=False)
    return figure


def optimizers(steps: int) -> Figure:
    """`gradient_cosine` and `update_cosine`, median of the layers, under three optimizers."""
    figure, axes = panels(3)
    made: dict[str, Callable[[nn.Module], Optimizer]] = {
        "SGD": lambda model: SGD(model.parameters(), lr=RATE),
        "SGD, momentum 0.9": momentum,
        "Adam": lambda model: Adam(model.parameters(), lr=1e-3),
    }
    for axis, (name, make) in zip(axes, made.items(), strict=True):
        model = network()
        _, reports = trained(model, make(model), digits(steps))
        for measure, colour in (("gradient_cosine", GREY), ("update_cosine", RED)):
            medians = [report.summary()[measure].median for report in reports]
            axis.plot(medians, color=colour, label=measure)
        axis.set(ylim=(-0.1, 1), title=name, xlabel="step")
        axis.axhline(0, color="black", linewidth=0.5)
    axes[0].legend(frameon=False)
    return figure


def inputs(steps: int) -> Figure:
    """The first layer's first step, by how far its inputs are from centred."""
    figure, (axis,) = panels(1)
    offsets = [0, 0.25, 0.5, 1, 2, 4, 8]
    measures = {"common_share": RED, "gradient_cosine": BLUE, "attainable_cosine": GREY}
    found: dict[str, list[float]] = {measure: [] for measure in measures}
    for offset in offsets:
        model = network()
        shifted = digits(1, lambda x, by=offset: x + by)
        _, (report, *_) = trained(model, momentum(model), shifted, attainable=True)
        for measure in measures:
            found[measure].append(getattr(report.layers["0"], measure))
    for measure, colour in measures.items():
        axis.plot(found[measure], "o-", color=colour, label=measure)
    axis.set(xticks=range(len(offsets)), xticklabels=offsets, ylim=(0, 1.05))
    axis.set(xlabel="added to all inputs, in standard deviations", title="first layer, first step")
    axis.legend(frameon=False, loc="center right")
    return figure


def scales(steps: int) -> Figure:
    """How the row scales of the first layer lie, and what they cost."""
    figure, (axis,) = panels(1)
    levels = torch.linspace(0, 1, 33)

    def unequal(x: Tensor) -> Tensor:
        return x * torch.randn(len(x), 1, generator=torch.Generator().manual_seed(1)).exp()

    runs = (
        ("as they are", GREY, lambda x: x, False),
        ("lengths spread", RED, unequal, False),
        ("lengths spread, affine-like layers", GREEN, unequal, True),
    )
    for said, colour, change, corrected in runs:
        model = network()
        if corrected:
            convert(model, to="affine-like")
        batches = digits(1, change)
        _, (report, *_) = trained(model, momentum(model), batches)
        reading = report.layers["0"]
        squares = batches[0][0].square().sum(1) + 1
        rows = torch.ones_like(squares) if corrected else squares
        told = f"{said}: scale_cv {reading.scale_cv:.2f}, diagonal_cosine"
        told = f"{told} {reading.diagonal_cosine:.2f}"
        axis.plot(levels, rows.quantile(levels), color=colour, label=told)
    axis.set(yscale="log", xlabel="share of the rows with a smaller scale")
    axis.set(title="scale of the rows, first layer")
    axis.legend(frameon=False, fontsize=8, loc="upper left")
    axis.set_ylim(top=2e5)
    return figure


def realised(steps: int) -> Figure:
    """What a step promised and what it gave, at growing rates."""
    figure, (left, right) = panels()
    tried = [0.01, 0.03, 0.1, 0.3, 1, 3]
    promised, given, errors = [], [], []
    for rate in tried:
        model = network()
        trained(model, momentum(model), digits(steps // 3))  # on the way, at one rate
        optimizer = SGD(model.parameters(), lr=rate)
        ((x, y),) = digits(1)  # as many samples as the probe has
        _, (report,) = trained(model, optimizer, [(x[:8], y[:8])], realised=True)
        promised.append(report.descent)
        given.append(-(report.realised_loss_change or 0.0))
        # The first layer is linear in its weights: its error is rounding.
        later = list(report.layers)[1:]
        errors.append([report.layers[name].first_order_error for name in later])
    left.plot(tried, promised, "o-", color=GREY, label="descent, summed over layers")
    left.plot(tried, given, "o-", color=RED, label="fall of the loss (realised_loss_change)")
    left.axhline(0, color="black", linewidth=0.5)
    left.set(xscale="log", title="decrease of the loss in one step", xlabel="learning rate")
    left.set_yscale("symlog", linthresh=0.01)
    left.legend(frameon=False, fontsize=8, loc="lower left")
    right.plot(tried, errors, "o-", label=[f"layer {name}" for name in later])
    right.set(xscale="log", yscale="log", title="first_order_error", xlabel="learning rate")
    right.legend(frameon=False)
    return figure


def rows(steps: int) -> Figure:
    """`update_cosine` of one step with its standard error, from ever more rows."""
    figure, (axis,) = panels(1)
    counts: list[int | None] = [4, 8, 16, 32, 48, None]
    for place, count in enumerate(counts):
        for seed in range(8):
            model = network()
            options: dict[str, Any] = {"max_rows": count, "seed": seed}
            _, (report,) = trained(model, momentum(model), digits(1), **options)
            reading = report.layers["2"]
            error = reading.standard_error.get("update_cosine", 0.0)
            at = place + (seed - 3.5) / 12
            axis.errorbar(at, reading.update_cosine, 2 * error, fmt="o", color=BLUE, markersize=3)
    axis.axhline(reading.update_cosine, color=GREY, linewidth=0.5)
    axis.set(xticks=range(len(counts)), xticklabels=[*map(str, counts[:-1]), "all 64"])
    axis.set(xlabel="max_rows", title="update_cosine ± 2 standard errors, eight draws each")
    return figure


PICTURES = {made.__name__: made for made in (rates, layers, optimizers, inputs, scales)}
PICTURES |= {made.__name__: made for made in (realised, rows)}


def panels(count: int = 2) -> tuple[Figure, Sequence[Axes]]:
    """A figure of as many axes side by side."""
    figure = Figure(figsize=(4.0 * max(count, 1.5), 3.2), layout="constrained", dpi=130)
    axes = figure.subplots(1, count, squeeze=False)[0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def healthy(axis: Axes, measure: str) -> None:
    """Shade what healthy layers read, as dashboards have it."""
    within = [value for value, level in HEALTH[measure].knots if abs(level) == 0.5]
    axis.axhspan(within[0], within[1], color="#009e73", alpha=0.12, linewidth=0)


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PICTURES)}")
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "images")
    chosen = options.parse_args()
    if unknown := set(chosen.names) - set(PICTURES):
        options.error(f"there is no picture {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    for name in chosen.names or PICTURES:
        path = chosen.out / f"{name}.png"
        PICTURES[name](chosen.steps).savefig(path)
        print(path)


if __name__ == "__main__":
    main()
