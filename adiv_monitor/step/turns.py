"""Turns of modules whose layers are measured in different steps."""

from dataclasses import replace
from itertools import chain

from adiv_monitor.capture.selection import Selection
from adiv_monitor.report import Turn


def in_turn(
    selection: Selection, modules_per_step: int | None, number: int
) -> tuple[Selection, Turn | None]:
    """Return the selection with the parameters that are due, and the turn.

    The order is the model's, the same in all ranks, whatever a forward pass calls. Modules that
    share a parameter count as one; parameters that torch moved into other modules (`parametrize`)
    belong to their original module.

    Args:
        selection: all parameters to measure.
        modules_per_step: number of modules whose layers are measured in one step; None: all.
        number: number of the turn, from 0.
    """
    if modules_per_step is None:
        return selection, None
    held: dict[str, list[int]] = {}  # ids of parameters by module
    for key, places in selection.places.items():
        homes = [place.home[0] for place in places]
        mine = next((held[home] for home in homes if home in held), [])
        mine.append(key)
        held |= dict.fromkeys(homes, mine)
    modules = list({id(keys): keys for keys in held.values()}.values())
    turns = max(1, -(-len(modules) // modules_per_step))
    first = number % turns * modules_per_step
    due = modules[first : first + modules_per_step]
    turn = Turn(first + bool(due), first + len(due), len(modules))
    return replace(selection, due=frozenset(chain(*due))), turn
