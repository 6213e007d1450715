"""What the open questions share: arms that each have a learning rate of their own.

An arm is tuned in half decades with seed 0, by its score on data held out; if the best learning
rate lies on an edge of the arm's grid, the grid is widened. The best is then trained with more
seeds. `OUT/NAME.json` holds a run per arm, learning rate and seed, written as soon as it ends:
killed at any moment, `--resume` goes on with the next one.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import cifar
import torch
from cifar import Data
from ensemble import Network
from fair import HELD_OUT, rate, widen
from readings import by_layer
from torch import nn
from training import CRITERION, Course, Run, Setting, accuracy, fit, images, replace
from tuned_report import Question, best_rate, plot, text

from adiv_monitor import Monitor, StepReport


class Trial(NamedTuple):
    """What tells a run of a question from the others."""

    arm: str
    learning_rate: float
    seed: int


class Tuning:
    """The runs of a question.

    Args:
        file: the JSON file that holds them.
        grids: by arm the learning rates that are tried first, in half decades from 1.
        known: what all runs share; a file with runs that share something else is refused.
        train: trains one. Its result has a `score` on data held out, higher is better, and a
            `result` on test data, both None if it diverged.
    """

    def __init__(
        self,
        file: Path,
        grids: Mapping[str, range],
        known: Run,
        train: Callable[[Trial], Run],
    ) -> None:
        self.file = file
        self.grids = grids
        self.known = known
        self.train = train
        self.runs: list[Run] = json.loads(file.read_text()) if file.exists() else []

    def check(self, parser: argparse.ArgumentParser, resume: bool) -> None:
        """End the command if results would be lost or mixed with others."""
        if self.file.exists() and not resume:
            parser.error(f"{self.file} exists: --resume goes on with it, another --out starts anew")
        for run in self.runs:
            for name, value in self.known.items():
                if run[name] != value:
                    parser.error(
                        f"{self.file} holds runs with {name} {run[name]!r}, not {value!r}: choose "
                        "another --out"
                    )

    def run(self, seeds: int, *, tune: bool = True) -> None:
        """Tune every arm, and train the best of each with so many seeds.

        Args:
            seeds: how many.
            tune: False takes the middle of every grid.
        """
        for arm, first in self.grids.items():
            places = list(first) if tune else [first[len(first) // 2]]
            while True:
                for place in places:
                    self._finish(Trial(arm, rate(place), 0))
                chosen = best_rate(self.runs, arm)
                if not tune or not widen(places, chosen, first):
                    break
            for seed in range(1, seeds):
                self._finish(Trial(arm, chosen, seed))

    def _finish(self, trial: Trial) -> None:
        """Train one, unless its run is there."""
        if any(Trial(*(run[name] for name in Trial._fields)) == trial for run in self.runs):
            return
        started = time.perf_counter()
        self.runs.append({**trial._asdict(), **self.known, **self.train(trial)})
        lines = ",\n".join(json.dumps(run) for run in self.runs)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        replace(self.file, f"[\n{lines}\n]\n".encode())
        took = time.perf_counter() - started
        print(*trial, f"score {self.runs[-1]['score']}, {took:.0f} s", flush=True)


def read(reports: Sequence[StepReport], measures: Iterable[str]) -> Run:
    """What a run keeps of its reports: steps, and measures by layer and step."""
    steps = [report.step for report in reports]
    return {"step": steps, **{measure: by_layer(reports, measure) for measure in measures}}


class Images:
    """CIFAR-10 for a question: images that are trained on, held out, and tested on.

    Args:
        data: the images.
        batch_size: of the training.
        pixels: what networks see, a name of `cifar.PIXELS`.
        epochs: how long.
        device: where.
    """

    REPORTS = 10  # per run, evenly spaced

    def __init__(
        self, data: Data, batch_size: int, pixels: str, epochs: int, device: str = "cpu"
    ) -> None:
        apart = cifar.held_out(data, min(HELD_OUT, len(data.train) // 10))
        # A network of one unit stands in the ensemble that is not trained here.
        unused = (Network("standard", "tanh", 0, 1.0),)
        self.course = Course(Setting(batch_size, 1, 1, pixels, unused), apart, device)
        self.test = data.test.to(device), data.test_labels.to(device)
        self.epochs = epochs
        self.known = {
            "data": data.source,
            "images": images(data),
            "pixels": pixels,
            "batch_size": batch_size,
            "epochs": epochs,
        }

    def fit(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        seed: int,
        measures: Iterable[str],
        *,
        realised: bool = False,
    ) -> Run:
        """Train a classifier under a monitor; its score is its accuracy on images held out.

        Args:
            model: takes rows of inputs.
            optimizer: its own.
            seed: of the order of the images.
            measures: what is kept of the monitor's reports.
            realised: measure the real move of the activations too.
        """
        steps = self.epochs * -(-len(self.course.train[0]) // self.course.batch_size)
        every = max(steps // self.REPORTS, 1)
        with Monitor(
            *(model, optimizer),
            every_n_steps=every,
            realised=CRITERION if realised else False,
            keep=2 * self.REPORTS,
        ) as monitor:
            found = fit(model, optimizer, self.course, seed, self.epochs, monitor.complete_report)
            reports = list(monitor.reports)
        finite = all(bool(each.isfinite().all()) for each in model.parameters())
        return {
            "score": found["test_accuracy"][-1] if finite else None,
            "result": accuracy(model, self.course, *self.test) if finite else None,
            "train_accuracy": found["train_accuracy"],
            **read(reports, measures),
        }


def answer(
    question: Question,
    file: Path,
    grids: Mapping[str, range],
    known: Run,
    train: Callable[[Trial], Run],
    given: argparse.Namespace,
    parser: argparse.ArgumentParser,
) -> None:
    """Train what a question needs, and write runs, page and picture; the whole command.

    Args:
        question: what is asked.
        file: the JSON file, beside which page and picture are written.
        grids: as in `Tuning`.
        known: as in `Tuning`.
        train: as in `Tuning`.
        given: the arguments `resume`, `seeds` and `quick`, which takes one learning rate per arm.
        parser: of the arguments.
    """
    tuning = Tuning(file, grids, known, train)
    tuning.check(parser, given.resume)
    tuning.run(given.seeds, tune=not given.quick)
    page = text(question, tuning.runs)
    file.with_suffix(".md").write_text(page)
    plot(question, tuning.runs, file.with_suffix(".png"))
    print(page)
