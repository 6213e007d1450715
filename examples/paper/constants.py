"""Two tuned constants in place of measured alignments, on CIFAR-10.

    python examples/paper/constants.py --quick --data DIR --out OUT     one learning rate each
    python examples/paper/constants.py --data DIR --out OUT             about an hour

`alignments.py` lets learning rates of layers follow measured alignments, or carries factors over
from a narrow network. Here nothing is measured: the rates of the hidden layer and of the readout
are multiplied by 1, 3, 10 or 30, with the first layer's left as it is, and the pair is chosen on
images held out with seed 0, at rates from half a decade below full alignment's best. It goes on
from the runs of `alignments.py` with the same OUT, and shares seeds and batches with them.
"""

import json
from collections.abc import Callable, Iterator, Sequence

from alignments import CONSTANTS, RATES, Task, train
from alignments_report import ARMS, changes, of_held_out, of_test, of_training, settings
from commandline import count, parsed
from experiment import arguments, load
from fair import rate
from slopes import Run, mean_and_error
from table import markdown, plus
from tuned import Tuning
from tuned_report import Best, best, best_rate, curve

READS: dict[str, Callable[[Run], float]] = {
    "loss on images held out × 100": of_held_out,
    "training loss × 100": of_training,
    "test accuracy, percent": of_test,
}


def chosen(runs: Sequence[Run], setting: str) -> str:
    """The constants with the highest score of seed 0 at any rate."""
    scores = {
        run["arm"]: max(curve(runs, run["arm"]).values())
        for run in runs
        if run["arm"].startswith(f"{setting}, ")
    }
    arm: str = max(scores, key=lambda arm: scores[arm])
    return arm


def compared(runs: Sequence[Run], measured: Sequence[Run]) -> Best:
    """The best runs of `alignments.py` in the networks of these, and those of tuned constants."""
    found, of = best(measured), best(runs)
    for setting in settings(of):
        found[f"{setting}, constants"] = of[chosen(runs, setting)]
    return {arm: mine for arm, mine in found.items() if arm.partition(",")[0] in settings(of)}


def less(found: Best, setting: str, arm: str, read: Callable[[Run], float]) -> list[float]:
    """What constants have more than an arm, by seed."""
    both = (changes(found, setting, each, read) for each in ("constants", arm))
    return [mine - theirs for mine, theirs in zip(*both, strict=True)]


def _rows(found: Best, read: Callable[[Run], float]) -> Iterator[list[str]]:
    for setting in settings(found):
        full = mean_and_error([read(run) for run in found[f"{setting}, full"]])
        each = [less(found, setting, arm, read) for arm in ARMS]
        yield [setting, plus(*full), *(plus(*mean_and_error(x), sign=True) for x in each)]


def claims(found: Best, factors: Sequence[tuple[float, float]]) -> Iterator[list[str]]:
    """What was stated before the run, and whether it held."""
    every = [less(found, s, "full", of_held_out) for s in settings(found)]
    lower = sum(x < 0 for values in every for x in values)
    of = sum(map(len, every))
    yield ["constants have a lower loss on images held out than full alignment in most pairs",
           "held" if lower > of / 2 else "**failed**", f"{lower} of {of}"]  # fmt: skip
    worse = [
        f"{setting}, {arm} {plus(mean, error, sign=True)}"
        for setting in settings(found)
        for arm in ARMS[1:]
        for mean, error in [mean_and_error(less(found, setting, arm, of_held_out))]
        if mean > 2 * error
    ]
    yield ["in no network is that loss above that of sum, pareto or carried by two errors",
           "**failed**" if worse else "held", ", ".join(worse) or "none"]  # fmt: skip
    above = all(hidden > 1 for hidden, _ in factors)
    yield ["the hidden layer gets more than full alignment's rate everywhere",
           "held" if above else "**failed**",
           ", ".join(f"{hidden:g}" for hidden, _ in factors)]  # fmt: skip
    largest = max(max(each.values()) for each in CONSTANTS.values())
    at_end = sum(each == largest for pair in factors for each in pair)
    yield [f"no factor that is chosen is {largest:g}, the end of the grid",
           "**failed**" if at_end else "held", f"{at_end} of {2 * len(factors)}"]  # fmt: skip


def text(runs: Sequence[Run], measured: Sequence[Run]) -> str:
    """The page, in Markdown.

    Args:
        runs: of constants.
        measured: those of `alignments.py`.
    """
    found, of = compared(runs, measured), settings(best(runs))
    best_arms = [chosen(runs, setting) for setting in of]
    factors = [CONSTANTS[arm.partition(", ")[2]] for arm in best_arms]
    pairs = [(each["2"], each["4"]) for each in factors]
    tuned = [
        [setting, f"{hidden:g}", f"{readout:g}", f"{best_rate(runs, arm):g}",
         f"{best_rate(measured, f'{setting}, full'):g}",
         str(sum(run["arm"].startswith(setting) and not run["seed"] for run in runs))]
        for setting, arm, (hidden, readout) in zip(of, best_arms, pairs, strict=True)
    ]  # fmt: skip
    first, seeds = runs[0], {len(found[f"{setting}, constants"]) for setting in of}
    head = ["network", "full", *(f"constants less {arm}" for arm in ARMS)]
    parts = [
        "# Two tuned constants in place of measured alignments, on CIFAR-10",
        f"Data: {first['data']}. Two hidden layers, ReLU, no biases; parametrization, optimizer, "
        f"width. Pixels: {first['pixels']}; batch size: {first['batch_size']}; steps: "
        f"{first['steps']}; seeds: {' or '.join(map(str, seeds))}. ± standard error over seeds.",
        "## Stated before the run",
        markdown(["stated", "", "found"], list(claims(found, pairs))),
        "## Chosen with seed 0",
        markdown(["network", "hidden ×", "readout ×", "rate", "full's rate", "runs"], tuned),
        "## Paired by seed",
    ]
    for what, read in READS.items():
        parts += [f"{what.capitalize()}:", markdown(head, list(_rows(found, read)))]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = arguments(__doc__.split("\n\n")[0], epochs=1)
    parser.add_argument("--steps", type=count, default=1000)
    parser.add_argument("--width", type=count, default=128)
    given = parsed(parser, seeds=1, steps=20)
    of = given.out / "alignments.json"
    if not of.exists():
        parser.error(f"{of} is not there: run alignments.py with the same --out first")
    measured: list[Run] = json.loads(of.read_text())
    task = Task(load(given), given.steps)
    for name in ("images", "steps"):
        if measured[0][name] != task.known[name]:
            parser.error(f"{of} holds runs with {name} {measured[0][name]}, not {task.known[name]}")
    grids: dict[str, range] = {}
    for setting in (f"{name} {given.width}" for name in RATES):
        full = best_rate(measured, f"{setting}, full")
        place = next(i for i in range(-20, 9) if rate(i) == full)
        grids |= {f"{setting}, {arm}": range(place - 1, place + 1) for arm in CONSTANTS}
    tuning = Tuning(
        *(given.out / "constants.json", grids, task.known),
        lambda trial: train(trial, task, measured),
    )
    tuning.check(parser, given.resume)
    tuning.run(1, tune=not given.quick)
    arms = [chosen(tuning.runs, setting) for setting in settings(best(tuning.runs))]
    tuning.grids = {arm: grids[arm] for arm in arms}
    tuning.run(given.seeds, tune=not given.quick)
    page = text(tuning.runs, measured)
    (given.out / "constants.md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
