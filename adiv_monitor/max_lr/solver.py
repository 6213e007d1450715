"""`solve_max_lr`: the smallest exponents c, hence the largest learning rates, that are stable."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np

from adiv_monitor.max_lr.exponents import (
    Exponents,
    Parametrization,
    parametrization_named,
    unstable_at_initialisation,
)
from adiv_monitor.max_lr.network import (
    Alignments,
    Network,
    checked_layers,
    checked_predecessors,
    full_alignment,
)
from adiv_monitor.max_lr.optimizers import AnyRule, update_rule
from adiv_monitor.max_lr.program import Array, Program
from adiv_monitor.max_lr.stability import feature_change, gradient_exponents

Objective = Literal["pareto", "sum", "max-min"]
Status = Literal["optimal", "infeasible", "unstable at initialisation", "failed"]
Given = float | Sequence[float | None] | None
# One program minimises the sum first and the largest excess second. Trading the sum for the excess
# costs far more than this share, so two programs would give the same result.
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
        return tuple(full - c for full, c in zip(self.c_full, self.c, strict=False))


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
    tied: Sequence[Sequence[int]] = (),
    frozen: Collection[int] = (),
    fixed: Collection[int] = (),
) -> MaxLRSolution:
    """Find the largest learning rates at which no layer's features change by more than order one.

    Layers are given in the order in which they run: embedding first, readout last. The solution is
    that of a linear program in c and r with r ≥ 0 (see `program.py`). "sum" minimises Σ c, which
    may slow one layer so that others can be faster. "pareto" does the same with c ≤ c_full and
    omega ≤ a + b: no layer gets slower than under full alignment. "max-min" maximises the
    smallest gain. Among several optima, the one with the smallest max(c − c_full) is returned.

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
        tied: groups of layers that share a weight: one c each.
        frozen: layers that don't learn: no updates, c = c_full.
        fixed: layers that keep c = c_full.

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
    a, b, alpha, omega, u = map(_plain, (a, b, alpha, omega, u))
    if objective not in get_args(Objective):
        raise ValueError(f"objective={objective!r}: expected one of {get_args(Objective)}")
    n = _count(layers, a, b, alpha, omega, u, predecessors)
    graph = checked_predecessors(predecessors, n)
    a, b = _exponents(graph, parametrization, a, b)
    network = Network(
        a=a,
        b=b,
        rule=update_rule(optimizer),
        predecessors=graph,
        tied=tuple(tuple(sorted(checked_layers("tied", group, n))) for group in tied),
        frozen=checked_layers("frozen", frozen, n),
        fixed=checked_layers("fixed", fixed, n),
    )
    full = full_alignment(n)
    alignments = Alignments(
        _each("alpha", alpha, full.alpha), _each("omega", omega, full.omega), _each("u", u, full.u)
    )
    if wrong := unstable_at_initialisation(a, b, network.sources, network.sinks):
        return MaxLRSolution((), (), "unstable at initialisation", message=wrong)
    for name in ("alpha", "omega", "u"):
        for i, value in enumerate(getattr(alignments, name)):
            if graph[i] and not -_ROUNDING <= value <= 1 + _ROUNDING:
                why = f"{name} of layer {i} is {value:g}, expected 0 to 1: clip it"
                return MaxLRSolution((), (), "infeasible", message=why)
    c_full, why = _full(replace(network, frozen=frozenset(), fixed=frozenset()))
    if not c_full:
        return MaxLRSolution((), (), "infeasible", message=f"under full alignment: {why}")
    if objective == "pareto":
        budgets = (x + y for x, y in zip(a, b, strict=True))
        alignments = replace(alignments, omega=tuple(map(min, alignments.omega, budgets)))
    program = Program(network, alignments, c_full)
    if objective == "pareto":
        program.bounds[:n, 1] = np.minimum(program.bounds[:n, 1], c_full)
    if objective != "max-min":
        status, x, message = program.minimise(program.cost(1, _TIE_BREAK))
    else:
        status, x, message = program.minimise(program.cost(0, 1))
        if status == "optimal":
            program.bounds[program.t, 1] = x[program.t]
            status, x, message = program.minimise(program.cost(1))
    if status != "optimal":
        return MaxLRSolution((), (), status, c_full, message=message)
    c = _exponents_of(x[:n])
    r = feature_change(network, alignments, c)
    return MaxLRSolution(c, r, "optimal", c_full, gradient_exponents(network, c))


@lru_cache(maxsize=256)
def _full(network: Network) -> tuple[Exponents, str]:
    """Return c under full alignment, and ""; () and the reason if there is no solution."""
    program = Program(network, full_alignment(len(network)))
    status, x, message = program.minimise(program.cost(1))
    return (_exponents_of(x[: len(network)]), "") if status == "optimal" else ((), message)


def _exponents_of(c: Array) -> Exponents:
    """Return the exponents with 0.0 for the -0.0 that HiGHS returns for zero."""
    return tuple((c + 0.0).tolist())


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


def _exponents(
    graph: Sequence[Sequence[int]],
    parametrization: str | Parametrization | None,
    a: Sequence[float] | None,
    b: Sequence[float] | None,
) -> tuple[Exponents, Exponents]:
    """Return a and b of every layer, as they are given or those of the parametrization."""
    feeding = {layer for before in graph for layer in before}
    if idle := [i for i, before in enumerate(graph) if not before and i not in feeding]:
        raise ValueError(
            f"predecessors: layer {idle[0]} feeds none and is fed by none, expected it to be part "
            "of the network"
        )
    if parametrization is not None and a is None and b is None:
        chosen = parametrization_named(parametrization)
        kinds = [(1 if i in feeding else 2) if before else 0 for i, before in enumerate(graph)]
        a, b = ([part[kind] for kind in kinds] for part in (chosen.a, chosen.b))
    elif parametrization is not None or a is None or b is None:
        raise ValueError("solve_max_lr: expected either parametrization=… or both a=… and b=…")
    return tuple(map(float, a)), tuple(map(float, b))


def _each(name: str, given: Given, full: Exponents) -> Exponents:
    if given is None or isinstance(given, int | float):
        return full if given is None else (float(given),) * len(full)
    if len(given) != len(full):
        raise ValueError(f"{name}: got {len(given)} values for {len(full)} layers")
    return tuple(x if value is None else float(value) for value, x in zip(given, full, strict=True))
