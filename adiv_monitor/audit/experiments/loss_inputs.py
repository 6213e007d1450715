"""What does the loss get? Questions about the loss's own calls, and about those that lead to it."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from adiv_monitor.audit.experiments.calls import Call, Derived, calls_of, given, rate_of, see_calls
from adiv_monitor.audit.experiments.modules import ends_of_function
from adiv_monitor.audit.experiments.questions import Look, asks, looks, of_each_call
from adiv_monitor.audit.training.batches import size_of, tensors
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import ActivatedOutput, Fact
from adiv_monitor.diagnosis.seen import balance

LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
DIFFERENCES = ("sub", "subtract", "__rsub__", "rsub", *LOSSES)
MULTIPLIES = ("mul", "multiply")
OWN = ("cross_entropy", "binary_cross_entropy_with_logits")  # with their own softmax or sigmoid
CLASSIFIES = (*OWN, "nll_loss", "binary_cross_entropy", "multi_margin_loss")


def parts_like(x: Tensor, batches: Sequence[Any]) -> list[Tensor]:
    """Return the tensor of each batch that holds these entries in the first one; []: none does."""
    entries = x.detach().flatten().double()
    for i, part in enumerate(tensors(batches[0])):
        if part.numel() == len(entries) and torch.equal(part.flatten().double(), entries):
            return [list(tensors(batch))[i] for batch in batches]
    return []


class Known:
    """What is known of tensors, by their memory: views have it, too, until it is written to."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Tensor, int, Any]] = {}  # held, so that memory is not reused

    def note(self, x: Tensor, known: Any) -> None:
        """Note what is known of a tensor."""
        self._of[x.untyped_storage().data_ptr()] = x, x._version, known

    def of(self, x: object) -> Any:
        """Return what is known of a tensor; None: nothing."""
        if not isinstance(x, Tensor):
            return None
        _, version, known = self._of.get(x.untyped_storage().data_ptr(), (None, -1, None))
        return known if version == x._version else None


def outputs_and_targets(call: Call) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each of a call's first two tensors with the other, if that depends on no parameters."""
    sides = [x for x in (*call.args, *call.kwargs.values()) if isinstance(x, Tensor)][:2]
    for output, target in zip(sides, reversed(sides), strict=True):
        if len(sides) == 2 and not target.requires_grad:
            yield output, target


# Each output with the targets of all samples


@of_each_call("broadcast-loss")
def broadcast(call: Call, fork: Fork) -> Fact | None:
    """Find results larger than their operands, of which one depends on parameters.

    The operands have different numbers of dimensions, but the same number of samples, for example
    (B, 1) and (B,), whose difference is (B, B). Other functions than differences count in the loss,
    if they work entry by entry on one number for each sample: vectors may be paired on purpose. In
    the loss, outputs (B, B) less (B,) are some that one index chose for all samples, `q[:, a]`.
    """
    a, b = call.args[:2] if len(call.args) > 1 else (None, None)
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.requires_grad == b.requires_grad:
        return None
    if a.ndim == b.ndim or not (a.ndim and b.ndim and len(a) == len(b) > 1):
        return None
    is_difference = call.name in DIFFERENCES
    if not is_difference and (call.path is not None or not a.numel() == b.numel() == len(a)):
        return None
    shape = torch.broadcast_shapes(a.shape, b.shape)  # type: ignore[no-untyped-call]
    result, times = call.result, math.prod(shape) / max(a.numel(), b.numel())
    is_entrywise = isinstance(result, Tensor) and result.requires_grad and result.shape == shape
    words = {"of": str(tuple(a.shape)), "and": str(tuple(b.shape))}
    small, large = sorted((a, b), key=lambda x: x.ndim)
    is_square = large.shape == (len(small), *small.shape) and large.requires_grad
    times = max(times, len(small) * (is_difference and is_square and call.path is None))
    is_met = times > 1 and (is_difference or is_entrywise)
    return Fact(call.place, {"times": times}, words) if is_met else None


@of_each_call("arguments-exchanged")
def exchanged(call: Call, fork: Fork) -> Fact | None:
    """Find losses of unlike sides whose target depends on parameters, and whose input does not."""
    x, y = (call.argument(i, name) for i, name in enumerate(("input", "target")))
    is_met = call.name in CLASSIFIES and y.requires_grad and not x.requires_grad
    return Fact(call.place) if is_met else None


# Log-probabilities

_CLASSES = {"nll_loss": 1, "kl_div": -1, "ctc_loss": -1}  # the axis of the classes, by loss
_CLOSE = 1e-3  # rounding of a sum of probabilities
# Distances of the logarithm of the sum from 0: one that no rounding explains, and one that it may.
_FAR, _NEAR = 0.1, 0.02


@of_each_call("no-log")
def no_log(call: Call, fork: Fork) -> Fact | None:
    """Find losses of log-probabilities that are given something else."""
    given = given_to(call)
    return Fact(call.place, {}, {"given": given}) if given else None


@torch.no_grad()
def given_to(call: Call) -> str:
    """Return what a loss receives in place of log-probabilities; "": nothing else, as far as known.

    Probabilities are not negative and sum to 1, over the classes or the last axis. The exponentials
    of log-probabilities sum to 1: "another axis" if they do so along another one than that of the
    classes. Scores of which most rows violate this along all axes, some with positive entries,
    are "logits". Over which axes `kl_div` sums is not known.
    """
    x = _scores(call)
    if call.name not in _CLASSES or not isinstance(x, Tensor) or x.ndim < 2 or not x.numel():
        return ""
    classes = _CLASSES[call.name] % x.ndim
    several = [axis for axis in range(x.ndim) if x.shape[axis] > 1]
    sums = [x.float().sum(axis) for axis in {classes, 1, x.ndim - 1}.intersection(several)]
    if x.min() >= 0 and any(bool((total - 1).abs().max() < _CLOSE) for total in sums):
        return "probabilities"
    if call.name == "kl_div" or classes not in several:
        return ""
    off = {axis: x.float().logsumexp(axis).abs() for axis in several}
    if all(bool(each.median() > _FAR) for each in off.values()):
        return "logits" if bool(x.max() > 0) else ""
    is_other = any(bool(each.max() < _NEAR) for each in off.values())
    is_other &= call.name != "nll_loss" or x.ndim > 2  # else this is softmax-over-samples
    return "another axis" if is_other and bool(off[classes].median() > _FAR) else ""


def _scores(call: Call) -> Any:
    return call.argument(0, "log_probs" if call.name == "ctc_loss" else "input")


@of_each_call("label-is-blank")
def label_is_blank(call: Call, fork: Fork) -> Fact | None:
    """Return the share of a CTC loss's labels that have the number of its blank."""
    if call.name != "ctc_loss":
        return None
    labels, blank = call.argument(1, "targets"), call.argument(4, "blank", 0)
    if labels.ndim > 1:  # with padding
        lengths = torch.as_tensor(call.argument(3, "target_lengths"), device=labels.device)
        labels = labels[torch.arange(labels.shape[1], device=labels.device) < lengths[:, None]]
    share = float((labels == blank).double().mean())
    return Fact(call.place, {"share": share, "blank": float(blank)}) if share > 0 else None


# A softmax over one entry, or over the samples

SOFTMAXES = ("softmax", "log_softmax", "softmin")


@of_each_call("softmax-of-one")
def of_one(call: Call, fork: Fork) -> Fact | None:
    """Find softmaxes over an axis of length 1, of classes or of scores: the result is always 1."""
    samples, x, axis = size_of(fork.batches[0]), call.argument(0, "input"), call.argument(1, "dim")
    if samples > 1 and _softmax_over(call, 1) == (samples, 1):
        return _of_shape(call)
    is_softmax = call.name in SOFTMAXES and call.path is not None and isinstance(axis, int)
    if not is_softmax or x.ndim < 3 or x.shape[axis] != 1 or max(x.shape[1:]) == 1:
        return None
    return _of_shape(call, scores="True")


@looks("softmax-over-samples")
class OverAnotherAxis(Look):
    """Tells softmaxes of (samples, classes) over the first axis, which mix samples.

    If the tensors of a batch are of unlike length, as of one bag of instances and its target, their
    first axis is not that of the samples. Also tells cross-entropies of (samples, places, classes)
    as a linear layer returns them, with as many places: the classes of a cross-entropy are axis 1.
    """

    def __init__(self, fork: Fork) -> None:
        super().__init__(fork)
        self._samples = size_of(fork.batches[0])
        self._alike = all(len(x) == self._samples for x in tensors(fork.batches[0]) if x.ndim)
        self._made: list[Tensor] = []

    def see(self, call: Call) -> None:
        """Look at a call."""
        length, classes = _softmax_over(call, 0) or (0, 0)
        if self._alike and length == self._samples > 1 and classes not in (1, self._samples):
            self._found.append(_of_shape(call))
        scores = call.argument(0, "input")
        if call.name == "linear" and call.result.ndim == 3:
            self._made.append(call.result)
        elif call.name == "cross_entropy" and any(scores is x for x in self._made):
            self._found.append(_of_shape(call, places="True"))


def _of_shape(call: Call, **words: str) -> Fact:
    shape = str(tuple(call.argument(0, "input").shape))
    return Fact(call.place, {}, {"shape": shape, **words})


def _softmax_over(call: Call, axis: int) -> tuple[int, ...]:
    """Return the shape of a softmax, or cross-entropy, of two dimensions over an axis; or ()."""
    x, of = call.argument(0, "input"), call.argument(1, "dim")
    if call.name not in (*SOFTMAXES, "cross_entropy") or not isinstance(x, Tensor) or x.ndim != 2:
        return ()
    return tuple(x.shape) if (of % 2 if isinstance(of, int) else 1) == axis else ()


# Weights of classes


@of_each_call("class-weights")
@torch.no_grad()
def class_weights(call: Call, fork: Fork) -> Fact | None:
    """Return the `balance` of weights and counts; of binary targets, of 1 and `pos_weight`."""
    weight, target = call.argument(2, "weight"), call.argument(1, "target")
    positive = call.argument(6, "pos_weight") if call.name == OWN[1] else None
    if isinstance(positive, Tensor) and positive.numel() == 1:
        weight = torch.cat([torch.ones_like(positive.flatten()), positive.flatten()])
    elif call.name not in ("cross_entropy", "nll_loss") or target.is_floating_point():
        return None
    if not isinstance(weight, Tensor):
        return None
    targets = torch.cat([x.flatten() for x in parts_like(target, fork.batches) or [target]])
    targets = targets[targets != call.kwargs.get("ignore_index", -100)].long()
    counted = targets.bincount(minlength=len(weight))[: len(weight)]
    return next(balance(call.place, weight.tolist(), counted.tolist()), None)


# Targets that the function on the outputs can't reach

# Functions with a bounded range that never fall; and what moves or scales a result by a number.
BOUNDED = ("relu", "softplus", "relu6", "sigmoid", "special_expit", "hardsigmoid", "tanh",
           "hardtanh", "clamp", "clamp_min", "clamp_max", "clip", "exp", "elu")  # fmt: skip
_MOVES = ("mul", "div", "neg", "add", "sub", "rsub", "__rsub__")
NEARLY = 0.05  # of the targets' standard deviation: those that are less beyond a range count as met
SEVERAL = 1.5  # sum of the targets of a sample from which on they are of several classes


@looks("targets-out-of-range")
class OutOfRange:
    """The share of targets that the function on the outputs can't reach.

    These are targets outside its range, rows of targets of several classes at once, if it is a
    softmax, whose results sum to 1, or targets of a binary cross-entropy below 0 or above 1.
    """

    def __init__(self, fork: Fork) -> None:
        self._known = Known()  # of results: the bounded function or softmax, and its ends
        # Each with a comparison: the call that can't reach targets, those of them, and words.
        self._met: list[tuple[Call, Call, Tensor, Tensor, dict[str, str]]] = []

    def see(self, call: Call) -> None:
        """Note bounds and softmaxes, and what a call compares with targets."""
        known = (*DIFFERENCES, *CLASSIFIES, *MULTIPLIES)  # overlaps multiply
        for output, target in outputs_and_targets(call) if call.name in known else ():
            is_read = call.name not in MULTIPLIES or _is_mask(target)
            if is_read and target.numel() > 1 and output.requires_grad:  # no number that scales
                self._compare(call, output, target.double())
        if call.name == "softmax" and isinstance(call.argument(1, "dim"), int):
            self._known.note(call.result, (call, None))
        elif call.args and call.name in (*BOUNDED, *_MOVES) and len(given(call)) == 1:
            source, ends = self._known.of(call.args[0]) or (call, None)
            if call.name in BOUNDED:
                source, ends = call, [-math.inf, math.inf]
            if ends is not None:
                ends = call.function(torch.tensor(ends), *call.args[1:], **call.kwargs)
                self._known.note(call.result, (source, sorted(ends.tolist())))

    def _compare(self, call: Call, x: Tensor, y: Tensor) -> None:
        source, ends = self._known.of(x) or (call, None)
        axis = min(1, y.ndim - 1) if source is call else source.argument(1, "dim")
        is_own = call.name == "cross_entropy" if source is call else x.shape == source.result.shape
        if call.name == "binary_cross_entropy_with_logits":
            self._met.append((call, call, (y < 0) | (y > 1), y, {}))
        elif ends is not None:
            words = {"low": f"{ends[0]:g}", "high": f"{ends[1]:g}"}
            beyond = torch.maximum(ends[0] - y, y - ends[1]) > NEARLY * y.std()
            self._met.append((call, source, beyond, y, words))
        elif is_own and x.shape == y.shape:
            self._met.append((call, source, y.sum(axis) > SEVERAL, y, {"sum": "1"}))

    def facts(self, loss: Tensor) -> Iterable[Fact]:
        """Return a fact for each function that can't reach some targets that count in the loss.

        If a loss compares entry by entry, a mask may leave some out: their gradient is zero.
        """
        for call, source, wrong, target, words in self._met:
            counts = torch.ones_like(wrong)
            if call.result.requires_grad and call.result.shape == wrong.shape:
                (g,) = torch.autograd.grad(loss, call.result, retain_graph=True, allow_unused=True)
                counts = counts if g is None else g != 0
            share = float(wrong[counts].double().mean())
            if share > 0:
                if not words:
                    at = target[counts]
                    words["farthest"] = f"{float(at[(at - 0.5).abs().argmax()]):.3g}"
                words["function"] = source.name
                yield Fact(source.place, {"share": share}, words)


def _is_mask(x: Tensor) -> bool:
    """Return whether entries are 0 or another number, as 255 in masks that are read from files."""
    return bool(((x == 0) | (x == x.max())).all()) and float(x.max()) not in (0.0, 1.0)


# Statistics of the outputs that a normalisation at the end forces

_AXES = {"instance_norm": 2, "layer_norm": -1}  # the first axis that each normalises over


@looks("outputs-forced")
class Forced:
    """Tells a normalisation of samples at the end, and what it leaves out of the targets.

    That is the variance of the targets' means over its axes, over that of the targets.
    """

    def __init__(self, fork: Fork) -> None:
        self._made, self._found = Derived(), dict[str, Fact]()

    def see(self, call: Call) -> None:
        """Follow the results of normalisations to what they are compared with."""
        for x, y in outputs_and_targets(call) if call.name in DIFFERENCES else ():
            if x.shape == y.shape and (norm := self._made.source(x)) and x.requires_grad:
                means = y.double().flatten(_AXES[norm.name]).mean(-1)
                share = float(means.var(0).mean() / y.double().var())
                self._found[norm.place] = Fact(norm.place, {"share": share})
        self._made.follow(call)
        if call.name in _AXES and call.result.ndim > 1:
            self._made.begin(call)

    def facts(self, loss: Tensor) -> Iterable[Fact]:
        """Return a fact for each such normalisation."""
        return self._found.values()


# Dropout

HIGH = 0.7  # share that dropout drops


@of_each_call("dropout-too-high")
def dropout_too_high(call: Call, fork: Fork) -> Fact | None:
    """Return a dropout rate above 0.7."""
    rate = rate_of(call)
    return Fact(call.place, {"rate": rate}) if rate > HIGH else None


@asks("dropout-on-outputs")
def dropout_on_outputs(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return where dropout acts on what the loss compares with targets."""
    return (Fact(call.place, {"rate": rate_of(call)}) for call in dropped(setup.fork()))


def dropped(fork: Fork) -> list[Call]:
    """Return the calls of dropout whose results the loss compares with targets.

    A function of further computed tensors, such as the sum of a residual connection, ends the
    chain.
    """
    made, found = Derived(), dict[int, Call]()

    def see(call: Call) -> None:
        is_met = call.name in (*CLASSIFIES, *DIFFERENCES)
        for output, _ in outputs_and_targets(call) if is_met else ():
            if (source := made.source(output)) is not None:
                found[source.number] = source
        if len([x for x in given(call) if x.grad_fn is not None]) == 1:
            made.follow(call)
        if call.path is not None and rate_of(call) > 0:
            made.begin(call)

    see_calls(fork, see)
    return [*found.values()]


# An activation function, or a softmax, on logits


@torch.no_grad()
def activation(fork: Fork) -> Call | None:
    """Return the call of the activation function, or softmax, whose outputs are taken for logits.

    Its outputs go unchanged into a loss that has a softmax, a sigmoid or an exponential of its own.
    None: there is no such function.
    """
    known, found = Known(), None

    def see(call: Call) -> None:
        nonlocal found
        takes_exp = call.name == "poisson_nll_loss" and call.argument(2, "log_input", True)
        if call.name in (*OWN, "log_softmax") or takes_exp:
            found = known.of(call.argument(0, "input")) or found
        elif call.name == "logsumexp" and call.path is None:  # that of `Categorical(logits=…)`
            source = known.of(call.argument(0, "input"))
            found = source if source and _activation(source) == "softmax" else found
        x = call.result
        if isinstance(x, Tensor) and x.is_floating_point() and _activation(call):
            known.note(x, call)

    see_calls(fork, see)
    return found


def activated_output(fork: Fork) -> ActivatedOutput | None:
    """Return the name and the module of that function."""
    call = activation(fork)
    return None if call is None else ActivatedOutput(_activation(call), call.path)


def _activation(call: Call) -> str:
    if call.name in ("softmax", "exp"):
        return call.name
    ends = ends_of_function(call.name, call.kwargs)
    return ends[0] if ends else ""


# Logits within ±1, like cosines without a temperature

CLASSES = 8  # fewest classes: with fewer, the lowest loss is not far from zero
MOST = 0.9  # share of the logits
_LARGER = 10.0
_GROWN = 3.0  # small logits without bounds grow at least as the last layer's weights


@asks("bounded-logits")
@torch.no_grad()
def bounded_logits(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return the share of a trained model's logits within ±1, also with larger weights."""
    fork = setup.fork_like(trained)
    shares, sizes = [], []
    for factor in (1.0, _LARGER):
        for p in fork.model.parameters():
            p.mul_(factor)
        calls = calls_of(fork, lambda call: call.name == "cross_entropy")
        logits = [x.float() for call in calls if (x := call.argument(0, "input")).ndim > 1]
        if not logits or logits[0].shape[1] < CLASSES:
            return ()
        shares.append(min(float((x.abs() <= 1).float().mean()) for x in logits))
        sizes.append(max(float(x.square().mean()) ** 0.5 for x in logits))
    if min(shares) <= MOST or not 0 < sizes[1] < _GROWN * sizes[0]:
        return ()
    classes = logits[0].shape[1]
    floor = math.log1p((classes - 1) * math.exp(-2))
    return (Fact(calls[0].place, {"share": min(shares), "classes": classes, "floor": floor}),)


# A tensor compared with itself


_CANCELS = ("sub", "div")


@asks("zero-gradient")
@torch.enable_grad()
def compared_with_itself(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return the losses of a trained model whose output equals its target to the last digit.

    And differences, or ratios, of two equal results with gradients, which cancel.

    These are the same entries in memory, or results of different calls. A student that begins as a
    copy of its teacher no longer equals it after training.
    """
    fork = setup.fork_like(trained)
    calls = calls_of(fork, lambda call: _are_equal(call) or _cancels(call))
    return (Fact(call.place) for call in calls)


def _cancels(call: Call) -> bool:
    """Return whether a call in the loss subtracts, or divides, a result by an equal one."""
    x, y = call.args[:2] if call.name in _CANCELS and call.path is None else (None, None)
    both = isinstance(x, Tensor) and isinstance(y, Tensor) and x.requires_grad and y.requires_grad
    return both and x.shape == y.shape and x.numel() > 1 and torch.equal(x, y)


def _are_equal(call: Call) -> bool:
    """Return whether both sides of a loss are equal; those of `kl_div` up to rounding."""
    x, y = call.argument(0, "input"), call.argument(1, "target")
    if call.name not in (*LOSSES, "kl_div") or x.shape != y.shape or x.numel() < 2:
        return False
    if call.name == "kl_div":
        y = y if call.argument(5, "log_target", False) else y.log()
        return torch.allclose(x.exp(), y.exp(), rtol=1e-6, atol=1e-7)
    return torch.equal(x, y) and bool((y != y.flatten()[0]).any())
