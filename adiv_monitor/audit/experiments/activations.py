"""The activation functions of a model: where they are flat, dead units, results that are lost."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from adiv_monitor.audit.experiments.backward import nodes_of
from adiv_monitor.audit.experiments.beginning import MAPS
from adiv_monitor.audit.experiments.calls import Call, Watched, calls_of, flat, given, see_calls
from adiv_monitor.audit.experiments.changed_inputs import SAMPLES, ChangedInputs, still
from adiv_monitor.audit.experiments.questions import asks
from adiv_monitor.audit.training.batches import first
from adiv_monitor.audit.training.setup import Fork, Setup, seeded
from adiv_monitor.diagnosis.record import Fact, UnitStatistics

# Where functions are flat: their slope is below 2 % of its maximum. The numbers solve
# |f′(x)| = 0.02·max|f′| (differentiation and bisection); beyond them the slope only falls. They are
# those of the default α and β. Functions without a flat end (leaky ReLU, PReLU) are not listed.
_LOG_50 = math.log(50)  # e^-x is below 2 % beyond it
_LOGIT_98 = math.log(49)  # 1/(1 + e^x) is below 2 % beyond it

# A function is flat at or below the first number, and at or above the second.
ENDS: Mapping[str, tuple[float, float]] = {
    "relu": (0.0, math.inf),
    "relu6": (0.0, 6.0),
    "gelu": (-2.7392, math.inf),
    "silu": (-5.2528, math.inf),
    "mish": (-5.2741, math.inf),
    **dict.fromkeys(("elu", "celu", "selu"), (-_LOG_50, math.inf)),
    "softplus": (-_LOGIT_98, math.inf),
    "tanh": (-2.6442, 2.6442),
    "sigmoid": (-5.2883, 5.2883),
    "softsign": (-6.0711, 6.0711),
    "hardsigmoid": (-3.0, 3.0),
    "hardswish": (-3.0, math.inf),
    "log_sigmoid": (-math.inf, _LOGIT_98),
}
_SAME = {"special_expit": "sigmoid", "logsigmoid": "log_sigmoid"}


def ends_of_function(
    function: str, arguments: Mapping[str, Any]
) -> tuple[str, tuple[float, float]] | None:
    """Return name and flat ends of a torch function; None if it is no activation with a flat end.

    Args:
        function: The function's `__name__`; in-place variants are accepted.
        arguments: Arguments other than the input, by name.
    """
    name = function.strip("_")
    name = _SAME.get(name, name)
    if name == "hardtanh":
        ends = arguments.get("min_val", -1.0), arguments.get("max_val", 1.0)
        return ("relu6" if ends == (0.0, 6.0) else name), ends
    is_clamped = name in ("clamp", "clip", "clamp_min") and arguments.get("min") == 0
    if is_clamped and arguments.get("max") is None:
        name = "relu"
    return (name, ENDS[name]) if name in ENDS else None


# Dead units and saturated entries

_NORMS = ("batch_norm", "group_norm", "instance_norm")
_LAST = (
    *("linear", "layer_norm", "rms_norm", "matmul", "bmm", "addmm", "einsum", "embedding"),
    *("multi_head_attention_forward", "scaled_dot_product_attention"),
)
# Class names of modules that compose these functions from tanh and sigmoid, which aren't looked at.
_COMPOSED = re.compile("gelu|silu|swish", re.IGNORECASE)


class Units:
    """Accumulates statistics of the inputs of activation functions during `watching`.

    Functions are named by the path of the innermost module that they run in. Functions outside of
    modules (in the loss) and inside fused functions (recurrent layers) are not observed. Units are
    the channels behind a convolution or batch normalisation, and the last dimension elsewhere.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        names = {path: type(module).__name__ for path, module in model.named_modules()}
        self._composed = {path for path, name in names.items() if _COMPOSED.search(name)}
        # Of each call: function, units with an entry that is not flat, flat entries, all, batch.
        self._seen: dict[str, list[tuple[str, Tensor, int, int, int]]] = defaultdict(list)
        self._batches = 0

    @property
    def fewest_values(self) -> int:
        """The number of values that each unit of any function has got, at least."""
        every = self._seen.values()
        return min((sum(x[3] // len(x[1]) for x in seen) for seen in every), default=0)

    def statistics(self) -> dict[str, UnitStatistics]:
        """Return the statistics of each function by path; `path#2` is a module's second one.

        Functions whose number of units differs between calls are left out.
        """
        found = {}
        for key, seen in self._seen.items():
            names, awake, flat, entries, batches = zip(*seen, strict=True)
            if len({*names}) == len({*map(len, awake)}) == 1:
                share = sum(flat) / max(sum(entries), 1)
                dead = int((~torch.stack(awake).any(0)).sum())
                found[key] = UnitStatistics(names[0], len(awake[0]), dead, share, len({*batches}))
        return found

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe one batch that runs through the model in this context."""
        self._calls: Counter[str] = Counter()
        self._channels: bool | None = None
        with Watched(self._model, change=self._call):
            yield
        self._batches += 1

    def _call(self, call: Call) -> Any:
        """Handle a function that is about to run."""
        x = call.argument(0, "input")
        if call.path is None or not isinstance(x, Tensor):
            return NotImplemented
        if call.name.startswith("conv") or call.name in _NORMS:
            self._channels = x.ndim > 2
        elif call.name in _LAST:
            self._channels = False
        elif not (call.name in ("tanh", "sigmoid") and call.path in self._composed):
            given = dict(zip(("min", "max"), call.args[1:], strict=False))  # of clamps
            ends = ends_of_function(call.name, {**given, **call.kwargs})
            if ends is not None and x.is_floating_point() and x.ndim:
                self._look(call.path, *ends, x)
        return NotImplemented

    @torch.no_grad()
    def _look(self, path: str, name: str, ends: tuple[float, float], x: Tensor) -> None:
        self._calls[path] += 1
        key = path if self._calls[path] == 1 else f"{path}#{self._calls[path]}"
        flat = x <= ends[0]
        if ends[1] != math.inf:
            flat |= x >= ends[1]
        channels = x.ndim > 3 if self._channels is None else self._channels and x.ndim > 2
        # A vector holds one value for each sample, of a single unit.
        flat = flat[None] if x.ndim == 1 else flat.movedim(1 if channels else -1, 0).flatten(1)
        counts = int(flat.count_nonzero()), flat.numel(), self._batches
        self._seen[key].append((name, ~flat.all(1).cpu(), *counts))


# Results of activation functions that are lost, and models without any

LEAST = 4  # samples: of fewer, some sums are samples themselves
ROUNDING = 1e-4  # share of the outputs' spread: rounding in a network of many layers


@asks("no-activation")
def no_activation(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Report lost results of activation functions, and a model of several maps that is affine.

    A result is lost if no other function uses it, nor the loss. A custom function, whose call is
    not seen, shows in the graph of the loss.
    """
    fork = setup.fork()
    made: list[tuple[Call, Tensor]] = []
    used: list[Tensor] = []  # they are held so that ids stay unique

    def see(call: Call) -> None:
        used.extend(given(call))
        x = call.result
        is_new = isinstance(x, Tensor) and x is not call.argument(0, "input") and x.requires_grad
        if is_new and call.path is not None and ends_of_function(call.name, call.kwargs):
            made.append((call, x))

    fork.model.register_forward_hook(lambda module, args, out: used.extend(flat(out)))
    with torch.enable_grad():
        loss = see_calls(fork, see)
    known, reached = {id(loss), *map(id, used)}, nodes_of([loss.grad_fn])
    lost = [call for call, x in made if id(x) not in known and x.grad_fn not in reached]
    facts = [Fact(call.place, {}, {"by": "lost"}) for call in lost]
    layers = len(maps_that_run(setup.fork()))
    if layers > 1 and _is_affine(_switched_on(still(setup.fork()))):
        facts.append(Fact("", {"layers": float(layers)}, {"by": "affine"}))
    return facts


def maps_that_run(fork: Fork) -> list[str]:
    """Return the paths of the linear and convolutional layers that the loss runs."""
    maps = [path for path, module in fork.model.named_modules() if isinstance(module, MAPS)]
    return [*dict.fromkeys(str(c.path) for c in calls_of(fork, lambda call: call.path in maps))]


@torch.no_grad()
def _switched_on(fork: Fork) -> Fork:
    """Move gains, biases and weights that are zero, so that no branch is multiplied by next to 0.

    Residual branches may begin so (ReZero, LayerScale, a last layer of zeros). An affine model
    stays affine whatever its weights are.
    """
    with seeded(fork.seed):
        for p in fork.model.parameters():
            if p.is_floating_point() and (p.ndim < 2 or p.squeeze().ndim < 2 or not p.any()):
                p.add_(torch.randn_like(p), alpha=0.3)
    return fork


def _is_affine(fork: Fork) -> bool:
    """Return whether f(a + b − c) = f(a) + f(b) − f(c) for samples a, b and c of the first batch.

    It is False if the model has not exactly one input, of floating-point numbers.
    """
    run = ChangedInputs(fork, first(fork.batches[0], SAMPLES))
    if len(run.inputs) != 1 or not run.inputs[0].is_floating_point():
        return False

    def mixed(x: Tensor) -> Tensor:
        return x + x.roll(1, 0) - x.roll(2, 0)

    def fits(x: Tensor, y: Tensor) -> bool:
        spread = float((x - x.mean(0)).norm())
        is_told = spread > ROUNDING * float(x.norm())
        return is_told and float((mixed(x) - y).norm()) <= ROUNDING * spread

    size = len(run.inputs[0])
    pairs = [(x, y) for x, y in zip(run.own, run.outputs(mixed), strict=True)
             if x.shape[:1] == (size,)]  # fmt: skip
    return size >= LEAST and bool(pairs) and all(fits(x, y) for x, y in pairs)
