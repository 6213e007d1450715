"""What surveys have learned: in which modules functions need not be watched in later steps."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from torch import nn

from adiv_monitor.capture.selection import Selection
from adiv_monitor.capture.site import Site

# After so many surveys in a row that changed nothing, there are no more.
_IN_VAIN = 3
_LAST = (
    f"{_IN_VAIN} surveys of all functions have changed nothing (experts, layer drop, two networks "
    "in turns?): there are no more, and functions that a module began to use since are not seen."
)


class Plan(NamedTuple):
    """How the modules are followed in a step after a survey.

    Attributes:
        known: the modules whose uses are known, by id.
        watched: the modules in which functions are watched.
    """

    known: dict[int, Site]
    watched: list[nn.Module]


class Trace:
    """Decides when all functions are watched: in a survey.

    The first step is a survey. There is another one if other parameters are measured, or if a
    parameter without a visible use has a gradient; but no more after some that changed nothing.
    """

    def __init__(self) -> None:
        self._selection: Selection | None = None  # what is known holds for it
        self._sites: dict[nn.Module, Site | None] = {}  # None: it uses none of its own
        self._unseen: Collection[int] = ()
        self._plan: Plan | None = None
        self._is_due = True  # a survey
        self._in_vain = 0  # surveys in a row that changed nothing

    def plan(self, selection: Selection) -> Plan | None:
        """Return the plan for the next step, with these parameters to measure; None: a survey."""
        if self._selection is not selection:
            if self._selection is None or _places(self._selection) != _places(selection):
                self._is_due, self._in_vain = True, 0
            self._selection, self._plan = selection, None
        if self._is_due:
            return None
        if self._plan is None:
            found = [(module, self._sites.get(module, module)) for module in selection.modules]
            known = {id(module): site for module, site in found if isinstance(site, Site)}
            self._plan = Plan(known, [module for module, site in found if site is module])
        return self._plan

    def learn(
        self,
        sites: Mapping[nn.Module, Site | None],
        others: Collection[nn.Module],
        unseen: set[int],
        *,
        is_survey: bool,
    ) -> str | None:
        """Record the result of a step, and return a note if it was the last survey.

        Args:
            sites: the modules that ran, with their uses; None: a module has none of its own.
            others: the modules whose uses plain hooks can't catch.
            unseen: ids of parameters that have a gradient but no visible use.
            is_survey: whether all functions were watched.
        """
        before = self._sites.keys()
        if is_survey or sites or others:
            known = {**({} if is_survey else self._sites), **sites}
            self._sites = {module: site for module, site in known.items() if module not in others}
            self._plan = None
        if not is_survey:
            self._is_due = self._in_vain < _IN_VAIN and not unseen.issubset(self._unseen)
            return None
        is_new = before != self._sites.keys() or unseen != self._unseen
        self._in_vain = 0 if is_new else self._in_vain + 1
        self._unseen, self._is_due = unseen, False
        return _LAST if self._in_vain == _IN_VAIN else None


def _places(selection: Selection) -> list[tuple[int, str]]:
    """Return ids and names of the parameters to measure."""
    return [(key, x.full_name) for key, places in selection.places.items() for x in places]
