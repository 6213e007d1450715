"""Does dropout, or a normalisation, stand between the last layer and the loss?"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from adiv_monitor.audit.experiments.calls import Call, change_calls, see_calls
from adiv_monitor.audit.experiments.derived import Derived, flat
from adiv_monitor.audit.experiments.dropout import rate_of
from adiv_monitor.audit.experiments.probes.broadcast_loss import DIFFERENCES
from adiv_monitor.audit.experiments.questions import asks
from adiv_monitor.audit.experiments.repeated_loss import RepeatedLoss
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact

CLASSIFIES = ("cross_entropy", "nll_loss", "binary_cross_entropy",
              "binary_cross_entropy_with_logits", "multi_margin_loss")  # fmt: skip
NORMS = ("batch_norm", "instance_norm", "layer_norm", "group_norm")


@asks("dropout-on-outputs")
def dropout(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return where dropout acts on what the loss compares with targets, and what it costs."""
    found = dropped(setup.fork())
    if not found:
        return ()
    bare = replace(trained)
    leave_out(bare, found)
    batch = trained.batches[-1]
    price = {"with": RepeatedLoss(trained).of(batch), "without": RepeatedLoss(bare).of(batch)}
    return tuple(Fact(call.place, {"rate": rate_of(call), **price}) for call in found)


@asks("outputs-normalised")
def normalised(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return the normalisations of the outputs that a regression compares with targets.

    Each comes with the means and the standard deviations of outputs and targets.
    """
    facts = {}
    for call, output, target in _compared(setup.fork(), _normalises, DIFFERENCES):
        x, y = output.detach().double(), target.detach().double()
        numbers = {
            "mean": float(x.mean()),
            "std": float(x.std()),
            "target mean": float(y.mean()),
            "target std": float(y.std()),
        }
        facts[call.place] = Fact(call.place, numbers, {"function": call.name})
    return tuple(facts.values())


def dropped(fork: Fork) -> list[Call]:
    """Return the calls of dropout whose results the loss compares with targets."""
    compare = (*CLASSIFIES, *DIFFERENCES)
    return [call for call, *_ in _compared(fork, lambda call: rate_of(call) > 0, compare)]


def norms(fork: Fork) -> list[Call]:
    """Return the calls of normalisations whose results a regression compares with targets."""
    return [call for call, *_ in _compared(fork, _normalises, DIFFERENCES)]


def leave_out(fork: Fork, calls: list[Call]) -> None:
    """Let calls of a pass, known by their numbers, return their inputs from now on."""
    names = {call.number: call.name for call in calls}

    def change(call: Call) -> object:
        is_one = names.get(call.number) == call.name
        return call.argument(0, "input") if is_one else NotImplemented

    change_calls(fork, change)


def _normalises(call: Call) -> bool:
    return call.name in NORMS


def _compared(
    fork: Fork, is_met: Callable[[Call], bool], compare: tuple[str, ...]
) -> list[tuple[Call, Tensor, Tensor]]:
    """Return calls from whose results one side of a comparison derives, with both sides.

    The other side depends on no parameters. A function of further computed tensors, such as the sum
    of a residual connection, ends the chain.
    """
    made = Derived()
    found: dict[int, tuple[Call, Tensor, Tensor]] = {}

    def look(call: Call) -> None:
        if call.name in compare:
            for source, output, target in _sides(call, made):
                found.setdefault(source.number, (source, output, target))
        computed = [x for x in flat([*call.args, *call.kwargs.values()]) if x.grad_fn is not None]
        if len(computed) == 1:
            made.follow(call)
        if call.path is not None and is_met(call):
            made.begin(call)

    with torch.enable_grad():
        see_calls(fork, look)
    return list(found.values())


def _sides(call: Call, made: Derived) -> Iterator[tuple[Call, Tensor, Tensor]]:
    sides = [x for x in (*call.args, *call.kwargs.values()) if isinstance(x, Tensor)][:2]
    for output, target in zip(sides, reversed(sides), strict=True):
        source = made.source(output)
        if source is not None and not target.requires_grad:
            yield source, output, target
