"""The solver against tables, properties, and a formulation of the same problem with integers."""

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

pytest.importorskip("scipy")
from scipy.optimize import Bounds, LinearConstraint, milp

from adiv_monitor.max_lr import MaxLRSolution, solve_max_lr
from adiv_monitor.max_lr.exponents import PARAMETRIZATIONS
from adiv_monitor.max_lr.network import Alignments, Network, chain
from adiv_monitor.max_lr.optimizers import UpdateRule, update_rule

H = 0.5
# c of embedding, hidden layers and readout. Under no alignment MFP with Adam has c = -½ in the
# readout, where two published libraries have +½: the shift rule below and the program give -½.
TABLE = {
    ("sp", "sgd"): ((-H, H, 1), (-H, 0, H)),
    ("sp", "adam"): ((0, 1, 1), (0, H, H)),
    ("sp", "adafactor"): ((0, H, H), (0, 0, 0)),
    ("ntk", "sgd"): ((-H, -H, 0), (-H, -1, -H)),
    ("ntk", "adam"): ((0, H, H), (0, 0, 0)),
    ("ntk", "adafactor"): ((0, H, H), (0, 0, 0)),
    ("mup", "sgd"): ((0, 0, 0), (0, -H, 0)),
    ("mup", "adam"): ((H, 1, H), (H, H, 0)),
    ("mup", "adafactor"): ((0, H, 0), (0, 0, 0)),
    ("mfp", "sgd"): ((-1, -1, -1), (-1, -1.5, -1)),
    ("mfp", "adam"): ((0, H, 0), (0, 0, -H)),
    ("mfp", "adafactor"): ((0, H, 0), (0, 0, 0)),
}
GRADIENTS = {"sp": (H, H, 0), "ntk": (H, 1, H), "mup": (H, 1, H), "mfp": (1, 1.5, 1)}


def spread(by_role: Sequence[float], layers: int) -> tuple[float, ...]:
    return (by_role[0], *[by_role[1]] * (layers - 2), by_role[2])


def exponents(name: str, layers: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    chosen = PARAMETRIZATIONS[name]
    return spread(chosen.a, layers), spread(chosen.b, layers)


def close(found: Sequence[float], expected: Sequence[float]) -> bool:
    return tuple(found) == pytest.approx(tuple(expected), abs=1e-9)


@pytest.mark.parametrize(("layers", "objective"), [(3, "sum"), (5, "pareto"), (5, "max-min")])
@pytest.mark.parametrize(("name", "optimizer"), TABLE)
def test_full_alignment_gives_the_known_exponents(
    name: str, optimizer: str, layers: int, objective: str
) -> None:
    found = solve_max_lr(
        parametrization=name, optimizer=optimizer, layers=layers, objective=objective
    )
    assert found.status == "optimal"
    assert close(found.c, spread(TABLE[name, optimizer][0], layers))
    assert close(found.r, [0] * layers)
    assert close(found.gains, [0] * layers)
    assert close(found.gradients, spread(GRADIENTS[name], layers))


@pytest.mark.parametrize(("name", "optimizer"), TABLE)
def test_no_alignment_gives_the_known_exponents(name: str, optimizer: str) -> None:
    layers = 4
    found = solve_max_lr(
        parametrization=name,
        optimizer=optimizer,
        layers=layers,
        objective="sum",
        **dict.fromkeys(("alpha", "omega", "u"), H),
    )
    assert close(found.c, spread(TABLE[name, optimizer][1], layers))
    vanishing = name in ("mup", "mfp") and optimizer != "adam"
    assert close(found.r, [*[0] * (layers - 1), H * vanishing])


VALUES = [
    # parametrization, optimizer, alpha, omega, u, c of the sum, r, c of Pareto
    ("sp", "adam", (H, 0.8, 0.75), (H, 0.55, 0.65), (H, 0.75, 0.7),
     (0.2, 0.95, 0.75), (0.2, 0.15, 0), (0, 0.8, 0.75)),
    ("mup", "sgd", (H, 0.8, 0.6), (H, 0.54, 0.6), (H, 0.75, 0.7),
     (0.04, -0.2, 0), (0.04, 0, 0.3), (0, -0.2, 0)),
    ("mfp", "adam", (H, 0.8, 0.6), (H, 0.54, 0.6), (H, 0.75, 0.7),
     (0.04, 0.3, -0.3), (0.04, 0, 0), (0, 0.3, -0.3)),
    ("sp", "adafactor", (H, 0.8, 0.75), (H, H, H), (H, 0.75, 0.7),
     (0, 0.3, 0.25), (0, 0, 0), (0, 0.3, 0.25)),
    # A middle layer that may be faster by n^0.404, of which a published run tells.
    ("mup", "sgd", (H, 0.596, 0.596), (H, H, H), (H, 0.596, 0.607),
     (0, -0.404, 0), (0, 0, 0.393), (0, -0.404, 0)),
]  # fmt: skip


@pytest.mark.parametrize("case", VALUES, ids=range(len(VALUES)))
def test_values(case: tuple[object, ...]) -> None:
    name, optimizer, alpha, omega, u, c, r, pareto = case
    given = {"parametrization": name, "optimizer": optimizer, "alpha": alpha, "omega": omega}
    found = solve_max_lr(**given, u=u, objective="sum")
    assert close(found.c, c) and close(found.r, r)
    assert close(solve_max_lr(**given, u=u, objective="pareto").c, pareto)


# Random networks ---------------------------------------------------------------------------------


def random_case(seed: int) -> tuple[Network, Alignments]:
    """Return a random problem: three to five layers, a chain or sums, any rule and alignment."""
    rng = random.Random(seed)
    n = rng.randint(3, 5)
    a, b = exponents(rng.choice([*PARAMETRIZATIONS]), n)
    shift = [round(rng.uniform(-1, 1), 3) for _ in range(n)]
    readout = rng.choice([0, 0, round(rng.uniform(0, 1), 3)])  # a + b may exceed ½ there
    a = tuple(x + t for x, t in zip(a, shift, strict=True))
    b = (*(x - t for x, t in zip(b, shift, strict=True)),)
    b = (*b[:-1], b[-1] + readout)
    rule = rng.choice(["sgd", "adam", "adafactor", "muon", (0.1, 0.3, 0.2)])
    graph = chain(n)
    if rng.random() < 0.5:
        graph = tuple(
            tuple({i - 1, *rng.sample(range(i), rng.randint(1, i))}) if i else () for i in range(n)
        )

    def draw(low: float, high: float) -> tuple[float, ...]:
        return tuple(round(rng.uniform(low, high), 3) for _ in range(n))

    alignments = Alignments(draw(0.3, 1), draw(0.2, 0.8), draw(0.3, 1))
    return Network(a, b, update_rule(rule), graph), alignments


def solved(network: Network, alignments: Alignments, **options: object) -> MaxLRSolution:
    return solve_max_lr(
        optimizer=network.rule,
        a=network.a,
        b=network.b,
        alpha=alignments.alpha,
        omega=alignments.omega,
        u=alignments.u,
        predecessors=network.predecessors,
        **{"objective": "sum", **options},
    )


def with_integers(network: Network, alignments: Alignments) -> float:
    """Return the smallest Σ c, with each r, ρ and G the minimum of its terms by big-M integers."""
    n, rule = len(network), network.rule
    columns: list[tuple[float, float, int]] = []  # low, high, integer

    def variable(low: float, high: float, integer: int = 0) -> int:
        columns.append((low, high, integer))
        return len(columns) - 1

    rows: list[tuple[dict[int, float], float, float]] = []
    c = [variable(0 if rule.relative and i else -10, 10) for i in range(n)]
    r = [variable(0, 30) for _ in range(n)]
    big = 60.0

    def least(target: int, terms: list[tuple[dict[int, float], float]]) -> None:
        chosen = [variable(0, 1, 1) for _ in terms]
        rows.append((dict.fromkeys(chosen, 1.0), 1, math.inf))
        for y, (term, constant) in zip(chosen, terms, strict=True):
            above = {target: 1.0}
            for column, value in term.items():
                above[column] = above.get(column, 0) - value
            rows.append((above, -math.inf, constant))  # target ≤ term
            rows.append(({**above, y: -big}, constant - big, math.inf))  # and = where y is 1

    G = variable(-40, 40)
    end = n - 1
    least(G, [({}, network.a[end] + network.b[end]), ({c[end]: 1.0}, network.p[end])])
    for i, before in enumerate(network.predecessors):
        k = {c[i]: 1.0, **({G: 1.0} if rule.follows_gradient and i < end else {})}
        p = rule.from_a * network.a[i] + rule.from_b * network.b[i]
        p += rule.h[0 if i == 0 else 2 if i == end else 1]
        if not before:
            least(r[i], [(k, p)])
            continue
        rho = variable(0, 30)
        least(rho, [({r[j]: 1.0}, 0) for j in before])
        kept = network.a[i] + network.b[i] - alignments.omega[i]
        terms = [(k, p - alignments.alpha[i]), ({**k, rho: 1.0}, p - alignments.u[i])]
        least(r[i], [*terms, ({rho: 1.0}, kept)])
    matrix = np.zeros((len(rows), len(columns)))
    for place, (row, _, _) in enumerate(rows):
        matrix[place, list(row)] = list(row.values())
    cost = np.zeros(len(columns))
    cost[c] = 1
    low, high, integer = (np.array(values) for values in zip(*columns, strict=True))
    limits = [np.array([row[side] for row in rows]) for side in (1, 2)]
    found = milp(
        cost,
        integrality=integer,
        bounds=Bounds(low, high),
        constraints=LinearConstraint(matrix, *limits),
        options={"mip_rel_gap": 0},
    )
    assert found.status == 0, found.message
    return float(found.fun)


@pytest.mark.slow(one_in=50)
@pytest.mark.parametrize("block", range(50))
def test_agrees_with_a_formulation_with_integers(block: int) -> None:
    for seed in range(10 * block, 10 * block + 10):
        network, alignments = random_case(seed)
        found = solved(network, alignments)
        assert found.status == "optimal", seed
        assert min(found.r) > -1e-7, seed  # recomputed: each really the least of its terms
        assert sum(found.c) == pytest.approx(with_integers(network, alignments), abs=1e-4), seed


@pytest.mark.parametrize("objective", ["sum", "pareto", "max-min"])
def test_less_alignment_never_costs(objective: str, whole: bool) -> None:
    for seed in range(20 if whole else 7):
        network, alignments = random_case(seed)
        before = solved(network, alignments, objective=objective)
        rng = random.Random(seed)
        lower = Alignments(
            *(
                tuple(value - rng.random() * 0.2 for value in values)
                for values in (alignments.alpha, alignments.omega, alignments.u)
            )
        )
        after = solved(network, lower, objective=objective)
        if objective == "max-min":
            assert min(after.gains) >= min(before.gains) - 1e-8
        else:
            assert sum(after.c) <= sum(before.c) + 1e-8


def test_updates_of_a_users_own_size() -> None:
    """Muon's hidden updates have an RMS of n^(-½) by themselves."""
    muon = solve_max_lr(parametrization="sp", optimizer="muon", layers=4)
    assert close(muon.c, (0, H, H, 1))
    own = solve_max_lr(parametrization="sp", optimizer=(0, H, 0), layers=4)
    assert own.c == muon.c
    assert close(
        solve_max_lr(parametrization="sp", optimizer=UpdateRule("x"), layers=3).c, (0, 1, 1)
    )


# Networks that are no chain ----------------------------------------------------------------------


def test_several_embeddings_and_readouts() -> None:
    found = solve_max_lr(
        parametrization="mup", optimizer="sgd", predecessors=[(), (), (0, 1), (2,), (2,)]
    )
    assert close(found.c, (0, 0, 0, 0, 0))
    assert close(found.gradients, (H, H, 1, H, H))


def test_tied_weights_keep_to_the_bounds_of_both_uses() -> None:
    found = solve_max_lr(parametrization="sp", optimizer="adam", layers=3, tied=[(0, 2)])
    assert close(found.c, (1, 1, 1)) or found.c[0] == found.c[2]
    assert found.c[0] == pytest.approx(found.c[2], abs=1e-9)
    assert min(found.r) >= -1e-9


def test_frozen_and_fixed_layers_keep_their_rate() -> None:
    given = {
        "parametrization": "sp",
        "optimizer": "adam",
        "alpha": H,
        "omega": 0.55,
        "u": H,
        "objective": "sum",
    }
    free = solve_max_lr(layers=4, **given)
    fixed = solve_max_lr(layers=4, fixed=[1], **given)
    assert fixed.c[1] == pytest.approx(fixed.c_full[1])
    assert free.c[1] < fixed.c[1] - 0.1
    # What does not learn can't disturb: the first layer, which paid for omega, pays no more.
    frozen = solve_max_lr(layers=4, frozen=[0], **given)
    assert frozen.c[0] == pytest.approx(frozen.c_full[0])
    assert math.isinf(frozen.r[0])
    assert sum(frozen.c[1:]) < sum(free.c[1:]) + 1e-9


def test_optimal_or_a_reason() -> None:
    def status(**given: object) -> str:
        found = solve_max_lr(**{"parametrization": "sp", "optimizer": "adam", "layers": 3, **given})
        assert bool(found.c) == (found.status == "optimal")
        assert bool(found.message) == (found.status != "optimal")
        return found.status

    assert status(alpha=float("nan")) == "infeasible"
    assert status(alpha=(float("nan"), 1, 1)) == "optimal"  # an embedding's is never used
    assert status(alpha=15.0, objective="sum") == "infeasible"
    assert status(alpha=1.2) == "infeasible"
    assert status(alpha=(1.2, 1, 1)) == "optimal"
    why = solve_max_lr(parametrization="sp", optimizer="adam", u=(1, 1, 1.2), objective="sum")
    assert why.message == "u of layer 2 is 1.2, expected 0 to 1: clip it"
    assert status(alpha=-0.2) == "infeasible"
    ab = {"parametrization": None, "a": (0, 0, 0)}
    assert status(**ab, b=(0, H, 0.4)) == "unstable at initialisation"
    assert status(**ab, b=(0.1, H, H)) == "unstable at initialisation"
    assert status(**ab, b=(0, 0.6, H)) == "unstable at initialisation"
    assert status(**ab, b=(0, H, 0.9)) == "optimal"


WRONG = [
    ({"layers": 1}, "an embedding and a readout"),
    ({"layers": 3, "alpha": (1, 1)}, "one number of them"),
    ({}, "one number of them"),
    ({"layers": 3, "optimizer": "adamant"}, "expected one of 'sgd'"),
    ({"layers": 3, "optimizer": (1, 2)}, "three exponents"),
    ({"layers": 3, "parametrization": "zen"}, "expected one of 'sp'"),
    ({"layers": 3, "parametrization": None}, "either parametrization"),
    ({"layers": 3, "a": (0, 0, 0)}, "either parametrization"),
    ({"layers": 3, "objective": "best"}, "objective='best'"),
    ({"layers": 3, "tied": [(0, 3)]}, "tied: got 3"),
    ({"predecessors": [(), (2,), (1,)]}, "order in which they run"),
    ({"predecessors": [(), (0,), ()]}, "feeds none"),
]


@pytest.mark.parametrize(("given", "message"), WRONG, ids=[m for _, m in WRONG])
def test_what_can_not_be_meant_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        solve_max_lr(**{"parametrization": "sp", "optimizer": "adam", **given})


def test_what_is_meant_is_understood() -> None:
    expected = solve_max_lr(parametrization="mup", optimizer="adam", alpha=(0.5, 0.8, 0.6))
    for name, optimizer in (
        *(("muP", "AdamW"), ("MUP", torch.optim.Adam), ("mup", "Lion")),
        ("mup", torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])),
    ):
        for alpha in (np.array([0.5, 0.8, 0.6]), torch.tensor([0.5, 0.8, 0.6]).double()):
            found = solve_max_lr(parametrization=name, optimizer=optimizer, alpha=alpha)
            assert found.c == expected.c
    one = solve_max_lr(parametrization="mup", optimizer="adam", layers=3, alpha=np.float32(0.5))
    assert one.status == "optimal"
    with pytest.raises(ValueError, match="LBFGS grow with width is not known"):
        solve_max_lr(parametrization="mup", optimizer=torch.optim.LBFGS, layers=3)
