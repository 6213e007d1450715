"""The search for a line that keeps the loss high, where no finding explains it.

As in program repair by search (Le Goues et al. 2012), each edit changes the calls of one function
in one line of a fork, which then trains as the run did. An edit that leaves the loss far lower
shows where the fault is, whatever its kind.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from adiv_monitor.audit.experiments.calls import Call, calls_of, change_calls
from adiv_monitor.audit.training.setup import Setup
from adiv_monitor.audit.training.train import Progress, silent
from adiv_monitor.audit.trials.edits import Edit, edits_of
from adiv_monitor.audit.trials.trial import (
    NEVER,
    Cap,
    Losses,
    affordable,
    at_the_end,
    compared,
    losses_of,
)
from adiv_monitor.diagnosis.faults.edits import LEFT_OUT, REARRANGED
from adiv_monitor.diagnosis.finding import NO_STEPS
from adiv_monitor.diagnosis.record import Fact, Probed, Record

FOR_EDITS = 12.0  # largest cost, in the unit of `Facts.step_cost`
MOST, SHORT = 24, 4  # edits that are tried; each first in a run of 1/4 of the steps
BEST = 2  # of them get a whole run
ALIKE = 0.3  # of the first loss: a change outside the model that alters it more makes another loss


@dataclass
class Candidate:
    """An edit of all calls of a function in one line.

    Attributes:
        edit: the edit of the last of these calls in the recorded pass.
        call: that call.
        results: by number of a call, its new result.
    """

    edit: Edit
    call: Call
    results: dict[int, Callable[[Call], Any]] = field(default_factory=dict)

    def losses(self, setup: Setup, record: Record, cap: Cap) -> Losses:
        """Return the losses of a run with the edit; (): it does not run, or there is no time."""

        def result(call: Call) -> Any:
            of = self.results.get(call.number) if call.name == self.call.name else None
            return NotImplemented if of is None else of(call)

        fork = setup.fork()
        change_calls(fork, result)
        try:
            cap.check(record, setup.steps)
            cap.left -= setup.steps
            return losses_of(fork)
        except Exception:  # shapes or kinds do not fit, or the cap is reached
            return ()


def with_edits(
    setup: Setup, record: Record, *, cap: Cap = NEVER, progress: Progress = silent
) -> Record:
    """Return the record with the best edit, if it leaves the loss far lower than any rate does.

    Args:
        setup: training setup.
        record: record of the unchanged run, with `rates` if learning rates were tried.
        cap: time by which the runs end.
        progress: called with ("edits", edits done, edits).

    Raises:
        KeyboardInterrupt: the user interrupted a run.
    """
    without = record.losses[: setup.steps]
    short = replace(setup, steps=max(1, setup.steps // SHORT))
    candidates, begun = _candidates(setup), list[tuple[float, int]]()
    cap.left = len(candidates) * short.steps + BEST * setup.steps
    if cap.left > affordable(record, FOR_EDITS):
        return replace(record, probed={**record.probed, "one-edit": Probed(untold=NO_STEPS)})
    for number, candidate in enumerate(candidates):
        progress("edits", number, len(candidates))
        losses = candidate.losses(short, record, cap)
        end = at_the_end(losses, short.steps)
        if end < at_the_end(without[: short.steps], short.steps):
            # Outside the model, the first loss tells whether it is the same function of outputs.
            off = abs(losses[0] - without[0]) if candidate.call.path is None else 0.0
            if off <= ALIKE * abs(without[0]):
                begun.append((end, number))
    facts = []
    for _, number in sorted(begun)[:BEST]:
        edit, call = candidates[number].edit, candidates[number].call
        losses = candidates[number].losses(setup, record, cap)
        trial = compared("", losses, without, setup.steps)
        others = [trial.loss_without, *(rate.loss for rate in record.rates.values())]
        share = LEFT_OUT if edit.leaves_out else REARRANGED
        if trial.pays and 0 <= trial.loss < share * min(others):
            numbers = {"loss": trial.loss, "without": trial.loss_without}
            of = "loss" if call.path is None else "model"
            facts.append(Fact(call.place, numbers, {"edit": edit.words, "of": of}))
    facts.sort(key=lambda fact: fact.numbers["loss"])
    return replace(record, probed={**record.probed, "one-edit": Probed(tuple(facts[:1]))})


def _candidates(setup: Setup) -> list[Candidate]:
    """Return the edits of the first batch's pass, those nearest to the loss first."""
    found: dict[tuple[str, str, str], Candidate] = {}
    for call in reversed(calls_of(setup.fork(), lambda call: isinstance(call.result, Tensor))):
        for edit in edits_of(call):
            one = found.setdefault((call.line, call.name, edit.words), Candidate(edit, call))
            one.results[call.number] = edit.result
    return [*found.values()][:MOST]
