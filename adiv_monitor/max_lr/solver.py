"""`solve_max_lr`: the smallest exponents c, hence the largest learning rates, that are stable."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np

from adiv_monitor.max_lr.exact import minimise_exactly
from adiv_monitor.max_lr.exponents import (
    Exponents,
    Parametrization,
    parametrization_named,
    unstable_at_initialisation,
)
from adiv_monitor.max_lr.network import (
    FULL_ALPHA,
    FULL_OMEGA,
    FULL_U,
    Alignments,
    Network,
    checked_layers,
    checked_predecessors,
    full_alignment,
)
from adiv_monitor.max_lr.optimizers import AnyRule, update_rule
from adiv_monitor.max_lr.program import Outcome, Program, minimise
from adiv_monitor.max_lr.stability import feature_change, gradient_exponents

Objective = Literal["pareto", "sum", "max-min"]
Status = Literal["optimal", "infeasible", "unstable at initialisation", "not finite", "failed"]
Given = float | Sequence[float | None] | None
# One program minimises the sum first and the largest excess second. Unless weights of layers are
# nearly equal, trading the sum for the excess costs far more than this share, so two programs would
# give the same result; else the sum is off by this share at most.
_TIE_BREAK = 1e-4
_ROUNDING = 1e-3  # a measured alignment may exceed 1 by this much


@dataclass(frozen=True)
class MaxLRSolution:
    """Exponents of the largest stable learning rates, η n^(−c); a smaller c is a larger rate.

    Attributes:
        c: exponent of every layer; () unless the status is "optimal".
        r: for every layer: its features change by n^(−r); computed from c, not by the solver. With
            "pareto", ω counts as at most a + b there, as in the program.
        status: "optimal", or why there is no solution.
        c_full: c under full alignment (1, ½, 1), for comparison.
        gradients: g of every layer: ∂L/∂W is n^(−g), and Adam's ε must shrink by this factor.
        message: details of a failure.
    """

    c: Exponents
    r: Exponents
    status: Status
    c_full: Exponents = ()
    gradients: Exponents = ()
    message: str = ""

    @property
    def gains(self) -> Exponents:
        """c_full − c: each layer's rate may be n^gain times that under full alignment."""
        return (
            tuple(full - c for full, c in zip(self.c_full, self.c, strict=True)) if self.c else ()
        )


def solve_max_lr(
    *,
    optimizer: AnyRule,
    parametrization: str | Parametrization | None = None,
    a: Sequence[float] | None = None,
    b: Sequence[float] | None = None,
    alpha: Given = None,
    omega: Given = None,
    u: Given = None,
    layers: int | None = None,
    predecessors: Sequence[Collection[int]] | None = None,
    objective: Objective = "pareto",
    epsilon: float = 0.0,
    weights: Sequence[float] | None = None,
    tied: Sequence[Sequence[int]] = (),
    frozen: Collection[int] = (),
    fixed: Collection[int] = (),
    feature_learning: bool = False,
    nontrivial: bool = False,
) -> MaxLRSolution:
    """Find the largest learning rates at which no layer's features change by more than order one.

    Layers are given in the order in which they run: embedding first, readout last. The solution is
    that of a linear program in c and r with r ≥ 0 (see `program.py`). "sum" minimises Σ w c, which
    may slow one layer so that others can be faster. "pareto" does the same with c ≤ c_full +
    epsilon and omega ≤ a + b: no layer gets slower than under full alignment. "max-min" maximises
    the smallest gain. Among several optima, the one with the smallest max(c − c_full) is returned.

    Args:
        optimizer: "sgd" (momentum too), "adam" (and others with updates of RMS 1), "adafactor",
            "muon", an optimizer or its class, an `UpdateRule`, or exponents h (embedding, hidden,
            readout): updates of n^(−h).
        parametrization: "sp", "ntk", "mup", "mfp", or one of yours; or give `a` and `b`.
        a: exponents of the multipliers n^(−a), one per layer.
        b: exponents of the initial standard deviations n^(−b), one per layer.
        alpha: alignment of updates with features: one value per layer, or one for all. None, also
            as one layer's value: full alignment, 1. Values of embeddings are not used.
        omega: alignment of initial weights with the change of features; full alignment: ½.
        u: alignment of updates with the change of features; full alignment: 1.
        layers: number of layers, if no other argument determines it.
        predecessors: of each layer, the layers whose outputs make up its input (summed,
            concatenated or multiplied); None: each feeds the next. Layers without any are
            embeddings, layers that feed none are readouts.
        objective: "pareto", "sum" or "max-min".
        epsilon: by how much "pareto" may slow a layer, as an exponent, ≥ 0.
        weights: w of the sum, one per layer, > 0; None: 1 each.
        tied: groups of layers that share a weight: one c each.
        frozen: layers that don't learn: no updates, c = c_full.
        fixed: layers that keep c = c_full.
        feature_learning: require r = 0 of the layers that feed readouts.
        nontrivial: require r = 0 of the readouts.

    Returns:
        The solution; if there is none, its status says why.

    Raises:
        ValueError: arguments contradict each other, or refer to layers that do not exist.
        ImportError: without scipy (pip install "adiv-monitor[lr]").

    Example:
        >>> from adiv_monitor.max_lr import solve_max_lr
        >>> solve_max_lr(parametrization="mup", optimizer="adam", layers=3).c
        (0.5, 1.0, 0.5)
    """
    a, b, alpha, omega, u, weights = map(_plain, (a, b, alpha, omega, u, weights))
    n = _count(layers, a, b, alpha, omega, u, predecessors)
    graph = checked_predecessors(predecessors, n)
    network = Network(
        a=(),
        b=(),
        rule=update_rule(optimizer),
        predecessors=graph,
        tied=tuple(tuple(sorted(checked_layers("tied", group, n))) for group in tied),
        frozen=checked_layers("frozen", frozen, n),
        fixed=checked_layers("fixed", fixed, n),
    )
    network = _with_exponents(network, n, parametrization, a, b)
    alignments = Alignments(
        _each("alpha", alpha, FULL_ALPHA, n),
        _each("omega", omega, FULL_OMEGA, n),
        _each("u", u, FULL_U, n),
    )
    w = (1.0,) * n if weights is None else tuple(map(float, weights))
    _check_objective(objective, epsilon, w, n)
    asked = (*network.sinks,) if nontrivial else ()
    if feature_learning:
        asked += tuple({j for i in network.sinks for j in graph[i]})
    return _solve(network, alignments, objective, epsilon, w, asked)


def _solve(
    network: Network,
    alignments: Alignments,
    objective: Objective,
    epsilon: float,
    weights: Exponents,
    changing: tuple[int, ...],
) -> MaxLRSolution:
    if wrong := unstable_at_initialisation(network.a, network.b, network.sources, network.sinks):
        return MaxLRSolution((), (), "unstable at initialisation", message=wrong)
    used = [i for i, before in enumerate(network.predecessors) if before]
    kinds = (alignments.alpha, alignments.omega, alignments.u)
    if not all(math.isfinite(values[i]) for values in kinds for i in used):
        return MaxLRSolution((), (), "not finite", message=f"got {alignments}")
    for name, values in zip(("alpha", "omega", "u"), kinds, strict=True):
        if above := [i for i in used if values[i] > 1 + _ROUNDING]:
            why = f"{name} of layer {above[0]} is {values[above[0]]:g}: no alignment is above 1"
            return MaxLRSolution((), (), "infeasible", message=why)
        if below := [i for i in used if values[i] < -_ROUNDING]:
            why = f"{name} of layer {below[0]} is {values[below[0]]:g}: expected 0 to 1, clip it"
            return MaxLRSolution((), (), "infeasible", message=why)
    c_full, why = _full(replace(network, frozen=frozenset(), fixed=frozenset()))
    if not c_full:
        return MaxLRSolution((), (), "infeasible", message=f"under full alignment: {why}")
    if objective == "pareto":
        budgets = (x + y for x, y in zip(network.a, network.b, strict=True))
        clamped = tuple(map(min, alignments.omega, budgets))
        alignments = Alignments(alignments.alpha, clamped, alignments.u)
    program = Program(network, alignments, c_full)
    if objective == "pareto":
        for i, full in enumerate(c_full):
            program.bounds[i, 1] = min(program.bounds[i, 1], full + epsilon)
    status, x, message = _best(program, objective, weights)
    if status == "optimal" and changing:
        r = feature_change(network, alignments, tuple(map(float, x[: len(network)])))
        if max(r[i] for i in changing) > 1e-6:
            cost = program.cost(weights, _tie_break(weights))
            status, x, message = minimise_exactly(program, network, alignments, cost, changing)
    if status != "optimal":
        return MaxLRSolution((), (), status, c_full, message=message)
    # HiGHS returns -0.0 for zero; adding 0 makes it positive.
    c = tuple(float(value) + 0.0 for value in x[: len(network)])
    r = feature_change(network, alignments, c)
    return MaxLRSolution(c, r, "optimal", c_full, gradient_exponents(network, c))


def _best(program: Program, objective: Objective, weights: Exponents) -> Outcome:
    if objective != "max-min":
        return minimise(program, program.cost(weights, _tie_break(weights)))
    first = minimise(program, program.cost((0.0,) * len(weights), 1.0))
    if first[0] != "optimal":
        return first
    program.bounds[program.t, 1] = first[1][program.t]
    return minimise(program, program.cost(weights))


def _tie_break(weights: Exponents) -> float:
    return _TIE_BREAK * min(weights)


@lru_cache(maxsize=256)
def _full(network: Network) -> tuple[Exponents, str]:
    """Return c under full alignment, and ""; () and the reason if there is no solution."""
    program = Program(network, full_alignment(len(network)))
    status, x, message = minimise(program, program.cost((1.0,) * len(network)))
    c = tuple(float(value) + 0.0 for value in np.asarray(x)[: len(network)])
    return (c, "") if status == "optimal" else ((), message)


def _plain(given: Any) -> Any:
    """Convert an array of numpy or torch into Python numbers."""
    return given.tolist() if hasattr(given, "tolist") else given


def _count(layers: int | None, *given: object) -> int:
    counts = {len(values) for values in given if isinstance(values, Sequence)}
    if layers is not None:
        counts.add(layers)
    if len(counts) != 1:
        raise ValueError(
            f"solve_max_lr: got {sorted(counts) or 'no'} layers, expected one number of them: "
            "one value per layer in a, b, alpha, omega, u and predecessors, or layers=…"
        )
    count = counts.pop()
    if count < 2:
        raise ValueError(f"solve_max_lr: got {count} layers, expected an embedding and a readout")
    return count


def _with_exponents(
    network: Network,
    n: int,
    parametrization: str | Parametrization | None,
    a: Sequence[float] | None,
    b: Sequence[float] | None,
) -> Network:
    lone = [i for i, before in enumerate(network.predecessors) if not before]
    feeding = {layer for before in network.predecessors for layer in before}
    if idle := [i for i in lone if i not in feeding]:
        raise ValueError(
            f"predecessors: layer {idle[0]} feeds none and is fed by none, expected it to be part "
            "of the network"
        )
    if parametrization is not None and a is None and b is None:
        chosen = parametrization_named(parametrization)
        kinds = [0 if i in lone else 1 if i in feeding else 2 for i in range(n)]
        return replace(
            network,
            a=tuple(float(chosen.a[kind]) for kind in kinds),
            b=tuple(float(chosen.b[kind]) for kind in kinds),
        )
    if parametrization is not None or a is None or b is None:
        raise ValueError("solve_max_lr: expected either parametrization=… or both a=… and b=…")
    return replace(network, a=tuple(map(float, a)), b=tuple(map(float, b)))


def _each(name: str, given: Given, full: float, n: int) -> Exponents:
    if given is None or isinstance(given, int | float):
        return (full if given is None else float(given),) * n
    if len(given) != n:
        raise ValueError(f"{name}: got {len(given)} values for {n} layers")
    return tuple(full if value is None else float(value) for value in given)


def _check_objective(objective: str, epsilon: float, weights: Exponents, n: int) -> None:
    if objective not in get_args(Objective):
        raise ValueError(f"objective={objective!r}: expected one of {get_args(Objective)}")
    if not (math.isfinite(epsilon) and epsilon >= 0):
        raise ValueError(f"epsilon={epsilon!r}: expected a finite exponent of at least 0")
    if len(weights) != n or not all(math.isfinite(w) and w > 0 for w in weights):
        raise ValueError(f"weights={weights}: expected {n} finite values above 0")
