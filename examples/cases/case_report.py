"""What a case's runs and its audit say, as text and picture."""

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from case import Case
from matplotlib.figure import Figure
from scipy import stats

from adiv_monitor.audit.report import AuditReport
from adiv_monitor.diagnosis.finding import Advice, Finding

BASELINE, ADVISED = "baseline", "advised"
Run = dict[str, Any]


def of_arm(runs: Iterable[Run], arm: str) -> dict[float, list[Run]]:
    """Runs of an arm by learning rate."""
    found: dict[float, list[Run]] = {}
    for run in runs:
        if run["arm"] == arm:
            found.setdefault(run["learning_rate"], []).append(run)
    return found


def best_rate(runs: Iterable[Run], arm: str) -> float:
    """The learning rate with the highest mean score; one that diverged with a seed is out."""
    scores = {rate: [run["score"] for run in mine] for rate, mine in of_arm(runs, arm).items()}
    whole = {rate: sum(s) / len(s) for rate, s in scores.items() if None not in s}
    return max(whole, key=lambda rate: whole[rate])


def mean_and_error(values: Sequence[float]) -> str:
    """Mean ± standard error, three digits behind the point."""
    mean = shown(statistics.fmean(values))
    if len(values) < 2:
        return mean
    return f"{mean} ± {statistics.stdev(values) / math.sqrt(len(values)):.3f}"


def results(runs: Iterable[Run]) -> list[float]:
    """Results of the runs that did not diverge."""
    return [run["result"] for run in runs if run["result"] is not None]


def difference(runs: Sequence[Run]) -> list[float]:
    """Results with the advice less those without, seed by seed, each at its best learning rate."""
    with_, without = (
        {run["seed"]: run["result"] for run in of_arm(runs, arm)[best_rate(runs, arm)]}
        for arm in (ADVISED, BASELINE)
    )
    return [with_[seed] - without[seed] for seed in with_ if seed in without]


def verdict(paired: Sequence[float], *, higher: bool, test_share: float = 0.0) -> str:
    """What differences of results say, in words.

    The variance of their mean is s²·(1/n + `test_share`): seeds that split the same rows share
    training rows (Nadeau and Bengio, 2003, Machine Learning 52, 239).

    Args:
        paired: differences, seed by seed.
        higher: whether a higher result is better.
        test_share: test rows over training rows if seeds split the same rows, else 0.
    """
    mean, count = statistics.fmean(paired), len(paired)
    if count < 2:
        return f"{shown(mean)}, of one seed, which says nothing about chance"
    error = statistics.stdev(paired) * math.sqrt(1 / count + test_share)
    chance = 2 * float(stats.t.sf(abs(mean) / error, count - 1)) if error else 0.0
    of_mean = f"{shown(mean)} ± {error:.3f}, p = {chance:.2g}"
    if abs(mean) <= 2 * error:
        return f"{of_mean}: no difference beyond two standard errors"
    return f"{of_mean}: {'better' if (mean > 0) == higher else 'worse'}"


def shown(number: float) -> str:
    """Three digits behind the point."""
    return f"{number:.3f}".replace("-", "−")


def text(
    case: Case, runs: Sequence[Run], report: AuditReport, taken: tuple[Finding, Advice] | None
) -> str:
    """The whole page, in Markdown."""
    arms = [arm for arm in (BASELINE, ADVISED) if of_arm(runs, arm)]
    by_rate = {arm: of_arm(runs, arm) for arm in arms}
    rows = []
    for rate in by_rate[BASELINE]:
        cells = []
        for arm in arms:
            mine = by_rate[arm].get(rate, [])
            known = results(mine)
            lost = "" if len(known) == len(mine) else f" ({len(mine) - len(known)} diverged)"
            mark = "**" if rate == best_rate(runs, arm) else ""
            cells.append(f"{mark}{mean_and_error(known)}{mark}{lost}" if known else "diverged")
        rows.append(f"| {rate:g} | {' | '.join(cells)} |")
    seeds = len({run["seed"] for run in runs})
    parts = [
        f"# {case.title}",
        f"{case.setting} Data: {case.data}; {case.steps} steps; seeds: {seeds}.",
        f"**Stated before the run.** {case.expected}",
        f"## {case.unit.capitalize()}",
        "Mean ± standard error over seeds; in bold at the learning rate that data held out choose.",
        "\n".join(
            [f"| learning rate | {' | '.join(arms)} |", f"| --- |{' --- |' * len(arms)}", *rows]
        ),
        "## The audit",
        f"Of the baseline at its best learning rate, with the first seed. {report.verdict}",
        "\n".join(
            f"- **{finding.strength}** `{finding.name}`: {finding.summary}"
            for finding in report.findings
        ),
    ]
    if taken is None:
        parts.append("It advises nothing that it can do itself but learning rates.")
    else:
        finding, advice = taken
        found = verdict(difference(runs), higher=case.higher, test_share=case.test_share)
        parts += [
            f"Advice that was taken, of `{finding.name}`: {advice.outcome.mark} {advice}.",
            "With the advice less without it, each at its best learning rate, paired by seed (p "
            f"two-sided): {found}.",
        ]
        if case.test_share:
            parts.append(
                "Every seed splits the same rows anew. The error of the difference counts that "
                "seeds share training rows (Nadeau and Bengio, 2003)."
            )
    return "\n\n".join(filter(None, parts)) + "\n"


def plot(case: Case, runs: Sequence[Run], file: Path) -> None:
    """Results by learning rate; losses of the first seed at the best one.

    Args:
        case: the case.
        runs: of all arms.
        file: where to write the picture.
    """
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    by_rate, by_step = figure.subplots(1, 2)
    for arm in (BASELINE, ADVISED):
        rates = of_arm(runs, arm)
        if not rates:
            continue
        known = {rate: results(mine) for rate, mine in rates.items() if results(mine)}
        means = [statistics.fmean(values) for values in known.values()]
        errors = [
            statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
            for values in known.values()
        ]
        by_rate.errorbar(list(known), means, errors, fmt="o-", ms=4, lw=1, capsize=3, label=arm)
        best = rates[best_rate(runs, arm)][0]["losses"]
        size = case.steps / len(best)
        steps = [size * (i + 0.5) for i in range(len(best))]
        by_step.plot(steps, [math.nan if x is None else x for x in best], lw=1, label=arm)
    by_rate.set(xscale="log", xlabel="learning rate", ylabel=case.unit)
    by_step.set(yscale="log", xlabel="step", ylabel="training loss, at the best learning rate")
    by_rate.legend()
    figure.suptitle(case.data, fontsize=8)
    figure.savefig(file, dpi=110)
