"""Work of the host in a measured step, per layer: time, calls, garbage collection.

Every step is measured. Plain steps, the monitor's and those of `wandb.watch(log="all",
log_freq=1)`, where it is installed, are interleaved. CPU time of one thread is taken, so that other
programs hardly count. The step is the ratio to the plain one by medians, and by means, in which
garbage collections show.

Host time is the time of a measured step beyond that of the operations it dispatches (the model's
and the optimizer's included), called once more one after the other; per layer. Calls are those of
Python functions and of C functions, as counted by `cProfile`, beyond a plain step's, per layer: a
number that is the same on every machine.

    python tests/benchmarks/host.py [--models layers mlp] [--steps 30] [--write FILE]
"""

import cProfile
import gc
import pstats
import statistics
import time
from contextlib import ExitStack
from importlib.util import find_spec

import torch
from models import TASKS, Task, Trainer
from monitor import Operations, operations_of
from peers import Runner, wandb_watch
from write_up import heading, parser, table, write

CHOSEN = ["layers", "mlp", "resnet18", "resnet18-160", "mobilenet", "gpt"]
# Set beforehand: calls by layer, ms of the host by layer, and measured to plain step.
CALLS, MILLISECONDS = 900, 0.35
RATIOS = {"mlp": 1.95, "resnet18": 1.75, "resnet18-160": 1.3, "mobilenet": 1.95, "gpt": 1.15}
COLUMNS = (
    *("model", "layers", "plain, ms", "measured to plain: median", "mean", "goal"),
    *("host by layer, ms", "calls by layer", "collecting garbage, ms", "wandb.watch: median"),
)


class Collections:
    """Milliseconds that Python spends on garbage collection inside the block."""

    def __init__(self) -> None:
        self.milliseconds = 0.0
        self._began = 0.0

    def __enter__(self) -> "Collections":
        gc.callbacks.append(self._count)
        return self

    def __exit__(self, *error: object) -> None:
        gc.callbacks.remove(self._count)

    def _count(self, phase: str, info: object) -> None:
        if phase == "start":
            self._began = time.process_time()
        else:
            self.milliseconds += 1e3 * (time.process_time() - self._began)


def taken(step: Trainer | Operations | Runner) -> float:
    """Return a step's milliseconds of CPU time."""
    start = time.process_time()
    step.step()
    return 1e3 * (time.process_time() - start)


def calls(trainer: Trainer, steps: int = 3) -> float:
    """Return the number of calls in one step."""
    profile = cProfile.Profile()
    gc.disable()  # what others have left is not this step's
    profile.enable()
    for _ in range(steps):
        trainer.step()
    profile.disable()
    gc.enable()
    counted: int = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
    return counted / steps


def row(name: str, task: Task, steps: int) -> tuple[object, ...]:
    with ExitStack() as stack:
        plain, measured = Trainer(task), Trainer(task, {"every_n_steps": 1})
        stack.callback(measured.close)
        others: dict[str, Trainer | Operations | Runner] = {"measured": measured}
        if find_spec("wandb") is not None:
            others["wandb"] = wandb_watch(1)(task, stack)
        for runner in (plain, *others.values()):
            for _ in range(5):
                runner.step()
        operations = operations_of(task, "cpu")
        times: dict[str, list[float]] = {key: [] for key in ("plain", "operations", *others)}
        garbage = []
        for _ in range(steps):
            times["plain"].append(taken(plain))
            times["operations"].append(taken(operations))
            for key, runner in others.items():
                with Collections() as collections:
                    times[key].append(taken(runner))
                if key == "measured":
                    garbage.append(collections.milliseconds)
        operations.close()
        assert measured.monitor is not None
        report = measured.monitor.latest
        layers = 0 if report is None else len(report.layers)
        counted = (calls(measured) - calls(plain)) / layers
    median = {key: statistics.median(values) for key, values in times.items()}
    mean = statistics.mean(times["measured"]) / statistics.mean(times["plain"])
    watched = f"{median['wandb'] / median['plain']:.2f}" if "wandb" in median else "not measured"
    return (
        *(task.title, layers, f"{median['plain']:.1f}"),
        *(f"{median['measured'] / median['plain']:.2f}", f"{mean:.2f}", RATIOS.get(name, "")),
        *(f"{(median['measured'] - median['operations']) / layers:.2f}", f"{counted:.0f}"),
        *(f"{statistics.mean(garbage):.1f}", watched),
    )


def main(given: list[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--models", nargs="+", choices=TASKS)
    made.add_argument("--steps", type=int, default=30)
    made.set_defaults(threads=1)
    arguments = made.parse_args(given)
    torch.set_num_threads(arguments.threads)
    if arguments.quick:
        arguments.steps = 2
    chosen = arguments.models or (["mlp"] if arguments.quick else CHOSEN)
    lines = [
        *heading("Host work of a measured step", __file__, arguments),
        f"Goals: at most {CALLS} calls and {MILLISECONDS} ms by layer for 60 × Linear(32).",
        "",
    ]
    rows: list[tuple[object, ...]] = []
    text = ""
    for name in chosen:
        rows.append(row(name, TASKS[name], arguments.steps))
        text = write([*lines, *table(COLUMNS, rows)], arguments.write)
    print(text)


if __name__ == "__main__":
    main()
