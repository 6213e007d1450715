"""Is a softmax taken over a single entry, or over the samples of the batch?"""

from torch import Tensor

from adiv_monitor.audit.experiments.calls import Call
from adiv_monitor.audit.experiments.questions import of_each_call
from adiv_monitor.audit.training.batches import size_of, tensors
from adiv_monitor.audit.training.setup import Fork
from adiv_monitor.diagnosis.record import Fact

FUNCTIONS = ("softmax", "log_softmax", "softmin")
OWN = (
    "cross_entropy",
    "binary_cross_entropy_with_logits",
)  # losses with their own softmax or sigmoid


@of_each_call("softmax-of-one")
def of_one(call: Call, fork: Fork) -> Fact | None:
    """Find softmaxes of (samples, 1) over the last axis, whose result is always 1."""
    return _fact(call) if is_of_one(call, size_of(fork.batches[0])) else None


@of_each_call("softmax-over-samples")
def over_samples(call: Call, fork: Fork) -> Fact | None:
    """Find softmaxes of (samples, classes) over the first axis, which mix samples.

    If the tensors of a batch are of unlike length, as of one bag of instances and its target, their
    first axis is not that of the samples.
    """
    samples = size_of(fork.batches[0])
    alike = all(len(x) == samples for x in tensors(fork.batches[0]) if x.ndim)
    return _fact(call) if alike and is_over_samples(call, samples) else None


def _fact(call: Call) -> Fact:
    shape = str(tuple(call.argument(0, "input").shape))
    return Fact(call.place, {}, {"shape": shape, "function": call.name})


def is_of_one(call: Call, samples: int) -> bool:
    """Return whether a call is a softmax, or a cross-entropy, of one class."""
    x = call.argument(0, "input")
    if not isinstance(x, Tensor) or x.ndim != 2 or len(x) != samples or samples < 2:
        return False
    if call.name == "cross_entropy":
        return x.shape[1] == 1
    return call.name in FUNCTIONS and x.shape[1] == 1 and _axis(call, x) == 1


def is_over_samples(call: Call, samples: int) -> bool:
    """Return whether a call is a softmax over the samples, with several classes."""
    x = call.argument(0, "input")
    if call.name not in FUNCTIONS or not isinstance(x, Tensor):
        return False
    is_matrix = x.ndim == 2 and len(x) == samples > 1 and x.shape[1] > 1
    return is_matrix and x.shape[0] != x.shape[1] and _axis(call, x) == 0


def _axis(call: Call, x: Tensor) -> int:
    axis = call.argument(1, "dim")
    return 1 if axis is None else int(axis) % x.ndim
