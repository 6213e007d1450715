"""A fix: a change of a fork before its training."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from adiv_monitor.audit.experiments.calls import Call, change_calls, see_calls
from adiv_monitor.audit.training.setup import Fork, seeded
from adiv_monitor.diagnosis.record import Record

Change = Callable[[Fork, Sequence[str], Record | None], None]


class DoesNotApply(ValueError):
    """Raised if a fix has nothing to change in a fork; the message says why."""


@dataclass(frozen=True)
class Fix:
    """A change of a fork: of its model, optimizer, batches, loss or clipping.

    Attributes:
        name: The name that rules use in `Advice.fix`.
        text: What a user would do, in plain words.
        change: Function that changes a fork in place, from fork, paths of layers (empty: wherever
            it applies) and the record of the run that the fix is for (None: unknown).
        rescales: Whether the fix may need another learning rate, so that a fair trial uses several,
            as for the unchanged model.
    """

    name: str
    text: str
    change: Change
    rescales: bool = False

    def apply(self, fork: Fork, layers: Sequence[str] = (), record: Record | None = None) -> None:
        """Change a fork in place; random numbers follow from the fork's seed.

        Raises:
            DoesNotApply: There is nothing to change.
        """
        with seeded(fork.seed):
            self.change(fork, layers, record)


def replace_calls(
    fork: Fork, is_met: Callable[[Call], bool], instead: Callable[[Call], object]
) -> None:
    """Replace the results of calls of a kind from now on.

    Raises:
        DoesNotApply: nothing of that kind is called.
    """
    met: list[Call] = []
    see_calls(fork, lambda call: met.append(call) if is_met(call) else None)
    if not met:
        raise DoesNotApply("nothing of that kind is called")
    change_calls(fork, lambda call: instead(call) if is_met(call) else NotImplemented)
