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

    Attributes:
        G: column of G.
        t: column of t, which is at least c − c_full of every layer whose c is free.
        bounds: bounds of x (columns, 2).
    """

    def __init__(
        self, network: Network, alignments: Alignments, c_full: Exponents | None = None
    ) -> None:
        self.n = n = len(network)
        self.G, self.t = 2 * n, 2 * n + 1
        self._rows: list[dict[int, float]] = []
        self._limits: list[float] = []
        self.bounds = np.empty((2 * n + 2, 2))
        self.bounds[:n] = -C_LIMIT, C_LIMIT
        self.bounds[n : 2 * n] = 0, R_LIMIT
        self.bounds[self.G] = (-4 * C_LIMIT, 4 * C_LIMIT) if network.rule.follows_gradient else 0
        self.bounds[self.t] = -2 * C_LIMIT, 2 * C_LIMIT
        for layer in range(n):
            self._add_layer(network, alignments, layer)
        for first, *others in network.tied:
            for layer in others:
                self.add({layer: 1, first: -1}, 0)
                self.add({layer: -1, first: 1}, 0)
        for sink in network.sinks if network.rule.follows_gradient else ():
            self.add({self.G: 1}, network.a[sink] + network.b[sink])
            if sink not in network.frozen:
                self.add({self.G: 1, sink: -1}, network.p[sink])
        for layer, full in enumerate(c_full or ()):
            if layer in network.fixed | network.frozen:
                self.bounds[layer] = full
            else:
                self.add({layer: 1, self.t: -1}, full)

    def add(self, row: dict[int, float], limit: float) -> None:
        """Add the row Σ coefficient · x ≤ limit."""
        self._rows.append(row)
        self._limits.append(limit)

    def cost(self, of_c: float, of_t: float = 0.0) -> Array:
        """Return the cost `of_c` · Σ c + `of_t` · t, as coefficients (columns,)."""
        cost = np.zeros(len(self.bounds))
        cost[: self.n] = of_c
        cost[self.t] = of_t
        return cost

    def _add_layer(self, network: Network, alignments: Alignments, layer: int) -> None:
        """Add a row "r − term ≤ constant" for each term whose minimum is the layer's r."""
        r, p = self.n + layer, network.p[layer]
        before = network.predecessors[layer]
        if before and network.rule.relative:
            self.bounds[layer, 0] = 0
        if layer not in network.frozen:  # r − k ≤ p − …, with k the exponent of the update
            moved = {r: 1.0, layer: -1.0, **({self.G: -1.0} if network.s[layer] else {})}
            self.add(moved, p - alignments.alpha[layer] if before else p)
            for other in before:
                self.add({**moved, self.n + other: -1.0}, p - alignments.u[layer])
        for other in before:
            kept = network.a[layer] + network.b[layer] - alignments.omega[layer]
            self.add({r: 1.0, self.n + other: -1.0}, kept)

    def minimise(
        self, cost: Array
    ) -> tuple[Literal["optimal", "infeasible", "failed"], Array, str]:
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
        matrix = np.zeros((len(self._rows), len(self.bounds)))
        for i, row in enumerate(self._rows):
            matrix[i, list(row)] = list(row.values())
        found = linprog(cost, A_ub=matrix, b_ub=self._limits, bounds=self.bounds, method="highs")
        if found.status == 0:
            return "optimal", np.asarray(found.x), ""
        return "infeasible" if found.status == 2 else "failed", np.empty(0), str(found.message)
