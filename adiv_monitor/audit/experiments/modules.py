"""Modules that lose what their inputs tell: modes, norms, dropout, flat functions, constants."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from adiv_monitor.audit.experiments.backward import nodes_of
from adiv_monitor.audit.experiments.calls import Call, Watched, calls_of, given, rate_of, see_calls
from adiv_monitor.audit.experiments.changed_inputs import SAMPLES, ChangedInputs, still
from adiv_monitor.audit.experiments.questions import Look, Untold, asks, looks, of_each_call
from adiv_monitor.audit.experiments.state import MAPS
from adiv_monitor.audit.training.batches import first, mapped, size_of, tensors
from adiv_monitor.audit.training.setup import Fork, Setup, seeded
from adiv_monitor.diagnosis.record import Fact, UnitStatistics
from adiv_monitor.step.training import ONE_BATCH, SLOW

BATCH_NORM = nn.modules.batchnorm._BatchNorm
NORMS = (BATCH_NORM, nn.modules.instancenorm._InstanceNorm)
FEW = 4  # values: the variance's relative error, √(2/(n−1)), is 82 % for four
FEWEST = 3  # samples of a batch
VARIES = 1e-4  # share of the mean square, from which inputs vary over samples
CONSTANT = 1e-6  # share below which outputs do not
ROUNDING = 1e-9  # share of the inputs' variance: what is left of x − x in single precision
LEFT = 0.5  # share of the outputs' variation that is left after training
NEARLY = 1e-2  # of the first loss: what outputs of 0 leave of it, where they solve the task
_AS_LOW = 1e-2  # share of the fall of the loss: what training has still to go


def _batch_norm(call: Call, fork: Fork) -> nn.Module | None:
    """Return the batch normalisation that calls this, if it uses the batch's own statistics."""
    if call.name != "batch_norm" or call.path is None or not call.argument(5, "training"):
        return None
    module = fork.model.get_submodule(call.path)
    return module if isinstance(module, BATCH_NORM) else None


@of_each_call("batch-norm-starved")
def starved(call: Call, fork: Fork) -> Fact | None:
    """Return samples × positions per channel of a batch normalisation, if four or fewer."""
    if _batch_norm(call, fork) is None:
        return None
    x = call.argument(0, "input")
    values = x.numel() / x.shape[1]
    return Fact(str(call.path), {"values": values}) if values <= FEW else None


@of_each_call("running-statistics")
def running(call: Call, fork: Fork) -> Fact | None:
    """Return the momentum of running statistics that stay as they began, or are of one batch."""
    norm: Any = _batch_norm(call, fork)
    momentum = getattr(norm, "momentum", None)
    if norm is None or norm.num_batches_tracked is None or momentum is None:
        return None
    is_told = momentum >= ONE_BATCH or (momentum < SLOW and int(norm.num_batches_tracked) <= 1)
    return Fact(str(call.path), {"momentum": float(momentum)}) if is_told else None


@asks("left-in-eval")
def left_in_eval(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return normalisations in evaluation mode with mean exactly 0 and variance exactly 1.

    They are those of a pass in training mode.
    """
    fork = setup.fork()
    with torch.no_grad():
        fork.first_loss()  # a forward pass may call eval()
    return [Fact(path) for path, m in fork.model.named_modules()
            if not m.training and isinstance(m, NORMS) and _is_unused(m)]  # fmt: skip


def _is_unused(norm: Any) -> bool:
    mean, variance = norm.running_mean, norm.running_var
    return mean is not None and not bool(mean.any()) and bool((variance == 1).all())


@asks("dropout-in-eval")
def dropout_in_eval(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return dropout that drops where the module that calls it is in evaluation mode.

    A model that keeps its modules in training mode, to sample its outputs, does so on purpose.
    """
    fork = setup.fork()
    fork.model.eval()

    def rate(call: Call) -> float:
        if call.path is None or fork.model.get_submodule(call.path).training:
            return 0.0
        is_fused = call.name == "scaled_dot_product_attention"
        return call.argument(4, "dropout_p", 0.0) if is_fused else rate_of(call)

    drops = calls_of(fork, lambda call: rate(call) > 0)
    return (Fact(call.place, {"rate": rate(call)}) for call in drops)


@looks("outputs-constant")
class Constant(Look):
    """Are a module's outputs, and with them the model's, the same for all samples?

    The variance over samples is compared with the mean square, both summed over all entries of a
    sample. The module's inputs vary, and the outputs of the model do not. A last layer whose
    weights are zero begins with constant outputs on purpose.
    """

    def __init__(self, fork: Fork) -> None:
        self._size = size_of(fork.batches[0])
        self._found: list[Fact] = []
        self._outputs: list[tuple[float, float]] = []
        self._last: nn.Module | None = None
        for path, module in fork.model.named_modules():
            if path and not [*module.children()]:
                module.register_forward_hook(partial(self._after, path))
        fork.model.register_forward_hook(lambda m, _, out: self._outputs.extend(self._spreads(out)))

    def facts(self, loss: Tensor) -> Iterable[Fact]:
        """Return the first leaf module whose outputs no longer vary over samples."""
        if self._size < FEWEST:
            raise Untold(f"the batch has fewer than {FEWEST} samples")
        is_constant = all(v <= CONSTANT * square for v, square in self._outputs)
        return self._found[:1] if self._outputs and is_constant and not _is_zero(self._last) else ()

    def _after(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        if [*module.parameters()]:
            self._last = module
        given, made = self._spreads(args[:1]), self._spreads(output)
        if not given or not made:
            return
        (before, square_before), (variance, square) = given[0], made[0]
        is_constant = variance <= max(CONSTANT * square, ROUNDING * min(before, 1.0))
        if variance > max(CONSTANT * square, ROUNDING):
            self._found.clear()  # a later sum varies again
        elif is_constant and before > VARIES * square_before:
            share = min(variance / square, variance / before) if square else 0.0
            words = {"class": type(module).__name__}
            words |= {"before": "all layers"} if self._last is None else {}
            self._found.append(Fact(path, {"share": share}, words))

    def _spreads(self, x: Any) -> list[tuple[float, float]]:
        """Return variance over samples and mean square of each tensor that has all samples."""
        each = [y.detach().double() for y in tensors(x) if y.is_floating_point() and y.numel()
                and y.shape[:1] == (self._size,) and y.layout is torch.strided]  # fmt: skip
        return [(float(y.var(0, correction=0).mean()), float(y.square().mean())) for y in each]


def _is_zero(module: nn.Module | None) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and not weight.any()


@of_each_call("added-to-itself")
def added_to_itself(call: Call, fork: Fork) -> Fact | None:
    """Find sums in the model whose two operands are one computed tensor."""
    x, y = call.args[:2] if call.name == "add" and len(call.args) > 1 else (None, None)
    is_one = x is y and isinstance(x, Tensor) and x.requires_grad and call.path is not None
    return Fact(call.place) if is_one else None


@asks("collapsed")
def collapsed(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """See how much less outputs vary after training, where one output for all gives as low a loss.

    Before training, all samples get the outputs of the first one, and then these times −1. A convex
    loss of outputs and targets is not below that of outputs of zero both times.
    """
    if size_of(setup.batches[0]) < FEWEST:
        raise Untold(f"the batch has fewer than {FEWEST} samples")
    (first, start, own), (last, end, left) = map(_passed, (setup.fork(), setup.fork_like(trained)))
    if left < LEFT * own and (zero := _passed(setup.fork(), 0)[0]) <= min(last, NEARLY * first):
        return (Fact("", {"before": own, "after": left, "loss": zero}, {"zero": "True"}),)
    if end >= LEFT * start or first <= last:
        return ()
    loss = max(_passed(setup.fork(), sign)[0] for sign in (1, -1))
    is_lowest = loss <= last + _AS_LOW * (first - last)
    return (Fact("", {"before": start, "after": end, "loss": loss}),) if is_lowest else ()


def _passed(fork: Fork, sign: int | None = None) -> tuple[float, float, float]:
    """Run a fork's loss with the samples' own outputs (None), or the first one's times a sign.

    Outputs that are multiplied by 0 keep their gradients.

    These are the outputs of the modules that no other module calls, if they depend on trained
    parameters: a teacher keeps its own. Every call with outputs of the same shape then gives the
    same ones, so two views of a sample do not differ either.

    Returns:
        The loss, the variance over the samples of the last such outputs over their mean square,
        and this.
    """
    size = size_of(fork.batches[0])
    running: list[nn.Module] = []
    outputs: list[Tensor] = []
    of_all: dict[torch.Size, Tensor] = {}

    def in_place_of(x: Tensor) -> Tensor:
        if not x.requires_grad or not x.ndim or not len(x):
            return x
        if is_of_samples := len(x) % size == 0:
            outputs.append(x.detach().double())
        if not sign or not is_of_samples:
            return 0 * x if sign == 0 else x
        return of_all.setdefault(x.shape[1:], sign * x[0]).expand_as(x).clone()

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        running.pop()
        return None if running else mapped(output, in_place_of)

    for module in fork.model.modules():
        module.register_forward_pre_hook(lambda module, args: running.append(module))
        module.register_forward_hook(after)
    with torch.enable_grad():
        loss = float(fork.first_loss().detach())
    if not outputs:
        raise Untold("no trained module that the loss calls returns outputs of the samples")
    square = float(outputs[-1].square().mean())
    return loss, float(outputs[-1].var(0, correction=0).mean()) / square if square else 0.0, square


# Where functions are flat: their slope is below 2 % of its maximum. The numbers solve
# |f′(x)| = 0.02·max|f′| (differentiation and bisection); beyond them the slope only falls. They are
# those of the default α and β. Functions without a flat end (leaky ReLU, PReLU) are not listed.
_LOG_50 = math.log(50)  # e^-x is below 2 % beyond it
_LOGIT_98 = math.log(49)  # 1/(1 + e^x) is below 2 % beyond it

# A function is flat at or below the first number, and at or above the second.
Ends = tuple[float, float]
ENDS: Mapping[str, Ends] = {
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


def ends_of_function(function: str, arguments: Mapping[str, Any]) -> tuple[str, Ends] | None:
    """Return name and flat ends of a torch function; None if it is no activation with a flat end.

    Args:
        function: The function's `__name__`; in-place variants are accepted.
        arguments: Arguments other than the input, by name.
    """
    name = _SAME.get(function, function)
    if name == "hardtanh":
        ends = arguments.get("min_val", -1.0), arguments.get("max_val", 1.0)
        return ("relu6" if ends == (0.0, 6.0) else name), ends
    is_clamped = name in ("clamp", "clip", "clamp_min") and arguments.get("min") == 0
    if is_clamped and arguments.get("max") is None:
        name = "relu"
    return (name, ENDS[name]) if name in ENDS else None


# Dead units and saturated entries

_NORMS = ("batch_norm", "group_norm", "instance_norm")
_LAST = ("linear", "layer_norm", "rms_norm", "matmul", "bmm", "addmm", "einsum", "embedding",
         "multi_head_attention_forward", "scaled_dot_product_attention")  # fmt: skip
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
    def _look(self, path: str, name: str, ends: Ends, x: Tensor) -> None:
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
AFFINE = 1e-4  # share of the outputs' spread: rounding in a network of many layers


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

    fork.model.register_forward_hook(lambda module, args, out: used.extend(tensors(out)))
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

    Or so it is of what a sigmoid or a softmax at the end gets. It is False if the model has not
    exactly one input, of floating-point numbers.
    """
    run = ChangedInputs(fork, first(fork.batches[0], SAMPLES))
    if len(run.inputs) != 1 or not run.inputs[0].is_floating_point():
        return False

    def mixed(x: Tensor) -> Tensor:
        return x + x.roll(1, 0) - x.roll(2, 0)

    def fits(x: Tensor, y: Tensor) -> bool:
        spread = float((x - x.mean(0)).norm())
        is_told = spread > AFFINE * float(x.norm())
        return is_told and float((mixed(x) - y).norm()) <= AFFINE * spread

    size = len(run.inputs[0])
    pairs = [(x, y) for x, y in zip(run.own, run.outputs(mixed), strict=True)
             if x.shape[:1] == (size,)]  # fmt: skip
    return size >= LEAST and bool(pairs) and all(
        fits(x, y) or fits(_logits(x), _logits(y)) for x, y in pairs)  # fmt: skip


def _logits(x: Tensor) -> Tensor:
    """Return of what x is the sigmoid, or the softmax over the last axis; else NaN."""
    is_softmax = x.ndim > 1 and bool(((x.sum(-1) - 1).abs() < AFFINE).all())
    return x.log() - x.log().mean(-1, keepdim=True) if is_softmax else x.logit()
