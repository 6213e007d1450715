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
from collections.abc import Sequence

import cifar
import torch
from alignments_report import ARMS, MEASURES, READINGS, late, plot, text
from commandline import count, parsed
from experiment import arguments, load
from fair import HELD_OUT
from torch import Tensor, nn
from training import CLASSES, Run, images
from tuned import Trial, Tuning
from tuned_report import best

from adiv_monitor.alignment import Alignment, Probe
from adiv_monitor.max_lr import (
    MaxLRScheduler,
    optimizer_groups,
    parametrize_model,
    solve_max_lr,
)

BATCH, PROBE = 256, 128
OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
# Learning rates that are tried first, in half decades from 1: −3 is 0.03.
RATES = {
    "sp sgd": range(-5, -2),
    "sp adam": range(-7, -4),
    "mup sgd": range(-3, 0),
    "mup adam": range(-5, -2),
}
# Constant factors of the layers' rates, of `constants.py`.
CONSTANTS = {
    f"hidden {hidden:g} readout {readout:g}": {"0": 1.0, "2": hidden, "4": readout}
    for hidden, readout in list(itertools.product((1.0, 3.0, 10.0, 30.0), repeat=2))[1:]
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
    gains = CONSTANTS.get(arm)
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


def main() -> None:
    parser = arguments(__doc__.split("\n\n")[0], epochs=1)
    parser.add_argument("--steps", type=count, default=1000)
    parser.add_argument("--widths", type=count, nargs="+", default=[64, 128, 256])
    given = parsed(parser, seeds=1, steps=20)
    if len(given.widths) < 2:
        parser.error("--widths: give two or more, for factors are carried from the first")
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
