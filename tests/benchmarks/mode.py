"""The cost of watching a forward pass: hooks on modules, and a mode that sees every function.

It compares the plain forward pass with one in which all uses of parameters are found, but nothing
is recorded of them: no rows are taken, and no tensor gets a hook. Each watched pass has its own
watcher, as each measured step has, made and removed outside of the measured time. A third pass has
hooks and a mode that do nothing: the lower bound of this method. Processor time of this process,
passes in turns, the median of each kind.

Goal: at most 1.10 for each. Expected before it was measured: ResNet-18 1.12, MobileNetV3 1.6, GPT
1.04, if nothing is computed twice.

    python tests/benchmarks/mode.py [--models resnet18 gpt] [--passes N] [--write FILE]
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from models import TASKS, Task, images, vision
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from write_up import heading, parser, table, write

from adiv_monitor.capture.context import Context
from adiv_monitor.capture.forwards import Forwards
from adiv_monitor.capture.guard import Guard
from adiv_monitor.capture.layer_rows import Chooser
from adiv_monitor.capture.layers import Layers
from adiv_monitor.capture.names import Names
from adiv_monitor.capture.selection import select
from adiv_monitor.capture.watching import Watching
from adiv_monitor.capture.weights.provenance import Provenance
from adiv_monitor.capture.whole_modules.without_rule import ParametersWithoutRule

SMALL = {
    "resnet18": TASKS["resnet18"],
    "resnet18-224": TASKS["resnet18-224"],
    "mobilenet": Task(
        "MobileNetV3-small, 16×3×64×64",
        lambda: vision.mobilenet_v3_small(num_classes=10),
        lambda: images(16, 3, 64, 64),
    ),
    "gpt": TASKS["gpt"],
    "mlp": TASKS["mlp"],
}


class _Nobody:
    """A receiver that only counts the uses found."""

    found = 0

    def use(self, *_: Any, **__: Any) -> None:
        self.found += 1

    def maps(self, *_: Any) -> list[Tensor]:
        return []

    def whole(self, *_: Any) -> None:
        pass


class _Nothing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Idle:
    """Hooks on all modules, until closed, that do nothing."""

    def __init__(self, model: nn.Module) -> None:
        self._hooks = []
        for module in model.modules():
            before = module.register_forward_pre_hook(lambda *_: None, with_kwargs=True)
            options = {"with_kwargs": True, "always_call": True}
            self._hooks += [before, module.register_forward_hook(lambda *_: None, **options)]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


class Watched:
    """A watch over the model's forward passes, until closed."""

    def __init__(self, model: nn.Module) -> None:
        self._takes = _Nobody()
        selection = select(model, None, None)
        guard = Guard(lambda error: None)
        self._forwards = Forwards.of(selection, guard)
        origin = Provenance(model, selection.parameters)
        chooser = Chooser(None, np.random.default_rng(0))
        names = Names(model, selection, self._forwards)
        layers = Layers(names, origin, chooser, Context(guard))
        leftovers = ParametersWithoutRule(selection, guard)
        watching = Watching(selection, self._forwards, layers, leftovers, self._takes)
        self._forwards.watch(watching)

    def close(self) -> int:
        """Remove the watch; return the number of uses found."""
        self._forwards.remove()
        return self._takes.found


def seconds(function: Callable[[], object]) -> float:
    begun = time.process_time()
    function()
    return time.process_time() - begun


def compare(task: Task, passes: int) -> tuple[list[float], int]:
    """Return the seconds of a plain, an idle and a watched forward pass, and one pass's uses."""
    torch.manual_seed(0)
    model, (x, _) = task.model(), task.batch()
    times: list[tuple[float, float, float]] = []
    uses = 0
    for _ in range(passes + 3):
        plain = seconds(lambda: model(x))
        idle = Idle(model)
        with _Nothing():
            least = seconds(lambda: model(x))
        idle.close()
        watcher = Watched(model)
        watched = seconds(lambda: model(x))
        uses = watcher.close()
        times.append((plain, least, watched))
    return [median(kind) for kind in zip(*times[3:], strict=True)], uses


def main(given: list[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--models", nargs="+", choices=SMALL)
    made.add_argument("--passes", type=int, default=40)
    arguments = made.parse_args(given)
    torch.set_num_threads(arguments.threads)
    chosen = arguments.models or (["mlp"] if arguments.quick else list(SMALL))
    passes = 3 if arguments.quick else arguments.passes
    lines = heading("What it costs a forward pass to be watched", __file__, arguments)
    rows = []
    for name in chosen:
        (plain, idle, watched), uses = compare(SMALL[name], passes)
        ratios = f"{idle / plain:.2f}", f"{watched / plain:.2f}"
        extra = f"{1e6 * (watched - plain) / uses:.0f}"
        rows.append((SMALL[name].title, f"{1e3 * plain:.1f}", *ratios, uses, extra))
    header = ("model", "plain, ms", "idle", "watched", "uses", "µs per use")
    lines += table(header, rows)
    print(write(lines, arguments.write))


if __name__ == "__main__":
    main()
