"""Questions about copies of the model, by the names of the faults that they are about.

A question changes nothing of the run, and uses none of its random numbers. Those that only look at
the calls of one pass share that pass.
"""

import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from adiv_monitor.audit.experiments.calls import Call, see_calls, undropped
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact, Probed

Ask = Callable[[Setup, Fork], Iterable[Fact]]
FactOf = Callable[[Call, Fork], Fact | None]


class Untold(Exception):
    """Raised by a question that can't be answered; the message says why."""


class Look:
    """A question about the recorded pass: one pass, loss and backward pass of the first batch.

    Dropout drops nothing. `Look(fork)` may put hooks on the copy.
    """

    def __init__(self, fork: Fork) -> None:
        self._fork = fork
        self._found: list[Fact] = []

    def see(self, call: Call) -> None:
        """Look at a call after it has returned; its tensors may be overwritten later."""

    def facts(self, loss: Tensor) -> Iterable[Fact]:
        """Return the facts, after the backward pass, which keeps the graph."""
        return self._found


ASKS: dict[str, Ask] = {}  # with passes of their own
# Those that need all samples.
OF_DATA = ("same-batch", "unshuffled", "constant-data", "targets-moved", "labels-unrelated",
           "class-untaught", "behind-reference", "target-leak")  # fmt: skip
LOOKS: dict[str, type[Any]] = {}  # of `Look`


def asks(name: str) -> Callable[[Ask], Ask]:
    """Register a question with passes of its own, from the setup and a trained copy to facts."""
    return lambda ask: ASKS.setdefault(name, ask)


def looks(name: str) -> Callable[[type[Any]], type[Any]]:
    """Register a class of `Look`."""
    return lambda look: LOOKS.setdefault(name, look)


def of_each_call(name: str) -> Callable[[FactOf], FactOf]:
    """Register a question about single calls of the recorded pass, from call and copy to a fact."""

    def register(fact_of: FactOf) -> FactOf:
        class EachCall(Look):
            def see(self, call: Call) -> None:
                if (fact := fact_of(call, self._fork)) is not None:
                    self._found.append(fact)

        LOOKS[name] = EachCall
        return fact_of

    return register


def asked(
    setup: Setup, trained: Fork, names: Collection[str] = (), small: Setup | None = None
) -> dict[str, Probed]:
    """Return the answers by name, of all questions or of some; a failed one has a reason.

    Questions about the model are asked of a setup of few samples, `small`, if there is one.
    """
    found = _looked(setup, [name for name in LOOKS if not names or name in names])
    for name, ask in ASKS.items():
        if not names or name in names:
            found[name] = _answer(ask, setup if name in OF_DATA else small or setup, trained)
    return found


def _looked(setup: Setup, names: Collection[str]) -> dict[str, Probed]:
    """Run the recorded pass for some questions."""
    found: dict[str, Probed] = {}
    fork = setup.fork()
    made: dict[str, Look] = {name: LOOKS[name](fork) for name in names}

    def see(call: Call) -> None:
        for name, look in made.items():
            try:
                if name not in found:
                    look.see(call)
            except Exception as error:  # a call of an unusual kind
                found[name] = _failed(error)

    try:
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run has shown them
            loss = see_calls(fork, see, change=undropped) if made else torch.zeros(())
            if loss.requires_grad:
                loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    except Exception as error:
        return {name: _failed(error) for name in made} | found
    return {name: _answer(look.facts, loss) for name, look in made.items()} | found


def _answer(ask: Callable[..., Iterable[Fact]], *given: Any) -> Probed:
    """Return the first fact at each place, up to where the question fails."""
    found: dict[str | int, Fact] = {}
    try:
        for number, fact in enumerate(ask(*given)):
            found.setdefault(fact.place or number, fact)
    except Exception as error:  # a copy may not run with the question's inputs
        return replace(_failed(error), facts=tuple(found.values()))
    return Probed(tuple(found.values()))


def _failed(error: Exception) -> Probed:
    said = str(error).partition("\n")[0]
    return Probed(untold=said if isinstance(error, Untold) else f"{type(error).__name__}: {said}")
