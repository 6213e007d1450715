"""Is a tensor concatenated with itself, or added to itself?"""

from collections.abc import Sequence

from torch import Tensor

from adiv_monitor.audit.seen.calls import Call, see_calls
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact, Probed

JOINS = ("cat", "concat", "concatenate")
SUMS = ("add", "__add__", "__iadd__")


def ask(setup: Setup, trained: Fork) -> Probed:
    """Return the calls in modules that join features with the same features."""
    found: dict[str, Fact] = {}

    def look(call: Call) -> None:
        if call.path is not None and (x := joined(call)) is not None:
            words = {"function": call.name, "shape": str(tuple(x.shape))}
            found.setdefault(call.place, Fact(call.place, {}, words))

    see_calls(setup.fork(), look)
    return Probed(tuple(found.values()))


def joined(call: Call) -> Tensor | None:
    """Return the tensor that a call concatenates with itself, or adds to itself; else None.

    Only features that depend on parameters count: channels of an input may be repeated on purpose.
    Copies along the first axis, that of the samples, are no repeated features.
    """
    if call.name in JOINS:
        given = call.argument(0, "tensors")
        axis = call.argument(1, "dim", call.kwargs.get("axis", 0))
        parts = [x for x in given if isinstance(x, Tensor)] if isinstance(given, Sequence) else []
        if not parts or not isinstance(axis, int) or axis % max(parts[0].ndim, 1) == 0:
            return None
    elif call.name in SUMS:
        parts = [x for x in call.args[:2] if isinstance(x, Tensor)]
    else:
        return None
    computed = [x for x in parts if x.grad_fn is not None]
    return next(
        (x for i, x in enumerate(computed) if any(x is other for other in computed[:i])), None
    )
