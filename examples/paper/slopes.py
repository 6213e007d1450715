"""Accuracy against batch size: what is read off runs, and lines through it.

A run's accuracy is the mean of its last tenth of epochs. A line through a seed's accuracies at all
batch sizes has an intercept, which the paper calls average accuracy, and a slope. Both are means
over seeds, with errors over seeds: accuracy is no straight line of batch size, and bends alike with
every seed, so residuals from a line through all points would count the bend as noise.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from scipy import stats

Run = dict[str, Any]
Read = Callable[[Run], float | None]
BY_BATCH = "test_accuracy_by_batch_statistics"
BATCHNORM_BY_BATCH = "batchnorm, tested on batches"


class Line(NamedTuple):
    """Accuracy = intercept + slope · batch size, means over seeds with standard errors.

    `correlation` is that of accuracy and batch size over all points.
    """

    intercept: float
    intercept_error: float
    slope: float
    slope_error: float
    correlation: float
    seeds: int

    def chance(self, sign: int) -> float:
        """Probability of a slope as far to the stated side or farther, were there none."""
        if self.seeds < 2 or self.slope_error == 0:
            return math.nan
        return float(stats.t.sf(sign * self.slope / self.slope_error, self.seeds - 1))


class Arm(NamedTuple):
    """Runs that differ in seed and batch size only: accuracies by batch size and seed."""

    method: str
    activation: str
    learning_rate: float
    accuracies: dict[int, dict[int, float]]

    def line(self) -> Line | None:
        """The mean line of the seeds that have all batch sizes, if these are two or more."""
        sizes = sorted(self.accuracies)
        seeds = set.intersection(*(set(by_seed) for by_seed in self.accuracies.values()))
        if len(sizes) < 2 or not seeds:
            return None
        by_seed = [[self.accuracies[size][seed] for size in sizes] for seed in sorted(seeds)]
        fits = [stats.linregress(sizes, accuracies) for accuracies in by_seed]
        together = stats.linregress(sizes * len(by_seed), [a for each in by_seed for a in each])
        return Line(
            *mean_and_error([fit.intercept for fit in fits]),
            *mean_and_error([fit.slope for fit in fits]),
            together.rvalue,
            len(fits),
        )

    def at(self, batch_size: int) -> tuple[float, float]:
        """Mean over seeds and its standard error (nan for one seed)."""
        return mean_and_error(list(self.accuracies[batch_size].values()))


def at_the_end(run: Run, which: str = "test_accuracy") -> float:
    """Accuracy, mean of the last tenth of the epochs."""
    accuracies: list[float] = run[which]
    last = accuracies[-max(len(accuracies) // 10, 1) :]
    return sum(last) / len(last)


def at_updates(updates: float) -> Read:
    """Test accuracy when so many updates were made, the mean of the last tenth of them.

    The epoch next to them where a tenth holds no end of an epoch; None for a run that is shorter,
    or whose first epoch is longer by half.
    """

    def read(run: Run) -> float | None:
        made: list[int] = [epoch * run["updates_per_epoch"] for epoch in run["epoch"]]
        if made[-1] < 0.9 * updates or made[0] > 1.5 * updates:
            return None
        chosen = [i for i, n in enumerate(made) if 0.9 * updates < n <= updates]
        chosen = chosen or [min(range(len(made)), key=lambda i: abs(made[i] - updates))]
        accuracies: list[float] = run["test_accuracy"]
        return sum(accuracies[i] for i in chosen) / len(chosen)

    return read


def fewest_updates(runs: Iterable[Run]) -> int:
    """Updates that the shortest of the runs made."""
    return min(int(run["epoch"][-1] * run["updates_per_epoch"]) for run in runs)


def with_both_tests(runs: Iterable[Run]) -> list[Run]:
    """The runs, those with batch normalisation once more as tested by the batch's statistics."""
    found = []
    for run in runs:
        found.append(run)
        if BY_BATCH in run:
            found.append({**run, "method": BATCHNORM_BY_BATCH, "test_accuracy": run[BY_BATCH]})
    return found


def arms(runs: Iterable[Run], read: Read) -> list[Arm]:
    """Runs gathered by method, activation and learning rate, where there is something to read."""
    found: dict[tuple[str, str, float], Arm] = {}
    for run in runs:
        accuracy = read(run)
        key = (run["method"], run["activation"], run["learning_rate"])
        if accuracy is not None:
            by_batch = found.setdefault(key, Arm(*key, {})).accuracies
            by_batch.setdefault(run["batch_size"], {})[run["seed"]] = accuracy
    return list(found.values())


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and its standard error, nan for a single value."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, math.nan
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def holm(chances: Sequence[float]) -> list[float]:
    """p-values corrected for their number, S. Holm's step-down way; nan where there is none."""
    known = sorted((p, place) for place, p in enumerate(chances) if not math.isnan(p))
    corrected, largest = [math.nan] * len(chances), 0.0
    for rank, (p, place) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        corrected[place] = largest
    return corrected
