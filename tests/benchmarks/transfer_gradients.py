"""Why rates that the solver finds for torch's own initialisation don't transfer with SGD.

The gradient of the features before a readout is (p − y) W, and W = W₀ + dW has two parts: through
the initial weights it is n^(−½) in "sp", through what the readout has learned, at the rate that
keeps logits of order one, n^(−1). The solver takes the larger one at infinite width, the first.
Where the second is larger, gradients shrink faster than it assumes, and layers before the readout
slow down. In muP both are n^(−1). Adam's updates don't depend on the size of gradients.

Read are, at the rate that is best at 32, by width and arm (torch, mup, solver; see `transfer.py`):
the second part over the first, in root mean square over all judged data; the features' gradient,
both half-way through training; and by how much training changes the features. Beside it, which
kind of parameter is too slow in the MLP at 256: the loss with the rate of one kind three times
larger or smaller.

Expected before it was run, from the loss at other rates: with the solver's, parts are about equal
at 256, gradients fall faster than n^(−½), features change less at larger widths; with muP all of it
is the same at all widths but for the gradient, which is n^(−1).

    python tests/benchmarks/transfer_gradients.py --write tests/benchmarks/results
"""

import argparse
import json
import math
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from transfer import mean_and_error, power, written
from transfer_training import SEEDS, STEPS, Setting, Together, batches, judged, share_of_rate, train
from write_up import hardware, heading, table, write

from adiv_monitor.max_lr.multiplier import multiplier_of

IMAGES = Path(__file__).parents[2] / "docs" / "images"
ARMS = ("torch", "mup", "solver")
WIDTHS = {"mlp": (32, 64, 128, 256, 512), "gpt": (32, 64, 128)}
RATES = {"mlp": -7.5, "gpt": -5}  # tenfold exponents: the best at 32, of all arms
READOUT = {"mlp": "4", "gpt": "head"}
READINGS = ("learned / initial", "gradient", "change")
KINDS = ("input", "hidden", "readout", "vector")


def parts(setting: Setting, models: Together) -> tuple[Tensor, Tensor]:
    """Features before the readout and p − y, of every model, on judged data."""
    x, y = judged(setting.model)
    body = deepcopy(models.model)
    body.set_submodule(READOUT[setting.model], nn.Identity())
    kept = dict(body.named_parameters())

    def run(weights: list[Tensor]) -> tuple[Tensor, Tensor]:
        named = dict(zip(models.names, weights, strict=True))
        features = functional_call(body, {n: w for n, w in named.items() if n in kept}, x)
        p = functional_call(models.model, named, x).softmax(-1)
        return features, p - F.one_hot(y, p.shape[-1])

    with torch.no_grad():
        found: tuple[Tensor, Tensor] = vmap(run)(models.weights)
    return found


def readout(models: Together, setting: Setting) -> Tensor:
    """Weights of the readouts as they are used, (models, classes, features)."""
    path = READOUT[setting.model]
    place = next(i for i, n in enumerate(models.names) if n.startswith(path) and "weight" in n)
    multiplier = multiplier_of(models.model.get_submodule(path), "weight")
    return models.weights[place].detach() * (1 if multiplier is None else multiplier.factor)


def read(setting: Setting) -> dict[str, list[float]]:
    """The readings and the loss, by seed."""
    models = Together(setting, [(RATES[setting.model], seed) for seed in SEEDS])
    initial, before = readout(models, setting).clone(), parts(setting, models)[0]
    found: dict[str, list[float]] = {}
    for t, (x, y) in enumerate(batches(setting.model)):
        if t == STEPS[setting.model] // 2:
            errors, used = parts(setting, models)[1], readout(models, setting)
            through = [rms(errors @ w) for w in (initial, used - initial, used)]
            found["learned / initial"] = (through[1] / through[0]).tolist()
            found["gradient"] = through[2].tolist()
        gradients = torch.autograd.grad(models.losses(x, y).sum(), models.weights)
        models.step(gradients, share_of_rate(t, STEPS[setting.model]))
    found["change"] = rms(parts(setting, models)[0] - before).tolist()
    with torch.no_grad():
        data = (z.expand(len(SEEDS), *z.shape) for z in judged(setting.model))
        found["loss"] = models.losses(*data).tolist()
    return found


def rms(of_models: Tensor) -> Tensor:
    """Of every model, (models,)."""
    return of_models.flatten(1).square().mean(1).sqrt()


def slope(widths: Sequence[int], values: Sequence[float]) -> float:
    """Of the logarithm over that of the width, by least squares."""
    x, y = ([math.log(v) for v in of] for of in (widths, values))
    from_mean = [v - mean(x) for v in x]
    return sum(d * v for d, v in zip(from_mean, y, strict=True)) / sum(d * d for d in from_mean)


def plot(found: dict[str, Any], file: Path) -> None:
    """A row for each model, a panel for each reading, a line for each arm."""
    figure = Figure(figsize=(11, 3.6 * len(found)), layout="constrained")
    grid = figure.subplots(len(found), len(READINGS), squeeze=False)
    titles = ("features' gradient: learned part / initial part", "features' gradient", "")
    for (kind, arms), line in zip(found.items(), grid, strict=True):
        for name, title, axes in zip(READINGS, titles, line, strict=True):
            for place, (arm, by_width) in enumerate(arms.items()):
                widths = [int(width) for width in by_width]
                means = [mean(readings[name]) for readings in by_width.values()]
                label = f"{arm}: n^{slope(widths, means):+.2f}"
                axes.plot(widths, means, "o-", color=f"C{place}", label=label)
                for width, readings in zip(widths, by_width.values(), strict=True):
                    axes.plot([width] * len(SEEDS), readings[name], ".", ms=4, color=f"C{place}")
            axes.set(xscale="log", yscale="log", xlabel="width n")
            axes.set_title(title or "change of the features by training", fontsize=9)
            axes.set_xticks(widths, [str(width) for width in widths])
            axes.set_xticks([], minor=True)
            axes.yaxis.set_major_formatter("{x:.3g}")
            axes.yaxis.set_minor_formatter("{x:.3g}")
            axes.tick_params(axis="y", which="both", labelsize=7)
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8)
        line[0].axhline(1, color="grey", lw=0.8)
        line[0].set_ylabel({"mlp": "MLP, SGD", "gpt": "GPT, SGD"}[kind])
    figure.savefig(file, dpi=100)


def lines_of(found: dict[str, Any]) -> list[str]:
    """A table for each model."""
    lines = []
    for kind, arms in found.items():
        rows = [
            [arm, width, *(f"{mean(r[n]):.3g}" for n in READINGS), written(mean_and_error_of(r))]
            for arm, by_width in arms.items()
            for width, r in by_width.items()
        ]
        rows += [
            [
                *(f"{arm}: slope", ""),
                *(
                    f"{slope([*map(int, by)], [mean(r[n]) for r in by.values()]):+.2f}"
                    for n in READINGS
                ),
                "",
            ]
            for arm, by in arms.items()
        ]
        lines += [f"## {kind}, SGD at {power(RATES[kind])}", ""]
        lines += table(["", "width", *READINGS, "loss"], rows)
    return lines


def mean_and_error_of(readings: dict[str, list[float]]) -> tuple[float, float]:
    return mean_and_error(dict(enumerate(readings["loss"])))


def kinds_lines(width: int) -> list[str]:
    """A table of the loss with the rate of one kind another one."""
    rows = []
    for kind in KINDS:
        cells = []
        for tenfold in (-5, 0, 5):
            setting = Setting("mlp", "sgd", f"solver:{kind}={tenfold}", width)
            losses = train(setting, [(RATES["mlp"], seed) for seed in SEEDS])[0]
            cells.append(written(mean_and_error(dict(enumerate(losses)))))
        rows.append([kind, *cells])
    title = f"## mlp {width} wide, the solver's rates at {power(RATES['mlp'])}, one kind changed"
    return [title, "", *table(["", "× 10^-0.5", "× 1", "× 10^0.5"], rows)]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=WIDTHS, default=["mlp"])
    parser.add_argument("--quick", action="store_true", help="two widths: does it still run?")
    parser.add_argument("--write", type=Path, help="the folder of the results; draws as well")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for kind in given.models:
        widths = WIDTHS[kind][: 2 if given.quick else None]
        found[kind] = {
            arm: {str(width): read(Setting(kind, "sgd", arm, width)) for width in widths}
            for arm in ARMS
        }
    lines = heading("Gradients of features over widths", __file__, argparse.Namespace())
    lines[2] = "`python tests/benchmarks/transfer_gradients.py --write tests/benchmarks/results`"
    lines += [*lines_of(found), *kinds_lines(64 if given.quick else 256)]
    print(write(lines, given.write and given.write / "transfer-gradients.md"))
    if given.write:
        made = {"command": lines[2].strip("`"), "torch": torch.__version__, "on": hardware()}
        text = json.dumps({**made, "results": found}) + "\n"
        (given.write / "transfer-gradients.json").write_text(text)
        plot(found, IMAGES / "transfer-gradients.png")


if __name__ == "__main__":
    main()
