"""The monitor's cost beside that of other tools, in the same run.

Every step: like `monitor.py`, each round times one step of every variant, in shuffled order,
between two plain steps. Whole runs: of `--steps` steps, each step of every variant between those of
the others, so that a busy machine slows all alike. The share is (time of the variant's run − time
of the plain run) over the time of the plain run, with everything included: the first measured step
with its extra copies, histograms when they are written. "From medians" is the same share with
unchanged times of the logging steps, and every other step at the median of its kind: it varies
less. The plain run is there twice; the second's deviation from 0 % is the machine's noise.
`wandb.watch` at its default interval, 1,000, writes nothing in such a run: only its hooks count.

Peers are timed as a user runs them: `wandb` with its own client and service process, offline, and
one `log` of the loss per step; BackPACK's first-order extensions on the models that it supports
unchanged (it supports no operation in place), for all parameters or those that it knows;
TensorBoard's histogram of every parameter and every gradient. None provides the monitor's readings:
they show the price that people pay today.

    pip install -e ".[peers]"
    python tests/benchmarks/peers.py [--models resnet18 gpt] [--rounds 30] [--seconds 300]
        [--steps 151] [--threads 2] [--write FILE]
"""

import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from models import TASKS, Task, Trainer, cross_entropy
from torch import nn
from write_up import heading, parser, table, write

INTERVAL = 100  # the monitor's default
# What is measured of a model on a CPU: the others of `models.py` only if asked for.
CHOSEN = ["resnet18", "mlp", "mobilenet", "convnext", "gpt"]
# "At the default interval the monitor adds at most 1 % to each model": set beforehand.
GOAL = 1.0


class Runner(NamedTuple):
    """One way to train."""

    step: Callable[[], object]
    covered: str  # the part of the model that it reports on
    logs_at: Callable[[int], bool]  # whether it does more than usual in this step of a run


Peer = Callable[[Task, ExitStack], Runner]


def plain(task: Task, stack: ExitStack) -> Runner:
    return Runner(Trainer(task).step, "", lambda step: False)


def ours(interval: int) -> Peer:
    def start(task: Task, stack: ExitStack) -> Runner:
        trainer = Trainer(task, {"every_n_steps": interval})
        stack.callback(trainer.close)
        # The next step's beginning completes a measured step.
        return Runner(
            trainer.step, "", lambda step: min(step % interval, (step - 1) % interval) == 0
        )

    return start


def wandb_watch(interval: int) -> Peer:
    def start(task: Task, stack: ExitStack) -> Runner:
        import wandb

        trainer = Trainer(task)
        run = wandb.run or stack.enter_context(_offline_run())
        run.watch(trainer.model, log="all", log_freq=interval)
        stack.callback(run.unwatch, trainer.model)

        def step() -> None:
            trainer.optimizer.zero_grad()
            loss = cross_entropy(trainer.model(trainer.x), trainer.y)
            loss.backward()
            trainer.optimizer.step()
            run.log({"loss": loss.item()})

        return Runner(step, "", lambda step: (step + 1) % interval == 0)

    return start


@contextmanager
def _offline_run() -> Iterator[object]:
    import wandb

    with tempfile.TemporaryDirectory() as folder:
        settings = wandb.Settings(silent=True, console="off")
        run = wandb.init(mode="offline", project="peers", dir=folder, settings=settings)
        try:
            yield run
        finally:
            run.finish()


def histograms(interval: int) -> Peer:
    def start(task: Task, stack: ExitStack) -> Runner:
        from torch.utils.tensorboard import SummaryWriter

        trainer = Trainer(task)
        writer = SummaryWriter(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.callback(writer.close)
        done = 0

        def step() -> None:
            nonlocal done
            trainer.step()
            if done % interval == 0:
                for name, parameter in trainer.model.named_parameters():
                    writer.add_histogram(name, parameter, done)
                    writer.add_histogram(f"{name}.grad", parameter.grad, done)
            done += 1

        return Runner(step, "", lambda step: step % interval == 0)

    return start


def backpack_of(extension: str) -> Peer:
    def start(task: Task, stack: ExitStack) -> Runner:
        from backpack import backpack, extend, extensions

        trainer = Trainer(task)
        model, loss = extend(trainer.model), extend(nn.CrossEntropyLoss())
        asked = getattr(extensions, extension)()

        def step() -> None:
            trainer.optimizer.zero_grad()
            output = model(trainer.x)
            with backpack(asked):
                loss(output.flatten(0, -2), trainer.y.flatten()).backward()
            trainer.optimizer.step()

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns once of every unknown module
            step()
        known = [hasattr(p, asked.savefield) for p in model.parameters()]
        return Runner(step, f" ({sum(known)} of {len(known)} parameters)", lambda step: False)

    return start


EVERY_STEP: dict[str, Peer] = {
    "plain again": plain,
    "adiv-monitor, every step": ours(1),
    'wandb.watch(log="all", log_freq=1)': wandb_watch(1),
    "TensorBoard histograms, every step": histograms(1),
    **{f"BackPACK {name}": backpack_of(name) for name in ("BatchGrad", "BatchL2Grad", "Variance")},
}
WHOLE_RUNS: dict[str, Peer] = {
    "plain again": plain,
    f"adiv-monitor, default interval ({INTERVAL})": ours(INTERVAL),
    'wandb.watch(log="all"), default interval (1,000)': wandb_watch(1000),
    f'wandb.watch(log="all", log_freq={INTERVAL})': wandb_watch(INTERVAL),
    f"TensorBoard histograms, every {INTERVAL} steps": histograms(INTERVAL),
}


def started(
    peers: dict[str, Peer], task: Task, stack: ExitStack
) -> tuple[dict[str, Runner], dict[str, str]]:
    """Start the runners; return those that run, and why the others do not."""
    runners: dict[str, Runner] = {}
    missing: dict[str, str] = {}
    for name, start in peers.items():
        try:
            runners[name] = start(task, stack)
        except ImportError:
            missing[name] = "not installed"
        except Exception as error:  # a peer's refusal of a model is a finding, not a failure
            missing[name] = f"does not take this model: {str(error).partition('. ')[0]}"
    return runners, missing


def timed(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def every_step(task: Task, rounds: int, seconds: float) -> list[tuple[str, ...]]:
    """Return table rows: the ratio of a step to the plain steps around it."""
    with ExitStack() as stack:
        runners, missing = started(EVERY_STEP, task, stack)
        reference = plain(task, stack).step
        for step in (reference, *(runner.step for runner in runners.values())):
            for _ in range(3):
                step()
        found: dict[str, list[float]] = {name: [] for name in runners}
        shuffle, end = random.Random(0), time.perf_counter() + seconds
        for done in range(rounds):
            if done >= 3 and time.perf_counter() > end:
                break
            before = timed(reference)
            for name in shuffle.sample(list(runners), len(runners)):
                taken = timed(runners[name].step)
                after = timed(reference)
                found[name].append(2 * taken / (before + after))
                before = after
    rows = []
    for name in EVERY_STEP:
        if name in missing:
            rows.append((task.title, name, missing[name]))
            continue
        low, middle, high = statistics.quantiles(found[name], n=4)
        text = f"{middle:.2f} [{low:.2f}, {high:.2f}]"
        rows.append((task.title, name + runners[name].covered, text))
    return rows


def whole_runs(task: Task, steps: int) -> list[tuple[str, ...]]:
    """Return table rows: the extra time of a run of this many steps in percent."""
    with ExitStack() as stack:
        runners, missing = started(WHOLE_RUNS, task, stack)
        runners["plain"] = plain(task, stack)
        for _ in range(3):
            Trainer(task).step()  # so that the process has seen this model
        times: dict[str, list[float]] = {name: [] for name in runners}
        shuffle = random.Random(0)
        for _ in range(steps):
            for name in shuffle.sample(list(runners), len(runners)):
                times[name].append(timed(runners[name].step))
    # The first step of each creates the optimizer's state, the plain one's too, so it is fair.
    reference = times.pop("plain")
    rows = []
    for name in WHOLE_RUNS:
        if name in missing:
            rows.append((task.title, name, missing[name], ""))
            continue
        share = sum(times[name]) / sum(reference) - 1
        calm = smoothed(times[name], runners[name].logs_at) / smoothed(reference, lambda _: False)
        rows.append((task.title, name, f"{share:+.2%}", f"{calm - 1:+.2%}"))
    return rows


def smoothed(times: list[float], logs_at: Callable[[int], bool]) -> float:
    """Return the run's time, with the median in place of each step that does not log."""
    logging = [t for step, t in enumerate(times) if logs_at(step)]
    others = [t for step, t in enumerate(times) if not logs_at(step)]
    return sum(logging) + len(others) * statistics.median(others or [0.0])


def main(given: list[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--models", nargs="+", choices=TASKS)
    made.add_argument("--rounds", type=int, default=30)
    made.add_argument("--seconds", type=float, default=300, help="for every step of one model")
    made.add_argument("--steps", type=int, default=151, help="of a whole run; 0: none")
    arguments = made.parse_args(given)
    torch.set_num_threads(arguments.threads)
    if arguments.quick:
        arguments.rounds, arguments.steps = 2, 3
    chosen = arguments.models or (["mlp"] if arguments.quick else CHOSEN)
    top = heading("The monitor's cost beside its peers'", __file__, arguments)
    steps: list[tuple[str, ...]] = []
    runs: list[tuple[str, ...]] = []
    text = ""
    for name in chosen:
        steps += every_step(TASKS[name], arguments.rounds, arguments.seconds)
        if arguments.steps:
            runs += whole_runs(TASKS[name], arguments.steps)
        lines = [
            *top,
            *table(("model", "step", "ratio to plain: median [quartiles]"), steps),
            f"Whole runs of {arguments.steps} steps; goal for the monitor: at most {GOAL:g} %.",
            "",
            *table(("model", "run", "longer than plain", "from medians"), runs),
        ]
        text = write(lines, arguments.write)
    print(text)


if __name__ == "__main__":
    main()
