"""What surveys have learned: in which modules functions need not be watched in later steps."""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from adiv_monitor.capture.selection import Selection
from adiv_monitor.capture.site import SPECIAL, Site

# Surveys that are made to see one parameter: its use may be rare (experts, layer drop).
_TRIES = 3


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
    parameter without a visible use has a gradient; but not after some did not see that one.
    """

    def __init__(self) -> None:
        self._places: list[tuple[int, str]] = []  # of what is measured
        self._sites: dict[nn.Module, Site | str | None] = {}  # None: it uses none of its own
        self._tried = Counter[int]()  # surveys, by id of an unseen parameter
        self._is_due = True  # a survey

    def plan(self, selection: Selection) -> Plan | None:
        """Return the plan for the next step, with these parameters to measure; None: a survey."""
        places = [(key, x.full_name) for key, of in selection.places.items() for x in of]
        if self._places != places:
            self._places, self._is_due = places, True
            self._tried.clear()
        if self._is_due:
            return None
        without = [module for module in selection.modules if module not in selection.rules]
        found = [(module, self._sites.get(module, SPECIAL)) for module in without]
        known = {id(module): site for module, site in found if isinstance(site, Site)}
        return Plan(known, [module for module, site in found if site is SPECIAL])

    def learn(
        self, sites: Mapping[nn.Module, Site | str | None], unseen: set[int], *, is_survey: bool
    ) -> None:
        """Record the result of a step.

        Args:
            sites: the modules that ran, with their uses, or `SPECIAL`; None: a module has none of
                its own.
            unseen: ids of parameters that have a gradient but no visible use.
            is_survey: whether all functions were watched.
        """
        self._sites = {**({} if is_survey else self._sites), **sites}
        self._is_due = not is_survey and any(self._tried[key] < _TRIES for key in unseen)
        self._tried.update(dict.fromkeys(unseen, _TRIES if is_survey else 1))
