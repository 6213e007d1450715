"""Coverage of every model of the zoo: functions, kinds of layers, and the cost of a step.

Every model of the zoo (`tests/zoo`) takes three steps, of which the last one's report counts.
Coverage: share of the trained parameters' elements that lie in measured layers. Functions: those
that take a parameter, or a view of it, as an argument, with the number of parameters; counted
without the monitor (`uses.py`). Kinds: of the layers in the report, with their number. Cost: a
measured step over a plain one, the median over rounds, each of which times a step of an equal model
with the monitor between two steps of one without. The models and their data are as small as
possible, so a step is short and the ratio high; `monitor.py` measures the cost of a step of
ordinary size.

    python tests/benchmarks/covered.py [--models resnet18 gpt2] [--rounds 20] [--threads 2]
        [--write FILE]
"""

import importlib.metadata
import re
import statistics
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor
from uses import Uses
from write_up import heading, parser, table, write

from adiv_monitor import Monitor, StepReport

sys.path.append(str(Path(__file__).parents[1]))  # location of the zoo

from zoo import ZOO, Specimen, Training, seed

LIBRARIES = ("torchvision", "transformers", "timm", "peft")
MODELS = (
    *("model", "parameters", "coverage", "functions that take them", "kinds of layers"),
    "measured / plain step",
)
MISSING = ("model", "not measured", "elements", "reason")
EXPLAINED = """
This page lists what the monitor measures of each model. *Parameters* counts the trained ones, and
*coverage* is the share of them that is in measured layers. *Functions* are those that take a
parameter or a view of it, with the number of parameters. *Kinds* are those of the report's layers,
with their number. The last column is the cost of a measured step: the median of its ratio to a
plain step, with quartiles, in one run. Models and batches are as small as possible, so a plain step
is short and the ratio is high; [cost](cost.md) has models of ordinary size.
"""


def trained(training: Training) -> list[dict[str, Tensor]]:
    """Return, for each optimizer, the parameters that it trains by name."""
    return [
        {name: p for name, p in each.model.named_parameters() if p.requires_grad}
        for each in training.trained
    ]


def monitored(training: Training, stack: ExitStack) -> list[Monitor]:
    return [
        stack.enter_context(Monitor(each.model, each.optimizer, every_n_steps=1, on_error="raise"))
        for each in training.trained
    ]


def reports(specimen: Specimen) -> list[StepReport]:
    """Return the reports of the third step, one for each optimizer."""
    seed(0)
    training = specimen.build()
    with ExitStack() as stack:
        monitors = monitored(training, stack)
        for _ in range(3):
            training.step()
    return [report for monitor in monitors if (report := monitor.latest)]


def functions(specimen: Specimen) -> Counter[str]:
    """Count the parameters by the functions that take them; several functions are joined by "+"."""
    seed(0)
    training = specimen.build()
    parameters = [p for named in trained(training) for p in named.values()]
    with Uses(parameters) as uses:
        training.step()
    return Counter(" + ".join(sorted(uses.functions[id(p)])) or "none" for p in parameters)


def ratios(specimen: Specimen, rounds: int) -> list[float]:
    """Return the times of measured steps over those of the plain steps around them."""
    seed(0)
    plain, measured = specimen.build(), specimen.build()
    found = []
    with ExitStack() as stack:
        monitored(measured, stack)
        for training in 2 * (plain, measured):
            training.step()
        before = timed(plain.step)
        for _ in range(rounds):
            taken, after = timed(measured.step), timed(plain.step)
            found.append(taken / ((before + after) / 2))
            before = after
    return found


def timed(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def model_row(specimen: Specimen, found: list[StepReport], rounds: int) -> tuple[str, ...]:
    sizes = [p.numel() for named in trained(specimen.build()) for p in named.values()]
    missing = sum(sum(report.unmeasured.values()) for report in found)
    kinds = Counter(reading.kind for report in found for reading in report.layers.values())
    low, middle, high = statistics.quantiles(ratios(specimen, rounds), n=4)
    return (
        specimen.title,
        f"{sum(sizes):,}",
        percent(missing, sum(sizes)),
        counted(functions(specimen)),
        counted(kinds),
        f"{middle:.2f} [{low:.2f}, {high:.2f}]",
    )


def percent(missing: int, whole: int) -> str:
    """Return the coverage in percent, rounded down, so that only full coverage is 100 %."""
    return f"{10_000 * (whole - missing) // whole / 100:.2f} %" if missing else "100 %"


def counted(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in counts.most_common()) or "–"


def missing_rows(specimen: Specimen, found: Iterable[StepReport]) -> list[tuple[str, ...]]:
    """Return unmeasured parameters with the monitor's reason; "*" stands for a block's number."""
    elements: defaultdict[tuple[str, str], int] = defaultdict(int)
    for report in found:
        for name, size in report.unmeasured.items():
            elements[re.sub(r"\b\d+\b", "*", name), reason(name, report)] += size
    return [
        (specimen.title, f"`{name}`", f"{size:,}", why) for (name, why), size in elements.items()
    ]


def reason(name: str, report: StepReport) -> str:
    """Return the report's reason for this parameter, or for the innermost module around it."""
    places = (
        path for path in report.unsupported if f"{name}.".startswith(f"{path}." if path else "")
    )
    told = max(places, key=len, default=None)
    return "none is given" if told is None else report.unsupported[told]


def versions() -> str:
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES)


def main(given: list[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--models", nargs="+", choices=ZOO)
    made.add_argument("--rounds", type=int, default=20)
    arguments = made.parse_args(given)
    torch.set_num_threads(arguments.threads)
    if arguments.quick:
        arguments.rounds = 2
    chosen = arguments.models or (["ten_times", "function"] if arguments.quick else list(ZOO))
    lines = heading("Models", __file__, arguments)
    lines += [f"{versions()}.", *EXPLAINED.splitlines(), ""]
    models: list[tuple[str, ...]] = []
    missing: list[tuple[str, ...]] = []
    text = ""
    for name in chosen:
        with warnings.catch_warnings():
            for message in ZOO[name].warnings:
                warnings.filterwarnings("ignore", message)
            found = reports(ZOO[name])
            models.append(model_row(ZOO[name], found, arguments.rounds))
        missing += missing_rows(ZOO[name], found)
        tables = table(MODELS, models)
        if missing:
            tables += ["## Not measured", "", *table(MISSING, missing)]
        text = write([*lines, *tables], arguments.write)
    print(text)


if __name__ == "__main__":
    main()
