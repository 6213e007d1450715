"""A training as people do it: swept, read by the monitor, audited, and the advice taken.

    python examples/cases/sweep.py regression --out OUT               minutes
    python examples/cases/sweep.py unscaled --data DIR --out OUT      half an hour
    python examples/cases/sweep.py resnet --data DIR --out OUT        a day on two cores
    python examples/cases/sweep.py gpt --out OUT                      a day on two cores
    python examples/cases/sweep.py gpt --out OUT --device cuda --jobs 5

First the baseline is trained at every learning rate with every seed. At the best one, a `Monitor`
at its default interval reads the run of the first seed, and the audit looks at its beginning. Its
first advice that it can take itself, learning rates left aside, is then taken in whole runs, at
every learning rate with every seed. `OUT/CASE.jsonl` has a line per run, written when it ends:
killed at any moment, `--resume` goes on with the next one. With `--jobs`, so many runs are trained
at a time, each in a process of its own. `OUT/CASE.md` and pictures are computed from the lines.
"""

import argparse
import importlib
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path

import torch
from case import Case
from case_report import ADVISED, BASELINE, Run, best_rate, plot, text

from adiv_monitor import Monitor, audit
from adiv_monitor.audit.report import AuditReport
from adiv_monitor.audit.training.setup import Fork
from adiv_monitor.audit.trials.fixes import FIXES
from adiv_monitor.diagnosis.finding import Advice, Finding
from adiv_monitor.diagnosis.record import Record

sys.path.insert(0, str(Path(__file__).parents[1] / "paper"))  # images and text come from there
from commandline import count, device, folder, parsed

CASES = ("resnet", "gpt", "regression", "unscaled")
AUDITED = 60  # steps
POINTS = 60  # of a loss curve
Change = Callable[[Fork], None]
Which = tuple[float, int]  # learning rate, seed
Ended = tuple[float, int, Run]
Trained = Callable[[Change, Sequence[Which]], Iterable[Ended]]


def nothing(fork: Fork) -> None:
    """Change nothing: the baseline."""


def train(case: Case, change: Change, rate: float, seed: int, picture: Path | None = None) -> Run:
    """Train once.

    Args:
        case: what.
        change: a fix, or `nothing`.
        rate: the learning rate.
        seed: of everything that is random.
        picture: where to write what a monitor saw; None: no monitor.

    Returns:
        Score and result, None if the loss was not finite, and means of the loss over `POINTS`
        equal pieces of the run.
    """
    part = case.part(seed)
    torch.manual_seed(seed)
    alone = case.model()
    optimizer = case.optimizer(alone, rate)
    first = list(itertools.islice(part.batches(), AUDITED))
    fork = Fork(alone, optimizer, case.loss, first, None, seed)
    change(fork)
    if fork.optimizer is not optimizer:  # its learning rate is swept, too
        for group in fork.optimizer.param_groups:
            group["lr"] = rate
    scheduler = None if case.scheduler is None else case.scheduler(fork.optimizer, case.steps)
    watched = nullcontext() if picture is None else Monitor(fork.model, fork.optimizer)
    losses: list[float] = []
    with watched as monitor:
        for batch in itertools.islice(part.batches(), case.steps):
            fork.optimizer.zero_grad()
            loss = fork.loss(fork.model, batch)
            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                return {"score": None, "result": None, "losses": in_pieces(losses)}
            torch.autograd.backward(loss)
            if fork.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(fork.model.parameters(), fork.clip_norm)
            fork.optimizer.step()
            if scheduler is not None:
                scheduler.step()
        if monitor is not None and picture is not None:
            monitor.complete_report()
            monitor.plot().savefig(picture)
    fork.model.eval()
    with torch.no_grad():
        score, result = part.score(fork.model), part.result(fork.model)
    finite = math.isfinite(score) and math.isfinite(result)
    return {
        "score": score if finite else None,
        "result": result if finite else None,
        "losses": in_pieces(losses),
    }


def one_by_one(case: Case, change: Change, left: Sequence[Which]) -> Iterator[Ended]:
    """Train at these learning rates with these seeds, in this process."""
    for rate, seed in left:
        yield rate, seed, train(case, change, rate, seed)


class Beside:
    """Train several at a time, each in a process of its own, in whatever order they end.

    Args:
        jobs: how many.
        made: makes the case, which holds functions that no other process can be sent.
    """

    def __init__(self, jobs: int, made: Callable[[], Case]) -> None:
        self.jobs = jobs
        self.made = made

    def __call__(self, change: Change, left: Sequence[Which]) -> Iterator[Ended]:
        """Train at these learning rates with these seeds."""
        # A CUDA context can't be forked.
        with ProcessPoolExecutor(self.jobs, get_context("spawn")) as pool:
            asked = {pool.submit(self.run, change, *which): which for which in left}
            failed = []
            for done in as_completed(asked):
                if done.exception() is None:
                    yield *asked[done], done.result()
                else:
                    failed.append(done)
            for done in failed:  # once the others are written
                done.result()

    def run(self, change: Change, rate: float, seed: int) -> Run:
        """Train once, in this process."""
        torch.set_num_threads(1)
        return train(self.made(), change, rate, seed)


def watch(case: Case, change: Change, rate: float, picture: Path) -> None:
    """Train the first seed again under a monitor, unless its picture is there."""
    if not picture.exists():
        train(case, change, rate, 0, picture)


def in_pieces(losses: Sequence[float]) -> list[float | None]:
    """Means over `POINTS` pieces, four digits; None where they are not finite."""
    size = max(len(losses) // POINTS, 1)
    pieces = [losses[start : start + size] for start in range(0, len(losses), size)]
    means = [sum(piece) / len(piece) for piece in pieces]
    return [float(f"{mean:.4g}") if math.isfinite(mean) else None for mean in means]


class OtherRuns(Exception):
    """A file holds runs that can't be compared with these."""


class Sweep:
    """Runs at every learning rate with every seed, a line of a file each.

    Args:
        case: what is trained.
        seeds: how many.
        file: of the lines.
        device: where it is trained.
        trained: trains runs; None: one after the other.
    """

    def __init__(
        self, case: Case, seeds: int, file: Path, device: str, trained: Trained | None = None
    ) -> None:
        self.case, self.seeds, self.file = case, seeds, file
        self.about = {"data": case.data, "steps": case.steps, "device": device}
        self.trained = partial(one_by_one, case) if trained is None else trained

    def all_runs(self, arm: str, change: Change, advice: str = "") -> list[Run]:
        """Train what has no line in the file yet; all lines.

        Args:
            arm: name of the runs.
            change: what is done to the case.
            advice: the same in words.

        Raises:
            OtherRuns: lines are of other data, another length, device or advice.
        """
        runs = lines(self.file)
        mine = [run for run in runs if run["arm"] == arm]
        for name, value in {**self.about, "advice": advice}.items():
            for run in mine if name == "advice" else runs:
                if run.get(name) != value:
                    raise OtherRuns(
                        f"{self.file} holds runs of another {name}: {run.get(name)!r}, expected "
                        f"{value!r}; choose another --out"
                    )
        done = {(run["learning_rate"], run["seed"]) for run in mine}
        every = itertools.product(self.case.rates, range(self.seeds))
        for rate, seed, found in self.trained(change, [what for what in every if what not in done]):
            what = {"arm": arm, "advice": advice, "learning_rate": rate, "seed": seed}
            runs.append({**what, **self.about, **found})
            with self.file.open("a") as opened:
                opened.write(json.dumps(runs[-1]) + "\n")
            print(f"{arm}, learning rate {rate:g}, seed {seed}: {found['result']}", flush=True)
        return runs


def lines(file: Path) -> list[Run]:
    """Runs in a file; a line that was not written whole is left out, and removed."""
    if not file.exists():
        return []
    whole = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    file.write_text("".join(whole))
    return [json.loads(line) for line in whole]


def audited(case: Case, rate: float) -> AuditReport:
    """Audit the beginning of the baseline, with the first seed."""
    torch.manual_seed(0)
    return audit(
        case.model(),
        itertools.islice(case.part(0).batches(), AUDITED),
        loss=case.loss,
        optimizer=lambda model: case.optimizer(model, rate),
        steps=min(AUDITED, case.steps),
    )


def first_advice(report: AuditReport) -> tuple[Finding, Advice] | None:
    """The first advice that the audit can take itself, has not found useless, and is no rate."""
    for finding in report.findings:
        for advice in finding.advice:
            is_rate = advice.fix is None or advice.fix.startswith("rate*")
            if not is_rate and advice.outcome.mark != "✗":
                return finding, advice
    return None


def take(fix: str, layers: Sequence[str], record: Record, fork: Fork) -> None:
    """Change what the advice names."""
    FIXES[fix].apply(fork, tuple(layers), record)


@cache
def case_of(name: str, data: str, quick: bool, device: str, steps: int | None) -> Case:
    """The case as the arguments have it."""
    case: Case = importlib.import_module(name).case(data, quick=quick, device=device)
    if quick:
        case = case._replace(rates=case.rates[1:3])
    return case if steps is None else case._replace(steps=steps)


def both_arms(
    case: Case, swept: Sweep, out: Path
) -> tuple[list[Run], AuditReport, tuple[Finding, Advice] | None]:
    """Train, read and audit the baseline, then take the first advice in whole runs.

    Args:
        case: what.
        swept: its runs.
        out: where pictures go, less what follows the case's name.

    Returns:
        All runs, the audit, and the advice with its finding; None: there is none to take.
    """
    runs = swept.all_runs(BASELINE, nothing)
    rate = best_rate(runs, BASELINE)
    watch(case, nothing, rate, out.with_name(f"{out.name}-monitor-{rate:g}.png"))
    report = audited(case, rate)
    taken = first_advice(report)
    if taken is not None:
        finding, advice = taken
        layers = () if advice.everywhere else finding.layers
        change = partial(take, str(advice.fix), layers, report.record)
        runs = swept.all_runs(ADVISED, change, f"{advice.fix} {', '.join(layers)}".strip())
        rate = best_rate(runs, ADVISED)
        watch(case, change, rate, out.with_name(f"{out.name}-monitor-advised-{rate:g}.png"))
    return runs, report, taken


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--out", type=folder, required=True)
    parser.add_argument(
        "--data", default="synthetic", help="CIFAR-10, for unscaled and resnet: see cifar.py"
    )
    parser.add_argument("--seeds", type=count, default=3)
    parser.add_argument("--steps", type=count, help="other than the case's own")
    parser.add_argument("--quick", action="store_true", help="as little as shows that it runs")
    parser.add_argument("--device", type=device, default="cpu")
    parser.add_argument("--jobs", type=count, default=1, help="runs at a time")
    parser.add_argument("--resume", action="store_true")
    given = parsed(parser, seeds=1)
    torch.set_num_threads(1)
    made = partial(case_of, given.case, given.data, given.quick, given.device, given.steps)
    try:
        case = made()
    except FileNotFoundError as error:
        parser.error(str(error))
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / f"{given.case}.jsonl"
    if file.exists() and not given.resume:
        parser.error(f"{file} exists: --resume goes on with it, another --out starts anew")
    trained = None if given.jobs == 1 else Beside(given.jobs, made)
    swept = Sweep(case, given.seeds, file, given.device, trained)
    try:
        runs, report, taken = both_arms(case, swept, given.out / given.case)
    except OtherRuns as error:
        parser.error(str(error))
    page = text(case, runs, report, taken)
    (given.out / f"{given.case}.md").write_text(page)
    plot(case, runs, given.out / f"{given.case}.png")
    print(page)


if __name__ == "__main__":
    main()
