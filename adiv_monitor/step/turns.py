"""Turns of modules whose layers are measured in different steps."""

from dataclasses import replace

from adiv_monitor.capture.selection import Selection
from adiv_monitor.report import Turn


class Turns:
    """Round-robin over the modules that hold parameters, some in each measured step.

    The order is the model's, the same in all ranks, whatever a forward pass calls. Parameters that
    torch moved into other modules (`parametrize`) belong to their original module; modules that
    share a parameter count as one.

    Args:
        modules_per_step: number of modules whose layers are measured in one step; None: all.

    Attributes:
        taken: number of turns so far; incremented by the code that counts measured steps.
    """

    def __init__(self, modules_per_step: int | None) -> None:
        self._size = modules_per_step
        self.taken = 0

    def next(self, selection: Selection) -> tuple[Selection, Turn | None]:
        """Return the selection with the parameters due whose turn is next, and the turn."""
        if self._size is None:
            return selection, None
        held = _held_together(selection)
        first = self.taken % -(-len(held) // self._size) * self._size if held else 0
        due = held[first : first + self._size]
        keys = frozenset(key for parameters in due for key in parameters)
        return replace(selection, due=keys), Turn(first + bool(due), first + len(due), len(held))


def _held_together(selection: Selection) -> list[list[int]]:
    """Return ids of each module's parameters, in the model's order; tied modules share a list."""
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
