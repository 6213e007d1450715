"""What a fix is: a change of a fork before it is trained."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from adiv_monitor.audit.training.setup import Fork, seeded
from adiv_monitor.diagnosis.record import Record

Change = Callable[[Fork, Sequence[str], Record | None], None]


class DoesNotApply(ValueError):
    """A fix has nothing to change in this fork; the message says why."""


@dataclass(frozen=True)
class Fix:
    """A change of a fork: of its model, optimizer, batches, loss or clipping.

    Attributes:
        name: what rules call it in `Advice.fix`.
        text: what a user would do, in plain words.
        change: fork, paths of layers (empty: wherever it applies), the record of the run that the
            fix is for (None: nothing is known of it) → nothing; the fork is changed.
        rescales: whether another learning rate may be right with it, so that it is fair to try it
            with several, as the model as it is was.
    """

    name: str
    text: str
    change: Change
    rescales: bool = False

    def apply(self, fork: Fork, layers: Sequence[str] = (), record: Record | None = None) -> None:
        """Change a fork in place; what it draws by chance follows from the fork's seed.

        Raises:
            DoesNotApply: there is nothing to change.
        """
        with seeded(fork.seed):
            self.change(fork, layers, record)
