"""The constraints as a linear program in x = [c of every layer, r of every layer, G, t].

Larger r and G only relax the other rows, so "r = min(…)" may be replaced by "r ≤ each of …", and no
integers are needed.
"""

from typing import Any, Literal

import numpy as np

from adiv_monitor.max_lr.exponents import Exponents
from adiv_monitor.max_lr.network import Alignments, Network

Array = np.ndarray[Any, np.dtype[np.float64]]
C_LIMIT, R_LIMIT = 10.0, 10.0


class Program:
    """The linear program: minimise cost · x subject to A x ≤ limits and bounds.

    Args:
        network: the layers.
        alignments: alignments of the layers.
        c_full: c under full alignment; None while it is computed.
    """

    def __init__(
        self, network: Network, alignments: Alignments, c_full: Exponents | None = None
    ) -> None:
        n = len(network)
        self.network = network
        self.n = n
        self.G, self.t = 2 * n, 2 * n + 1
        self.columns = 2 * n + 2
        self._rows: list[dict[int, float]] = []
        self._limits: list[float] = []
        self.bounds = np.empty((self.columns, 2))
        self.bounds[:n] = -C_LIMIT, C_LIMIT
        self.bounds[n : 2 * n] = 0, R_LIMIT
        self.bounds[self.G] = (-4 * C_LIMIT, 4 * C_LIMIT) if network.rule.follows_gradient else 0
        self.bounds[self.t] = -2 * C_LIMIT, 2 * C_LIMIT
        self._add_stability(alignments)
        if network.rule.relative:
            later = [i for i in range(n) if i not in network.sources]
            self.bounds[later, 0] = 0
        if c_full is not None:
            for i in network.fixed | network.frozen:
                self.bounds[i] = c_full[i]
            self._add_largest_excess(c_full)

    def r(self, layer: int) -> int:
        """Return the column of this layer's r."""
        return self.n + layer

    def add(self, row: dict[int, float], limit: float) -> None:
        """Add the row Σ coefficient · x ≤ limit."""
        self._rows.append(row)
        self._limits.append(limit)

    @property
    def matrix(self) -> Array:
        """The matrix A (rows, columns)."""
        dense = np.zeros((len(self._rows), self.columns))
        for i, row in enumerate(self._rows):
            dense[i, list(row)] = list(row.values())
        return dense

    @property
    def limits(self) -> Array:
        """Upper limits of A x (rows,)."""
        return np.array(self._limits)

    def cost(self, weights: Exponents, t: float = 0.0) -> Array:
        """Return the cost Σ weight · c + `t` · t, as coefficients (columns,)."""
        cost = np.zeros(self.columns)
        cost[: self.n] = weights
        cost[self.t] = t
        return cost

    def _add_stability(self, alignments: Alignments) -> None:
        network = self.network
        for i, before in enumerate(network.predecessors):
            for row, limit in self.r_terms(alignments, i, before):
                self.add(row, limit)
        for group in network.tied:
            for i in group[1:]:
                self.add({i: 1, group[0]: -1}, 0)
                self.add({i: -1, group[0]: 1}, 0)
        if network.rule.follows_gradient:
            for i in network.sinks:
                for row, limit in self.G_terms(i):
                    self.add(row, limit)

    def r_terms(
        self, alignments: Alignments, layer: int, before: tuple[int, ...]
    ) -> list[tuple[dict[int, float], float]]:
        """Return rows "r − term ≤ constant", one for each term whose minimum is r."""
        network, r = self.network, self.r(layer)
        # r − k ≤ p, with k the exponent of the update
        moved = {r: 1.0, layer: -1.0, **({self.G: -1.0} if network.s[layer] else {})}
        learns = layer not in network.frozen
        if not before:
            return [(moved, network.p[layer])] if learns else []
        terms = []
        if learns:
            terms.append((moved, network.p[layer] - alignments.alpha[layer]))
        for j in before:
            if learns:
                terms.append(({**moved, self.r(j): -1.0}, network.p[layer] - alignments.u[layer]))
            kept = network.a[layer] + network.b[layer] - alignments.omega[layer]
            terms.append(({r: 1.0, self.r(j): -1.0}, kept))
        return terms

    def G_terms(self, sink: int) -> list[tuple[dict[int, float], float]]:
        """Return rows "G − term ≤ constant" of a readout."""
        network = self.network
        initial: tuple[dict[int, float], float] = (
            {self.G: 1.0},
            network.a[sink] + network.b[sink],
        )
        if sink in network.frozen:
            return [initial]
        return [initial, ({self.G: 1.0, sink: -1.0}, network.p[sink])]

    def _add_largest_excess(self, c_full: Exponents) -> None:
        """Add rows t ≥ c − c_full for every layer whose c is free."""
        for i in range(self.n):
            if i not in self.network.fixed | self.network.frozen:
                self.add({i: 1, self.t: -1}, c_full[i])


Outcome = tuple[Literal["optimal", "infeasible", "failed"], Array, str]


def minimise(program: Program, cost: Array) -> Outcome:
    """Return the status, the best x (columns,), and the solver's message.

    Raises:
        ImportError: without scipy.
    """
    try:
        from scipy.optimize import linprog
    except ImportError as error:
        raise ImportError(
            'adiv_monitor.max_lr needs scipy: pip install "adiv-monitor[lr]"'
        ) from error
    found = linprog(
        cost, A_ub=program.matrix, b_ub=program.limits, bounds=program.bounds, method="highs"
    )
    if found.status == 0:
        return "optimal", np.asarray(found.x), ""
    status: Literal["infeasible", "failed"] = "infeasible" if found.status == 2 else "failed"
    return status, np.empty(0), str(found.message)
