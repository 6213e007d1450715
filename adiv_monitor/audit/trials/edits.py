"""Edits of single calls, which are tried where no finding explains a loss that stays high.

As in program repair by search (Le Goues et al. 2012), each edit changes one line's calls of one
function in a fork, which then trains as the run did. An edit that leaves the loss far lower shows
the line where the fault is, whatever its kind.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from adiv_monitor.audit.experiments.calls import Call, calls_of, change_calls, given
from adiv_monitor.audit.training.setup import Setup
from adiv_monitor.audit.training.train import Progress, silent
from adiv_monitor.audit.trials.trial import (
    NEVER,
    Cap,
    CapReached,
    affordable,
    at_the_end,
    compared,
    losses_of,
)
from adiv_monitor.diagnosis.record import Fact, Probed, Record

FOR_EDITS = 12.0  # largest cost, in the unit of `Facts.step_cost`
MOST = 40  # edits of which the first third of a run is made
BEST = 3  # of them whose runs are made whole
ALIKE = 0.3  # of the first loss: an edit outside the model that changes it more is another loss
# An edit counts if it leaves less than this share of the loss: a rearrangement does so only where
# the former order is wrong; a function that is left out may have slowed a healthy training.
REARRANGED, LEFT_OUT = 0.75, 0.5

_SUBTRACT = ("sub", "__sub__", "rsub", "div", "__truediv__", "true_divide", "kl_div")
_SCALE = ("mul", "__mul__", "__rmul__", "div", "__truediv__")
_VIEWS = ("view", "reshape", "flatten", "unflatten", "__getitem__")
_KEPT = ("linear", "to", "float", "contiguous", "clone", "type", "embedding", "dropout")
_COMPARE = (
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "sub", "__sub__"),
)
_WITHOUT_AXIS = (*_VIEWS, *_SCALE, *_SUBTRACT, "squeeze", "unsqueeze")
Result = Callable[[Call], Any]


@dataclass
class Edit:
    """A change of all calls of a function in one line.

    Attributes:
        words: the change.
        call: the first of them, in the recorded pass.
        share: the share of the loss below which it counts.
        results: by number of the call, what it returns instead.
    """

    words: str
    call: Call
    share: float
    results: dict[int, Result] = field(default_factory=dict)

    def apply(self, call: Call) -> Any:
        """Return the call's new result; `NotImplemented`: it is none of these."""
        result = self.results.get(call.number)
        return NotImplemented if result is None or call.name != self.call.name else result(call)


def with_edits(
    setup: Setup, record: Record, *, cap: Cap = NEVER, progress: Progress = silent
) -> Record:
    """Return the record with the best edit, if one leaves the loss far lower than any rate does.

    Args:
        setup: training setup.
        record: record of the unchanged run, with `rates` if learning rates were tried.
        cap: time by which the runs end.
        progress: called with ("edits", edits done, edits).

    Raises:
        KeyboardInterrupt: the user interrupted a run.
    """
    edits, without = _edits(setup), record.losses[: setup.steps]
    cap.left = affordable(record, FOR_EDITS)
    short = max(1, setup.steps // 3)
    begun: list[tuple[float, int]] = []
    for number, edit in enumerate(edits):
        progress("edits", number, len(edits))
        losses = _run(replace(setup, steps=short), record, edit, cap)
        end = at_the_end(losses, short)
        is_same = edit.call.path is not None or abs(losses[0] - without[0]) < ALIKE * abs(
            without[0]
        )
        if losses and is_same and end < at_the_end(without[:short], short):
            begun.append((end, number))
    rates = [trial.loss for trial in record.rates.values()]
    facts = []
    for _, number in sorted(begun)[:BEST]:
        edit = edits[number]
        found = compared("", _run(setup, record, edit, cap), without, setup.steps)
        if found.pays and found.loss < edit.share * min([found.loss_without, *rates]):
            numbers = {"loss": found.loss, "without": found.loss_without}
            facts.append(Fact(edit.call.place, numbers, {"edit": edit.words}))
    facts.sort(key=lambda fact: fact.numbers["loss"])
    return replace(record, probed={**record.probed, "one-edit": Probed(tuple(facts[:1]))})


def _run(setup: Setup, record: Record, edit: Edit, cap: Cap) -> tuple[float, ...]:
    """Return the losses of a run with an edit; () if it does not run, or there is no time."""
    fork = setup.fork()
    change_calls(fork, edit.apply)
    try:
        cap.check(record, setup.steps)
        cap.left -= setup.steps
        return losses_of(fork)
    except CapReached:
        return ()
    except Exception:  # no such edit: shapes or kinds do not fit
        return ()


def _is_same_loss(edit: Edit, losses: Sequence[float], without: Sequence[float]) -> bool:
    """Return whether two runs have the same loss: the edit is in the model, or changes no size."""
    return edit.call.path is not None or abs(losses[0] - without[0]) < ALIKE * abs(without[0])


def _edits(setup: Setup) -> list[Edit]:
    """Return the edits of the first batch's pass, those nearest to the loss first."""
    found: dict[tuple[str, str, str], Edit] = {}
    for call in reversed(calls_of(setup.fork(), lambda call: isinstance(call.result, Tensor))):
        for words, share, result in (*_rearranged(call), *_left_out(call)):
            edit = found.setdefault((call.line, call.name, words), Edit(words, call, share))
            edit.results[call.number] = result
    return [*found.values()][:MOST]


def _left_out(call: Call) -> Iterator[tuple[str, float, Result]]:
    """Yield the edit that returns the first argument, if it has the result's shape and dtype."""
    x = call.argument(0, "input")
    is_alike = isinstance(x, Tensor) and x.is_floating_point() and x.dtype == call.result.dtype
    is_new = x is not call.result and call.name not in (*_KEPT, "__get__", "__set__")
    if is_alike and is_new and x.shape == call.result.shape and "rand" not in call.name:
        yield "left out", LEFT_OUT, lambda call: call.argument(0, "input")


def _rearranged(call: Call) -> Iterator[tuple[str, float, Result]]:
    """Yield edits that take axes, operands, masks or targets in another order or sense."""
    several = given(call)
    x, axes = (several[0], several[0].ndim) if several else (call.result, 0)
    axis = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 else None)
    if type(axis) is int and call.name not in (
        *_VIEWS,
        "unsqueeze",
        "squeeze",
        *_SCALE,
        *_SUBTRACT,
    ):
        for other in set(range(axes)) - {axis % max(axes, 1)}:
            yield f"with dim={other}", REARRANGED, partial(_along, axis=other)
    if call.name in _VIEWS[:3] and x.numel() == call.result.numel():
        for pair in combinations(range(min(axes, 3)), 2):
            yield f"after transpose{pair}", REARRANGED, partial(_transposed, pair=pair)
    if call.name in _SUBTRACT and len(several) == 2 and several[0].shape == several[1].shape:
        yield "with its operands exchanged", REARRANGED, _exchanged
    if (
        call.name in _SCALE
        and type(call.args[1]) in (int, float)
        and call.args[1] not in (0, 1, -1)
    ):
        yield f"by 1/{call.args[1]:g}", REARRANGED, _inverted
    if any(
        y.dtype.is_floating_point is False and str(y.dtype) == "torch.bool" for y in several[1:]
    ):
        yield "with the mask inverted", REARRANGED, _unmasked
    if call.name == "__getitem__" and _ends(call.args[1]) != call.args[1]:
        yield "at the other end", REARRANGED, lambda call: call.args[0][_ends(call.args[1])]
    if call.name in _COMPARE and call.path is None and len(several) > 1:
        y = several[1]
        for axis in range(y.ndim):
            for words, change in _ORDERS.items():
                yield (
                    f"with targets {words} along axis {axis}",
                    REARRANGED,
                    partial(_of_targets, change=partial(change, axis=axis)),
                )
        for pair in combinations(range(1, y.ndim), 2):
            if y.shape[pair[0]] == y.shape[pair[1]]:
                yield (
                    f"with targets transposed{pair}",
                    REARRANGED,
                    partial(_of_targets, change=lambda y, pair=pair: y.transpose(*pair)),
                )


def _along(call: Call, axis: int) -> Any:
    if "dim" in call.kwargs:
        return call.function(*call.args, **{**call.kwargs, "dim": axis})
    return call.function(call.args[0], axis, *call.args[2:], **call.kwargs)


def _transposed(call: Call, pair: tuple[int, int]) -> Any:
    return call.function(call.args[0].transpose(*pair).contiguous(), *call.args[1:], **call.kwargs)


def _exchanged(call: Call) -> Any:
    x, y, *others = call.args
    return call.function(y, x, *others, **call.kwargs)


def _inverted(call: Call) -> Any:
    return call.function(call.args[0], 1 / call.args[1])


def _unmasked(call: Call) -> Any:
    def change(x: Any) -> Any:
        return ~x if isinstance(x, Tensor) and x.dtype is torch.bool else x

    kwargs = {name: change(x) for name, x in call.kwargs.items()}
    return call.function(call.args[0], *map(change, call.args[1:]), **kwargs)


def _ends(index: Any) -> Any:
    """Return an index with the last place for the first one, and the first for the last."""
    if isinstance(index, tuple):
        return tuple(_ends(i) for i in index)
    return {0: -1, -1: 0}.get(index, index) if type(index) is int else index


_ORDERS: dict[str, Callable[..., Tensor]] = {
    "reversed": lambda y, axis: y.flip(axis),
    "moved by one": lambda y, axis: y.roll(1, axis),
    "moved back by one": lambda y, axis: y.roll(-1, axis),
}


def _of_targets(call: Call, change: Callable[[Tensor], Tensor]) -> Any:
    x, y, *others = call.args
    return call.function(x, change(y), *others, **call.kwargs)
