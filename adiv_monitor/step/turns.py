"""Layers that are measured in turn: whose turn it is."""

from dataclasses import replace

from adiv_monitor.capture.selection import Selection
from adiv_monitor.report import Turn


class Turns:
    """Goes round the modules that hold parameters, so many in each measured step.

    The order is the model's, the same in all ranks: what a forward pass happens to call has no
    say in it. Parameters that torch moved into modules of their own (`parametrize`) go with the
    module that they were moved from; modules that share a parameter count as one.

    Args:
        modules_per_step: how many modules' layers are measured in one step; None: all, always.

    Attributes:
        taken: turns so far: whoever counts measured steps counts them here.
    """

    def __init__(self, modules_per_step: int | None) -> None:
        self._size = modules_per_step
        self.taken = 0

    def next(self, selection: Selection) -> tuple[Selection, Turn | None]:
        """The selection with those parameters due whose turn is next."""
        if self._size is None:
            return selection, None
        held = _held_together(selection)
        first = self.taken % -(-len(held) // self._size) * self._size if held else 0
        due = held[first : first + self._size]
        keys = frozenset(key for parameters in due for key in parameters)
        return replace(selection, due=keys), Turn(first + bool(due), first + len(due), len(held))


def _held_together(selection: Selection) -> list[list[int]]:
    """Ids of the parameters of each module, in the model's order; of tied modules in one list."""
    held: dict[str, list[int]] = {}
    for key, places in selection.places.items():
        homes = dict.fromkeys(place.home[0] for place in places)
        known = [held[home] for home in homes if home in held]
        mine = known[0] if known else []
        mine.append(key)
        for other in known[1:]:
            if other is not mine:
                mine += other
                held |= {home: mine for home, keys in held.items() if keys is other}
        held |= dict.fromkeys(homes, mine)
    return list({id(keys): keys for keys in held.values()}.values())
