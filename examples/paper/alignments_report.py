"""What the runs of `alignments.py` say, as text and picture: what was expected, and what came."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats
from slopes import Run, mean_and_error
from table import markdown, plus
from tuned_report import Best, Claim, Question, Verdict, best
from tuned_report import text as tuned_text

READINGS = 20  # of the alignments, per run
MEASURES = ("alpha", "omega", "u")
ARMS = ("full", "sum", "carried", "pareto")


def late(run: Run, measure: str) -> list[float]:
    """A measure of the layers after the first, over the last tenth of the steps."""
    return [
        statistics.fmean(v for v in layer[-(READINGS // 10) :] if v) for layer in run[measure][1:]
    ]


def settings(found: Best) -> list[str]:
    """Parametrization, optimizer and width of all networks."""
    return list(dict.fromkeys(arm.partition(",")[0] for arm in found))


def of_training(run: Run) -> float:
    """The result: training loss of the last tenth of the steps, times 100; ∞ if it diverged."""
    return math.inf if run["result"] is None else float(run["result"])


def of_held_out(run: Run) -> float:
    """The loss by which rates are chosen, times 100; ∞ if it diverged."""
    return math.inf if run["score"] is None else -100 * float(run["score"])


def of_test(run: Run) -> float:
    """Test accuracy in percent."""
    return 0.0 if run["accuracy"] is None else float(run["accuracy"])


def changes(
    found: Best, setting: str, arm: str, read: Callable[[Run], float] = of_training
) -> list[float]:
    """By how much an arm is above full alignment, by seed."""
    full, mine = (
        {run["seed"]: read(run) for run in found.get(f"{setting}, {each}", [])}
        for each in ("full", arm)
    )
    return [mine[seed] - full[seed] for seed in sorted(full.keys() & mine.keys())]


def every_change(
    found: Best, arm: str, within: str = "", read: Callable[[Run], float] = of_training
) -> list[float]:
    """The changes of all networks whose setting contains a word."""
    chosen = [setting for setting in settings(found) if within in setting]
    return [change for setting in chosen for change in changes(found, setting, arm, read)]


def above(
    found: Best, arm: str, read: Callable[[Run], float] = of_training
) -> tuple[int, list[str]]:
    """In how many networks an arm was run, and those in which it is above by two errors."""
    each = {setting: changes(found, setting, arm, read) for setting in settings(found)}
    known = {s: mean_and_error(values) for s, values in each.items() if len(values) > 1}
    worse = [
        f"{setting} {plus(change, error, sign=True)}"
        for setting, (change, error) in known.items()
        if not change <= 2 * error
    ]
    return len(known), worse


def _most(found: Best) -> Verdict:
    below = [change < 0 for change in every_change(found, "sum")]
    return sum(below) > len(below) / 2, f"{sum(below)} of {len(below)}"


def _never(arm: str) -> Claim:
    def verdict(found: Best) -> Verdict:
        networks, worse = above(found, arm)
        if not networks:
            return None, "not run"
        return not worse, f"{', '.join(worse) or 'none'} of {networks} networks"

    return Claim(f"{arm}: in no network is the loss above that of full by two errors", verdict)


def _parametrizations(found: Best) -> Verdict:
    sp, mup = (mean_and_error(every_change(found, "sum", name)) for name in ("sp ", "mup "))
    error = math.hypot(sp[1], mup[1])
    said = f"{plus(*sp, sign=True)} and {plus(*mup, sign=True)}"
    return None if abs(sp[0] - mup[0]) <= 2 * error else sp[0] < mup[0], said


def _optimizers(found: Best) -> Verdict:
    adam, sgd = (
        mean_and_error(every_change(found, "carried", name)) for name in (" adam ", " sgd ")
    )
    said = f"{plus(*adam, sign=True)} with Adam, {plus(*sgd, sign=True)} with SGD"
    known = all(abs(change) > 2 * error for change, error in (adam, sgd))
    return (adam[0] < 0 < sgd[0]) if known else None, said


def apart(found: Best, setting: str) -> list[float]:
    """By how much carried factors change the alpha to which layers converge, by seed."""
    pairs = zip(found[f"{setting}, full"], found.get(f"{setting}, carried", []), strict=False)
    return [
        statistics.fmean(
            abs(a - b) for a, b in zip(late(x, "alpha"), late(y, "alpha"), strict=True)
        )
        for x, y in pairs
    ]


def _converged(found: Best) -> Verdict:
    sgd, adam = (
        mean_and_error([x for s in settings(found) if name in s for x in apart(found, s)])
        for name in (" sgd ", " adam ")
    )
    said = f"{sgd[0]:.3f} ± {sgd[1]:.3f} with SGD, {adam[0]:.3f} ± {adam[1]:.3f} with Adam"
    error = math.hypot(sgd[1], adam[1])
    return None if abs(sgd[0] - adam[0]) <= 2 * error else sgd[0] > adam[0], said


def slowed(run: Run) -> float:
    """By how much layers are slowed, as a factor: mean over layers and readings, gains ignored."""
    logs = [max(0.0, -math.log(m)) for layer in run["factor"] for m in layer]
    return math.exp(statistics.fmean(logs)) if logs else math.nan


def trades(found: Best) -> Iterator[tuple[str, float, float]]:
    """Setting, slowing and change of the loss of every run of the dynamic schedule."""
    for setting in settings(found):
        mine = [run for run in found.get(f"{setting}, sum", []) if run["result"] is not None]
        for run, change in zip(mine, changes(found, setting, "sum"), strict=False):
            yield setting, slowed(run), change


def _traded(found: Best) -> Verdict:
    _, slow, change = zip(*trades(found), strict=True)
    if min(len(set(slow)), len(set(change))) < 3:
        return None, "too few runs differ"
    r, p = map(float, stats.spearmanr(slow, change))
    said = f"rank correlation {r:+.2f} over {len(change)} runs, p = {p:.1g}".replace("-", "−")
    return None if p > 0.05 else r > 0, said


def _tested(found: Best) -> Verdict:
    points = {s: changes(found, s, "sum", of_test) for s in settings(found)}
    each = {s: mean_and_error(values) for s, values in points.items() if values}
    most = max(each, key=lambda setting: abs(each[setting][0]))
    within = all(abs(change) <= 1 + 2 * error for change, error in each.values())
    return within, f"largest: {most} {plus(*each[most], sign=True)}"


QUESTION = Question(
    title="Learning rates that follow measured alignments, on CIFAR-10",
    setting="Two hidden layers, ReLU, no biases; parametrization, optimizer, width, arm.",
    unit="training loss × 100",
    measures=MEASURES,
    panels=(),
    claims=(
        Claim("sum: the loss is below that of full in the majority of paired runs", _most),
        _never("sum"),
        _never("pareto"),
        Claim("sum: the loss falls by more in SP than in muP", _parametrizations),
        Claim("carried: the loss is below that of full with Adam, above it with SGD", _optimizers),
        Claim(
            "carried: layers converge to another alpha than with full, more so with SGD", _converged
        ),
        Claim("sum: the more layers are slowed, the less the loss falls", _traded),
        Claim("sum: test accuracy changes by one point at most, within two errors", _tested),
    ),
    score="− loss on images held out",
)


def _paired(found: Best, read: Callable[[Run], float]) -> str:
    """Full alignment's, and what the other arms have more, as a table."""
    rows = []
    for setting in settings(found):
        full = mean_and_error([read(run) for run in found[f"{setting}, full"]])
        each = [changes(found, setting, arm, read) for arm in ARMS[1:]]
        less = [plus(*mean_and_error(values), sign=True) if values else "" for values in each]
        rows.append([setting, plus(*full), *less])
    return markdown(["network", *ARMS], rows)


def at_best(runs: Sequence[Run], setting: str, arm: str) -> float:
    """The lowest training loss of seed 0 at any rate."""
    mine = [run for run in runs if run["arm"] == f"{setting}, {arm}" and run["seed"] == 0]
    return min(map(of_training, mine), default=math.nan)


def text(runs: Sequence[Run]) -> str:
    """The page, in Markdown."""
    found = best(runs)
    lowest = []
    for setting in settings(found):
        full, *others = (at_best(runs, setting, arm) for arm in ARMS)
        more = [plus(x - full, 0.0, sign=True).partition(" ")[0] for x in others]
        lowest.append([setting, f"{full:.2f}", *more])
    counts = []
    for arm in ARMS[1:]:
        for what, read in (("training", of_training), ("images held out", of_held_out)):
            below = [change < 0 for change in every_change(found, arm, "", read)]
            networks, worse = above(found, arm, read)
            if networks:
                row = [arm, what, f"{sum(below)} of {len(below)}", ", ".join(worse) or "none"]
                counts.append(row)
    return "\n\n".join(
        [
            tuned_text(QUESTION, runs).rstrip(),
            "## Less full alignment, paired by seed",
            "Training loss × 100, at the rates that are best on images held out:",
            _paired(found, of_training),
            "Test accuracy, percent:",
            _paired(found, of_test),
            "## Added when half of the results had been seen",
            "At larger rates the training loss goes on falling while the loss on images held out "
            "rises. So where the best rates of two arms lie half a decade apart, most of the "
            "difference in training loss is that of the rates. The loss on images held out × 100, "
            "by which rates are chosen:",
            _paired(found, of_held_out),
            "Training loss × 100 of seed 0, every arm at the rate at which it is lowest:",
            markdown(["network", *ARMS], lowest),
            "Paired runs with a lower loss than full alignment, and networks with a higher one by "
            "two errors:",
            markdown(["arm", "loss", "lower", "higher"], counts) + "\n",
        ]
    )


def _signed(axes: Axes) -> None:
    """An axis of differences, some of which are far larger than the others."""
    axes.set_yscale("symlog", linthresh=2)
    ticks = (-30, -10, -3, -1, 0, 1, 3, 10)
    axes.set_yticks(ticks, [f"{tick:+d}".replace("-", "−") for tick in ticks])
    axes.axhline(0, color="grey", lw=0.8)
    axes.legend(fontsize=8)


def _changed(axes: Axes, found: Best, what: str, read: Callable[[Run], float]) -> None:
    """Changes of a loss, by network and arm."""
    shown = settings(found)
    for place, arm in enumerate(ARMS[1:]):
        style: dict[str, Any] = {"fmt": "o", "ms": 4, "capsize": 3, "color": f"C{place}"}
        axes.errorbar([], [], label=arm, **style)
        for x, setting in enumerate(shown):
            if values := [v for v in changes(found, setting, arm, read) if math.isfinite(v)]:
                at = x + 0.22 * (place - 1)
                mean, error = mean_and_error(values)
                axes.errorbar([at], [mean], [error], **style)
                axes.plot([at] * len(values), values, ".", ms=4, color=f"C{place}", alpha=0.5)
    axes.set_xticks(range(len(shown)), [s.replace(" ", "\n") for s in shown], fontsize=8)
    axes.margins(y=0.1)
    axes.set_title(f"{what} × 100, less that of full; dots: seeds", fontsize=9)
    _signed(axes)


def _traded_off(axes: Axes, found: Best) -> None:
    """Changes of the dynamic schedule's loss by how far it slows layers."""
    names = dict.fromkeys(setting.rpartition(" ")[0] for setting in settings(found))
    for name, marker in zip(names, "osD^", strict=False):
        points = [(slow, change) for s, slow, change in trades(found) if s.startswith(name)]
        axes.plot([x for x, _ in points], [y for _, y in points], marker, ms=4, label=name)
    axes.set_title("sum: training loss, over the slowing of layers", fontsize=9)
    axes.set_xlabel("mean factor of those slowed (1: none)")
    _signed(axes)


def _courses(factors: Axes, aligned: Axes, found: Best, setting: str) -> None:
    """Factors of the layers and their alpha over the steps of seed 0."""
    for arm, dash in (("sum", "-"), ("carried", ":"), ("full", "--")):
        for run in found.get(f"{setting}, {arm}", [])[:1]:
            for layer in range(3):
                label = f"{arm}, layer {layer + 1}"
                style: dict[str, Any] = {"ls": dash, "color": f"C{layer}", "label": label}
                if arm != "full":
                    factors.plot(run["step"], run["factor"][layer], **style)
                if arm != "carried":
                    values = [v or math.nan for v in run["alpha"][layer]]
                    aligned.plot(run["step"], values, **style)
    factors.set(yscale="log", ylim=(0.1, 10))
    factors.set_title(f"{setting}: factors of the learning rate", fontsize=9)
    aligned.set(xlabel="step", ylim=(0.4, 1.05))
    aligned.set_title(f"{setting}: alpha", fontsize=9)
    for axes in (factors, aligned):
        axes.axhline(1, color="grey", lw=0.8)


def plot(runs: Sequence[Run], file: Path) -> None:
    """Draw changes of the loss, and factors and alignments of the widest networks."""
    found = best(runs)
    figure = Figure(figsize=(15, 11), layout="constrained")
    grid = figure.add_gridspec(3, 12)
    _changed(figure.add_subplot(grid[0, :5]), found, "training loss", of_training)
    _changed(figure.add_subplot(grid[0, 5:9]), found, "loss on images held out", of_held_out)
    _traded_off(figure.add_subplot(grid[0, 9:]), found)
    widest = [s for s in settings(found) if s.split()[-1] == settings(found)[-1].split()[-1]]
    for place, setting in enumerate(widest):
        columns = slice(3 * place, 3 * place + 3)
        factors, aligned = (figure.add_subplot(grid[row, columns]) for row in (1, 2))
        _courses(factors, aligned, found, setting)
        if place == 0:
            factors.legend(fontsize=7)
            aligned.legend(fontsize=7)
    figure.suptitle(runs[0]["data"], fontsize=8)
    figure.savefig(file, dpi=90)
