"""Figs 8 and 9 of the paper: PatchNorm in two convolutional networks, against normalisers.

    python examples/paper/convolutional.py --quick --data DIR --out OUT     minutes
    python examples/paper/convolutional.py --data DIR --out OUT             days on a CPU

The paper does not give its networks. Both have 3 × 3 filters here. "pooled" (Fig 8) ends in global
average pooling and an affine map; "strided" (Fig 9) halves the image with every layer until one
position is left. Each finished network is added to `OUT/convolutional.json`; killed at any moment,
`--resume` goes on with the next one.
"""

import argparse
import itertools
import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import cifar
import torch
from adiv_layers import AffineLikeLinear, NormLikeLinear, PatchNormConv2d
from commandline import count, parsed, rate
from ensemble import NONLINEAR, Network
from experiment import arguments, load
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from slopes import at_the_end, mean_and_error
from table import markdown, plus
from torch import Tensor, nn
from training import CLASSES, Course, Run, Setting, fit, images, replace

NETWORKS = ("pooled", "strided")
# What divides the input of a whole image, without parameters; and what divides single patches.
NORMALISERS = ("none", "batchnorm", "layernorm", "rmsnorm", "l2norm")
PATCH_MAPS = ("patch-norm-like", "patch-norm-like-half", "patch-affine-like")
MAPS = (*NORMALISERS, *PATCH_MAPS)
COLOURS = {
    "none": "tab:blue",
    "batchnorm": "tab:orange",
    "layernorm": "tab:brown",
    "rmsnorm": "tab:purple",
    "l2norm": "tab:gray",
    "patch-norm-like": "tab:green",
    "patch-norm-like-half": "yellowgreen",
    "patch-affine-like": "tab:red",
}
WHAT = ("network", "map", "activation", "batch_size", "seed", "learning_rate", "pixels")


class Over(nn.Module):
    """A sample over the length of all of its values, or over their root mean square.

    Args:
        by_size: divide by the root mean square.
        eps: added to the mean square, or to the square of the length.
    """

    def __init__(self, by_size: bool, eps: float = 1e-5) -> None:
        super().__init__()
        self.by_size = by_size
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Samples of x, (samples, channels, …)."""
        squares = x.flatten(1).square()
        square = squares.mean(1) if self.by_size else squares.sum(1)
        return x * (square + self.eps).rsqrt().view(-1, *[1] * (x.dim() - 1))


def model(network: str, map_: str, activation: str, seed: int) -> nn.Sequential:
    """A network that takes rows of inputs; networks of a seed begin with the same weights.

    Args:
        network: one of `NETWORKS`.
        map_: one of `MAPS`; every convolution and affine map has it.
        activation: "tanh" or "leaky".
        seed: of the first weights.
    """
    torch.manual_seed(seed)
    act = nn.Tanh if activation == "tanh" else nn.LeakyReLU
    layers: list[nn.Module] = [nn.Unflatten(1, (3, 32, 32))]
    channels = (3, 16, 32, 64) if network == "pooled" else (3, 16, 32, 64, 64)
    for i, (n, m) in enumerate(itertools.pairwise(channels)):
        stride = 1 if network == "pooled" and i == 0 else 2
        layers += [*_normaliser(map_, n), _convolution(map_)(n, m, 3, stride, 1), act()]
    if network == "pooled":
        layers += [nn.AdaptiveAvgPool2d(1)]
        layers += [*_normaliser(map_, channels[-1]), nn.Flatten(), _affine(map_)(64, CLASSES)]
    else:  # 2 × 2 positions are left
        layers += [*_normaliser(map_, 64), _convolution(map_)(64, CLASSES, 2), nn.Flatten()]
    return nn.Sequential(*layers)


def _normaliser(map_: str, channels: int) -> list[nn.Module]:
    if map_ == "batchnorm":
        return [nn.BatchNorm2d(channels, affine=False)]
    if map_ == "layernorm":
        return [nn.GroupNorm(1, channels, affine=False)]
    return [Over(map_ == "rmsnorm")] if map_ in ("rmsnorm", "l2norm") else []


def _convolution(map_: str) -> Any:
    if map_ not in PATCH_MAPS:
        return nn.Conv2d
    if map_ == "patch-affine-like":
        return partial(PatchNormConv2d, form="affine-like")
    return partial(PatchNormConv2d, form="norm-like")


def _affine(map_: str) -> type[nn.Linear]:
    if map_ not in PATCH_MAPS:
        return nn.Linear
    return AffineLikeLinear if map_ == "patch-affine-like" else NormLikeLinear


def train(what: Run, course: Course, epochs: int) -> Run:
    """Train one network with Adam; accuracies in percent by epoch.

    Args:
        what: values of `WHAT`.
        course: the images.
        epochs: how long.
    """
    alone = model(what["network"], what["map"], what["activation"], what["seed"])
    alone.to(course.train[0].device)
    rate = what["learning_rate"] * (0.5 if what["map"] == "patch-norm-like-half" else 1)
    stepper = torch.optim.Adam(alone.parameters(), lr=rate)
    found = fit(alone, stepper, course, what["seed"], epochs)
    return {**what, "epoch": list(range(1, epochs + 1)), **found}


def text(runs: Sequence[Run]) -> str:
    """Accuracies of both networks, in Markdown."""
    first = runs[0]
    columns = list(dict.fromkeys((run["network"], run["activation"]) for run in runs))
    rows = []
    for map_ in dict.fromkeys(run["map"] for run in runs):
        row = [map_]
        for column in columns:
            mine = [
                at_the_end(run)
                for run in runs
                if (run["network"], run["activation"], run["map"]) == (*column, map_)
            ]
            row.append(plus(*mean_and_error(mine)) if mine else "")
        rows.append(row)
    return (
        f"Data: {first['data']}; pixels: {first['pixels']}; batch size: {first['batch_size']}; "
        f"epochs: {first['epoch'][-1]}; seeds: {len({run['seed'] for run in runs})}. Test accuracy "
        "in percent, mean of the last tenth of the epochs ± standard error over seeds.\n\n"
        f"{markdown(['map', *(', '.join(column) for column in columns)], rows)}\n"
    )


def plot(runs: Sequence[Run], file: Path) -> None:
    """Accuracy by epoch, means over seeds: a panel per network and activation."""
    panels = list(dict.fromkeys((run["network"], run["activation"]) for run in runs))
    figure = Figure(figsize=(4.6 * len(panels) + 2.4, 3.8), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False)
    for panel, axes in zip(panels, grid[0], strict=True):
        for map_ in dict.fromkeys(run["map"] for run in runs):
            mine = [r for r in runs if (r["network"], r["activation"], r["map"]) == (*panel, map_)]
            by_epoch = zip(*(run["test_accuracy"] for run in mine), strict=False)
            means, errors = zip(*(mean_and_error(values) for values in by_epoch), strict=True)
            style = {"fmt": ".-", "lw": 1, "capsize": 2, "label": map_}
            axes.errorbar(range(1, len(means) + 1), means, errors, color=COLOURS[map_], **style)
        axes.set(title=", ".join(panel), xlabel="epoch", ylabel="test accuracy, percent ± error")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", title="map")
    figure.suptitle(runs[0]["data"], fontsize=8)
    figure.savefig(file, dpi=110)


def wanted(given: argparse.Namespace) -> list[Run]:
    """What tells the networks that are to be trained from each other."""
    every = itertools.product(
        *(given.networks, given.maps, given.activations, [given.batch_size]),
        *(range(given.seeds), [given.lr], [given.pixels]),
    )
    return [dict(zip(WHAT, each, strict=True)) for each in every]


def main() -> None:
    parser = arguments(__doc__.split("\n\n")[0], epochs=100)
    parser.set_defaults(seeds=5)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=NETWORKS)
    parser.add_argument("--maps", nargs="+", choices=MAPS, default=MAPS)
    parser.add_argument("--activations", nargs="+", choices=NONLINEAR, default=["leaky"])
    parser.add_argument("--batch-size", type=count, default=32)
    parser.add_argument("--lr", type=rate, default=1e-3)
    parser.add_argument("--pixels", choices=cifar.PIXELS, default="unit")
    given = parsed(parser, seeds=1, epochs=1, batch_size=128)
    data = load(given)
    known = {"data": data.source, "images": images(data)}
    file = given.out / "convolutional.json"
    if file.exists() and not given.resume:
        parser.error(f"{file} exists: --resume goes on with it, another --out starts anew")
    given.out.mkdir(parents=True, exist_ok=True)
    runs: list[Run] = json.loads(file.read_text()) if file.exists() else []
    if any(run["images"] != known["images"] for run in runs):
        parser.error(f"{file} holds runs on other images: choose another --out")
    # A network of one unit stands in the ensemble that this experiment does not train.
    unused = (Network("standard", "tanh", 0, given.lr),)
    course = Course(Setting(given.batch_size, 1, 1, given.pixels, unused), data, given.device)
    for what in wanted(given):
        same = [run for run in runs if {name: run[name] for name in WHAT} == what]
        if any(run["epoch"][-1] >= given.epochs for run in same):
            continue
        started = time.perf_counter()
        run = {**train(what, course, given.epochs), **known}
        runs = [*(run for run in runs if run not in same), run]
        lines = ",\n".join(json.dumps(run) for run in runs)
        replace(file, f"[\n{lines}\n]\n".encode())
        print(*what.values(), f"{time.perf_counter() - started:.0f} s", flush=True)
    (given.out / "convolutional.md").write_text(text(runs))
    plot(runs, given.out / "convolutional.png")
    print((given.out / "convolutional.md").read_text())


if __name__ == "__main__":
    main()
