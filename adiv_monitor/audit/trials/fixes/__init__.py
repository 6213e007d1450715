"""Fixes: changes of a fork before its training, by name; their files register them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from adiv_monitor.audit.training.setup import Fork, seeded
from adiv_monitor.diagnosis.record import Record

T = TypeVar("T")
Change = TypeVar("Change", bound=Callable[..., None])
Layers = Sequence[str]


class DoesNotApply(ValueError):
    """Raised if a fix has nothing to change in a fork; the message says why."""


@dataclass(frozen=True)
class Fix:
    """A change of a fork: of its model, optimizer, batches, loss or clipping.

    Attributes:
        name: The name that rules use in `Advice.fix`.
        change: Function that changes a fork in place, from fork, paths of layers (empty: wherever
            it applies) and the record of the run that the fix is for (None: unknown).
        rescales: Whether the fix may need another learning rate, so that a fair trial uses several,
            as for the unchanged model.
    """

    name: str
    change: Callable[[Fork, Layers, Record | None], None]
    rescales: bool = False

    def apply(self, fork: Fork, layers: Layers = (), record: Record | None = None) -> None:
        """Change a fork in place; random numbers follow from the fork's seed.

        Raises:
            DoesNotApply: There is nothing to change.
        """
        with seeded(fork.seed):
            self.change(fork, layers, record)


FIXES: dict[str, Fix] = {}


def fix(name: str, *, rescales: bool = False, **given: object) -> Callable[[Change], Change]:
    """Register the function below as the change of a fix, with these further arguments."""

    def register(change: Change) -> Change:
        FIXES[name] = Fix(name, partial(change, **given), rescales)
        return change

    return register


def some(found: T | None, otherwise: str) -> T:
    """Return what a fix found to change.

    Raises:
        DoesNotApply: It found nothing; `otherwise` says so.
    """
    if not found:
        raise DoesNotApply(otherwise)
    return found
