"""What the runs of an open question say, as text and picture, from the runs alone."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from readings_report import by_step, layer_medians, typical
from slopes import Run, mean_and_error
from table import markdown, plus

Best = dict[str, list[Run]]  # by arm: the runs of every seed at the best learning rate
Verdict = tuple[bool | None, str]  # whether a claim held, None if unknown; and the figures


class Claim(NamedTuple):
    """What was stated before the run, and what the runs say of it."""

    stated: str
    verdict: Callable[[Best], Verdict]


class Question(NamedTuple):
    """What is asked, and how its answer is shown.

    Attributes:
        title: heading of the page.
        setting: what the page says of the training, beside data and epochs.
        unit: of the result.
        measures: what is read of every run.
        panels: measures of the picture; each by step or by layer.
        claims: stated before the run.
        score: on data held out, for the picture.
    """

    title: str
    setting: str
    unit: str
    measures: tuple[str, ...]
    panels: tuple[tuple[str, str], ...]
    claims: tuple[Claim, ...]
    score: str = "accuracy on images held out, percent"


def curve(runs: Iterable[Run], arm: str) -> dict[float, float]:
    """Scores of seed 0 by learning rate; −∞ where the run diverged."""
    tried = [run for run in runs if run["arm"] == arm and run["seed"] == 0]
    scores = {run["learning_rate"]: run["score"] for run in tried}
    return {rate: -math.inf if s is None else s for rate, s in sorted(scores.items())}


def best_rate(runs: Iterable[Run], arm: str) -> float:
    """The learning rate with the highest score."""
    scores = curve(runs, arm)
    return max(scores, key=lambda rate: scores[rate])


def best(runs: Sequence[Run]) -> Best:
    """The runs of every arm at its best learning rate."""
    found: Best = {arm: [] for arm in dict.fromkeys(run["arm"] for run in runs)}
    for arm, mine in found.items():
        chosen = best_rate(runs, arm)
        mine += [r for r in runs if r["arm"] == arm and r["learning_rate"] == chosen]
    return found


def mean(runs: Iterable[Run], measure: str) -> float:
    """A measure of an arm: over seeds, layers, and training (the median)."""
    return statistics.fmean(typical(run, measure) for run in runs)


def result(runs: Iterable[Run]) -> tuple[float, float]:
    """Result of an arm, mean over seeds and its standard error."""
    return mean_and_error([run["result"] for run in runs])


def more(found: Best, arm: str, than: str) -> tuple[float, float]:
    """By how much the result of an arm is higher than another's, paired by seed, with error."""
    theirs = {run["seed"]: run["result"] for run in found[than]}
    mine = {run["seed"]: run["result"] for run in found[arm]}
    return mean_and_error([mine[seed] - theirs[seed] for seed in mine if seed in theirs])


def above(difference: float, error: float, bound: float) -> bool | None:
    """Whether a difference lies above a bound; None if two standard errors do not tell."""
    return None if abs(difference - bound) <= 2 * error else difference > bound


def text(question: Question, runs: Sequence[Run]) -> str:
    """The whole page, in Markdown."""
    found, first = best(runs), runs[0]
    named = [name for name in ("pixels", "batch_size", "epochs", "steps") if name in first]
    shared = "; ".join(f"{name.replace('_', ' ')}: {first[name]}" for name in named).capitalize()
    seeds = sorted({len(mine) for mine in found.values()})
    verdicts = []
    for claim in question.claims:
        held, figures = claim.verdict(found)
        judged = {True: "held", False: "**failed**", None: "not shown"}[held]
        verdicts.append(
            [claim.stated, judged if seeds[0] > 1 else "one seed says nothing", figures]
        )
    tuned = []
    for arm in found:
        chosen, tried = best_rate(runs, arm), curve(runs, arm)
        shown = [
            f"**{rate:g}: {score:.4g}**" if rate == chosen else f"{rate:g}: {score:.4g}"
            for rate, score in tried.items()
        ]
        tuned.append([arm, ", ".join(shown).replace("-inf", "diverged")])
    rows = []
    for arm, mine in found.items():
        values = [mean(mine, measure) for measure in question.measures]
        shown = ["" if math.isnan(value) else f"{value:.3g}" for value in values]
        rows.append([arm, f"{best_rate(runs, arm):g}", plus(*result(mine)), *shown])
    return (
        "\n\n".join(
            [
                f"# {question.title}",
                f"Data: {first['data']}. {question.setting} {shared}; seeds: "
                f"{' or '.join(map(str, seeds))}. ± standard error over seeds.",
                "## Stated before the run",
                markdown(["stated", "", "found"], verdicts),
                "## Results at the best learning rate",
                markdown(["arm", "learning rate", question.unit, *question.measures], rows),
                "Readings: mean over layers of the median over training, and over seeds.",
                "## Learning rates",
                "Scores on data held out, with seed 0.",
                markdown(["arm", "learning rate: score"], tuned),
            ]
        )
        + "\n"
    )


def plot(question: Question, runs: Sequence[Run], file: Path) -> None:
    """Scores by learning rate, and measures of the first seed at the best one.

    Scores that are far below most of the others lie below the panel.

    Args:
        question: says which measures.
        runs: as in the JSON file.
        file: where to write the picture.
    """
    found = best(runs)
    columns = 1 + len(question.panels)
    figure = Figure(figsize=(3.6 * columns + 2.2, 3.6), layout="constrained")
    axes, *others = figure.subplots(1, columns, squeeze=False)[0]
    for place, arm in enumerate(found):
        style = {"color": f"C{place}", "marker": ".", "lw": 1, "label": arm}
        tried = [(r, score) for r, score in curve(runs, arm).items() if math.isfinite(score)]
        axes.plot([r for r, _ in tried], [score for _, score in tried], **style)
        for (measure, across), panel in zip(question.panels, others, strict=True):
            run = found[arm][0]
            if across == "layer":
                values = layer_medians(run, measure)
                panel.plot(range(1, len(values) + 1), values, **style)
            else:
                panel.plot(*by_step(run, measure), **style)
            panel.set(title=measure, xlabel=across)
            panel.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    scores = sorted(s for arm in found for s in curve(runs, arm).values() if math.isfinite(s))
    quarter, high = scores[len(scores) // 4], scores[-1]
    low = max(scores[0], quarter - 10 * (high - quarter))
    margin = 0.1 * (high - low) or 1.0
    axes.set(xscale="log", xlabel="learning rate", ylabel=question.score, title="seed 0")
    axes.set(ylim=(low - margin, high + margin))
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper")
    figure.suptitle(runs[0]["data"], fontsize=8)
    figure.savefig(file, dpi=110)
