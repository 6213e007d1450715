"""Learning rates that follow measured alignments, on CIFAR-10 (Kilian & Wojnar 2025).

    python examples/paper/alignments.py --quick --data DIR --out OUT     one learning rate each
    python examples/paper/alignments.py --data DIR --out OUT             hours; --steps 2000 more

ReLU networks of two hidden layers without biases, in two parametrizations and with two optimizers,
learn at a constant base rate, which is tuned for every arm on images held out:

- full: rates n^(−c) under full alignment;
- sum: these times the factors of `MaxLRScheduler` with the objective "sum", as published;
- pareto: the same with its default objective, under which no layer gets slower;
- carried: constant factors, which follow from the alignments to which the narrowest network
  converges under "full" (means over the last tenth of the steps and over seeds).

All arms of a seed begin alike and see the same batches. The result is the training loss of the last
tenth of the steps, times 100, so that less is better.
"""

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cifar
import torch
from commandline import count, parsed
from experiment import arguments, load
from fair import HELD_OUT
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats
from slopes import mean_and_error
from table import markdown, plus
from torch import Tensor, nn
from training import CLASSES, Run, images
from tuned import Trial, Tuning
from tuned_report import Best, Claim, Question, Verdict, best
from tuned_report import text as tuned_text

from adiv_monitor.alignment import Alignment, Probe
from adiv_monitor.max_lr import (
    MaxLRScheduler,
    optimizer_groups,
    parametrize_model,
    solve_max_lr,
)

BATCH, PROBE, READINGS = 256, 128, 20
MEASURES = ("alpha", "omega", "u")
ARMS = ("full", "sum", "carried", "pareto")
OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
# Learning rates that are tried first, in half decades from 1: −3 is 0.03.
RATES = {
    "sp sgd": range(-5, -2),
    "sp adam": range(-7, -4),
    "mup sgd": range(-3, 0),
    "mup adam": range(-5, -2),
}


def grids(widths: Sequence[int]) -> dict[str, range]:
    """The rates of every arm; "pareto" last, and nothing is carried to the narrowest network."""
    return {
        f"{setting} {width}, {arm}": rates
        for arms in (ARMS[:3], ARMS[3:])
        for width, (setting, rates), arm in itertools.product(widths, RATES.items(), arms)
        if arm != "carried" or width != widths[0]
    }


class Task:
    """Images that are trained on, held out, and tested on, as inputs; and how long to train."""

    def __init__(self, data: cifar.Data, steps: int) -> None:
        apart = cifar.held_out(data, min(HELD_OUT, len(data.train) // 10))
        inputs = cifar.pixels("standardised", apart.train)
        self.train = inputs(apart.train), apart.train_labels
        self.held_out = inputs(apart.test), apart.test_labels
        self.test = inputs(data.test), data.test_labels
        self.steps = steps
        self.known: Run = {
            "data": data.source,
            "images": images(data),
            "pixels": "standardised",
            "batch_size": BATCH,
            "steps": steps,
        }


def scored(model: nn.Module, rows: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Mean loss, and accuracy in percent."""
    with torch.no_grad():
        outputs = model(rows[0])
        right = (outputs.argmax(1) == rows[1]).double().mean().item()
        return nn.functional.cross_entropy(outputs, rows[1]).item(), 100 * right


def late(run: Run, measure: str) -> list[float]:
    """A measure of the layers after the first, over the last tenth of the steps."""
    return [
        statistics.fmean(v for v in layer[-(READINGS // 10) :] if v) for layer in run[measure][1:]
    ]


def carried(narrow: Sequence[Run], setting: str, width: int) -> dict[str, float]:
    """The factor of each layer's rate that a narrow network's alignments allow at a width.

    Args:
        narrow: its runs under full alignment.
        setting: parametrization and optimizer.
        width: of the network that is to be trained.
    """
    name, optimizer = setting.split()
    ratios: list[list[float | None]] = []
    for measure in MEASURES:
        layers = zip(*(late(run, measure) for run in narrow), strict=True)
        ratios.append([None, *(min(1.0, statistics.fmean(runs)) for runs in layers)])
    alpha, omega, u = ratios
    solution = solve_max_lr(
        parametrization=name,
        optimizer=optimizer,
        objective="sum",
        alpha=alpha,
        omega=omega,
        u=u,
    )
    return {str(2 * i): width**gain for i, gain in enumerate(solution.gains)}


def train(trial: Trial, task: Task, runs: Sequence[Run]) -> Run:
    """Train one network.

    Args:
        trial: which.
        task: on what.
        runs: those that are there; with what is carried among them.
    """
    setting, arm = trial.arm.split(", ")
    name, optimizer, width = setting.split()
    sizes = (task.train[0].shape[1], int(width), int(width), CLASSES)
    torch.manual_seed(trial.seed)
    linears = [nn.Linear(n, m, bias=False) for n, m in itertools.pairwise(sizes)]
    model = nn.Sequential(*[m for linear in linears for m in (linear, nn.ReLU())][:-1])
    probe = Probe(task.held_out[0][:PROBE])
    layers = parametrize_model(model, probe, name, scale={"2": 2**0.5})
    gains = None
    if arm == "carried":
        narrow = next(run["arm"] for run in runs if run["arm"].startswith(f"{name} {optimizer} "))
        gains = carried(best(runs)[narrow], f"{name} {optimizer}", int(width))
    groups = optimizer_groups(model, layers, name, optimizer, lr=trial.learning_rate, gains=gains)
    chosen = OPTIMIZERS[optimizer](groups)
    scheduler = None
    if arm in ("sum", "pareto"):
        scheduler = MaxLRScheduler(
            *(chosen, model, probe),
            mode="dynamic",
            parametrization=name,
            objective="sum" if arm == "sum" else "pareto",
            every_n_steps=max(task.steps // 50, 1),
            warm_up=task.steps // 10,
        )
    alignment = Alignment(model, probe)
    every = max(task.steps // READINGS, 1)
    losses: list[float] = []
    found: Run = {"step": [], **{name: [[], [], []] for name in (*MEASURES, "factor")}}
    for step in range(1, task.steps + 1):
        rows = torch.randint(len(task.train[0]), (BATCH,))
        chosen.zero_grad()
        inputs, labels = (each.index_select(0, rows) for each in task.train)
        loss = nn.functional.cross_entropy(model(inputs), labels)
        torch.autograd.backward(loss)
        chosen.step()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            return {"score": None, "result": None, "accuracy": None, "losses": [], **found}
        if scheduler is not None:
            scheduler.see_loss(losses[-1])
        if step % every == 0:
            found["step"].append(step)
            factors = gains if scheduler is None else scheduler.gains
            for place, (path, reading) in enumerate(alignment.read().items()):
                for measure in MEASURES:
                    value = getattr(reading, measure)
                    found[measure][place].append(None if value is None else round(value, 4))
                found["factor"][place].append(round((factors or {}).get(path, 1.0), 4))
    tail = losses[-max(task.steps // 10, 1) :]
    loss_apart, _ = scored(model, task.held_out)
    return {
        "score": -loss_apart if math.isfinite(loss_apart) else None,
        "result": 100 * statistics.fmean(tail),
        "accuracy": scored(model, task.test)[1],
        "losses": [round(statistics.fmean(losses[at - every : at]), 4) for at in found["step"]],
        **found,
    }


def settings(found: Best) -> list[str]:
    """Parametrization, optimizer and width of all networks."""
    return list(dict.fromkeys(arm.partition(",")[0] for arm in found))


def changes(found: Best, setting: str, arm: str, of: str = "result") -> list[float]:
    """By how much an arm is above full alignment, by seed; a run that diverged is infinitely so."""
    full, mine = (
        {run["seed"]: run[of] for run in found.get(f"{setting}, {each}", [])}
        for each in ("full", arm)
    )
    shared = sorted(full.keys() & mine.keys())
    return [math.inf if mine[s] is None else mine[s] - full[s] for s in shared]


def every_change(found: Best, arm: str, within: str = "") -> list[float]:
    """The changes of all networks whose setting contains a word."""
    chosen = [setting for setting in settings(found) if within in setting]
    return [change for setting in chosen for change in changes(found, setting, arm)]


def _most(found: Best) -> Verdict:
    below = [change < 0 for change in every_change(found, "sum")]
    return sum(below) > len(below) / 2, f"{sum(below)} of {len(below)}"


def _never(arm: str) -> Claim:
    def verdict(found: Best) -> Verdict:
        each = {setting: changes(found, setting, arm) for setting in settings(found)}
        known = {s: mean_and_error(values) for s, values in each.items() if len(values) > 1}
        if not known:
            return None, "not run"
        worse = [
            f"{setting} {plus(change, error, sign=True)}"
            for setting, (change, error) in known.items()
            if change > 2 * error
        ]
        return not worse, f"{', '.join(worse) or 'none'} of {len(known)} networks"

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
    each = {s: mean_and_error(changes(found, s, "sum", "accuracy")) for s in settings(found)}
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


def text(runs: Sequence[Run]) -> str:
    """The page, in Markdown."""
    found = best(runs)
    rows = []
    for setting in settings(found):
        full = mean_and_error([run["result"] for run in found[f"{setting}, full"]])
        row = [setting, plus(*full)]
        for of, arm in itertools.product(("result", "accuracy"), ARMS[1:]):
            values = changes(found, setting, arm, of)
            row.append(plus(*mean_and_error(values), sign=True) if values else "")
        rows.append(row)
    head = ["network", "full", *ARMS[1:], *(f"{arm}: test accuracy" for arm in ARMS[1:])]
    return (
        f"{tuned_text(QUESTION, runs)}\n## Less full alignment, paired by seed\n\n"
        f"Training loss × 100, and points of test accuracy.\n\n{markdown(head, rows)}\n"
    )


def _losses(changed: Axes, traded: Axes, found: Best) -> None:
    """Changes of the loss; and those of the dynamic schedule by how far it slows layers."""
    shown = settings(found)
    for place, arm in enumerate(ARMS[1:]):
        style: dict[str, Any] = {"fmt": "o", "capsize": 3, "color": f"C{place}", "label": arm}
        for x, setting in enumerate(shown):
            if values := [v for v in changes(found, setting, arm) if math.isfinite(v)]:
                at = x + 0.22 * (place - 1)
                mean, error = mean_and_error(values)
                changed.errorbar([at], [mean], [error], **style)
                changed.plot([at] * len(values), values, ".", ms=4, color=f"C{place}", alpha=0.5)
                style["label"] = None
    changed.set_xticks(range(len(shown)), [s.replace(" ", "\n") for s in shown], fontsize=8)
    changed.set_title("training loss × 100, less that of full alignment; dots: seeds", fontsize=9)
    for name, marker in zip(RATES, "osD^", strict=True):
        points = [(slow, change) for s, slow, change in trades(found) if s.startswith(name)]
        traded.plot([x for x, _ in points], [y for _, y in points], marker, ms=4, label=name)
    traded.set_title("the same of sum, over how far layers are slowed", fontsize=9)
    traded.set_xlabel("mean factor of those slowed (1: none)")
    for axes in (changed, traded):
        axes.axhline(0, color="grey", lw=0.8)
        axes.legend(fontsize=8)


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
    grid = figure.add_gridspec(3, 4)
    _losses(figure.add_subplot(grid[0, :3]), figure.add_subplot(grid[0, 3]), found)
    width = settings(found)[-1].split()[-1]
    for column, setting in enumerate(RATES):
        factors, aligned = (figure.add_subplot(grid[row, column]) for row in (1, 2))
        _courses(factors, aligned, found, f"{setting} {width}")
        if column == 0:
            factors.legend(fontsize=7)
            aligned.legend(fontsize=7)
    figure.suptitle(runs[0]["data"], fontsize=8)
    figure.savefig(file, dpi=90)


def main() -> None:
    parser = arguments(__doc__.split("\n\n")[0], epochs=1)
    parser.add_argument("--steps", type=count, default=1000)
    parser.add_argument("--widths", type=count, nargs="+", default=[64, 128, 256])
    given = parsed(parser, seeds=1, steps=20)
    task = Task(load(given), given.steps)
    file = given.out / "alignments.json"
    tuning = Tuning(
        *(file, grids(given.widths), task.known),
        lambda trial: train(trial, task, tuning.runs),
    )
    tuning.check(parser, given.resume)
    tuning.run(given.seeds, tune=not given.quick)
    page = text(tuning.runs)
    file.with_suffix(".md").write_text(page)
    plot(tuning.runs, file.with_suffix(".png"))
    print(page)


if __name__ == "__main__":
    main()
