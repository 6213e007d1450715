"""What the fair test found, as text and picture, from its runs alone."""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

from figures import COLOURS
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats
from slopes import Run, at_the_end, holm, mean_and_error
from table import markdown, plus


class Arm(NamedTuple):
    """What has a learning rate of its own."""

    method: str
    activation: str
    batch_size: int


class Claim(NamedTuple):
    """What was stated before the run: that the test accuracy of a map is higher than another's."""

    method: str
    than: str
    source: str


ORDER = (
    *("standard", "batchnorm", "layernorm", "rmsnorm", "constant-scale", "norm-like"),
    *("affine-like", "centred", "centred-affine-like", "rate-by-layer"),
    *("gradient-proportional", "gradient-disproportional", "gradient-batch"),
)
# By optimizer. A map that loses to `standard` is a weak rival: to be better proves little.
STATED = {
    "sgd": (
        Claim("affine-like", "standard", "theory; prototype +1.6 ± 0.3 with tanh, +0.3 with leaky"),
        Claim("norm-like", "standard", "theory"),
        Claim("affine-like", "layernorm", "theory"),
        Claim("affine-like", "constant-scale", "theory, which has no gain from a common scale"),
        Claim("centred", "standard", "prototype: +0.6 ± 0.2 with tanh, −0.1 ± 0.3 with leaky"),
        Claim("centred-affine-like", "affine-like", "centring adds to it; prototype: it does not"),
    ),
    "adam": (
        Claim("affine-like", "standard", "the paper; we expect 0 to 2 points, −1 to 1 with leaky"),
        Claim("norm-like", "standard", "the paper; we expect −1 to 1 point"),
        Claim("affine-like", "batchnorm", "the paper; we expect it with tanh alone"),
        Claim("affine-like", "layernorm", "the paper; we expect it too"),
        Claim("affine-like", "rmsnorm", "the paper; we expect 0 to 3 points"),
        Claim("affine-like", "constant-scale", "the paper's theory; we expect that it is not"),
        Claim("centred", "affine-like", "we: the mean of the pixels is what costs most"),
    ),
}
# Of the arms that came later, before they were run.
LATER = {
    "sgd": (
        Claim("rate-by-layer", "standard", "we expect 0 to 1 point with tanh, −0.5 to 0.5 leaky"),
        Claim("gradient-proportional", "standard", "theory; we expect 0 to 1 with tanh"),
        Claim("gradient-proportional", "rate-by-layer", "theory; we expect −0.5 to 0.5"),
        Claim("gradient-disproportional", "standard", "theory; we expect −1 to 0.5"),
        Claim("affine-like", "gradient-proportional", "we: the map is it; 0.5 to 1.5 with tanh"),
        Claim("gradient-batch", "standard", "theory; we expect 0 to 2, most at B = 128"),
        Claim("gradient-batch", "affine-like", "theory, which says less interference, more gain"),
        Claim("affine-like", "batchnorm", "the paper; we expect 0 to 2 with tanh, −2 to 0 leaky"),
        Claim("affine-like", "rmsnorm", "the paper; we expect 0 to 3"),
    ),
    "adam": (),
}
Accuracies = dict[Arm, dict[int, float]]  # by seed
SHOWN = {"test_accuracy": "-", "train_accuracy": "--"}


def of(run: Run) -> Arm:
    """The arm of a run."""
    return Arm(run["method"], run["activation"], run["batch_size"])


def curves(tuning: Iterable[Run]) -> dict[Arm, dict[float, float]]:
    """Accuracy on the images held out by learning rate, mean over seeds."""
    found: dict[Arm, dict[float, list[float]]] = {}
    for run in tuning:
        of_arm = found.setdefault(of(run), {})
        of_arm.setdefault(run["learning_rate"], []).append(at_the_end(run))
    return {
        arm: {rate: mean_and_error(values)[0] for rate, values in sorted(rates.items())}
        for arm, rates in found.items()
    }


def best(tuning: Iterable[Run]) -> dict[Arm, float]:
    """The learning rate of every arm with the highest accuracy on the images held out."""
    return {arm: max(curve, key=lambda each: curve[each]) for arm, curve in curves(tuning).items()}


def accuracies(
    tuning: Sequence[Run], final: Iterable[Run], which: str = "test_accuracy"
) -> Accuracies:
    """Accuracies by seed of the runs with the best learning rates."""
    chosen = best(tuning)
    found: Accuracies = {}
    for run in final:
        if chosen.get(of(run)) == run["learning_rate"]:
            found.setdefault(of(run), {})[run["seed"]] = at_the_end(run, which)
    return found


def difference(found: Accuracies, arm: Arm, than: str) -> list[float]:
    """Accuracies less those of another map, seed by seed."""
    theirs = found.get(arm._replace(method=than), {})
    return [a - theirs[seed] for seed, a in found.get(arm, {}).items() if seed in theirs]


def text(tuning: Sequence[Run], final: Sequence[Run]) -> str:
    """The whole page, in Markdown."""
    found = accuracies(tuning, final)
    sizes = sorted({arm.batch_size for arm in found})
    optimizer = final[0]["optimizer"]
    named = {"sgd": "plain SGD", "adam": "Adam"}[optimizer]
    layers = {2: "two"}.get(final[0]["depth"], final[0]["depth"])
    paths = ", with residual paths" if final[0].get("residual") else ""
    epochs = " or ".join(map(str, sorted({run["epoch"][-1] for run in final})))
    seeds = len({run["seed"] for run in final})
    tuned = {b: len({r["seed"] for r in tuning if r["batch_size"] == b}) for b in sizes}
    by_seeds = ", ".join(f"{count} at B = {b}" for b, count in tuned.items())
    parts = [
        f"Data: {final[0]['data']}; pixels: {final[0]['pixels']}; optimizer: {named}; {layers} "
        f"hidden layers, {final[0]['width']} wide{paths}; epochs: {epochs}; seeds: {seeds}. "
        "Accuracy in percent, mean of the last tenth of the epochs; differences are paired by "
        "seed; ± standard error over seeds.",
        "Learning rates are tuned in half decades, on training images held out. Seeds of that: "
        f"{by_seeds}.",
    ]
    for activation in dict.fromkeys(arm.activation for arm in found):
        methods = [m for m in ORDER if any(a[:2] == (m, activation) for a in found)]
        rows = [Arm(method, activation, 0) for method in methods]
        parts += [f"## {activation}: test accuracy", _accuracies(found, rows, sizes)]
        parts += [f"### {activation}: less standard", _differences(found, rows[1:], sizes)]
        trained = accuracies(tuning, final, "train_accuracy")
        parts += [f"### {activation}: training accuracy", _accuracies(trained, rows, sizes)]
        parts += [f"### {activation}: learning rates", _rates(tuning, rows, sizes)]
    parts += ["## Stated before the run", _claims(found, STATED[optimizer], sizes)]
    tried = {arm.method for arm in found}
    if any(tried >= {*claim[:2]} for claim in LATER[optimizer]):
        parts += ["## Stated later", _claims(found, LATER[optimizer], sizes)]
    parts += [
        "p: Student's t over seeds, two-sided, of the mean over batch sizes; corrected by Holm for "
        "all rows of its table."
    ]
    return "\n\n".join(parts) + "\n"


def _accuracies(found: Accuracies, rows: Sequence[Arm], sizes: Sequence[int]) -> str:
    def cell(arm: Arm) -> str:
        return plus(*mean_and_error(list(found[arm].values()))) if arm in found else ""

    return _by_size(rows, sizes, cell)


def _differences(found: Accuracies, rows: Sequence[Arm], sizes: Sequence[int]) -> str:
    def cell(arm: Arm) -> str:
        values = difference(found, arm, "standard")
        return plus(*mean_and_error(values), sign=True) if values else ""

    return _by_size(rows, sizes, cell)


def _rates(tuning: Sequence[Run], rows: Sequence[Arm], sizes: Sequence[int]) -> str:
    """The best of which, each with its accuracy on the images held out."""
    known, chosen = curves(tuning), best(tuning)

    def cell(arm: Arm) -> str:
        tried = known.get(arm, {})
        marks = {rate: "**" if rate == chosen[arm] else "" for rate in tried}
        return ", ".join(f"{marks[r]}{r:g}: {a:.1f}{marks[r]}" for r, a in tried.items())

    return _by_size(rows, sizes, cell)


def _by_size(rows: Sequence[Arm], sizes: Sequence[int], cell: Callable[[Arm], str]) -> str:
    lines = ([row.method, *(cell(row._replace(batch_size=b)) for b in sizes)] for row in rows)
    return markdown(["map", *(f"B = {b}" for b in sizes)], lines)


def _claims(found: Accuracies, claims: Sequence[Claim], sizes: Sequence[int]) -> str:
    """What was stated, judged over all batch sizes at once; Holm's correction for all claims."""
    activations = list(dict.fromkeys(arm.activation for arm in found))
    judged = [
        (claim, activation, shown, together(found, claim, activation))
        for claim in claims
        for activation in activations
        if any(shown := _by_batch(found, claim, activation, sizes))
    ]
    corrected = holm([chance(pooled) for *_, pooled in judged])
    rows = (
        [
            *(f"{claim.method} > {claim.than}", claim.source, activation, *shown),
            *(plus(*mean_and_error(pooled), sign=True) if pooled else "", _shown(p)),
        ]
        for (claim, activation, shown, pooled), p in zip(judged, corrected, strict=True)
    )
    head = ["stated", "by", "activation", *(f"B = {b}" for b in sizes), "mean over B", "p"]
    return markdown(head, rows)


def _by_batch(found: Accuracies, claim: Claim, activation: str, sizes: Sequence[int]) -> list[str]:
    each = [difference(found, Arm(claim.method, activation, size), claim.than) for size in sizes]
    return [plus(*mean_and_error(values), sign=True) if values else "" for values in each]


def together(found: Accuracies, claim: Claim, activation: str) -> list[float]:
    """The difference of a claim by seed, mean over batch sizes, of seeds that have all of them."""
    by_size = []
    for arm, mine in found.items():
        theirs = found.get(arm._replace(method=claim.than), {})
        if arm[:2] == (claim.method, activation) and theirs:
            by_size.append({seed: a - theirs[seed] for seed, a in mine.items() if seed in theirs})
    seeds = set.intersection(*map(set, by_size)) if by_size else set()
    return [mean_and_error([each[seed] for each in by_size])[0] for seed in sorted(seeds)]


def chance(values: Sequence[float]) -> float:
    """Probability of a mean as far from zero or farther: Student's t, two-sided."""
    mean, error = mean_and_error(values) if values else (math.nan, math.nan)
    if math.isnan(error) or error == 0:
        return math.nan
    return float(2 * stats.t.sf(abs(mean) / error, len(values) - 1))


def _shown(p: float) -> str:
    return "" if math.isnan(p) else f"{p:.1g}"


def plot(tuning: Sequence[Run], final: Sequence[Run], file: Path) -> None:
    """Above, differences from the standard map; below, accuracy against learning rate.

    The former by batch size; of a single one, by epoch.

    Args:
        tuning: runs on the training images that are not held out.
        final: runs on all training images.
        file: where to write the picture.
    """
    found, known, chosen = accuracies(tuning, final), curves(tuning), best(tuning)
    activations = list(dict.fromkeys(arm.activation for arm in found))
    sizes = sorted({arm.batch_size for arm in found})
    methods = [method for method in ORDER if any(arm.method == method for arm in found)]
    shape = (1 + len(sizes), len(activations))
    figure = Figure(figsize=(4.6 * shape[1] + 2.4, 3.6 * shape[0]), layout="constrained")
    grid = figure.subplots(*shape, squeeze=False)
    for activation, axes in zip(activations, grid[0], strict=True):
        if sizes[1:]:
            _draw_by_size(axes, found, activation, sizes, methods)
        else:
            _draw_by_epoch(axes, final, activation, methods)
        axes.axhline(0, color=COLOURS["standard"], lw=1)
        axes.set(title=activation, ylabel="accuracy less standard's, points ± error")
    for size, row in zip(sizes, grid[1:], strict=True):
        for activation, axes in zip(activations, row, strict=True):
            for method in methods:
                arm = Arm(method, activation, size)
                curve = known.get(arm, {})
                axes.plot(*_xy(curve), ".-", color=COLOURS[method], lw=1, label=method)
                if arm in chosen:  # a circle
                    peak = chosen[arm], curve[chosen[arm]]
                    axes.plot(*peak, "o", mfc="none", ms=9, color=COLOURS[method])
            axes.set(xscale="log", xlabel="learning rate", title=f"{activation}, batch size {size}")
            axes.set(ylabel="accuracy on images held out")
            axes.set_visible(any(arm[1:] == (activation, size) for arm in known))
    handles, labels = grid[1][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", title="map; ○ best rate")
    figure.suptitle(final[0]["data"], fontsize=8)
    figure.savefig(file, dpi=110)


def _draw_by_size(
    axes: Axes, found: Accuracies, activation: str, sizes: Sequence[int], methods: Sequence[str]
) -> None:
    """Draw differences in test accuracy by batch size, and those of single seeds."""
    for place, method in enumerate(methods[1:]):
        shift = 0.8 * ((place + 1) / len(methods) - 0.5)
        for x, size in enumerate(sizes):
            if values := difference(found, Arm(method, activation, size), "standard"):
                colour, (mean, error) = COLOURS[method], mean_and_error(values)
                axes.plot([x + shift] * len(values), values, ".", color=colour, ms=3, alpha=0.6)
                axes.errorbar([x + shift], [mean], [error], fmt="o", ms=5, capsize=3, color=colour)
    axes.set(xticks=range(len(sizes)), xticklabels=sizes, xlabel="batch size (test images)")


def _draw_by_epoch(
    axes: Axes, final: Sequence[Run], activation: str, methods: Sequence[str]
) -> None:
    """Draw differences by epoch, of test images in full and of training images dashed."""
    of_arm = {(run["method"], run["seed"]): run for run in final if run["activation"] == activation}
    for method, (which, style) in product(methods[1:], SHOWN.items()):
        seeds = [seed for name, seed in of_arm if name == method]
        both = [(of_arm[method, seed][which], of_arm["standard", seed][which]) for seed in seeds]
        each = [[x - y for x, y in zip(*pair, strict=True)] for pair in both]
        means = [mean_and_error(values) for values in zip(*each, strict=True)]
        epochs = range(1, 1 + len(means))
        axes.plot(epochs, [mean for mean, _ in means], style, color=COLOURS[method], lw=1)
        low, high = ([mean + way * error for mean, error in means] for way in (-1, 1))
        axes.fill_between(epochs, low, high, color=COLOURS[method], alpha=0.2, lw=0)
    axes.set(xlabel="epoch (test images; dashed: training images)")


def _xy(curve: dict[float, float]) -> tuple[list[float], list[float]]:
    return list(curve), list(curve.values())
