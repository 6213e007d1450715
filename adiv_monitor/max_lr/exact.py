"""Integer program for solutions in which chosen features change by order one; not convex."""

from collections.abc import Sequence

import numpy as np

from adiv_monitor.max_lr.network import Alignments, Network
from adiv_monitor.max_lr.program import Array, Outcome, Program

_BIG_M = 20.0
_Row = tuple[dict[int, float], float]


def minimise_exactly(
    program: Program,
    network: Network,
    alignments: Alignments,
    cost: Array,
    changing: Sequence[int],
) -> Outcome:
    """Return the best x (columns,) where each r equals its smallest term; r = 0 in `changing`.

    Each row "r ≤ term" has an integer variable, which is 1 if r equals that term.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    groups: list[Sequence[_Row]] = [
        program.r_terms(alignments, i, before) for i, before in enumerate(network.predecessors)
    ]
    if network.rule.follows_gradient:
        groups.append([term for i in network.sinks for term in program.G_terms(i)])
    groups = [group for group in groups if group]
    integers = sum(map(len, groups))
    reached = np.zeros((integers, program.columns + integers))
    one_of = np.zeros((len(groups), program.columns + integers))
    limits = np.empty(integers)
    place = 0
    for number, group in enumerate(groups):
        for row, limit in group:
            # term − r ≤ M (1 − y), where the row is r − (what varies in the term) ≤ limit
            reached[place, list(row)] = [-value for value in row.values()]
            reached[place, program.columns + place] = _BIG_M
            limits[place] = _BIG_M - limit
            one_of[number, program.columns + place] = 1
            place += 1
    free = np.zeros((len(program.limits), integers))
    bounds = np.vstack([program.bounds, np.tile([0.0, 1.0], (integers, 1))])
    bounds[[program.r(i) for i in changing]] = 0
    found = milp(
        np.concatenate([cost, np.zeros(integers)]),
        integrality=np.repeat([0, 1], [program.columns, integers]),
        bounds=Bounds(bounds[:, 0], bounds[:, 1]),
        constraints=[
            LinearConstraint(np.hstack([program.matrix, free]), ub=program.limits),
            LinearConstraint(reached, ub=limits),
            LinearConstraint(one_of, lb=1),
        ],
    )
    if found.status == 0:
        return "optimal", np.asarray(found.x[: program.columns]), ""
    return "infeasible" if found.status == 2 else "failed", np.empty(0), str(found.message)
