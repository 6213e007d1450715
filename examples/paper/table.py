"""Table 1 as text: accuracies, lines through them beside the paper's, and signs of the slopes."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from slopes import (
    BATCHNORM_BY_BATCH,
    Arm,
    Line,
    Run,
    arms,
    at_the_end,
    at_updates,
    fewest_updates,
    holm,
    mean_and_error,
    with_both_tests,
)

# Table 1 of the paper: intercept, its error, slope, its error.
PAPER = {
    ("standard", "tanh"): (38.35, 0.50, 5.80e-2, 1.17e-2),
    ("batchnorm", "tanh"): (39.08, 0.87, 5.04e-2, 1.21e-2),
    ("layernorm", "tanh"): (43.72, 0.21, -8.77e-3, 2.45e-3),
    ("rmsnorm", "tanh"): (27.31, 1.87, 1.05e-1, 0.21e-1),
    ("norm-like", "tanh"): (49.93, 0.10, -2.98e-2, 0.20e-2),
    ("norm-like-half", "tanh"): (48.42, 0.35, -2.58e-2, 0.53e-2),
    ("affine-like", "tanh"): (50.56, 0.13, -2.45e-2, 0.17e-2),
    ("standard", "leaky"): (47.56, 0.07, 5.51e-3, 2.83e-3),
    ("batchnorm", "leaky"): (45.54, 0.67, 3.56e-2, 0.86e-2),
    ("layernorm", "leaky"): (45.59, 0.15, -8.58e-3, 3.00e-3),
    ("rmsnorm", "leaky"): (49.15, 0.21, -5.38e-3, 2.45e-3),
    ("norm-like", "leaky"): (48.50, 0.22, 7.11e-4, 37.42e-4),
    ("norm-like-half", "leaky"): (48.74, 0.04, -6.19e-3, 1.00e-3),
    ("affine-like", "leaky"): (49.80, 0.23, -4.19e-3, 3.32e-3),
}
for _activation in ("tanh", "leaky"):
    PAPER[BATCHNORM_BY_BATCH, _activation] = PAPER["batchnorm", _activation]
# What the theory says of the slopes, for either activation. It says nothing of the others.
STATED = {"standard": 1, "batchnorm": 1, BATCHNORM_BY_BATCH: 1}
STATED |= {"norm-like": -1, "norm-like-half": -1, "affine-like": -1}
REFERENCE = "affine-like"  # whose accuracy the others' is compared with, seed by seed
LONG = 20  # epochs from which on the order of the methods means something


def text(runs: Sequence[Run]) -> str:
    """The whole page, in Markdown.

    Args:
        runs: as in table1.json, of one width, depth and treatment of pixels.
    """
    both = with_both_tests(runs)
    epochs = sorted({run["epoch"][-1] for run in runs})
    updates = fewest_updates(runs)
    shared = runs[0]
    parts = [
        f"Data: {shared['data']}; pixels: {shared['pixels']}; width: {shared['width']}; hidden "
        f"layers: {shared['depth']}; epochs: {' or '.join(map(str, epochs))}; "
        f"seeds: {_seeds(runs)}. Accuracy in percent, mean of the last tenth "
        "of the epochs ± standard error over seeds, for lines too: each seed has a line of its "
        "own, through all batch sizes. p: Student's t over seeds, to the stated side, corrected by "
        "Holm for all stated signs."
    ]
    verdicts = _verdicts(arms(both, at_the_end))
    for activation in dict.fromkeys(run["activation"] for run in runs):
        mine = [run for run in both if run["activation"] == activation]
        at_end = arms(mine, at_the_end)
        parts.append(f"## {activation}: test accuracy at equal epochs")
        parts.append(_table(at_end, verdicts))
        if (signs := _signs(at_end)) is not None:
            parts.append(signs)
        parts.append(f"Less that of {REFERENCE}, seed by seed:")
        parts.append(_differences(at_end))
        parts.append(f"### {activation}: training accuracy at equal epochs")
        trained = [run for run in mine if run["method"] != BATCHNORM_BY_BATCH]
        parts.append(_accuracies(arms(trained, lambda run: at_the_end(run, "train_accuracy"))))
        parts.append(f"### {activation}: test accuracy at equal updates ({updates})")
        equal = arms(mine, at_updates(updates))
        if all(len(arm.accuracies) < len(at_end[0].accuracies) for arm in equal):
            parts.append("Needs more epochs: the smallest batches make more updates in one.")
        else:
            parts.append(_accuracies(equal))
    if max(epochs) < LONG:
        parts.append(
            "What needs more epochs: the order of the maps, for with tanh affine-like ones pass "
            "layer and batch normalisation only after about 10,000 updates, which is in the second "
            "epoch at a batch size of 8, the tenth at 32 and between the 30th and the 61st at 128; "
            "layer normalisation's slope, which is near zero in the end; and the comparison at "
            "equal updates."
        )
    return "\n\n".join(parts) + "\n"


def _seeds(runs: Sequence[Run]) -> str:
    """How many seeds there are, and of which maps and batch sizes there are fewer."""
    found: dict[tuple[str, int], set[int]] = {}
    for run in runs:
        found.setdefault((run["method"], run["batch_size"]), set()).add(run["seed"])
    most = max(map(len, found.values()))
    fewer: dict[tuple[str, int], list[int]] = {}
    for (method, size), seeds in sorted(found.items()):
        if len(seeds) < most:
            fewer.setdefault((method, len(seeds)), []).append(size)
    shown = [
        f"{count} of {method} at B = {', '.join(map(str, sizes))}"
        for (method, count), sizes in fewer.items()
    ]
    return f"{most} ({'; '.join(shown)})" if shown else str(most)


def _table(found: Sequence[Arm], verdicts: Mapping[tuple[str, str, float], str]) -> str:
    """Accuracies, lines, the paper's lines, and what became of the stated signs."""
    sizes = _sizes(found)
    head = [*_head(sizes), "intercept", "paper's", "slope, 10⁻²", "paper's, 10⁻²"]
    head += ["correlation", "stated sign"]
    rows = []
    for arm in found:
        line, paper = _line(arm, sizes), PAPER.get((arm.method, arm.activation))
        row = _cells(arm, sizes, len({other.learning_rate for other in found}) > 1)
        row += _line_cells(line)[:1] + ([""] if paper is None else [plus(paper[0], paper[1])])
        row += _line_cells(line)[1:]
        row += [""] if paper is None else [plus(100 * paper[2], 100 * paper[3], sign=True)]
        row.append("" if line is None else plus(line.correlation, math.nan, sign=True))
        rows.append([*row, verdicts.get(arm[:3], "")])
    return markdown(head, rows)


def _accuracies(found: Sequence[Arm]) -> str:
    """Accuracies and lines only."""
    sizes = _sizes(found)
    several = len({arm.learning_rate for arm in found}) > 1
    rows = [_cells(arm, sizes, several) + _line_cells(_line(arm, sizes)) for arm in found]
    return markdown([*_head(sizes), "intercept", "slope, 10⁻²"], rows)


def _differences(found: Sequence[Arm]) -> str:
    """What every arm has more than the reference of the same rate, batch size and seed."""
    sizes = _sizes(found)
    of_reference = {a.learning_rate: a.accuracies for a in found if a.method == REFERENCE}
    several = len({arm.learning_rate for arm in found}) > 1
    rows = []
    for arm in found:
        theirs = of_reference.get(arm.learning_rate)
        if theirs is None or arm.method == REFERENCE:
            continue
        less = {
            b: {s: a - theirs[b][s] for s, a in seeds.items() if s in theirs.get(b, {})}
            for b, seeds in arm.accuracies.items()
        }
        rows.append(_cells(arm._replace(accuracies=less), sizes, several, sign=True))
    return markdown(_head(sizes), rows) if rows else "(it is not among the runs)"


def _signs(found: Sequence[Arm]) -> str | None:
    """How many slopes have the sign that was stated before the run."""
    lines = [(STATED[arm.method], arm.line()) for arm in found if arm.method in STATED]
    right = [sign * line.slope > 0 for sign, line in lines if line is not None]
    return f"Slopes with the stated sign: {sum(right)} of {len(right)}." if right else None


def _verdicts(found: Sequence[Arm]) -> dict[tuple[str, str, float], str]:
    """What became of every stated sign, by method, activation and learning rate."""
    lines = [(arm, line) for arm in found if arm.method in STATED and (line := arm.line())]
    chances = holm([line.chance(STATED[arm.method]) for arm, line in lines])
    return {
        arm[:3]: f"{'+' if STATED[arm.method] > 0 else '−'}: p = {p:.1g}"
        for (arm, _), p in zip(lines, chances, strict=True)
        if not math.isnan(p)
    }


def _line(arm: Arm, sizes: Sequence[int]) -> Line | None:
    """The arm's line if it has all batch sizes: one of fewer can't be compared with others."""
    return arm.line() if set(arm.accuracies) == set(sizes) else None


def _sizes(found: Iterable[Arm]) -> list[int]:
    return sorted({batch_size for arm in found for batch_size in arm.accuracies})


def _head(sizes: Sequence[int]) -> list[str]:
    return ["map", *(f"B = {b}" for b in sizes), "mean"]


def _cells(arm: Arm, sizes: Sequence[int], several: bool, sign: bool = False) -> list[str]:
    """Name, accuracy at every batch size, and their mean."""
    name = f"{arm.method} at {arm.learning_rate:g}" if several else arm.method
    known = [arm.at(b) if arm.accuracies.get(b) else (math.nan, math.nan) for b in sizes]
    mean, _ = mean_and_error([value for value, _ in known])
    return [name, *(plus(*each, sign=sign) for each in known), plus(mean, math.nan, sign=sign)]


def _line_cells(line: Line | None) -> list[str]:
    if line is None:
        return ["", ""]
    slope = plus(100 * line.slope, 100 * line.slope_error, sign=True)
    return [plus(line.intercept, line.intercept_error), slope]


def plus(value: float, error: float, *, sign: bool = False) -> str:
    """A value with its error, if there is one: "48.4 ± 0.2"."""
    if math.isnan(value):
        return ""
    shown = f"{value:+.2f}" if sign else f"{value:.2f}"
    return shown.replace("-", "−") + ("" if math.isnan(error) else f" ± {error:.2f}")


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""

    def lines() -> Iterator[Sequence[str]]:
        yield head
        yield ["---"] * len(head)
        yield from rows

    return "\n".join(f"| {' | '.join(line)} |" for line in lines())
