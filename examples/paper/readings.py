"""What the monitor reads while the paper's networks train, and whether accuracy follows it.

    python examples/paper/readings.py --quick --data DIR --out OUT     minutes
    python examples/paper/readings.py --data DIR --out OUT             many hours on a CPU

Every network is a separate model with an optimizer of its own and a `Monitor`; networks of a seed
begin with the same weights and see the same images in the same order. Each finished network is
added to `OUT/readings.json`; killed at any moment, `--resume` goes on with the next one.
"""

import math
import time
from collections.abc import Iterable

import cifar
from commandline import count, parsed, rate
from ensemble import NONLINEAR, OPTIMIZERS, Network
from experiment import Experiment, arguments, load, networks
from methods import METHODS
from plain import model, optimizer
from readings_report import MEASURES, plot, text
from table1 import ARMS
from training import Course, Run, Setting, fit, images

from adiv_monitor import Monitor, StepReport

REPORTS = 40  # per network, evenly spaced


def train(network: Network, setting: Setting, course: Course, epochs: int) -> Run:
    """Train one network, monitored.

    Args:
        network: which.
        setting: an ensemble that it belongs to.
        course: its images.
        epochs: how long.

    Returns:
        Accuracies by epoch in percent, and what was read by step.
    """
    data, _ = course.train
    alone = model(network, course.ensemble.sizes, course.typical).to(data.device)
    stepper = optimizer(network, alone, setting.optimizer)
    updates = -(-len(data) // setting.batch_size)
    every = max(epochs * updates // REPORTS, 1)
    with Monitor(
        alone, stepper, every_n_steps=every, keep=2 * REPORTS, on_error="raise"
    ) as monitor:
        found = fit(alone, stepper, course, network.seed, epochs, monitor.complete_report)
        reports = list(monitor.reports)
    return {
        **network._asdict(),
        **{name: value for name, value in setting._asdict().items() if name != "networks"},
        "updates_per_epoch": updates,
        "epoch": list(range(1, epochs + 1)),
        **found,
        "step": [report.step for report in reports],
        **{measure: by_layer(reports, measure) for measure in MEASURES},
    }


def by_layer(reports: Iterable[StepReport], measure: str) -> list[list[float | None]]:
    """A measure by layer and step, five digits; None where there is no direction.

    Measures of attention are by attention module.
    """
    of_scores = measure.startswith("attention_")
    by_step = [
        [getattr(r, measure) for r in (report.attention if of_scores else report.layers).values()]
        for report in reports
    ]
    return [list(map(_short, values)) for values in zip(*by_step, strict=True)]


def _short(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


def main() -> None:
    parser = arguments(__doc__.split("\n\n")[0], epochs=20)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=ARMS)
    parser.add_argument("--activations", nargs="+", choices=NONLINEAR, default=NONLINEAR)
    parser.add_argument("--batch-sizes", nargs="+", type=count, default=[128, 32, 8])
    parser.add_argument("--lr", nargs="+", type=rate, default=[1e-3])
    parser.add_argument("--pixels", choices=cifar.PIXELS, default="unit")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adam")
    given = parsed(parser, batch_sizes=[128, 32], seeds=1, epochs=1)
    data = load(given)

    experiment = Experiment(given.out, "readings", data, given.epochs, given.device)
    experiment.check(parser, given.resume)
    known = {"data": data.source, "images": images(data)}
    chosen = networks(given.methods, given.activations, given.seeds, given.lr)
    for batch_size in given.batch_sizes:
        whole = Setting(batch_size, 32, 2, given.pixels, chosen, given.optimizer)
        setting = whole.without(experiment.known(), given.epochs)
        if not setting.networks:
            continue
        course = Course(setting, data, given.device)
        for network in setting.networks:
            started = time.perf_counter()
            experiment.write([{**train(network, setting, course, given.epochs), **known}])
            seconds = time.perf_counter() - started
            print(f"batch size {batch_size}, {' '.join(map(str, network))}: {seconds:.0f} s")
    runs = experiment.write()
    (given.out / "readings.md").write_text(text(runs))
    plot(runs, given.out / "readings.png")
    print((given.out / "readings.md").read_text())


if __name__ == "__main__":
    main()
